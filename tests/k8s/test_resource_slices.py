"""The slice of a node, from what qgpud says about its cards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightkube.models.resource_v1 import Device, DeviceTaint, ResourceSliceSpec

from qgpu.errors import InvalidValueError
from qgpu.k8s import quantities, resource_slices
from qgpu.k8s.qgpud import Card, Node
from qgpu.k8s.resource_slices import Condition, Effect, SharingOptions
from tests.k8s.world import GI, NODE, card, device

MI = 1024**2
SHARING = SharingOptions(reserve=GI, memory_step=256 * MI, memory_default=GI, shares=8)
CARD = Card(0, card(0), "NVIDIA H200", 141 * GI, "burst-share", "best-effort", "", 0, 0)


def spec(*cards: Card, condition: Condition | None = None, driver: str = "580.105.08") -> ResourceSliceSpec:
    return resource_slices.spec(Node("kmod", driver, cards or (CARD,)), NODE, SHARING, condition or Condition(), 7)


def only(content: ResourceSliceSpec) -> Device:
    (found,) = content.devices or ()
    return found


def offered(content: ResourceSliceSpec) -> dict[str, int]:
    return {name: quantities.whole(each["value"]) for name, each in (only(content).capacity or {}).items()}


def taints(content: ResourceSliceSpec) -> dict[str, str]:
    return {taint.key: taint.effect for taint in only(content).taints or ()}


def test_card_sells_memory_less_its_reserve_and_all_time() -> None:
    content = spec()

    assert only(content).name == device(0)
    assert only(content).allowMultipleAllocations
    assert offered(content) == {"memory": 140 * GI, "cores": 100, "shares": 8}
    assert content.pool.generation == 7
    assert not taints(content)


def test_attributes_tell_what_claims_select_by() -> None:
    assert only(spec()).attributes == {
        "uuid": {"string": card(0)},
        "productName": {"string": "NVIDIA H200"},
        "policy": {"string": "burst-share"},
        "onlinePolicy": {"string": "best-effort"},
        "plane": {"string": "kmod"},
        "driverVersion": {"version": "580.105.8"},
    }


@pytest.mark.parametrize("version", ["", "unknown", "580"])
def test_unusual_driver_version_is_left_out(version: str) -> None:
    assert "driverVersion" not in (only(spec(driver=version)).attributes or {})


@given(st.integers(0, 200 * GI), st.integers(0, 100))
def test_what_others_hold_is_not_sold_again(memory: int, cores: int) -> None:
    content = spec(replace(CARD, held_memory=memory, held_cores=cores))
    free = CARD.memory - SHARING.reserve - memory

    assert offered(content)["cores"] == 100 - cores
    assert offered(content)["memory"] % SHARING.memory_step == 0
    if free >= SHARING.memory_step:
        assert 0 <= free - offered(content)["memory"] < SHARING.memory_step
        assert not taints(content)
    else:
        assert taints(content) == {"qgpu.io/full": "NoSchedule"}


def test_fixed_share_sells_at_least_one_per_cent() -> None:
    fixed = (only(spec(replace(CARD, policy="fixed-share"))).capacity or {})["cores"]["requestPolicy"]
    usual = (only(spec()).capacity or {})["cores"]["requestPolicy"]

    assert (fixed["default"], fixed["validRange"]["min"], usual["default"]) == ("1", "1", "0")


@pytest.mark.parametrize(
    ("given_card", "condition", "expected"),
    [
        (replace(CARD, problem="backend gone"), Condition(), {"qgpu.io/problem": "NoSchedule"}),
        (CARD, Condition(daemon="away"), {"qgpu.io/problem": "NoSchedule"}),
        (CARD, Condition(conflict="there"), {"qgpu.io/conflict": "NoSchedule"}),
        (CARD, Condition(drain={"all": Effect.NO_EXECUTE}), {"qgpu.io/drain": "NoExecute"}),
        (CARD, Condition(drain={card(0): Effect.NO_SCHEDULE}), {"qgpu.io/drain": "NoSchedule"}),
        (CARD, Condition(drain={card(1): Effect.NO_SCHEDULE}), {}),
    ],
)
def test_problem_and_drain_are_taints(given_card: Card, condition: Condition, expected: dict[str, str]) -> None:
    assert taints(spec(given_card, condition=condition)) == expected


def test_drain_annotation_names_cards_and_effects() -> None:
    assert resource_slices.drained("") == {}
    assert resource_slices.drained(f"{card(0)}, {card(1)}:NoExecute") == {
        card(0): Effect.NO_SCHEDULE,
        card(1): Effect.NO_EXECUTE,
    }
    with pytest.raises(InvalidValueError, match="NoSchedule or NoExecute"):
        resource_slices.drained("all:Now")


def test_card_with_an_unusual_uuid_is_left_out() -> None:
    assert spec(replace(CARD, uuid="MIG-1")).devices == []


def test_slice_is_the_same_however_the_server_writes_it() -> None:
    mine, servers = spec(condition=Condition(conflict="x")), spec(condition=Condition(conflict="x"))
    (only(servers).capacity or {})["memory"]["value"] = "140Gi"
    only(servers).taints = [DeviceTaint(key="qgpu.io/conflict", effect="NoSchedule", timeAdded="2026-01-01T00:00:00Z")]
    servers.pool.generation = 99

    assert resource_slices.same(mine, servers)


@pytest.mark.parametrize(
    "changed",
    [
        replace(CARD, held_memory=GI),
        replace(CARD, held_cores=1),
        replace(CARD, policy="best-effort"),
        replace(CARD, problem="gone"),
        replace(CARD, name="another"),
    ],
)
def test_change_of_a_card_makes_another_slice(changed: Card) -> None:
    assert not resource_slices.same(spec(), spec(changed))


def test_slice_without_sharing_is_noticed() -> None:
    stripped, unbounded = spec(), spec()
    only(stripped).allowMultipleAllocations = None
    del (only(unbounded).capacity or {})["memory"]["requestPolicy"]

    assert resource_slices.shares_cards(spec())
    assert not resource_slices.shares_cards(stripped)
    assert not resource_slices.shares_cards(unbounded)

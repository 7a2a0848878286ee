"""The judges of restart orders find shares that are granted twice, and what is left over."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.k8s.holdings import Holding, on_disk, sold_twice, strays

GIB = 1 << 30
CARDS = [{"index": 0, "memory": 10 * GIB, "memory_overcommit": 1.0}]
DEVICE = "qgpu.io/claim=uid-1"


def pod(name: str, cores: int | None = None, memory: int = GIB, *, claim: str = "", used: int = 0) -> dict[str, Any]:
    return {
        "name": name,
        "cgroup": f"/{name}",
        "joined": [],
        "claim": claim,
        "grants": [{"gpu": 0, "cores": cores, "memory": memory}],
        "usage": [{"gpu": 0, "memory": used}],
    }


def holding(*names: str, cores: int = 0, memory: int = GIB, claim: str = "", group: str = "") -> Holding:
    containers: Any = [SimpleNamespace(cgroup=f"/{name}") for name in names]
    return Holding(claim, {0: (memory, cores)}, containers, frozenset(), group)


@pytest.mark.parametrize(
    ("pods", "card"),
    [
        ([pod("a", 60), pod("b", 41)], True),
        ([pod("a", 60), pod("b", 40)], False),
        ([pod("a", memory=6 * GIB), pod("b", memory=5 * GIB)], True),
        ([pod("a", memory=6 * GIB), pod("b", memory=4 * GIB)], False),
        ([pod("a", memory=6 * GIB), pod("b", memory=GIB, used=5 * GIB)], True),
    ],
)
def test_cards_that_pods_have_more_of_than_there_is_are_found(pods, card):
    assert bool(sold_twice(pods, CARDS, [])) is card


def test_memory_of_an_overcommitted_card_may_be_granted_so_often():
    pods = [pod("a", memory=9 * GIB), pod("b", memory=9 * GIB)]

    assert sold_twice(pods, CARDS, [])
    assert not sold_twice(pods, [CARDS[0] | {"memory_overcommit": 2.0}], [])


@pytest.mark.parametrize(
    ("second", "more"),
    [
        (pod("b", 10), False),
        (pod("b", 11), True),
        (pod("b", 10, GIB + 3), True),
        (pod("else", 11, claim="c"), True),
        (pod("else", 11, claim="d"), False),
    ],
)
def test_claims_of_which_pods_have_more_than_they_hold_are_found(second, more):
    held = holding("a", "b", cores=20, memory=2 * GIB, claim="c")

    assert bool(sold_twice([pod("a", 10), second], CARDS, [held])) is more


def test_a_pod_on_a_card_that_its_claim_does_not_hold_is_found():
    other = pod("a", 1) | {"grants": [{"gpu": 1, "cores": 1, "memory": GIB}], "usage": [{"gpu": 1, "memory": 0}]}

    assert sold_twice([other], CARDS, [holding("a", cores=20)])


def test_pods_of_nobody_and_containers_without_a_pod_are_found():
    left, homeless = strays([pod("a"), pod("stray")], [holding("a", "b")])

    assert left == ["stray: /stray"]
    assert homeless == ["/b"]


def test_members_of_a_group_count_to_its_pod():
    group = pod("claim-1") | {"cgroup": "/qgpu/claim-1", "joined": ["/a", "/gone"]}
    left, homeless = strays([group], [holding("a", group="claim-1")])

    assert left == ["claim-1: /gone"]
    assert homeless == []


def test_files_of_claims_are_found_where_qgpud_keeps_them(tmp_path):
    cdi, kept = tmp_path / "cdi", tmp_path / "state" / "claims"
    cdi.mkdir()
    kept.mkdir(parents=True)
    content = {"kind": "qgpu.io/claim", "devices": [{"name": "uid-1"}]}
    (cdi / "qgpu-claim-uid-1.json").write_text(json.dumps(content))
    (cdi / "qgpu.json").write_text("{}")
    (kept / "uid-1.json").write_text(json.dumps({"devices": [{"cdi": DEVICE}]}))

    assert on_disk(cdi, tmp_path / "state") == {"CDI files": {DEVICE}, "kept claims": {DEVICE}}

    (cdi / ".qgpu-claim-uid-2.json.7-7").write_text("{")
    (kept / "uid-2.json").write_text("")
    found = on_disk(cdi, tmp_path / "state")
    assert found["CDI files"] == {DEVICE, ".qgpu-claim-uid-2.json.7-7"}
    assert found["kept claims"] == {DEVICE, "uid-2.json"}

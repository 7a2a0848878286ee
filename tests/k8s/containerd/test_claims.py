"""A container with a prepared device holds what was prepared, whatever its pod says of itself."""

from __future__ import annotations

import signal

import pytest

from qgpu.errors import QgpuError
from tests.k8s.containerd.claims import Claim, claim, device, granted
from tests.k8s.containerd.forgeries import FORGERIES, OTHER
from tests.k8s.containerd.node import until

GIB = 1 << 30
UID = "11111111-aaaa-4bbb-8ccc-000000000001"
PREPARED = {0: (20, 2 * GIB, "offline", None)}


@pytest.fixture(autouse=True)
def no_claims(node, empty):
    """Drop every claim at the end, after the containers are gone."""
    yield
    node.clear()
    for grant in node.call("grant.list")["grants"]:
        node.call("grant.drop", uid=grant["uid"])


def small(node, *consumers):
    return claim(node, consumers or (UID,), cores=20, memory=2 * GIB)


def test_container_of_a_claim_holds_what_was_prepared(node):
    (cdi,) = small(node).prepare(node)

    assert cdi.startswith("qgpu.io/claim=")
    assert node.runtime.run(node.runtime.sandbox("cart-1", UID), "model", cdi) == ""
    assert granted(node.pods()["shop.cart-1.model"]) == PREPARED


def test_class_and_target_of_a_claim_reach_the_pod(node):
    (cdi,) = claim(node, (UID,), cores=10, latency_target_ns=2_000_000, **{"class": "online"}).prepare(node)
    node.runtime.run(node.runtime.sandbox("cart-1", UID), "model", cdi)

    assert granted(node.pods()["shop.cart-1.model"]) == {0: (10, None, "online", 2_000_000)}


@pytest.mark.parametrize("forgery", FORGERIES, ids=str)
def test_what_a_pod_says_of_itself_adds_nothing_to_its_claim(node, forgery):
    (cdi,), (other,) = small(node).prepare(node), claim(node, (OTHER,), 1, cores=99, memory=9 * GIB).prepare(node)
    refused = forgery.start(node, UID, cdi, of_another=other)

    held = {name: granted(pod) for name, pod in node.pods().items()}
    assert held == ({} if refused else {"shop.forger.model": PREPARED})


def test_pod_that_the_claim_is_not_reserved_for_does_not_start(node):
    (cdi,) = small(node).prepare(node)
    said = node.runtime.run(node.runtime.sandbox("cart-1", OTHER), "model", cdi)

    assert "qgpu: " in said
    assert node.pods() == {}


def test_two_claims_in_one_container_add_up_card_by_card(node):
    first, second = Claim([UID], [device(node, 0, cores=20, memory=GIB)]), claim(node, (UID,), 0, cores=30, memory=GIB)
    third = claim(node, (UID,), 1, cores=10)
    names = [*first.prepare(node), *second.prepare(node), *third.prepare(node)]

    assert node.runtime.run(node.runtime.sandbox("cart-1", UID), "model", *names) == ""
    held = granted(node.pods()["shop.cart-1.model"])
    assert held == {0: (50, 2 * GIB, "offline", None), 1: (10, None, "offline", None)}


def test_two_devices_of_one_claim_on_one_card_add_up(node):
    two = Claim([UID], [device(node, 0, "a", cores=20), device(node, 0, "b", cores=30)])

    assert node.runtime.run(node.runtime.sandbox("cart-1", UID), "model", *two.prepare(node)) == ""
    assert granted(node.pods()["shop.cart-1.model"])[0][0] == 50


def test_containers_that_share_a_claim_hold_it_once(node):
    shared = claim(node, (UID, OTHER), cores=60, memory=100 * GIB)
    (cdi,) = shared.prepare(node)
    first, second = node.runtime.sandbox("cart-1", UID), node.runtime.sandbox("cart-2", OTHER)

    for sandbox, name in ((first, "model"), (first, "side"), (second, "model")):
        assert node.runtime.run(sandbox, name, cdi) == ""
    held = [granted(pod)[0] for pod in node.pods().values()]
    assert sum(cores for cores, *_ in held) <= 60
    assert sum(memory for _, memory, *_ in held) <= 100 * GIB
    (cdi,) = claim(node, (UID,), cores=40).prepare(node)
    with pytest.raises(QgpuError, match="does not fit"):
        claim(node, (UID,), cores=1).prepare(node)


def test_restarted_container_holds_its_claim_once(node):
    (cdi,) = claim(node, (UID,), cores=70).prepare(node)
    sandbox = node.runtime.sandbox("cart-1", UID)
    for attempt in range(3):
        container = node.runtime.create(sandbox, "model", cdi, attempt=attempt)
        assert node.runtime.start(container) == ""
        assert [granted(pod)[0][0] for pod in node.pods().values()] == [70]
        node.runtime.call("StopContainer", container_id=container, timeout=0)


def test_claim_in_use_is_not_dropped_and_an_unused_one_is(node):
    held = small(node)
    (cdi,) = held.prepare(node)
    sandbox = node.runtime.sandbox("cart-1", UID)
    node.runtime.run(sandbox, "model", cdi)

    with pytest.raises(QgpuError):
        held.drop(node)
    node.runtime.end(sandbox)
    until(lambda: not node.pods())
    held.drop(node)
    assert "unresolvable CDI devices" in node.runtime.run(node.runtime.sandbox("cart-2", UID), "model", cdi)


def test_what_is_prepared_is_not_granted_to_other_containers(node):
    claim(node, (UID,), cores=70).prepare(node)
    said = node.runtime.run(
        node.runtime.sandbox("cart-1"), "model", "qgpu.io/gpu=0", annotations={"qgpu.io/cores": "40"}
    )

    assert "30 % is left to grant" in said


def test_claim_with_a_card_of_no_claim_does_not_start(node):
    (cdi,) = small(node).prepare(node)

    assert "qgpu: " in node.runtime.run(node.runtime.sandbox("cart-1", UID), "model", cdi, "qgpu.io/gpu=1")
    assert node.pods() == {}


def test_missing_cdi_file_comes_back_with_the_next_preparation(node):
    lost = small(node)
    (cdi,) = lost.prepare(node)
    for path in node.containerd.cdi.glob("*claim*"):
        path.unlink()
    assert lost.prepare(node) == [cdi]

    assert node.runtime.run(node.runtime.sandbox("cart-1", UID), "model", cdi) == ""


def test_killed_daemon_knows_its_claims_again(node):
    (cdi,) = small(node).prepare(node)
    sandbox = node.runtime.sandbox("cart-1", UID)
    assert node.runtime.run(sandbox, "model", cdi) == ""
    node.restart(signal.SIGKILL)

    assert node.runtime.run(sandbox, "side", cdi) == ""
    assert sum(granted(pod)[0][0] for pod in node.pods().values()) <= 20


def test_a_container_without_a_claim_is_no_part_of_one(node):
    small(node).prepare(node)

    assert node.runtime.run(node.runtime.sandbox("cart-1", UID), "model") == ""
    assert node.pods() == {}

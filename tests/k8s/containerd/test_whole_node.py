"""From the API server to a working container: the driver prepares claims, and containerd gives them to containers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.k8s.containerd.world import ContainerdWorld
from tests.k8s.world import GI

_SETTLE_S, _MEASURE_S = 2, 5
#: How often a ratio is measured before a busy host is believed to be a defect.
TRIES = 3
LEAST, MOST = 1.94, 2.06
#: What part of a card a pod has at least to which all of it is guaranteed.
LEAST_GUARANTEED = 0.95


@pytest.fixture(scope="module")
def running() -> Iterator[ContainerdWorld]:
    made = ContainerdWorld("--resync", "0.2")
    try:
        made.start()
        made.devices()
        yield made
    finally:
        made.close()


@pytest.fixture
def world(running: ContainerdWorld) -> Iterator[ContainerdWorld]:
    """A node on which everything runs; what a test leaves is given up after it."""
    yield running
    running.clear()


@pytest.mark.quiet
def test_loads_of_two_claims_share_the_card_two_to_one(world: ContainerdWorld) -> None:
    world.start_pod("two", load=True, cores="60")
    world.start_pod("one", load=True, cores="30")
    found: list[float] = []
    while len(found) < TRIES and not (found and LEAST <= found[-1] <= MOST):
        found.append(world.ratio("two", "one", _SETTLE_S, _MEASURE_S))

    assert LEAST <= found[-1] <= MOST, found


@pytest.mark.quiet
def test_memory_alone_takes_idle_time_and_no_guaranteed_share(world: ContainerdWorld) -> None:
    world.start_pod("rest", load=True, memory="8Gi")
    _, granted = world.start_pod("granted", load=True, cores="100", memory="8Gi")
    found: list[float] = []
    while len(found) < TRIES and not (found and found[-1] < 1 - LEAST_GUARANTEED):
        found.append(world.ratio("rest", "granted", _SETTLE_S, _MEASURE_S))
    granted.kill()
    alone = world.card_time("rest", _SETTLE_S, _MEASURE_S)

    assert found[-1] < 1 - LEAST_GUARANTEED, found
    assert alone > LEAST_GUARANTEED


def test_claim_that_is_given_up_leaves_nothing(world: ContainerdWorld) -> None:
    before = world.on_disk()
    claim, container = world.start_pod("web", cores="30")
    names = world.kubelet.names(claim["metadata"]["uid"])
    assert all(there == set(names) for there in world.on_disk().values())
    container.kill()
    world.give_up(claim)

    assert world.on_disk() == before
    assert world.strays() == ([], [])
    late = world.container("web", names)
    assert "unresolvable CDI devices" in late.bind(may_be_refused=True)


def test_claim_of_a_running_container_is_not_given_up(world: ContainerdWorld) -> None:
    claim, container = world.start_pod("web", cores="30")

    assert "shop.web.main" in world.kubelet.unprepare(claim["metadata"]["uid"])
    assert container.lacks() == ""


def test_killed_containerd_leaves_containers_their_grants(world: ContainerdWorld) -> None:
    _, container = world.start_pod("web", cores="30", memory="4Gi")
    world.kill_containerd()
    world.kill_daemon()
    world.start_daemon()
    world.start_containerd()

    assert container.lacks() == ""
    (pod,) = world.ask("pod.list")["pods"]
    assert [(grant["cores"], grant["memory"]) for grant in pod["grants"]] == [(30, 4 * GI)]


def test_container_that_ends_without_containerd_frees_its_claim(world: ContainerdWorld) -> None:
    claim, container = world.start_pod("web", cores="30")
    world.kill_containerd()
    container.kill()
    world.give_up(claim)
    world.start_containerd()
    world.collect()

    assert world.strays() == ([], [])
    assert not world.grants()


def test_switched_off_node_runs_its_claims_again(world: ContainerdWorld) -> None:
    claim, container = world.start_pod("web", cores="30")
    world.containers.remove(container)
    world.switch_off()
    world.start_all()
    world.eventually(lambda: world.grants().keys() == {claim["metadata"]["uid"]})

    again = world.container("web", world.kubelet.names(claim["metadata"]["uid"]))
    assert again.bind() == ""
    assert again.lacks() == ""

"""From the API server to a working container: the driver prepares claims, and containerd gives them to containers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.k8s.container import ContainerLike
from tests.k8s.containerd.world import ContainerdWorld
from tests.k8s.world import GI, result

_SETTLE_S, _MEASURE_S = 2, 5
#: How often a ratio is measured before a busy host is believed to be a defect.
TRIES = 3
LEAST, MOST = 1.94, 2.06


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
    for part in running.parts:
        if not running.runs(part):
            running.start_part(part)
    for container in list(running.containers):
        container.kill()
    for claim in running.api.of("resourceclaims"):
        give_up(running, claim)
    running.eventually(lambda: not running.grants())


def started(
    world: ContainerdWorld, pod: str, *, load: bool = False, **consumed: str
) -> tuple[dict[str, Any], ContainerLike]:
    """Start a pod with a claim of its own; return the claim, and the pod's container."""
    claim = world.claim(result(**consumed), pods=(pod,))
    assert world.kubelet.prepare(claim, pod) == "", world.log
    container = world.container(pod, world.kubelet.names(claim["metadata"]["uid"]), load=load)
    assert container.bind() == ""
    return claim, container


def give_up(world: ContainerdWorld, claim: dict[str, Any]) -> None:
    """End a claim as a kubelet does, when its containers have ended."""
    uid = claim["metadata"]["uid"]
    world.eventually(lambda: uid not in world.kubelet.checkpoint or world.kubelet.unprepare(uid) == "")
    world.forget(claim)


def ratio(world: ContainerdWorld) -> float:
    """How often the GPU time of pod ``one`` goes into that of pod ``two``, over a while."""
    before = world.used_ns("two", "one")
    time.sleep(_MEASURE_S)
    two, one = (after - then for after, then in zip(world.used_ns("two", "one"), before, strict=True))
    return two / one


@pytest.mark.quiet
def test_loads_of_two_claims_share_the_card_two_to_one(world: ContainerdWorld) -> None:
    started(world, "two", load=True, cores="60")
    started(world, "one", load=True, cores="30")
    world.eventually(lambda: [pod["usage"][0]["busy"] for pod in world.ask("pod.list")["pods"]] == [True, True])
    time.sleep(_SETTLE_S)
    found: list[float] = []
    while len(found) < TRIES and not (found and LEAST <= found[-1] <= MOST):
        found.append(ratio(world))

    assert LEAST <= found[-1] <= MOST, found


def test_claim_that_is_given_up_leaves_nothing(world: ContainerdWorld) -> None:
    before = world.on_disk()
    claim, container = started(world, "web", cores="30")
    names = world.kubelet.names(claim["metadata"]["uid"])
    assert all(there == set(names) for there in world.on_disk().values())
    container.kill()
    give_up(world, claim)

    assert world.on_disk() == before
    assert world.strays() == ([], [])
    late = world.container("web", names)
    assert "unresolvable CDI devices" in late.bind(may_be_refused=True)


def test_claim_of_a_running_container_is_not_given_up(world: ContainerdWorld) -> None:
    claim, container = started(world, "web", cores="30")

    assert "shop.web.main" in world.kubelet.unprepare(claim["metadata"]["uid"])
    assert container.lacks() == ""


def test_killed_containerd_leaves_containers_their_grants(world: ContainerdWorld) -> None:
    _, container = started(world, "web", cores="30", memory="4Gi")
    world.kill_containerd()
    world.kill_daemon()
    world.start_daemon()
    world.start_containerd()

    assert container.lacks() == ""
    (pod,) = world.ask("pod.list")["pods"]
    assert [(grant["cores"], grant["memory"]) for grant in pod["grants"]] == [(30, 4 * GI)]


def test_container_that_ends_without_containerd_frees_its_claim(world: ContainerdWorld) -> None:
    claim, container = started(world, "web", cores="30")
    world.kill_containerd()
    container.kill()
    give_up(world, claim)
    world.start_containerd()
    world.collect()

    assert world.strays() == ([], [])
    assert not world.grants()


def test_switched_off_node_runs_its_claims_again(world: ContainerdWorld) -> None:
    claim, container = started(world, "web", cores="30")
    world.containers.remove(container)
    world.switch_off()
    for part in world.parts:
        if not world.runs(part):
            world.start_part(part)
    world.eventually(lambda: world.grants().keys() == {claim["metadata"]["uid"]})

    again = world.container("web", world.kubelet.names(claim["metadata"]["uid"]))
    assert again.bind() == ""
    assert again.lacks() == ""

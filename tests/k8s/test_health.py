"""A card with a problem, from qgpud's answer through the driver to the kubelet and the API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qgpu.ipc.control_socket import Client, Server, Session
from qgpu.ipc.systemd import FdStore
from tests.k8s.world import World, card, device, result

UNKNOWN, HEALTHY, UNHEALTHY = range(3)


class Between:
    """Stands between the driver and qgpud, and adds problems to what qgpud says of cards that have none."""

    def __init__(self, runtime_dir: Path, of_qgpud: Path) -> None:
        self._qgpud = of_qgpud
        #: What is wrong with cards, by UUID.
        self.problems: dict[str, str] = {}
        self._server = Server(runtime_dir, 0o600, None, self._answer, FdStore())

    def close(self) -> None:
        """Answer no more."""
        self._server.close()

    def _answer(self, _session: Session, message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        arguments = {key: value for key, value in message.items() if key != "op"}
        with Client(self._qgpud) as client:
            answer = client.call(message["op"], **arguments)
        for gpu in answer.get("gpus", ()):
            gpu["problem"] = gpu.get("problem") or self.problems.get(gpu["uuid"], "")
        return answer


@pytest.fixture
def node() -> Iterator[tuple[World, Between]]:
    """A node, and what stands between its driver and its qgpud."""
    world = World()
    runtime_dir = world.directory / "between"
    runtime_dir.mkdir()
    between = Between(runtime_dir, world.runtime_dir)
    world.options = "--runtime-dir", str(runtime_dir)
    try:
        yield world.start(), between
    finally:
        world.close()
        between.close()


def health(stream: Iterator[Any], expected: dict[str, int]) -> dict[str, int]:
    """Follow the stream until it says what is expected; the stream ends first if it never does."""
    found: dict[str, int] = {}
    while found != expected:
        found = {each.device.device_name: each.health for each in next(stream).devices}
    return found


def test_problem_of_a_card_reaches_kubelet_and_slice_and_goes(node: tuple[World, Between]) -> None:
    world, between = node
    well = {device(0): HEALTHY, device(1): HEALTHY}
    stream = world.kubelet.health()
    health(stream, well)
    assert not any(each.get("taints") for each in world.devices())

    between.problems[card(0)] = "GPU has fallen off the bus"
    health(stream, well | {device(0): UNHEALTHY})
    world.eventually(lambda: world.devices()[0].get("taints"))
    (taint,) = world.devices()[0]["taints"]
    assert (taint["key"], taint["effect"]) == ("qgpu.io/problem", "NoSchedule")
    assert not world.devices()[1].get("taints")

    between.problems.clear()
    health(stream, well)
    world.eventually(lambda: not any(each.get("taints") for each in world.devices()))


def test_kubelet_that_comes_back_hears_of_a_problem_at_once(node: tuple[World, Between]) -> None:
    world, between = node
    world.devices()
    between.problems[card(1)] = "GPU has fallen off the bus"
    health(world.kubelet.health(), {device(0): HEALTHY, device(1): UNHEALTHY})
    world.kubelet.stop()
    world.kubelet.start()

    health(world.kubelet.health(), {device(0): HEALTHY, device(1): UNHEALTHY})
    world.eventually(lambda: (world.api.slice() or {"spec": {"devices": [{}, {}]}})["spec"]["devices"][1].get("taints"))


def test_claims_on_a_card_with_a_problem_keep_their_grants(node: tuple[World, Between]) -> None:
    world, between = node
    world.devices()
    held = world.claim(result(0, cores="30"), pods=("p",))
    assert world.kubelet.prepare(held, "p") == ""
    before = world.grants()
    between.problems[card(0)] = "GPU has fallen off the bus"
    health(world.kubelet.health(), {device(0): UNHEALTHY, device(1): HEALTHY})

    assert world.grants() == before
    assert world.kubelet.unprepare(held["metadata"]["uid"]) == ""

"""A container starts whoever of ours dies at whichever step, and nothing is left of it when it ends.

Daemon and guardian are real and die of SIGKILL at the steps of ``deaths.py``; a service manager starts the daemon
again. On plane seccomp the driver is emulated and the container asks it for memory; on plane sim real runc starts it.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from qgpu.errors import QgpuError
from qgpu.guardian.failover.journal import Journal
from qgpu.ipc.control_socket import Client
from tests.cli.manager import Manager
from tests.k8s.guarded import GuardedContainer, GuardedWorld
from tests.runtime import deaths, oci

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

_TIMEOUT_S = 60
_GI = 1 << 30
_ROOT = Path(__file__).parents[2]
_numbers = itertools.count(1)

#: Who dies (in the process that does this step), and when. More than one: so do its successors.
GUARDED = [
    ("undisturbed", 0),
    ("before bind", 1),
    ("after reserve", 1),
    ("before note", 1),
    ("after note", 1),
    ("before admission", 1),
    ("after admission", 1),
    ("after bind", 1),
    ("after bind", 2),
    ("before guardian's admission", 1),
    ("before guardian's admission", 3),
    ("after guardian's admission", 1),
    ("after guardian's admission", 3),
    ("before agent's work", 1),
    ("before agent's work", 2),
    ("after agent's work", 1),
    ("before attachment", 1),
    ("after attachment", 1),
    ("before guardian's attachment", 1),
    ("before guardian's attachment", 3),
    ("after guardian's listening", 1),
    ("after guardian's attachment", 1),
    ("after guardian's attachment", 3),
    ("before holding", 1),
    ("after holding", 1),
    ("before first call", 1),
    ("before first call", 3),
    ("after first call", 1),
]
#: Of both.
PAIRS = [
    ("after bind", "before guardian's attachment"),
    ("before agent's work", "after guardian's admission"),
    ("before holding", "before first call"),
    ("after attachment", "after guardian's attachment"),
]
SIMULATED = [
    ("before bind", 1),
    ("after reserve", 1),
    ("after note", 1),
    ("before simulated admission", 1),
    ("before simulated keeping", 1),
    ("after simulated keeping", 1),
    ("after bind", 1),
    ("after bind", 2),
]


class Keeper:
    """Starts a daemon again whenever it has died, as a service manager does."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self._stop = threading.Event()
        self.go_on()

    def _keep(self) -> None:
        while not self._stop.wait(0.01):
            self.manager.listen()
            if self._process.poll() is not None:
                with suppress(AssertionError):  # it died again while it started
                    self._process = self.manager.start()

    def pause(self) -> None:
        """Kill the daemon and leave it away."""
        self._stop.set()
        self._thread.join()
        self._process.kill()
        self._process.wait()

    def go_on(self) -> None:
        """Start it again, now and whenever it has died."""
        self._stop.clear()
        self._process = self.manager.start()
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def close(self) -> None:
        self.pause()
        self.manager.close()


class Node:
    """A node of one plane: what is asked of it, and what it must not keep."""

    def __init__(self, manager: Manager, folder: Path, cdi: Path) -> None:
        self.manager, self.deaths, self.cdi = manager, folder, cdi
        self.keeper = Keeper(manager)

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Make a request, as often as it takes until there is an answer."""
        end = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                with Client(self.manager.runtime_dir, _TIMEOUT_S) as client:
                    return client.call(op, **arguments)
            except QgpuError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def prepare(self, uid: str, pod: str) -> list[str]:
        """Prepare a claim and return the names of its devices."""
        gpu = self.ask("gpu.list")["gpus"][0]["uuid"]
        limits = {"class": "offline", "cores": 10, "memory": _GI, "latency_target_ns": None}
        device = {"request": "gpu", "gpu": gpu, "share": "", **limits}
        named = {"uid": uid, "namespace": "team", "name": uid, "consumers": [pod]}
        return [each["cdi"] for each in self.ask("grant.prepare", **named, devices=[device])["devices"]]

    def pods(self) -> list[dict[str, Any]]:
        """Return the daemon's pods."""
        found: list[dict[str, Any]] = self.ask("pod.list")["pods"]
        return found

    def left(self) -> dict[str, Any]:
        """Return what is left of containers and claims; all of it empty if nothing is."""
        held = self.ask("gpu.list")["gpus"][0]["held_outside"]
        stored = [name for name in self.manager.stored if name.startswith(("start.", "listener."))]
        journal = self.manager.stored.get("journal")
        return {
            "pods": self.pods(),
            "claims": self.ask("grant.list")["grants"],
            "held": held["cores"],  # the emulated driver keeps memory of processes that have ended
            "stored": stored,
            "slots": Journal(os.dup(journal)).listeners() if journal is not None else set(),
            "cdi": [path.name for path in self.cdi.iterdir() if "claim" in path.name],
            "sockets": [path.name for path in self.manager.runtime_dir.iterdir() if path.name.count(".sock.")],
            "guardians": len(self.guardians()) - 2 if journal is not None else 0,
        }

    def guardians(self) -> list[int]:
        """Return the processes of guardian and standby."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                words = process.cmdline()
                if "qgpu.guardian" in words and str(self.manager.runtime_dir) in words:
                    found.append(process.pid)
        return found

    def is_clean(self) -> None:
        """Wait until nothing is left."""
        until(lambda: not any(self.left().values()), lambda: str(self.left()))


def until(condition: Callable[[], object], what: Callable[[], str]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + _TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.02)


class _Guarded(GuardedWorld):
    """A world whose daemon is a keeper's."""

    def __init__(self) -> None:
        super().__init__()
        self.node = Node(self._manager, self.deaths, self.cdi)

    def close(self) -> None:
        self.node.keeper.pause()
        super().close()


@pytest.fixture(scope="module")
def guarded() -> Iterator[_Guarded]:
    world = _Guarded()
    yield world
    world.close()


@contextmanager
def starting(world: _Guarded) -> Iterator[GuardedContainer]:
    """Make a container of a claim of its own; nothing may be left of both afterwards."""
    uid, pod = f"u{next(_numbers)}", f"pod-{next(_numbers)}"
    container = world.container(pod, world.node.prepare(uid, pod))
    assert isinstance(container, GuardedContainer)
    try:
        yield container
        # a container that runs may be ahead of who brought it there
        until(lambda: not any(world.deaths.glob("*")), lambda: "nobody came to the step")
    finally:
        deaths.clear(world.deaths)
        container.kill()
        until(lambda: not world.node.pods(), lambda: str(world.node.left()))
        world.node.ask("grant.drop", uid=uid)
    world.node.is_clean()


def start(container: GuardedContainer) -> None:
    """Start it, as often as its hook gives up on a busy host, and have it use its card up to its limit."""
    while why := container.bind(may_be_refused=True):
        assert "tried for" in why
    assert container.exceeds(_GI) == ""


@pytest.mark.parametrize(("step", "times"), GUARDED, ids=str)
def test_a_container_gets_its_card_whoever_dies_when(guarded: _Guarded, step: str, times: int) -> None:
    with starting(guarded) as container:
        deaths.order(guarded.deaths, step, times)
        start(container)


@pytest.mark.parametrize("steps", PAIRS, ids=str)
def test_a_container_gets_its_card_when_two_die(guarded: _Guarded, steps: tuple[str, str]) -> None:
    with starting(guarded) as container:
        for step in steps:
            deaths.order(guarded.deaths, step)
        start(container)


def test_a_container_restored_from_a_checkpoint_does_not_start(guarded: _Guarded) -> None:
    with starting(guarded) as container:
        said = container.run_hooks(may_be_refused=True, status="stopped")

    assert "it is restored from a checkpoint" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("step", ["before retirement", "after retirement"])
def test_nothing_is_left_if_guardian_dies_at_the_end(guarded: _Guarded, step: str) -> None:
    with starting(guarded) as container:
        start(container)
        deaths.order(guarded.deaths, step)
        container.process.kill()
        until(lambda: not any(guarded.deaths.iterdir()), lambda: "nobody came to the step")


@pytest.mark.parametrize("step", ["after bind", "after guardian's admission"])
def test_nothing_is_left_of_a_container_that_ends_half_bound(guarded: _Guarded, step: str) -> None:
    """Its runtime is killed with it, between hook and listener; its hook is left alone and asks on."""
    with starting(guarded) as container:
        deaths.order(guarded.deaths, step)
        hook = threading.Thread(target=container.run_hooks, args=(True,))
        hook.start()
        until(lambda: not any(guarded.deaths.iterdir()), lambda: "nobody came to the step")
        container.process.kill()
        hook.join()


def test_hooks_of_one_container_at_once_and_again_bind_it_once(guarded: _Guarded) -> None:
    with starting(guarded) as container:
        deaths.order(guarded.deaths, "after bind")
        with ThreadPoolExecutor(4) as pool:
            refused = [said for said in pool.map(container.run_hooks, [True] * 4) if said and "tried for" not in said]
        start(container)
        names = [pod["name"] for pod in guarded.node.pods()]

    assert refused == []
    assert len(names) == 1


def test_a_node_switched_off_half_bound_keeps_its_claim_alone(guarded: _Guarded) -> None:
    with starting(guarded) as container:
        deaths.order(guarded.deaths, "after admission")
        hook = threading.Thread(target=container.run_hooks, args=(True,))
        hook.start()
        until(lambda: not any(guarded.deaths.iterdir()), lambda: "nobody came to the step")
        guarded.node.keeper.pause()
        container.process.kill()
        guarded.switch_off()
        guarded.node.keeper.go_on()
        hook.join()
        claims = guarded.node.ask("grant.list")["grants"]

    assert len(claims) == 1


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    directory = tmp_path_factory.mktemp("qgpu")
    (directory / "qgpud.toml").write_text(f'[containers]\ncdi = "{directory / "cdi"}"\n')
    driver = f"PYTHONPATH={_ROOT / 'tests/hostile/driver'}:{_ROOT}"
    more = ("env", driver, f"{deaths.VARIABLE}={directory / 'deaths'}")
    manager = Manager(directory, "sim", more, ("--config", str(directory / "qgpud.toml")))
    node = Node(manager, directory / "deaths", directory / "cdi")
    yield node
    node.keeper.close()


@pytest.mark.skipif(bool(oci.missing("runc")), reason=oci.missing("runc") or "all there")
@pytest.mark.parametrize(("step", "times"), SIMULATED, ids=str)
def test_runc_starts_a_container_whoever_dies_when(simulated: Node, tmp_path: Path, step: str, times: int) -> None:
    uid, pod = f"u{next(_numbers)}", f"pod-{next(_numbers)}"
    (device,) = simulated.prepare(uid, pod)
    specification = json.loads((simulated.cdi / f"qgpu-claim-{uid}.json").read_text())
    container = oci.Container("runc", tmp_path, simulated.manager.runtime_dir, "sleep", "600")
    container.ask({"io.kubernetes.cri.sandbox-uid": pod}).give(specification, device.partition("=")[2])
    deaths.order(simulated.deaths, step, times)
    try:
        while (ran := container.start()).returncode and "tried for" in ran.stdout:
            container.end()
        assert ran.returncode == 0, ran.stdout
        (found,) = simulated.pods()
        assert (found["pids"], found["claim"]) == ([container.state()["pid"]], uid)
        assert not deaths.clear(simulated.deaths)
    finally:
        container.end()
    until(lambda: not simulated.pods(), lambda: str(simulated.left()))
    simulated.ask("grant.drop", uid=uid)
    simulated.is_clean()

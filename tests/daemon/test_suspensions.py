"""Suspended pods on the simulator: what the daemon promises of them, whatever happens in between."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qgpu.daemon import suspensions
from qgpu.daemon.suspension_file import SuspensionFile
from qgpu.daemon.suspensions import Suspensions
from qgpu.errors import CheckpointError, ExitCode, QgpuError, RefusedError, UnknownNameError
from qgpu.linux import cgroup
from qgpu.load.workload import Workload
from qgpu.model import Grant
from qgpu.model.checkpointer import GpuProcess, ProcessState
from qgpu.model.plane_api import PodInfo
from qgpu.model.suspension import Residency, Suspension
from qgpu.planes.sim.checkpointer import SimCheckpointer
from qgpu.planes.sim.host import Clock, SimHost

GIB = 1 << 30
FLOOD = Workload(kernel_us=1000.0, batch=0, memory=GIB)
TIMEOUT_S = 60.0


class Daemon:
    """What of a daemon knows of suspended pods, on a host that outlives it."""

    def __init__(self, host: SimHost, directory: Path, most: int | None = None) -> None:
        self.host = host
        self.moves = Suspensions(host, self.named, SuspensionFile(directory), most=most)

    def named(self, name: str) -> PodInfo:
        found = [pod for pod in self.host.pods() if pod.name == name]
        if not found:
            raise UnknownNameError(name)
        return found[0]

    def states(self) -> list[ProcessState | None]:
        """Return the state of every process of pod one."""
        driver = self.host.checkpointer()
        return [driver.state(each) for each in driver.processes(self.named("one"))]


@pytest.fixture
def host() -> SimHost:
    made = SimHost(1, Clock.VIRTUAL)
    made.admit("one", {0: Grant(cores=50, memory=8 * GIB)})
    return made


@pytest.fixture
def daemon(host: SimHost, tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(host, tmp_path)
    yield made
    made.moves.close()


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Let the simulated driver fail in the call ``name``, the ``number``-th time it is made."""
    real, calls = getattr(SimCheckpointer, name), [0]

    def call(self: SimCheckpointer, process: GpuProcess, *rest: object) -> None:
        calls[0] += 1
        if calls[0] == number:
            raise CheckpointError("the driver refused")
        real(self, process, *rest)

    monkeypatch.setattr(SimCheckpointer, name, call)


def test_suspended_pod_leaves_the_card_and_keeps_its_grant(host: SimHost, daemon: Daemon) -> None:
    load = host.start_load("one", 0, FLOOD)
    daemon.moves.suspend("one")

    assert daemon.moves.wait("one", TIMEOUT_S).residency is Residency.SUSPENDED
    pod = daemon.named("one")
    assert (pod.memory, pod.grants[0].memory) == ({}, 8 * GIB)
    assert daemon.moves.state("one").memory == {0: GIB}
    before = host.progress(load).kernels
    host.backend(0).wait(10**9)
    assert host.progress(load).kernels == before


def test_resumed_pod_goes_on_where_it_was(host: SimHost, daemon: Daemon) -> None:
    load = host.start_load("one", 0, replace(FLOOD, batch=1, period_us=10_000.0))
    backend = host.backend(0)
    backend.wait(10**9)
    before = host.progress(load).kernels
    daemon.moves.suspend("one")
    daemon.moves.wait("one", TIMEOUT_S)
    backend.wait(10**9)
    daemon.moves.resume("one")

    assert daemon.moves.wait("one", TIMEOUT_S).residency is Residency.RUNNING
    assert daemon.named("one").memory == {0: GIB}
    backend.sample()
    end_ns = backend.now_ns + 10**9
    while backend.now_ns < end_ns:
        backend.wait(end_ns - backend.now_ns)
    assert 90 <= host.progress(load).kernels - before <= 110


def test_suspended_pods_hold_no_more_than_they_may(host: SimHost, tmp_path: Path) -> None:
    daemon = Daemon(host, tmp_path, most=GIB + GIB // 2)
    host.admit("two", {0: Grant()})
    for name in ("one", "two"):
        host.start_load(name, 0, FLOOD)
    daemon.moves.suspend("one")
    daemon.moves.wait("one", TIMEOUT_S)
    with pytest.raises(RefusedError, match=r"pod two: it holds 1.0 GiB on cards, .* hold 1.0 GiB of the 1.5 GiB"):
        daemon.moves.suspend("two")
    assert (daemon.moves.state("two").residency, daemon.moves.host_room()) == (Residency.RUNNING, GIB + GIB // 2)
    daemon.moves.resume("one")
    daemon.moves.wait("one", TIMEOUT_S)
    daemon.moves.suspend("two")

    assert daemon.moves.wait("two", TIMEOUT_S).residency is Residency.SUSPENDED
    daemon.moves.close()


def test_of_two_that_leave_at_once_the_second_sees_the_first(
    host: SimHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon(host, tmp_path, most=GIB + GIB // 2)
    host.admit("two", {0: Grant()})
    for name in ("one", "two"):
        host.start_load(name, 0, FLOOD)

    def made(*arguments: Any, **more: Any) -> Suspension:
        with monkeypatch.context() as patch:
            patch.setattr(suspensions, "Suspension", Suspension)
            daemon.moves.suspend("one")
            daemon.moves.wait("one", TIMEOUT_S)
        return Suspension(*arguments, **more)

    monkeypatch.setattr(suspensions, "Suspension", made)
    with pytest.raises(RefusedError, match=r"pod two: .* hold 1.0 GiB of the 1.5 GiB"):
        daemon.moves.suspend("two")

    assert daemon.moves.state("two") == Suspension()
    daemon.moves.close()


@pytest.mark.parametrize("fits", [False, True])
def test_what_a_pod_allocates_until_it_is_held_must_fit_too(
    host: SimHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    daemon = Daemon(host, tmp_path, most=2 * GIB if fits else GIB)
    host.start_load("one", 0, FLOOD)
    real = SimCheckpointer.lock

    def lock(self: SimCheckpointer, process: GpuProcess, timeout_ms: int) -> None:
        host.start_load("one", 0, FLOOD)
        real(self, process, timeout_ms)

    monkeypatch.setattr(SimCheckpointer, "lock", lock)
    daemon.moves.suspend("one")
    found = daemon.moves.wait("one", TIMEOUT_S)

    if fits:
        assert (found.residency, found.memory) == (Residency.SUSPENDED, {0: 2 * GIB})
    else:
        assert (found.residency, daemon.states()) == (Residency.RUNNING, [ProcessState.RUNNING] * 2)
        assert "it holds 2.0 GiB on cards, and suspended pods hold 0.0 GiB of the 1.0 GiB" in found.error
    daemon.moves.close()


@pytest.mark.parametrize("suspended", [False, True])
def test_without_a_free_thread_a_pod_stays_where_it_is(
    host: SimHost, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, suspended: bool
) -> None:
    host.start_load("one", 0, FLOOD)
    if suspended:
        daemon.moves.suspend("one")
    before = daemon.moves.wait("one", TIMEOUT_S)
    operation = daemon.moves.resume if suspended else daemon.moves.suspend
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RefusedError, match="pod one: no thread is available to move it"):
            operation("one")

    assert daemon.moves.state("one") == before
    assert SuspensionFile(tmp_path).load().keys() == ({"one"} if suspended else set())
    operation("one")
    assert not daemon.moves.wait("one", TIMEOUT_S).error


def test_other_pods_run_while_one_is_suspended(host: SimHost, daemon: Daemon) -> None:
    host.start_load("one", 0, FLOOD)
    host.admit("two", {0: Grant()})
    other = host.start_load("two", 0, FLOOD)
    daemon.moves.suspend("one")
    daemon.moves.wait("one", TIMEOUT_S)
    backend = host.backend(0)
    backend.sample()
    backend.wait(10**9)

    assert host.progress(other).kernels > 900, "it has the card for itself"


@pytest.mark.parametrize("name", ["lock", "checkpoint"])
def test_a_failed_suspension_leaves_all_processes_running(
    host: SimHost, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for _ in range(3):
        host.start_load("one", 0, FLOOD)
    failing(monkeypatch, name, 2)
    daemon.moves.suspend("one")
    found = daemon.moves.wait("one", TIMEOUT_S)

    assert found.residency is Residency.RUNNING
    assert found.error == "process 2: the driver refused"
    assert daemon.states() == [ProcessState.RUNNING] * 3


def test_a_failed_resumption_leaves_all_processes_suspended(
    host: SimHost, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        host.start_load("one", 0, FLOOD)
    daemon.moves.suspend("one")
    daemon.moves.wait("one", TIMEOUT_S)
    failing(monkeypatch, "restore", 2)
    daemon.moves.resume("one")
    found = daemon.moves.wait("one", TIMEOUT_S)

    assert found.residency is Residency.SUSPENDED
    assert found.error == "process 2: the driver refused"
    assert daemon.states() == [ProcessState.CHECKPOINTED] * 3
    daemon.moves.resume("one")
    assert daemon.moves.wait("one", TIMEOUT_S) == replace(
        Suspension(), since_s=daemon.moves.state("one").since_s, late_s=found.late_s
    )


def test_a_pod_is_not_resumed_into_a_full_card(host: SimHost, daemon: Daemon) -> None:
    host.start_load("one", 0, FLOOD)
    daemon.moves.suspend("one")
    daemon.moves.wait("one", TIMEOUT_S)
    host.admit("two", {0: Grant()})
    big = host.start_load("two", 0, replace(FLOOD, memory=host.free_memory(0)))

    with pytest.raises(RefusedError, match=r"it needs 1.0 GiB of pGPU 0, which has 0.0 GiB free"):
        daemon.moves.resume("one")
    assert daemon.moves.state("one").residency is Residency.SUSPENDED
    host.stop_load(big)
    daemon.moves.resume("one")
    assert daemon.moves.wait("one", TIMEOUT_S).residency is Residency.RUNNING


@pytest.mark.root
def test_pod_with_more_cgroups_than_are_read_is_not_suspended(host: SimHost, daemon: Daemon) -> None:
    """Processes there would stay on the card."""
    try:
        at = cgroup.create(f"test-{os.getpid()}")
    except QgpuError as error:
        pytest.skip(str(error))
    below = [cgroup.mount() / at[1:] / str(number) for number in range(600)]
    for each in below:
        each.mkdir()
    host.admit("many", {0: Grant()}, at)
    host.start_load("many", 0, FLOOD)
    try:
        with pytest.raises(RefusedError, match=r"pod many: not all of its processes can be listed: .* more than"):
            daemon.moves.suspend("many")
    finally:
        for each in below:
            each.rmdir()
        cgroup.remove("many", at)

    assert daemon.moves.state("many").residency is Residency.RUNNING


def test_what_cannot_be_suspended_is_refused_at_once(host: SimHost, daemon: Daemon) -> None:
    with pytest.raises(UnknownNameError):
        daemon.moves.suspend("nobody")
    with pytest.raises(RefusedError, match="no process of it uses a card"):
        daemon.moves.suspend("one")
    daemon.moves.resume("one")
    assert daemon.moves.state("one") == Suspension()


def test_a_second_operation_is_refused_while_one_runs(
    host: SimHost, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.start_load("one", 0, FLOOD)
    refused: list[str] = []
    real = SimCheckpointer.checkpoint

    def checkpoint(self: SimCheckpointer, process: GpuProcess) -> None:
        for operation in (daemon.moves.suspend, daemon.moves.resume):
            with pytest.raises(RefusedError, match="already; wait") as error:
                operation("one")
            refused.append(str(error.value))
        real(self, process)

    monkeypatch.setattr(SimCheckpointer, "checkpoint", checkpoint)
    daemon.moves.suspend("one")

    assert daemon.moves.wait("one", TIMEOUT_S).residency is Residency.SUSPENDED
    assert len(refused) == 2


def test_whoever_sees_where_a_pod_is_may_move_it(
    host: SimHost, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.start_load("one", 0, FLOOD)
    release, seen = Suspensions._release, threading.Event()

    def late(moves: Suspensions, name: str) -> None:
        seen.wait(1)
        release(moves, name)

    monkeypatch.setattr(Suspensions, "_release", late)
    daemon.moves.suspend("one")
    while daemon.moves.state("one").residency is not Residency.SUSPENDED:
        time.sleep(0.001)
    daemon.moves.resume("one")
    seen.set()

    assert daemon.moves.wait("one", TIMEOUT_S).residency is Residency.RUNNING


def test_nothing_is_touched_if_it_cannot_be_written(host: SimHost, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    daemon = Daemon(host, tmp_path / "file")
    host.start_load("one", 0, FLOOD)

    with pytest.raises(RefusedError, match="nothing is suspended or resumed without it"):
        daemon.moves.suspend("one")
    assert daemon.states() == [ProcessState.RUNNING]
    assert daemon.moves.state("one") == Suspension()


def test_full_disk_is_no_refusal(host: SimHost, daemon: Daemon, tmp_path: Path) -> None:
    host.start_load("one", 0, FLOOD)
    (tmp_path / "suspensions.json").symlink_to("/dev/full")

    with pytest.raises(QgpuError, match="No space left on device; nothing is suspended") as failed:
        daemon.moves.suspend("one")
    assert (failed.value.code, daemon.states()) == (ExitCode.FAILED, [ProcessState.RUNNING])


def test_a_pod_whose_suspended_processes_ended_counts_as_running(host: SimHost, daemon: Daemon) -> None:
    load = host.start_load("one", 0, FLOOD)
    daemon.moves.suspend("one")
    daemon.moves.wait("one", TIMEOUT_S)
    daemon.moves.forget_ended(["one"])
    assert daemon.moves.state("one").residency is Residency.SUSPENDED
    host.stop_load(load)
    daemon.moves.forget_ended(["one"])

    assert daemon.moves.state("one").residency is Residency.RUNNING


def test_the_lock_waits_until_turns_have_come_round(
    host: SimHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, waits = Daemon(host, tmp_path), []
    monkeypatch.setattr(daemon.moves, "_period_ns", lambda: 10 * 10**9)
    real = SimCheckpointer.lock

    def lock(self: SimCheckpointer, process: GpuProcess, timeout_ms: int) -> None:
        waits.append(timeout_ms)
        real(self, process, timeout_ms)

    monkeypatch.setattr(SimCheckpointer, "lock", lock)
    host.start_load("one", 0, FLOOD)
    daemon.moves.suspend("one", work_s=2)
    daemon.moves.wait("one", TIMEOUT_S)

    assert waits == [32_000]


def test_what_others_bring_back_meanwhile_is_not_free(
    host: SimHost, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.admit("two", {0: Grant()})
    load = host.start_load("one", 0, replace(FLOOD, memory=100 * GIB // 16))
    for name in ("one", "two"):
        if name == "two":
            host.start_load("two", 0, replace(FLOOD, memory=host.free_memory(0)))
        daemon.moves.suspend(name)
        daemon.moves.wait(name, TIMEOUT_S)
    refused = []
    real = SimCheckpointer.restore

    def restore(self: SimCheckpointer, process: GpuProcess, moves: dict[str, str]) -> None:
        if process.pid == load:
            with pytest.raises(RefusedError, match="suspend or end another pod there first"):
                daemon.moves.resume("two")
            refused.append(process.pid)
        real(self, process, moves)

    monkeypatch.setattr(SimCheckpointer, "restore", restore)
    daemon.moves.resume("one")

    assert daemon.moves.wait("one", TIMEOUT_S).residency is Residency.RUNNING
    assert refused == [load]


def test_host_memory_holds_no_pod_that_is_still_on_its_way(
    host: SimHost, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.start_load("one", 0, FLOOD)
    real, begun, may_end = SimCheckpointer.checkpoint, threading.Event(), threading.Event()

    def slow(self: SimCheckpointer, process: GpuProcess) -> None:
        begun.set()
        may_end.wait()
        real(self, process)

    monkeypatch.setattr(SimCheckpointer, "checkpoint", slow)
    monkeypatch.setattr(SimCheckpointer, "host_room", lambda _: 10 * GIB)
    daemon.moves.suspend("one")
    begun.wait()
    on_the_way = daemon.moves.host_room()
    may_end.set()
    daemon.moves.wait("one", TIMEOUT_S)

    assert (on_the_way, daemon.moves.host_room()) == (10 * GIB, 11 * GIB)


def no_thread(self: threading.Thread) -> None:
    """Fail as Thread.start does where the kernel gives no thread."""
    raise RuntimeError("can't start new thread")


class Killed(BaseException):
    """The daemon was killed: nothing of it runs on."""


@settings(max_examples=60)
@given(processes=st.integers(1, 4), dies_at=st.integers(1, 14), before=st.booleans(), resuming=st.booleans())
def test_a_daemon_killed_at_any_call_leaves_no_pod_between(
    tmp_path_factory: pytest.TempPathFactory, processes: int, dies_at: int, before: bool, resuming: bool
) -> None:
    host = SimHost(1, Clock.VIRTUAL)
    host.admit("one", {0: Grant()})
    for _ in range(processes):
        host.start_load("one", 0, FLOOD)
    directory = tmp_path_factory.mktemp("state")
    first = Daemon(host, directory)
    if resuming:
        first.moves.suspend("one")
        first.moves.wait("one", TIMEOUT_S)
    with pytest.MonkeyPatch.context() as patch:
        kill(patch, dies_at, before=before, more=[(SuspensionFile, "save")])
        with suppress(Killed):
            (first.moves.resume if resuming else first.moves.suspend)("one")
    first.moves.close()
    no_waiting(directory)
    second = Daemon(host, directory)
    found = second.moves.wait("one", TIMEOUT_S)

    assert not found.residency.moving
    wanted = ProcessState.CHECKPOINTED if found.residency is Residency.SUSPENDED else ProcessState.RUNNING
    assert second.states() == [wanted] * processes


def kill(patch: pytest.MonkeyPatch, dies_at: int, *, before: bool, more: Sequence[tuple[type, str]] = ()) -> None:
    """Let the daemon die at its ``dies_at``-th call of the driver or of ``more``, before or after it takes effect."""
    calls = [0]

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            calls[0] += 1
            if calls[0] == dies_at and before:
                raise Killed
            result = real(*arguments)
            if calls[0] >= dies_at:
                raise Killed
            return result

        return call

    driver = [(SimCheckpointer, name) for name in ("lock", "checkpoint", "restore", "unlock")]
    for owner, name in (*driver, *more):
        patch.setattr(owner, name, dying(getattr(owner, name)))
    patch.setattr(Suspensions, "_begin", lambda self, name, operation: self._work(name, operation))


def no_waiting(directory: Path) -> None:
    """Let the next daemon wait for no call that was cut off: here, none is."""
    file = SuspensionFile(directory)
    file.save({name: replace(each, late_s=0.0) for name, each in file.load().items()})

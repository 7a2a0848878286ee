"""Which processes of a pod are taken off, and which pods are refused before anything is touched."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from qgpu.checkpoint import process_checkpointer
from qgpu.checkpoint.process_checkpointer import ProcessCheckpointer
from qgpu.errors import CheckpointError, NotSupportedError, RefusedError
from qgpu.linux import proc
from qgpu.model import Grant
from qgpu.model.checkpointer import GpuProcess, ProcessState
from qgpu.model.plane_api import Pgpu, PodInfo
from tests.checkpoint.conftest import Start

CARDS = [Pgpu(0, "GPU-a", "card", 1 << 40), Pgpu(1, "GPU-b", "card", 1 << 40)]

#: Maps what UVM takes for managed memory: a shared mapping at an offset equal to its address.
MANAGED = """
import ctypes, os, sys
libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
fd, size, at = os.memfd_create("uvm"), int(sys.argv[1]), 1 << 40
os.ftruncate(fd, at + size)
assert libc.mmap(at, size, 3, 0x1 | 0x10, fd, at) == at  # MAP_SHARED, MAP_FIXED
print("ready", flush=True); sys.stdin.read()
"""


def checkpointer(
    on_card: dict[str, list[int]], mps: tuple[int, ...] = (), driver: str = "580.159.04"
) -> ProcessCheckpointer:
    return ProcessCheckpointer(CARDS, driver, lambda uuid: on_card.get(uuid, []), lambda _: mps, lambda _: 0)


def managed(size: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", MANAGED, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_those_of_the_pod_that_are_on_any_card_are_found(start: Start) -> None:
    first, second, other = (start().pid for _ in range(3))
    driver = checkpointer({"GPU-a": [first, other], "GPU-b": [second, first]})
    found = driver.processes(PodInfo("web", pids=(first, second, 1), unrestorable=()))

    assert [each.pid for each in found] == sorted((first, second))
    assert all(map(driver.alive, found))


def test_what_the_driver_cannot_put_back_is_refused(start: Start) -> None:
    pid = start().pid
    pod = PodInfo("web", pids=(pid,), unrestorable=("peer access between cards",))
    with pytest.raises(RefusedError, match="pod web: a process of it has peer access between cards"):
        checkpointer({"GPU-a": [pid]}).processes(pod)


@pytest.mark.parametrize(
    ("processes", "cards", "refused"), [(1, 1, ""), (2, 1, "several processes"), (1, 2, "several c")]
)
def test_unseen_sharing_allows_one_process_on_one_card(start: Start, processes: int, cards: int, refused: str) -> None:
    pids = tuple(start().pid for _ in range(processes))
    pod = PodInfo("web", dict.fromkeys(range(cards), Grant()), pids, unrestorable=None)
    driver = checkpointer({"GPU-a": list(pids)})
    if refused:
        with pytest.raises(RefusedError, match=refused):
            driver.processes(pod)
    else:
        assert [each.pid for each in driver.processes(pod)] == list(pids)


def test_a_client_of_mps_is_refused(start: Start) -> None:
    pid = start().pid
    with pytest.raises(RefusedError, match=f"pod web: process {pid} uses MPS"):
        checkpointer({"GPU-a": [pid]}, (pid,)).processes(PodInfo("web", pids=(pid,)))


@pytest.mark.parametrize(("size", "refused"), [(2 << 20, False), (64 << 20, True)])
def test_managed_memory_is_refused_but_not_semaphores(size: int, refused: bool) -> None:
    process = managed(size)
    try:
        driver, pod = checkpointer({"GPU-a": [process.pid]}), PodInfo("web", pids=(process.pid,))
        if refused:
            with pytest.raises(RefusedError, match=f"process {process.pid} uses managed memory"):
                driver.processes(pod)
        else:
            assert [each.pid for each in driver.processes(pod)] == [process.pid]
    finally:
        process.communicate()


def test_another_process_of_the_same_pid_is_not_asked(libcuda: Path, start: Start) -> None:
    driver = checkpointer({})

    assert driver.state(GpuProcess(start().pid, "1")) is None
    assert driver.helper.pid == 0, "not even a helper was started"


def test_without_a_free_descriptor_no_process_has_ended(start: Start) -> None:
    pid = start().pid
    driver = checkpointer({"GPU-a": [pid]})
    (found,) = driver.processes(PodInfo("web", pids=(pid,)))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        for ask in (driver.alive, driver.state):
            with pytest.raises(CheckpointError, match=f"process {pid} cannot be looked at: Too many open files"):
                ask(found)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert driver.alive(found)


def test_a_process_that_has_ended_has_no_state(libcuda: Path, start: Start) -> None:
    process = start()
    driver = checkpointer({"GPU-a": [process.pid]})
    (found,) = driver.processes(PodInfo("web", pids=(process.pid,)))
    assert driver.state(found) is ProcessState.RUNNING
    process.kill()
    process.wait()

    assert driver.state(found) is None
    driver.close()


def test_who_got_an_ended_processs_pid_is_not_held(libcuda: Path, start: Start) -> None:
    pid = start().pid
    driver, other = checkpointer({"GPU-a": [pid]}), GpuProcess(pid, proc.start_time(pid))
    ended = GpuProcess(pid, "1")  # what had the number when it was last looked at
    with pytest.raises(CheckpointError, match=f"process {pid}: it has ended"):
        driver.lock(ended, 1000)

    assert driver.state(other) is ProcessState.RUNNING
    driver.close()


@pytest.mark.parametrize("named", [False, True])
def test_looking_at_a_pods_processes_has_an_end(start: Start, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    pid = start().pid
    monkeypatch.setattr(process_checkpointer, "_SCAN_S", -1.0)
    with pytest.raises(RefusedError, match="pod web: its 1 processes cannot be looked at within"):
        checkpointer({"GPU-a": [pid]} if named else {}).processes(PodInfo("web", pids=(pid,)))


def test_a_driver_without_checkpoints_is_refused() -> None:
    checkpointer({}, driver="570.86.15").close()
    with pytest.raises(NotSupportedError, match=r"driver 565\.57\.01: it cannot suspend processes; install branch 570"):
        checkpointer({}, driver="565.57.01")


def test_a_driver_that_restores_on_the_same_card_only_is_told() -> None:
    checkpointer({}).check_moves()
    with pytest.raises(NotSupportedError, match=r"driver 575\.64\.05: it cannot move processes .*; install branch 580"):
        checkpointer({}, driver="575.64.05").check_moves()

"""Whatever is killed in the middle of a move: in the end all processes run, or all are off their cards."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from qgpu.checkpoint.cuda_checkpoint import CudaCheckpoint
from qgpu.model.checkpointer import ProcessState
from qgpu.model.suspension import Residency
from tests.checkpoint import moving
from tests.checkpoint.conftest import Start

#: How long a process takes for each call, so that a kill meets calls in progress.
SLOW = ("lock=60", "checkpoint=120", "restore=120", "unlock=30")
#: When the kills come: from before the first call to after the last.
LATEST_S = 1.5
KILLS = 8


def daemon(directory: Path, pids: list[int]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.moving", str(directory), *map(str, pids)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip() if line == "" else ""


def states(pids: list[int]) -> set[ProcessState]:
    return {CudaCheckpoint().state(pid) for pid in pids}


def test_a_daemon_killed_at_random_moments_loses_no_pod(libcuda: Path, start: Start, tmp_path: Path) -> None:
    pids, dice = [start(*SLOW).pid for _ in range(2)], random.Random(1)
    place = "running"
    for _ in range(KILLS):
        first = daemon(tmp_path, pids)
        assert ask(first, "") == place
        ask(first, "suspend" if place == "running" else "resume")
        time.sleep(dice.uniform(0, LATEST_S))  # when a kill comes is what is varied
        first.kill()
        first.communicate()
        second = daemon(tmp_path, pids)
        place = ask(second, "")
        second.communicate()
        wanted = ProcessState.RUNNING if place == "running" else ProcessState.CHECKPOINTED

        assert states(pids) == {wanted}


def test_a_helper_killed_at_random_moments_loses_no_pod(libcuda: Path, start: Start, tmp_path: Path) -> None:
    pids, dice = [start(*SLOW).pid for _ in range(2)], random.Random(2)
    moves = moving.made(tmp_path, pids)
    for _ in range(KILLS):
        if moves.state("one").residency is Residency.RUNNING:
            moves.suspend("one", 0.3)
        else:
            moves.resume("one")
        killer = threading.Timer(dice.uniform(0.2, LATEST_S), kill_helpers)
        killer.start()
        found = moves.wait("one", moving.TIMEOUT_S)
        killer.join()
        running = found.residency is Residency.RUNNING

        assert states(pids) == {ProcessState.RUNNING if running else ProcessState.CHECKPOINTED}
    moves.close()


def kill_helpers() -> None:
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # one that has just ended
            if "qgpu.checkpoint" in child.cmdline():
                child.kill()


def test_a_process_killed_while_suspended_is_no_obstacle(libcuda: Path, start: Start, tmp_path: Path) -> None:
    one, other = start(), start()
    moves = moving.made(tmp_path, [one.pid, other.pid])
    moves.suspend("one", 0.3)
    assert moves.wait("one", moving.TIMEOUT_S).residency is Residency.SUSPENDED
    one.kill()
    one.wait()
    moves.resume("one")

    assert moves.wait("one", moving.TIMEOUT_S).residency is Residency.RUNNING
    assert states([other.pid]) == {ProcessState.RUNNING}
    moves.close()


@pytest.mark.parametrize(("how", "error"), [("fail", "NOT_READY"), ("exec", "UNKNOWN")])
@pytest.mark.parametrize("call", ["lock", "checkpoint"])
def test_a_process_that_cannot_be_suspended_lets_the_pod_go_on(
    libcuda: Path, start: Start, tmp_path: Path, call: str, how: str, error: str
) -> None:
    """The driver refuses it, or it executes a program without CUDA."""
    pids = [start().pid, start(f"{call}={how}").pid, start().pid]
    moves = moving.made(tmp_path, pids)
    moves.suspend("one", 0.3)
    found = moves.wait("one", moving.TIMEOUT_S)

    assert found.residency is Residency.RUNNING
    assert found.error == f"process {pids[1]}: cuCheckpointProcess{call.title()}: CUDA_ERROR_{error}"
    assert states(pids if how == "fail" else [pids[0], pids[2]]) == {ProcessState.RUNNING}
    moves.close()

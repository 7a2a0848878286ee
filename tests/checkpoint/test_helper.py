"""The helper process: what it answers, and what becomes of it when a call hangs or its parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from qgpu.checkpoint.helper import Helper, HelperLostError
from qgpu.errors import CheckpointError, NoGpuError, QgpuError
from qgpu.linux import cgroup
from tests.checkpoint.conftest import Start

WAIT_S = 60.0


def test_the_helper_makes_the_calls(libcuda: Path, start: Start) -> None:
    helper, pid = Helper(), start().pid
    helper.call("lock", WAIT_S, pid=pid, timeout_ms=100)

    assert helper.call("state", WAIT_S, pid=pid)["state"] == "locked"
    helper.close()


def test_errors_come_back_as_what_they_are(libcuda: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Helper()
    with pytest.raises(CheckpointError, match="cuCheckpointProcessUnlock: CUDA_ERROR_NOT_READY"):
        helper.call("unlock", WAIT_S, pid=start("unlock=fail").pid)
    helper.close()
    monkeypatch.setenv("QGPU_LIBCUDA", "/nowhere/libcuda.so")
    with pytest.raises(NoGpuError, match="no CUDA driver"):
        Helper().call("state", WAIT_S, pid=1)


def test_a_helper_that_hangs_is_killed(libcuda: Path, start: Start) -> None:
    helper, process = Helper(), start("checkpoint=hang")
    helper.call("lock", WAIT_S, pid=process.pid, timeout_ms=100)
    first = psutil.Process(helper.pid)
    with pytest.raises(HelperLostError, match="checkpoint: the helper process was lost: no answer within 0 s"):
        helper.call("checkpoint", 0.2, pid=process.pid)

    assert not first.is_running()
    assert helper.pid == 0


def test_a_helper_that_dies_is_told_from_one_that_answers(libcuda: Path, start: Start) -> None:
    helper, pid = Helper(), start().pid
    helper.call("state", WAIT_S, pid=pid)
    os.kill(helper.pid, signal.SIGKILL)
    with pytest.raises(HelperLostError, match="state: the helper process was lost"):
        helper.call("state", WAIT_S, pid=pid)

    assert helper.call("state", WAIT_S, pid=pid)["state"] == "running", "the next call starts another"
    helper.close()


def test_the_helper_ends_with_its_parent(libcuda: Path, start: Start) -> None:
    pid = start().pid
    code = (
        "from qgpu.checkpoint.helper import Helper; import time; helper = Helper();"
        f"helper.call('state', 60, pid={pid}); print(helper.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    helper = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()

    psutil.wait_procs([helper], timeout=WAIT_S)
    assert not helper.is_running()


@pytest.fixture
def undying(libcuda: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Helper, int]]:
    """A helper that was asked about a process, and that neither answers nor ends, as one in a call of the driver."""
    helper, pid = Helper(), start().pid
    helper.call("state", WAIT_S, pid=pid)
    stuck = psutil.Process(helper.pid)
    stuck.suspend()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda _: None)
        yield helper, pid
    with suppress(psutil.NoSuchProcess):
        stuck.kill()


def test_nobody_waits_for_a_helper_that_cannot_be_killed(undying: tuple[Helper, int]) -> None:
    helper, pid = undying
    with pytest.raises(HelperLostError, match="state: the helper process was lost: no answer within 0 s"):
        helper.call("state", 0.1, pid=pid)
    helper.close()

    assert helper.pid == 0


def test_a_pod_has_one_helper_that_hangs_at_most(undying: tuple[Helper, int], start: Start) -> None:
    helper, pid = undying
    stuck = helper.pid
    with pytest.raises(HelperLostError, match="was lost"):
        helper.call("state", 0.1, pid=pid)
    other = Helper()
    for each in (pid, start().pid):
        with pytest.raises(HelperLostError, match=f"helper process {stuck} hangs in the kernel"):
            other.call("state", WAIT_S, pid=each)
    assert other.pid == 0, "not even another was started"
    psutil.Process(stuck).kill()
    psutil.Process(stuck).wait(WAIT_S)

    assert other.call("state", WAIT_S, pid=pid)["state"] == "running"
    other.close()


@pytest.mark.root
def test_a_pods_own_cgroups_allow_it_no_second_helper(undying: tuple[Helper, int], start: Start) -> None:
    helper, pid = undying
    try:
        at = cgroup.create(f"test-{os.getpid()}")
    except QgpuError as error:
        pytest.skip(str(error))
    other, second = start(), Helper()
    below = [cgroup.mount() / at[1:] / name for name in ("one", "two")]
    try:
        for each, moved in zip(below, (pid, other.pid), strict=True):
            each.mkdir()
            (each / "cgroup.procs").write_text(str(moved))
        with pytest.raises(HelperLostError, match="was lost"):
            helper.call("state", 0.1, pid=pid)
        with pytest.raises(HelperLostError, match="hangs in the kernel"):
            second.call("state", WAIT_S, pid=other.pid)
    finally:
        second.close()
        for moved in (pid, other.pid):
            (cgroup.mount() / "cgroup.procs").write_text(str(moved))
        for each in below:
            each.rmdir()
        cgroup.remove("", at)

"""The binding of the driver's checkpoint calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from qgpu.checkpoint.cuda_checkpoint import CudaCheckpoint
from qgpu.errors import CheckpointError, NoGpuError, NotSupportedError
from qgpu.model.checkpointer import ProcessState
from tests.checkpoint.conftest import Start


def test_calls_take_a_process_through_all_states(libcuda: Path, start: Start) -> None:
    pid, driver = start().pid, CudaCheckpoint()
    seen = [driver.state(pid)]
    for call in (
        lambda: driver.lock(pid, 1000),
        lambda: driver.checkpoint(pid),
        lambda: driver.restore(pid, {}),
        lambda: driver.unlock(pid),
    ):
        call()
        seen.append(driver.state(pid))

    assert seen == [
        ProcessState.RUNNING,
        ProcessState.LOCKED,
        ProcessState.CHECKPOINTED,
        ProcessState.LOCKED,
        ProcessState.RUNNING,
    ]


def test_arguments_lie_where_the_driver_reads_them(libcuda: Path, start: Start) -> None:
    process, driver = start(), CudaCheckpoint()
    old, new = "GPU-00112233-4455-6677-8899-aabbccddeeff", "GPU-ffeeddcc-bbaa-9988-7766-554433221100"
    driver.lock(process.pid, 0x1234)
    driver.checkpoint(process.pid)
    driver.restore(process.pid, {old: new})
    assert process.stdout is not None

    assert process.stdout.readline() == f"lock {(0x1234).to_bytes(64, 'little').hex()}\n"
    assert process.stdout.readline() == f"checkpoint {bytes(64).hex()}\n"
    assert process.stdout.readline() == "restore " + "".join(each[4:].replace("-", "") for each in (old, new)) + "\n"


def test_a_move_to_what_is_no_whole_card_fails_in_words(libcuda: Path, start: Start) -> None:
    pid, driver = start().pid, CudaCheckpoint()
    with pytest.raises(CheckpointError, match=r"^MIG-7: it is no UUID of a whole card"):
        driver.restore(pid, {"MIG-7": "MIG-7"})


def test_an_error_has_the_calls_name_and_cudas(libcuda: Path, start: Start) -> None:
    with pytest.raises(CheckpointError, match=r"^cuCheckpointProcessLock: CUDA_ERROR_NOT_READY$"):
        CudaCheckpoint().lock(start("lock=fail").pid, 1)


def test_a_library_without_the_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QGPU_LIBCUDA", "libc.so.6")
    with pytest.raises(NotSupportedError, match="install driver branch 570 or newer"):
        CudaCheckpoint()
    monkeypatch.setenv("QGPU_LIBCUDA", "/nowhere/libcuda.so")
    with pytest.raises(NoGpuError, match="cannot load"):
        CudaCheckpoint()

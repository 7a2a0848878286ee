"""The driver's checkpoint calls (cuda.h, section Checkpoint), through cffi without a compiler.

Only the helper process loads the library: a call may take minutes, hang, or end the process that makes it. The
environment variable ``QGPU_LIBCUDA`` names a library to load instead of the driver's.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any

from cffi import FFI

from qgpu.errors import CheckpointError, NoGpuError, NotSupportedError
from qgpu.model.checkpointer import ProcessState

#: The first driver branch with the calls, and the first that restores on other cards (release notes of CUDA 13.0).
FIRST_BRANCH, FIRST_WITH_MOVES = 570, 580

# Each struct of arguments has 64 bytes; zero is the default.
_CDEF = """
typedef int CUresult;
typedef struct { unsigned char bytes[16]; } CUuuid;
typedef struct { CUuuid before, after; } CUcheckpointGpuPair;
typedef struct { unsigned int timeout_ms; unsigned char reserved[60]; } CUcheckpointLockArgs;
typedef struct { unsigned char reserved[64]; } CUcheckpointArgs;
typedef struct { CUcheckpointGpuPair *pairs; unsigned int count; unsigned char reserved[52]; } CUcheckpointRestoreArgs;

CUresult cuInit(unsigned int flags);
CUresult cuGetErrorName(CUresult error, const char **name);
CUresult cuCheckpointProcessGetState(int pid, int *state);
CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args);
CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointArgs *args);
CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args);
CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointArgs *args);
"""

#: CUprocessState in order.
_STATES = tuple(ProcessState)


class CudaCheckpoint:
    """The loaded library. Methods raise CheckpointError with CUDA's name of the error."""

    def __init__(self) -> None:
        self._ffi = FFI()
        self._ffi.cdef(_CDEF)
        name = os.environ.get("QGPU_LIBCUDA", "libcuda.so.1")
        try:
            self._lib: Any = self._ffi.dlopen(name)
        except OSError as error:
            raise NoGpuError(f"no CUDA driver: cannot load {name}; is the NVIDIA driver installed?") from error
        if not hasattr(self._lib, "cuCheckpointProcessCheckpoint"):
            raise NotSupportedError(
                f"{name}: it cannot suspend processes; install driver branch {FIRST_BRANCH} or newer"
            )
        self._call("cuInit", 0)

    def state(self, pid: int) -> ProcessState:
        """Return a process's state."""
        out: Any = self._ffi.new("int *")
        self._call("cuCheckpointProcessGetState", pid, out)
        if not 0 <= out[0] < len(_STATES):
            raise CheckpointError(f"cuCheckpointProcessGetState: unknown state {out[0]}")
        return _STATES[int(out[0])]

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Block a process's CUDA calls, and wait until its work ends, at most ``timeout_ms``."""
        self._call("cuCheckpointProcessLock", pid, self._ffi.new("CUcheckpointLockArgs *", {"timeout_ms": timeout_ms}))

    def checkpoint(self, pid: int) -> None:
        """Take a locked process off its cards, into host memory."""
        self._call("cuCheckpointProcessCheckpoint", pid, self._ffi.new("CUcheckpointArgs *"))

    def restore(self, pid: int, moves: Mapping[str, str]) -> None:
        """Put a process back on cards; ``moves`` maps the UUIDs of its old cards to those of the new ones."""
        pairs = self._ffi.new("CUcheckpointGpuPair[]", max(1, len(moves)))
        for pair, (before, after) in zip(pairs, moves.items(), strict=False):
            pair.before.bytes, pair.after.bytes = _bytes_of(before), _bytes_of(after)
        arguments: Any = self._ffi.new("CUcheckpointRestoreArgs *")
        if moves:
            arguments.pairs, arguments.count = pairs, len(moves)
        self._call("cuCheckpointProcessRestore", pid, arguments)

    def unlock(self, pid: int) -> None:
        """Unblock a process's CUDA calls."""
        self._call("cuCheckpointProcessUnlock", pid, self._ffi.new("CUcheckpointArgs *"))

    def _call(self, name: str, *args: Any) -> None:
        if result := getattr(self._lib, name)(*args):
            out: Any = self._ffi.new("const char **")
            text = self._ffi.string(out[0]) if self._lib.cuGetErrorName(result, out) == 0 and out[0] else b""
            assert isinstance(text, bytes)
            raise CheckpointError(f"{name}: {text.decode() or f'CUDA error {result}'}")


def _bytes_of(name: str) -> bytes:
    """Return the 16 bytes of a card's UUID, given as NVML writes it ("GPU-…"). Raises CheckpointError."""
    try:
        return uuid.UUID(name.removeprefix("GPU-")).bytes
    except ValueError as error:
        raise CheckpointError(f"{name}: it is no UUID of a whole card; the driver moves between those only") from error

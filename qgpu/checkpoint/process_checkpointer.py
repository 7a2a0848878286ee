"""Checkpoints of real processes: which of a pod's processes use a card, whether they can be suspended, and the calls.

Planes ``kmod`` and ``seccomp`` use it. Each object has a helper process of its own, which makes the calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from qgpu.checkpoint import host_memory
from qgpu.checkpoint.cuda_checkpoint import FIRST_BRANCH, FIRST_WITH_MOVES
from qgpu.checkpoint.helper import Helper, HelperLostError
from qgpu.errors import CheckpointError, NotSupportedError, RefusedError
from qgpu.guardian.accounting import managed_memory
from qgpu.linux import proc
from qgpu.model.checkpointer import GpuProcess, ProcessState
from qgpu.model.plane_api import Pgpu, PodInfo
from qgpu.nvidia import abi, nvml, versions

#: A CUDA context maps blocks for semaphores that look like managed memory. For a process with at most this many, the
#: driver decides: it refuses a process that uses managed memory.
_FEW_BLOCKS = 8
#: How the names of MPS's own processes begin.
_MPS = "nvidia-cuda-mps"
#: The most descriptors of a process that are checked.
_MOST_FILES = 1024
#: How long checking a pod's processes may take: the pod decides how many processes and mappings there are.
_SCAN_S = 30.0
#: How long each call may take: about ten times as long as on an H200, for a process as large as its card.
_CALL_S, _LONG_CALL_S = 20.0, 900.0
#: How long a lock call may take beyond its own limit.
_SLACK_S = 10.0


class ProcessCheckpointer:
    """Makes the checkpoints of this host's driver; opened for one operation, used by one thread."""

    def __init__(
        self,
        pgpus: Sequence[Pgpu],
        driver: str,
        on_card: Callable[[str], Iterable[int]] = nvml.processes,
        mps_clients: Callable[[str], Iterable[int]] = nvml.mps_clients,
        free: Callable[[str], int] = nvml.free_memory,
    ) -> None:
        """Take the driver's version, and functions that ask NVML. Raises NotSupportedError for an old driver."""
        if versions.find(driver).major < FIRST_BRANCH:
            raise NotSupportedError(
                f"NVIDIA driver {driver}: it cannot suspend processes; install branch {FIRST_BRANCH} or newer"
            )
        self._uuids, self._driver = {pgpu.index: pgpu.uuid for pgpu in pgpus}, driver
        self._on_card, self._mps_clients, self._free = on_card, mps_clients, free
        self.helper = Helper()

    def processes(self, pod: PodInfo) -> Sequence[GpuProcess]:
        """Return the pod's processes with a context on any card."""
        mine, in_time = set(pod.pids), partial(_in_time, pod, time.monotonic() + _SCAN_S)
        clients = {pid for uuid in self._uuids.values() for pid in self._mps_clients(uuid)} & mine
        for pid in sorted(clients | {pid for pid in in_time(mine) if proc.name(pid).startswith(_MPS)}):
            raise RefusedError(f"pod {pod.name}: process {pid} uses MPS, which the driver cannot suspend; end it first")
        using = {pid for uuid in self._uuids.values() for pid in self._on_card(uuid)} & mine
        found = _named(using) or _named(filter(self._uses_cuda, in_time(filter(_has_card, in_time(mine)))))
        for pid in in_time(each.pid for each in found):
            if _mapped_blocks(pid) > _FEW_BLOCKS:
                raise RefusedError(
                    f"pod {pod.name}: process {pid} uses managed memory, which the driver cannot suspend; end it first"
                )
        self.check_restorable(pod)
        if pod.unrestorable is None and (len(found) > 1 or len(pod.grants) > 1):
            several = "cards" if len(found) == 1 else "processes"
            raise RefusedError(
                f"pod {pod.name}: it uses several {several}, and this plane does not see whether they share memory, "
                "which the driver cannot put back; run it on plane seccomp"
            )
        return found

    def check_restorable(self, pod: PodInfo) -> None:
        """Check what the plane knows of its processes."""
        for what in pod.unrestorable or ():
            raise RefusedError(
                f"pod {pod.name}: a process of it has {what}, which the driver takes off a card but cannot put back; "
                "end that process first"
            )

    def _uses_cuda(self, pid: int) -> bool:
        """Ask the driver about a process that NVML does not list: it may be a child with inherited files only.

        NVML lists no processes in another PID namespace than the driver's.
        """
        found = _named([pid])
        with suppress(CheckpointError):
            return any(map(self._asked, found))
        return False

    def alive(self, process: GpuProcess) -> bool:
        """Compare its start time. Raises CheckpointError if that cannot be read, because the process may still run."""
        return _started_at(process.pid) == process.started

    def check_host_memory(self, pod: PodInfo, beside: int) -> None:
        """Check host memory and the limits of the pod's cgroup."""
        host_memory.check(pod.name, sum(pod.memory_granted.values()), beside, pod.cgroup)

    def check_moves(self) -> None:
        """Check the driver's branch."""
        if versions.find(self._driver).major < FIRST_WITH_MOVES:
            raise NotSupportedError(
                f"NVIDIA driver {self._driver}: it cannot move processes between cards; install branch "
                f"{FIRST_WITH_MOVES} or newer, or suspend the pod"
            )

    def host_room(self) -> int | None:
        """Return what the kernel calls available, less what stays free."""
        return host_memory.free()

    def free_memory(self, pgpu: int) -> int:
        """Ask NVML."""
        return self._free(self._uuids[pgpu])

    def state(self, process: GpuProcess) -> ProcessState | None:
        """Ask the driver. It holds nothing of a process without CUDA, such as one that has executed another program."""
        if not self.alive(process):
            return None
        try:
            return self._asked(process)
        except CheckpointError as error:
            if not self.alive(process):
                return None
            if isinstance(error, HelperLostError) or _has_cuda(process.pid):
                raise
            return ProcessState.RUNNING

    def _asked(self, process: GpuProcess) -> ProcessState:
        return ProcessState(self.helper.call("state", _CALL_S, pid=process.pid)["state"])

    def lock(self, process: GpuProcess, timeout_ms: int) -> None:
        """Block its calls and wait for its work. If its pid belongs to a new process by now, unlock that one again."""
        self.helper.call("lock", timeout_ms / 1000 + _SLACK_S, pid=process.pid, timeout_ms=timeout_ms)
        if not self.alive(process):
            with suppress(CheckpointError):
                self.helper.call("unlock", _CALL_S, pid=process.pid)
            raise CheckpointError(f"process {process.pid}: it has ended")

    def checkpoint(self, process: GpuProcess) -> None:
        """Take it off its cards."""
        self.helper.call("checkpoint", _LONG_CALL_S, pid=process.pid)

    def restore(self, process: GpuProcess, moves: Mapping[str, str]) -> None:
        """Put it back on its cards, or on those of ``moves``."""
        # The driver requires each card that the process could see, shared or not, once as source and once as target.
        every = {uuid: uuid for uuid in nvml.whole_cards()} if moves else {}
        back = {after: before for before, after in moves.items()}
        self.helper.call("restore", _LONG_CALL_S, pid=process.pid, moves=every | back | dict(moves))

    def unlock(self, process: GpuProcess) -> None:
        """Unblock its calls."""
        self.helper.call("unlock", _CALL_S, pid=process.pid)

    def close(self) -> None:
        """End the helper."""
        self.helper.close()


def _in_time(pod: PodInfo, until_s: float, pids: Iterable[int]) -> Iterator[int]:
    """Yield a pod's processes. Raises RefusedError after a time on CLOCK_MONOTONIC."""
    for pid in pids:
        if time.monotonic() > until_s:
            raise RefusedError(
                f"pod {pod.name}: its {len(pod.pids)} processes cannot be looked at within {_SCAN_S:.0f} s; end some "
                "of them first"
            )
        yield pid


def _named(pids: Iterable[int]) -> list[GpuProcess]:
    return [GpuProcess(pid, started) for pid in sorted(pids) if (started := _started_at(pid))]


def _started_at(pid: int) -> str:
    """Return a process's start time in clock ticks; empty if it has ended. Raises CheckpointError."""
    try:
        return proc.start_time(pid)
    except OSError as error:
        raise CheckpointError(
            f"process {pid} cannot be looked at: {error.strerror}; see the limits of qgpud and of the host"
        ) from error


def _has_card(pid: int) -> bool:
    """Tell whether a process has a card's device file open."""
    return any(
        os.major(number) == abi.NV_MAJOR and os.minor(number) != abi.NV_CONTROL_MINOR
        for _, number in proc.devices(pid, _MOST_FILES)
    )


def _has_cuda(pid: int) -> bool:
    """Tell whether a process may have loaded libcuda, without which no process can be suspended."""
    try:
        lines = proc.maps(pid)
        return lines is None or any(b"libcuda.so" in line for line in lines)
    except OSError:
        return True


def _mapped_blocks(pid: int) -> int:
    """Count the blocks of address space that could be managed memory."""
    areas = managed_memory.areas(proc.maps(pid) or ())
    return sum(-(-(end - start) // managed_memory.BLOCK) for start, end in areas)

"""Reports processes that use a card but are in no pod: nothing bounds them, and no pod's share counts them.

They may be legitimate, if the host shares its cards by other means too, or they may use a device file that a pod gave
them. They are not stopped. They appear in the log, in ``qgpuctl status`` and in the metrics.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from qgpu.daemon.device_isolation import DeviceIsolation
from qgpu.errors import QgpuError
from qgpu.linux import cgroup, proc
from qgpu.model.plane_api import Pgpu, PodInfo

_log = structlog.get_logger("unmanaged_processes")

#: How often the cards are checked. A process that lives shorter may be missed.
_POLL_S = 5.0
#: The most log lines per check; the rest are only counted.
_LINES = 10


@dataclass(frozen=True, slots=True)
class UnmanagedProcess:
    """A process on a card that is in no pod. It chose its own name, so the name proves nothing."""

    gpu: int
    pid: int
    name: str
    cgroup: str


def find(gpu: int, pids: Iterable[int], pods: Sequence[PodInfo]) -> list[UnmanagedProcess]:
    """Return the processes on a card that are neither a pod's nor qgpu's own."""
    ours = [cgroup.GUARDIANS, *(at for pod in pods for at in pod.cgroups)]
    in_pods = {pid for pod in pods for pid in pod.pids}
    found = []
    for pid in sorted(set(pids) - in_pods - {os.getpid()}):
        try:
            at = cgroup.of(pid)
        except OSError:  # ended, or in another PID namespace
            continue
        if not any(cgroup.within(at, path) for path in ours):
            found.append(UnmanagedProcess(gpu, pid, proc.name(pid), proc.printable(os.fsencode(at))))
    return found


class UnmanagedProcesses:
    """Checks every card every few seconds, in a thread of its own because the driver may be slow to answer."""

    def __init__(
        self,
        pgpus: Sequence[Pgpu],
        processes: Callable[[str], Iterable[int]],
        pods: Callable[[], Sequence[PodInfo]],
        isolation: DeviceIsolation,
    ) -> None:
        self._pgpus, self._processes, self._pods, self._isolation = pgpus, processes, pods, isolation
        #: By card; a card is missing if the driver did not list its processes.
        self.seen: Mapping[int, Sequence[UnmanagedProcess]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unmanaged_processes", daemon=True)

    def start(self) -> None:
        """Start the checks."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the checks, without waiting for one that the driver delays."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            try:
                self.look()
            except Exception:  # noqa: BLE001 - otherwise the thread would end unnoticed
                if not self._stop.is_set():  # otherwise its sources are being closed
                    _log.exception("the watch for processes outside pods failed, trying again")

    def look(self) -> None:
        """Check once, and log processes that were not there before."""
        listed = {}
        for pgpu in self._pgpus:
            try:
                listed[pgpu.index] = list(self._processes(pgpu.uuid))
            except QgpuError:
                continue
        try:
            pods = self._pods()  # listed last: processes of a pod that has just come are then its own
        except QgpuError:
            return
        before, self.seen = self.seen, {gpu: find(gpu, pids, pods) for gpu, pids in listed.items()}
        known = {each for there in before.values() for each in there}
        self._tell(
            "process on a card is in no pod: nothing bounds its share or memory",
            [
                {"pgpu": each.gpu, "pid": each.pid, "name": each.name, "cgroup": each.cgroup}
                for there in self.seen.values()
                for each in there
                if each not in known
            ],
        )
        self._tell(
            "a pod's device file was refused to a process outside it",
            [
                {"pid": each.pid, "name": each.name, "call": each.call, "times": each.times}
                for each in self._isolation.refusals()
            ],
        )

    def _tell(self, what: str, lines: Sequence[dict[str, object]]) -> None:
        for line in lines[:_LINES]:
            _log.warning(what, **line)
        if len(lines) > _LINES:
            _log.warning(what, more=len(lines) - _LINES)

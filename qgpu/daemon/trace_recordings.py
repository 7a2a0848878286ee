"""Recordings of pGPUs for clients: started by one request, fetched by others, ended when the client disconnects.

A recording shows when pods run, which reveals what they do. So only clients that may change things may record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from qgpu.daemon.gpu_loop import GpuLoop
from qgpu.daemon.request_args import Arguments
from qgpu.errors import InvalidValueError, RefusedError, no_pgpu
from qgpu.ipc.control_socket import Session
from qgpu.model.suspension import Residency, Suspension
from qgpu.trace.recorder import Recorder

#: Each recording keeps up to about ten megabytes until it is fetched.
MAX_TRACES = 4


@dataclass(slots=True)
class TraceRecordings:
    """The recordings in progress, by session."""

    loops: Mapping[int, GpuLoop]
    #: Where a pod is, by name.
    state: Callable[[str], Suspension]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _recorders: dict[Session, list[Recorder]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Return the number of recordings in progress."""
        return len(self._recorders)

    def start(self, session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Record one pGPU, or all, from the next tick on. Raises UnknownNameError, InvalidValueError, RefusedError."""
        wanted = arguments.get("gpu", int)
        if wanted is not None and wanted not in self.loops:
            raise no_pgpu(wanted, self.loops)
        with self._lock:
            if session in self._recorders:
                raise InvalidValueError("trace.start: this connection is recording already")
            if len(self._recorders) >= MAX_TRACES:
                raise RefusedError(f"trace: {MAX_TRACES} are being recorded already; end one of them first")
            recorders = [Recorder(index, self._residency) for index in self.loops if wanted in (None, index)]
            self._recorders[session] = recorders
        for recorder in recorders:
            self.loops[recorder.pgpu].watch(recorder.watch, detailed=True)
        session.at_end.append(partial(self._stop, session))
        return {}

    def read(self, session: Session, _arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Return the ticks recorded since the last read, and how much was dropped because reads came too late.

        Raises InvalidValueError if this session records nothing.
        """
        if session not in self._recorders:
            raise InvalidValueError("trace.read: nothing is being recorded on this connection")
        recorders = self._recorders[session]
        return {
            "ticks": [tick for recorder in recorders for tick in recorder.fetch()],
            "dropped": sum(recorder.dropped for recorder in recorders),
        }

    def _residency(self, pod: str) -> Residency:
        return self.state(pod).residency

    def _stop(self, session: Session) -> None:
        with self._lock:
            recorders = self._recorders.pop(session)
        for recorder in recorders:
            self.loops[recorder.pgpu].unwatch(recorder.watch)

"""Threads that a program cannot do without: if one dies, the program ends, so that its supervisor starts it again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import structlog

from qgpu.errors import QgpuError
from qgpu.linux.shutdown import Shutdown

_log = structlog.get_logger("k8s")


class Threads:
    """The threads of one program."""

    def __init__(self, stop: Shutdown) -> None:
        self._stop = stop
        self._dead = ""

    def start(self, name: str, run: Callable[[], None]) -> None:
        """Start a thread that runs until the program ends."""
        threading.Thread(target=partial(self._run, name, run), name=name, daemon=True).start()

    def check(self) -> None:
        """Raise QgpuError if a thread has died."""
        if self._dead:
            raise QgpuError(f"thread {self._dead} has died; this is a defect, see the log above")

    def _run(self, name: str, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception:  # noqa: BLE001 - a defect: it is logged, and ends the program
            _log.exception("thread died", thread=name)
            self._dead = name
            self._stop.set()

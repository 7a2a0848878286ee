"""The loop of one pGPU in a thread of its own, kept alive through whatever its backend runs into."""

from __future__ import annotations

import threading

import structlog

from qgpu import policies
from qgpu.config import GpuSettings
from qgpu.errors import QgpuError
from qgpu.sched import loop
from qgpu.sched.backend import Host
from qgpu.sched.ledger import Ledger

_log = structlog.get_logger("loop")

#: How long to leave a backend alone that has just failed. Its gates are open meanwhile.
_RETRY_S = 1.0


class GpuLoop:
    """Decides for one pGPU, period after period, with settings that may change while it runs."""

    def __init__(self, host: Host, pgpu: int, settings: GpuSettings) -> None:
        self._host = host
        self._pgpu = pgpu
        self._stop = threading.Event()
        self.settings = settings
        self.ledger = Ledger(pgpu)
        #: What keeps the backend from working at the moment; empty when all is well.
        self.trouble = ""
        self._thread = threading.Thread(target=self._run, name=f"pgpu{pgpu}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Tell whether the loop still runs; it ends by itself only through a defect."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the loop and wait until it has opened every gate."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._use_backend()
            except QgpuError as error:
                if str(error) != self.trouble:
                    self.trouble = str(error)
                    _log.error("backend failed, trying again", pgpu=self._pgpu, error=self.trouble)
                self._stop.wait(_RETRY_S)

    def _use_backend(self) -> None:
        backend = self._host.backend(self._pgpu)
        try:
            loop.run(backend, self._current, self.ledger, self._stop.is_set, self._seen)
        finally:
            backend.close()

    def _current(self) -> loop.Settings:
        settings = self.settings
        return loop.Settings(policies.compose(settings.policy, settings.online_policy), settings.period_ns)

    def _seen(self, ledger: Ledger) -> None:
        self.ledger = ledger
        if self.trouble:
            self.trouble = ""
            _log.info("backend works again", pgpu=self._pgpu)

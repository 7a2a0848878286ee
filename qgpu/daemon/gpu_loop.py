"""The scheduling loop of one pGPU, in a thread of its own. It retries when its backend fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from qgpu.config import GpuSettings
from qgpu.daemon.gang_exchange import GangExchange
from qgpu.errors import QgpuError
from qgpu.model.plane_api import Backend, Host
from qgpu.policies import registry
from qgpu.sched import loop
from qgpu.sched.ledger import Ledger

_log = structlog.get_logger("loop")

#: How long to wait after a backend has failed. Its gates are open meanwhile.
_RETRY_S = 1.0


#: Called after every tick with the ledger, and the number of context switches that the hardware dropped so far.
Watcher = Callable[[Ledger, int], None]


@dataclass(frozen=True, slots=True)
class TemporaryPolicy:
    """A policy in place of the set one for as long as only these pods are on the pGPU."""

    policy: str
    pods: frozenset[str]


class GpuLoop:
    """Schedules one pGPU, with settings that may change while it runs."""

    def __init__(self, host: Host, pgpu: int, settings: GpuSettings, exchange: GangExchange | None = None) -> None:
        self._host = host
        self._pgpu = pgpu
        self._exchange = exchange or GangExchange()
        self._stop = threading.Event()
        self._backend: Backend | None = None
        self._watching = threading.Lock()
        self._watchers: list[Watcher] = []
        #: The watchers that want start and end of every run.
        self._detail: list[Watcher] = []
        self.settings = settings
        self.temporary: TemporaryPolicy | None = None
        self.ledger = Ledger(pgpu, card=next((each.name for each in host.pgpus() if each.index == pgpu), ""))
        #: Why the backend does not work at the moment; empty if it does.
        self.problem = ""
        self._thread = threading.Thread(target=self._run, name=f"pgpu{pgpu}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Tell whether the loop still runs. It ends by itself only through a defect."""
        return self._thread.is_alive()

    def watch(self, watcher: Watcher, *, detailed: bool = False) -> None:
        """Call ``watcher`` after every tick. With ``detailed``, samples contain start and end of every run."""
        with self._watching:
            self._watchers = [*self._watchers, watcher]
            self._set_detail([*self._detail, watcher] if detailed else self._detail)

    def unwatch(self, watcher: Watcher) -> None:
        """Stop calling ``watcher``."""
        with self._watching:
            self._watchers = [each for each in self._watchers if each != watcher]
            self._set_detail([each for each in self._detail if each != watcher])

    def stop(self) -> None:
        """End the loop and wait until it has opened every gate."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._use_backend()
            except QgpuError as error:
                if str(error) != self.problem:
                    self.problem = str(error)
                    _log.error("backend failed, trying again", pgpu=self._pgpu, error=self.problem)
                self._stop.wait(_RETRY_S)

    def _use_backend(self) -> None:
        backend = self._backend = self._host.backend(self._pgpu)
        backend.detailed = bool(self._detail)
        try:
            loop.run(backend, self._current, self.ledger, self._stop.is_set, self._seen)
        finally:
            self._backend = None
            self._exchange.leave(self._pgpu)
            backend.close()

    def _set_detail(self, wanting: list[Watcher]) -> None:
        self._detail = wanting
        if (backend := self._backend) is not None:
            backend.detailed = bool(wanting)

    def _current(self) -> loop.Settings:
        settings, temporary = self.settings, self.temporary
        alone = temporary is not None and self.ledger.accounts.keys() <= temporary.pods
        offline = temporary.policy if temporary is not None and alone else settings.policy
        composed = registry.compose(offline, settings.online_policy)
        policy = self._exchange.in_step(composed, registry.POLICIES[offline].plan)
        return loop.Settings(policy, settings.period_ns, settings.offline_floor)

    def _seen(self, ledger: Ledger) -> None:
        self.ledger = ledger
        lost = self._backend.lost if self._backend is not None else 0
        for watcher in self._watchers:
            watcher(ledger, lost)
        if self.problem:
            self.problem = ""
            _log.info("backend works again", pgpu=self._pgpu)

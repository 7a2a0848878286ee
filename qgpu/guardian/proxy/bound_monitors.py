"""Which pods have bound the card's performance monitors, so that what unbinds them waits for the pod's own turn.

RM holds its lock for some 40 ms when it binds monitors, and again when it unbinds them: no gate moves meanwhile. Where
pods take turns by gate, each pays for that in its own turn. Controls and frees wait for that turn. If a process dies,
we keep its file open until then, because RM unbinds when the last reference to the file goes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from qgpu.guardian.accounting.rm_object import Key
from qgpu.nvidia import abi

#: Controls that bind or unbind, or may do so.
HOLDING = frozenset(
    {
        *(abi.NVB0CC_RESERVE_HWPM_LEGACY, abi.NVB0CC_RELEASE_HWPM_LEGACY),
        *(abi.NVB0CC_BIND_PM_RESOURCES, abi.NVB0CC_UNBIND_PM_RESOURCES),
    }
)
#: A profiler streams into two pieces of memory.
_FEW_STREAMS = 64
#: For how long RM holds its lock (H100, H200), with some margin.
HELD_NS = 45 * 10**6


@dataclass(slots=True)
class _Binding:
    """The last binding of a pod: its process, the profiler that bound, and a reference to that process's file."""

    pid: int
    client: int
    profiler: int
    file: int


@dataclass(slots=True)
class BoundMonitors:
    """The last binding of each pod; callable from any thread."""

    #: Closes a pod's file: that may take as long as the pod likes.
    close: Callable[[str, int], None]
    #: Returns the ns until RM's lock may be held for so many ns in a pod's turn, on the cards of one of its clients.
    until_own_turn: Callable[[str, int, int], int] = lambda _pod, _client, _ns: 0
    _bindings: dict[str, _Binding] = field(default_factory=dict)
    #: By pod, the memory into which profilers stream figures: RM frees a profiler with it.
    _streams: dict[str, set[Key]] = field(default_factory=dict)
    #: Held by a pod from the wait until the call is done, so that two of its calls do not share a turn.
    _turns: dict[str, threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def turn(self, pod: str, client: int) -> Iterator[None]:
        """Wait for the pod's turn, and take it for a call that binds or unbinds."""
        with self._lock:
            taken = self._turns.setdefault(pod, threading.Lock())
        with taken:
            time.sleep(self.until_own_turn(pod, client, HELD_NS) / 1e9)
            yield

    def bound(self, pod: str, pid: int, client: int, profiler: int, file: int) -> None:
        """Remember a binding in place of the pod's last one, and keep the file of its process."""
        try:
            kept = os.dup(file)
        except OSError:  # no descriptor is free: RM unbinds when the process ends
            return
        with self._lock:
            before = self._bindings.get(pod)
            self._bindings[pod] = _Binding(pid, client, profiler, kept)
        if before is not None:
            self.close(pod, before.file)

    def streams(self, pod: str, memories: Iterable[Key], exists: Callable[[Key], bool]) -> None:
        """Remember memory into which a profiler streams figures from now on, and forget what is gone of much."""
        known = self._streams.get(pod, set()) | set(memories)
        self._streams[pod] = known if len(known) <= _FEW_STREAMS else set(filter(exists, known))

    def unbinds(self, pod: str, client: int, freed: int, *, holds_others: bool) -> bool:
        """Tell whether the free of an object may unbind monitors: with it goes the profiler, or it ``holds_others``."""
        binding = self._bindings.get(pod)
        if binding is None or binding.client != client:
            return False
        return holds_others or freed == binding.profiler or (client, freed) in self._streams.get(pod, ())

    def exited(self, pid: int) -> None:
        """Close the file of a process that has ended in its pod's own turn."""
        for pod in list(self._bindings):
            if (binding := self._take(pod, lambda each: each.pid == pid)) is None:
                continue
            try:
                threading.Thread(target=self._release, args=(pod, binding), name="qgpu-monitors", daemon=True).start()
            except RuntimeError:  # no thread is available
                self.close(pod, binding.file)

    def unbound(self, pod: str, client: int) -> None:
        """Forget a pod's binding, if it is this client's."""
        if (binding := self._take(pod, lambda each: each.client == client)) is not None:
            self.close(pod, binding.file)

    def freed(self, pod: str, exists: Callable[[Key], bool]) -> None:
        """Forget a pod's binding, if RM has freed its profiler: it does so with memory only while that has a stream."""
        binding = self._bindings.get(pod)
        if binding is not None and not exists((binding.client, binding.profiler)):
            self.unbound(pod, binding.client)

    def retired(self, pod: str) -> None:
        """Forget a pod."""
        self._turns.pop(pod, None)
        self._streams.pop(pod, None)
        if (binding := self._take(pod, lambda _each: True)) is not None:
            self.close(pod, binding.file)

    def _release(self, pod: str, binding: _Binding) -> None:
        with self.turn(pod, binding.client):
            os.close(binding.file)

    def _take(self, pod: str, which: Callable[[_Binding], bool]) -> _Binding | None:
        """Remove a pod's binding, if it is the one that is meant, and return it."""
        with self._lock:
            binding = self._bindings.get(pod)
            if binding is None or not which(binding):
                return None
            return self._bindings.pop(pod)

"""Carries memory turns out: looks at every overcommitted pGPU, and lets pods yield and come back as the policy decides.

It runs in a thread of its own, once a second and when told. ``qgpu/policies/memory_turns.py`` decides,
``suspensions.py`` moves. A pod can make its processes slow to look at, so each move begins in a thread of its own,
without the lock. A pod that cannot be moved runs on, and is tried again later and later. After a restart the file of
suspensions says which pods yielded, and notes at cgroups say which have not begun yet.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import structlog

from qgpu import units
from qgpu.admission import Yielding
from qgpu.daemon.events import Events
from qgpu.daemon.gpu_loop import GpuLoop
from qgpu.daemon.pods import Pods
from qgpu.daemon.suspensions import Suspensions
from qgpu.errors import QgpuError
from qgpu.model import NS_PER_S, PodClass
from qgpu.model.plane_api import PodInfo
from qgpu.model.suspension import Residency
from qgpu.policies import memory_turns
from qgpu.policies.memory_turns import Moves, Place, PodMemory

_log = structlog.get_logger("memory_turns")

_TICK_S = 1.0
#: How long a look waits for the moves that it decided to begin.
_BEGIN_S = 1.0
#: A pod that could not be moved is tried again after this long, then after twice that, and so on.
_RETRY_NS, _MOST_RETRY_NS = 10 * NS_PER_S, 600 * NS_PER_S
_PLACES = {
    Residency.RUNNING: Place.ON,
    Residency.SUSPENDED: Place.OFF,
    Residency.SUSPENDING: Place.LEAVING,
    Residency.RESUMING: Place.COMING,
}


@dataclass(slots=True)
class _Known:
    """What is remembered of a pod on overcommitted pGPUs."""

    place: Place
    since_ns: int
    #: Whether it may have processes on its cards.
    begun: bool
    used_ns: int = 0
    used_at_ns: int = 0
    #: We moved it last.
    moved: bool = False
    #: A thread is about to begin its move: ``place`` says so before ``Suspensions`` does.
    beginning: bool = False
    #: How often in a row a move failed, why, and when it is tried again.
    failures: int = 0
    reason: str = ""
    retry_at_ns: int = 0


@dataclass(slots=True)
class _Card:
    """What is remembered of a pGPU."""

    at_ns: int
    charged_ns: dict[str, int] = field(default_factory=dict)


class MemoryTurns:
    """Memory turns on all pGPUs of this host. Safe to use from any thread."""

    def __init__(self, pods: Pods, suspensions: Suspensions, loops: Mapping[int, GpuLoop], events: Events) -> None:
        self._pods, self._suspensions, self._loops, self._events = pods, suspensions, loops, events
        self._now_ns = time.monotonic_ns
        self._lock = threading.Lock()
        self._wanted, self._stop = threading.Event(), threading.Event()
        self._cards: dict[int, _Card] = {}
        self._known: dict[str, _Known] = {}
        #: Pods that are gone, but still known here.
        self._retired: deque[str] = deque()
        self._short: Mapping[int, int] = {}
        #: The threads that begin the moves of the last look.
        self._moves: list[threading.Thread] = []
        now_ns = self._now_ns()
        for pod in pods.listed():
            place = _PLACES[suspensions.state(pod.name).residency]
            self._known[pod.name] = _Known(place, now_ns, pods.has_begun(pod), used_at_ns=now_ns)
        self._thread = threading.Thread(target=self._run, name="memory-turns", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing more."""
        self._stop.set()
        self._wanted.set()

    def waits(self, pod: PodInfo) -> str:
        """Return what a pod waits for before it begins or comes back, as text; empty if for nothing."""
        found, known = self._suspensions.state(pod.name), self._known.get(pod.name)
        there = ", ".join(str(index) for index in pod.grants if self._overcommitted(index))
        if found.residency is Residency.SUSPENDED and found.yielded:
            return f"memory of pGPU {there or next(iter(pod.grants), '?')}"
        if there and (known is None or not known.begun) and not any(pod.memory.values()):
            return f"memory of pGPU {there}"
        return ""

    def applies_to(self, pod: PodInfo) -> bool:
        """Tell whether a pod is on a pGPU whose memory is overcommitted."""
        return any(map(self._overcommitted, pod.grants))

    def pod_changed(self, name: str) -> str:
        """Look at once because of a change to a pod, and return what it waits for, as ``waits``."""
        pod = self._pods.named(name)
        if not self.applies_to(pod):
            return ""
        self.look()
        return self.waits(pod)

    def recall(self, name: str) -> str:
        """Let a suspended pod come back as soon as there is room, and return what it waits for, as ``waits``."""
        self._suspensions.allow_return(name)
        if (known := self._known.get(name)) is not None and known.place is Place.OFF:
            known.since_ns, known.retry_at_ns = 0, 0
        return self.pod_changed(name)

    def retired(self, name: str) -> None:
        """Forget a pod at the next look: the next of that name is another."""
        if self._active() or (name in self._known and name not in self._retired):
            self._retired.append(name)

    def yielded_bytes(self, index: int, pods: Sequence[PodInfo]) -> int:
        """Return how many bytes of a pGPU's pods lie in host memory because they yielded."""
        states = [self._suspensions.state(pod.name) for pod in pods]
        return sum(found.memory.get(index, 0) for found in states if found.yielded)

    def shortage(self, index: int) -> int:
        """Return how many bytes of a pGPU must still be made free for the limits of pods on it."""
        return self._short.get(index, 0)

    def shortages(self, pod: PodInfo) -> list[str]:
        """Say, for each pGPU, how much memory must still be made free for a pod's limit."""
        return [
            f"has to wait for its memory: {units.format_memory(missing)} of pGPU {index} is being made free"
            for index in pod.grants
            if (missing := self.shortage(index)) and not self.waits(pod)
        ]

    def stuck(self) -> dict[str, str]:
        """Return the pods that are on their cards because they could not be moved off, and why."""
        known = list(self._known.items())
        return {name: each.reason for name, each in known if each.failures and each.place is Place.ON}

    def yielding(self) -> Yielding:
        """Return which pods cannot make room, and what host memory holds of those that do."""
        return Yielding(frozenset(self.stuck()), self._suspensions.host_room())

    @contextmanager
    def room(self, index: int, name: str) -> Iterator[int | None]:
        """Let no pod come during the block, and yield the bytes that others' limits leave; None without overcommit."""
        with self._lock:
            if not self._overcommitted(index):
                yield None
                return
            now_ns = self._now_ns()
            there = [pod for pod in self._pods.listed() if index in pod.grants and pod.name != name]
            for pod in there:
                self._note(pod, now_ns)
            card = self._cards.get(index) or _Card(now_ns)
            yield self._pods.capacity(index) - sum(self._seen(index, pod, card, now_ns).present for pod in there)

    def look(self) -> None:
        """Look now, and begin what is to be done. Raises a QgpuError while the plane is gone."""
        until_s = time.monotonic() + _BEGIN_S
        for thread in self._decide():
            thread.join(max(0.0, until_s - time.monotonic()))

    def _decide(self) -> list[threading.Thread]:
        """Decide who moves; return the threads that begin the moves."""
        with self._lock:
            self._moves = []
            pods = self._pods.listed()
            now_ns = self._now_ns()
            self._forget({pod.name for pod in pods})
            for pod in pods:
                self._note(pod, now_ns)
            turns: dict[int, Moves] = {}
            for index in self._loops:
                there = [pod for pod in pods if index in pod.grants]
                if not self._overcommitted(index) and not any(map(self._yielded, there)):
                    self._cards.pop(index, None)
                else:
                    turns[index] = self._turn(index, there, now_ns)
            for pod in pods:
                on = turns.keys() & pod.grants.keys()
                if on and all(pod.name in turns[index].come for index in on):  # there is room on all of its pGPUs
                    self._come(pod, min(on), now_ns)
            self._short = short = {index: moves.short for index, moves in turns.items() if moves.short}
            for pod in pods:
                if not _takes_turns(pod) and not short.keys() & pod.grants.keys():
                    self._begin(pod, now_ns)
            return self._moves

    def mark_all_begun(self) -> None:
        """Count all pods as begun, before memory of their pGPU is overcommitted."""
        with self._lock:
            pods, now_ns = self._pods.listed(), self._now_ns()
            self._forget({pod.name for pod in pods})
            for pod in pods:
                self._note(pod, now_ns)

    def _run(self) -> None:
        problem = ""
        while not self._stop.is_set():
            self._wanted.wait(_TICK_S)
            self._wanted.clear()
            try:
                if self._active():
                    self.look()
                problem = ""
            except QgpuError as error:  # the plane is gone for the moment: nobody moves
                if self._stop.is_set():
                    return
                if str(error) != problem:
                    problem = str(error)
                    _log.error("memory turns stand still, trying again", error=problem)
            except Exception:  # noqa: BLE001 - also after a defect online pods must get their room
                _log.exception("memory turns failed")

    def _active(self) -> bool:
        return bool(self._cards) or any(map(self._overcommitted, self._loops)) or self._suspensions.any_yielded()

    def _overcommitted(self, index: int) -> bool:
        loop = self._loops.get(index)
        return loop is not None and loop.settings.memory_overcommit > 1

    def _forget(self, here: Collection[str]) -> None:
        """Forget all pods but these, and earlier pods of the same names."""
        gone = {self._retired.popleft() for _ in range(len(self._retired))}
        self._known = {name: known for name, known in self._known.items() if name in here and name not in gone}
        for card in self._cards.values():
            card.charged_ns = {name: charge for name, charge in card.charged_ns.items() if name not in gone}

    def _note(self, pod: PodInfo, now_ns: int) -> None:
        """Note where a pod is, when it last used a GPU, and what became of its last move."""
        found = self._suspensions.state(pod.name)
        place = _PLACES[found.residency]
        used_ns = sum(
            account.used_ns
            for index in pod.grants
            if index in self._loops and (account := self._loops[index].ledger.accounts.get(pod.name)) is not None
        )
        known = self._known.get(pod.name)
        if known is None:
            begun = pod.name in self._pods.begun or not self.applies_to(pod)
            known = self._known[pod.name] = _Known(place, now_ns, begun, used_ns, now_ns)
        if any(pod.memory.values()) or not self.applies_to(pod):
            self._begin(pod, now_ns)
        if used_ns != known.used_ns:
            known.used_ns, known.used_at_ns = used_ns, now_ns
        if place is not known.place and not known.beginning:
            if known.moved and place in (Place.ON, Place.OFF):
                known.moved = False
                if found.error:
                    self._failed(pod.name, known, found.error, now_ns)
                else:
                    known.failures, known.reason = 0, ""
            known.place, known.since_ns, known.used_at_ns = place, now_ns, now_ns

    def _yielded(self, pod: PodInfo) -> bool:
        return self._suspensions.state(pod.name).yielded

    def _turn(self, index: int, pods: Sequence[PodInfo], now_ns: int) -> Moves:
        """Decide for one pGPU, let pods leave, and return what was decided."""
        pace = self._suspensions.pace()
        card = self._cards.setdefault(index, _Card(now_ns))
        seen = [self._seen(index, pod, card, now_ns) for pod in pods]
        card.charged_ns = memory_turns.charge(card.charged_ns, seen, now_ns - card.at_ns, pace)
        card.at_ns = now_ns
        seen = [self._seen(index, pod, card, now_ns) for pod in pods]
        moves = memory_turns.decide(self._pods.capacity(index), seen, pace)
        for name in moves.leave:
            self._move(name, index, leaves=True, now_ns=now_ns)
        return moves

    def _come(self, pod: PodInfo, index: int, now_ns: int) -> None:
        if self._known[pod.name].begun:
            self._move(pod.name, index, leaves=False, now_ns=now_ns)
        else:
            self._begin(pod, now_ns)

    def _seen(self, index: int, pod: PodInfo, card: _Card, now_ns: int) -> PodMemory:
        """Return what the policy sees of a pod."""
        known, found, grant = self._known[pod.name], self._suspensions.state(pod.name), pod.grants[index]
        used, place = pod.memory.get(index, 0), known.place
        if place is Place.ON and not known.begun and _takes_turns(pod):
            place, held = Place.OFF, False
        elif place is Place.ON:
            held = len(pod.grants) > 1 or not used or now_ns < known.retry_at_ns
        elif place is Place.OFF:
            held = not found.yielded or now_ns < known.retry_at_ns
        else:
            held = not known.moved
        return PodMemory(
            pod.name,
            grant.pod_class,
            place,
            grant.memory,
            used,
            found.memory.get(index, 0) if found.residency is not Residency.RUNNING else 0,
            grant.cores,
            now_ns - known.since_ns,
            now_ns - known.used_at_ns,
            card.charged_ns.get(pod.name, 0),
            held,
        )

    def _begin(self, pod: PodInfo, now_ns: int) -> None:
        known = self._known[pod.name]
        if known.begun:
            return
        self._pods.may_begin(pod)
        known.begun, known.since_ns, known.used_at_ns = True, now_ns, now_ns
        _log.info("pod may begin", pod=pod.name)

    def _move(self, name: str, index: int, *, leaves: bool, now_ns: int) -> None:
        known = self._known[name]
        before, known.beginning = replace(known), True
        known.moved, known.since_ns = True, now_ns
        known.place = Place.LEAVING if leaves else Place.COMING

        def settle(error: str) -> None:
            known.beginning = False
            if error:
                known.place, known.since_ns, known.moved = before.place, before.since_ns, before.moved
                self._failed(name, known, error, now_ns)

        def begin() -> None:
            error = self._begun(name, leaves=leaves)
            with self._lock:
                settle(error)
            if not error:
                what = "pod yields its memory" if leaves else "pod comes back"
                self._events.decided(what, {"name": name, "gpu": index})

        thread = threading.Thread(target=begin, name=f"turn-{name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread is available
            settle(str(error))
        else:
            self._moves.append(thread)

    def _begun(self, name: str, *, leaves: bool) -> str:
        """Let a pod leave or come back; return why it cannot."""
        try:
            if leaves:
                self._suspensions.suspend(name, yielded=True)
            else:
                self._suspensions.resume(name, yielded=True)
        except Exception as error:  # noqa: BLE001 - also after a defect the pod must be known to stay
            if not isinstance(error, QgpuError):
                _log.exception("memory turns failed")
            return str(error) or repr(error)
        return ""

    def _failed(self, name: str, known: _Known, reason: str, now_ns: int) -> None:
        """Leave a pod where it is for a while, longer each time; a new reason is logged."""
        known.retry_at_ns = now_ns + min(_MOST_RETRY_NS, _RETRY_NS << min(known.failures, 10))
        known.failures += 1
        if reason != known.reason:
            known.reason = reason
            _log.warning("pod cannot be moved for others, trying again later", pod=name, reason=reason)


def _takes_turns(pod: PodInfo) -> bool:
    """Tell whether a pod may wait for its turn: an offline pod with a grant on one pGPU."""
    return len(pod.grants) == 1 and next(iter(pod.grants.values())).pod_class is PodClass.OFFLINE

"""Suspends and resumes pods: one operation a pod at a time, each in a thread of its own, none ever lost.

What is about to be done is written to a file first. A daemon that finds a pod on the way asks the driver where each of
its processes is, and finishes: suspended if all are off their cards, else all run. A pod's grant stays as it is, and
its other processes run on. ``qgpu/checkpoint/sequence.py`` knows the steps of one operation.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from qgpu.checkpoint import sequence
from qgpu.daemon.suspension_file import SuspensionFile
from qgpu.errors import CheckpointError, QgpuError, RefusedError
from qgpu.linux import cgroup
from qgpu.model import NS_PER_S
from qgpu.model.checkpointer import Checkpointer
from qgpu.model.plane_api import Host, PodInfo
from qgpu.model.suspension import Residency, Suspension
from qgpu.policies.memory_turns import Pace
from qgpu.units import GIB

_log = structlog.get_logger("suspensions")

_Operation = Callable[[Checkpointer], Residency]

#: How long a pod's work may take to end once its calls are held, besides three periods for its turns to come round.
WORK_S, MOST_WORK_S, _PERIODS = 10.0, 3600.0, 3
#: A call that was cut off takes effect within this time, or within this time for each GiB: ten times an H200's pace.
_LATE_S, _LATE_S_PER_GIB = 2.0, 5.0
#: How often an unfinished operation is tried again.
_RETRY_S = 2.0
_RUNS = Suspension()


@dataclass(slots=True)
class MoveTotals:
    """What was moved so far in one direction: operations, and their time and bytes."""

    count: int = 0
    seconds: float = 0.0
    bytes: int = 0


@dataclass(slots=True)
class PodTotals:
    """A pod's moves off its cards and back, those from card to card, and those that failed."""

    off: MoveTotals = field(default_factory=MoveTotals)
    back: MoveTotals = field(default_factory=MoveTotals)
    between: MoveTotals = field(default_factory=MoveTotals)
    failed: int = 0


class Suspensions:
    """All pods' places. Safe to use from any thread."""

    def __init__(
        self,
        host: Host,
        named: Callable[[str], PodInfo],
        file: SuspensionFile,
        period_ns: Callable[[], int] = lambda: 0,
        arrived: Callable[[str, Mapping[str, str], bool], None] = lambda _pod, _moves, _went: None,
        most: int | None = None,
    ) -> None:
        """``named`` returns a pod, or raises UnknownNameError; ``period_ns`` is the longest period of any pGPU.

        ``arrived`` is called with a pod that was to move to other cards, its moves, and whether it went there. ``most``
        is how many bytes of host memory suspended pods may hold together; None: any.
        """
        self._host, self._named, self._file, self._period_ns = host, named, file, period_ns
        self._arrived, self._most = arrived, most
        self._changed = threading.Condition()
        self._pods = file.load()
        #: Pods with an operation or its checks under way.
        self._taken: set[str] = set()
        self._totals: dict[str, PodTotals] = {}
        self._stop = threading.Event()
        for name, found in self._pods.items():
            if found.residency.moving or found.moves:
                _log.info("pod was on the way", pod=name, residency=found.residency.value)
                self._taken.add(name)
                self._begin(name, partial(self._settle, name, found.late_s))

    def state(self, name: str) -> Suspension:
        """Return a pod's place; running for a pod that was never moved."""
        return self._pods.get(name, _RUNS)

    def totals(self, name: str) -> PodTotals:
        """Return what was moved of a pod so far, since this daemon began."""
        return self._totals.get(name, PodTotals())

    def any_yielded(self) -> bool:
        """Tell whether any pod comes back by itself."""
        with self._changed:
            return any(each.yielded for each in self._pods.values())

    def wait(self, name: str, timeout_s: float) -> Suspension:
        """Wait until no operation is under way for a pod, and return its place then, or after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: name not in self._taken, timeout_s)
        return self.state(name)

    def suspend(self, name: str, work_s: float = WORK_S, *, yielded: bool = False) -> None:
        """Begin to take a pod off its cards; if it is off, it only stays there until it is resumed, or ``yielded``.

        ``work_s`` is how long its work may take to end. ``yielded``: it comes back by itself. Raises RefusedError,
        before anything is touched, if an operation is under way or it is known that this one cannot succeed. What goes
        wrong later is in ``state``.
        """
        lock_s = work_s + _PERIODS * self._period_ns() / NS_PER_S
        pod = self._named(name)
        with self._taking(name, Residency.SUSPENDED) as taken:
            if taken:
                found = replace(self._leaving(pod, lock_s), yielded=yielded)
                with self._changed:  # of two that begin at once, the second sees the first
                    self._check_host_memory(pod)
                    self._start(name, found, partial(self._suspend, name, round(lock_s * 1000)))
        if not taken and not yielded:
            self._keep_off(name)

    def resume(self, name: str, *, yielded: bool = False) -> None:
        """Begin to put a suspended pod back; nothing to do if it runs. Raises as ``suspend``.

        ``yielded``: only if it comes back by itself.
        """
        self._named(name)
        with self._taking(name, Residency.RUNNING) as taken:
            found = self.state(name)
            if taken and yielded and not found.yielded:
                self._release(name)
            elif taken:
                free = self._free(found.memory)
                with self._changed:
                    self._check_card_memory(name, found.memory, free)
                    entry = replace(found, residency=Residency.RESUMING, since_s=time.time(), error="")
                    self._start(name, entry, partial(self._resume, name))

    def allow_return(self, name: str) -> None:
        """Let a suspended pod come back when there is room. Raises as ``suspend``; nothing to do if it runs."""
        self._named(name)
        with self._taking(name, Residency.RUNNING) as taken:
            if taken:
                self._enter(name, replace(self.state(name), yielded=True, error=""))
                self._release(name)

    def pace(self) -> Pace:
        """Return what moving a GiB takes here, as far as that was measured; else what an H200 takes."""
        every, usual = list(self._totals.values()), Pace()
        off, back = (_ns_per_gib([getattr(each, way) for each in every]) for way in ("off", "back"))
        return Pace(off or usual.off_ns_per_gib, back or usual.back_ns_per_gib)

    def host_room(self) -> int | None:
        """Return how many bytes of suspended pods host memory can hold, those that it holds included; None: any.

        A pod that is being moved does not count as held, because nobody knows how much of it is there.
        """
        with closing(self._host.checkpointer()) as driver:
            room = driver.host_room()
        all_room = None if room is None else room + self._held(Residency.SUSPENDED)
        return min((each for each in (all_room, self._most) if each is not None), default=None)

    def relocate(
        self, name: str, moves: Mapping[str, str], needs: Mapping[int, int], admit: Callable[[], None]
    ) -> None:
        """Begin to move a pod to other cards; it runs there, or where it was.

        ``moves`` maps UUIDs of its cards to the others; ``needs`` is the memory that must be free, by pGPU. Raises as
        ``suspend``. ``admit`` gives it its grants there, after the move is in the file: whoever finishes it calls
        ``arrived``, which takes away the grants that are too many.
        """
        lock_s = WORK_S + _PERIODS * self._period_ns() / NS_PER_S
        pod = self._named(name)
        with closing(self._host.checkpointer()) as driver:
            driver.check_moves()
        with self._taking(name, None):
            before = found = self.state(name)
            if leaves := found.residency is Residency.RUNNING:
                found = self._leaving(pod, lock_s)
            entry = replace(found, residency=Residency.SUSPENDING, since_s=time.time(), moves=moves, error="")
            free, admitted = self._free(needs), False
            with self._changed:
                if leaves:
                    self._check_host_memory(pod)
                self._check_card_memory(name, needs, free)
                self._enter(name, entry)
            try:
                admit()
                admitted = True
                self._begin(name, partial(self._relocate, name, round(lock_s * 1000)))
            except Exception:
                if admitted:
                    self._arrived(name, moves, False)
                self._put(name, before)
                raise

    def forget_ended(self, pods: Iterable[str]) -> None:
        """Drop what is known of pods that are gone, or whose suspended processes have all ended; ``pods`` are there."""
        there = set(pods)
        with self._changed:
            known = [(name, found) for name, found in self._pods.items() if name not in self._taken]
        if not known:
            return
        with closing(self._host.checkpointer()) as driver:
            gone = [
                name
                for name, found in known
                if name not in there
                or (found.residency is Residency.SUSPENDED and not any(map(driver.alive, found.processes)))
            ]
        with self._changed:
            for name in set(gone) - self._taken:
                del self._pods[name]
                if name not in there:
                    self._totals.pop(name, None)
            if gone:
                with suppress(QgpuError):  # at worst the next daemon finds them ended, too
                    self._file.save(self._pods)

    def close(self) -> None:
        """Begin nothing more. What is under way ends with the daemon, and the next one finishes it."""
        self._stop.set()

    def _keep_off(self, name: str) -> None:
        """Let a pod that yielded its memory come back only when it is told to."""
        with self._changed:
            found = self.state(name)
            if found.yielded and found.residency is Residency.SUSPENDED and name not in self._taken:
                self._enter(name, replace(found, yielded=False))

    def _leaving(self, pod: PodInfo, lock_s: float) -> Suspension:
        """Describe a pod that is about to leave its cards. Raises RefusedError if it cannot."""
        _check_listed(pod)
        with closing(self._host.checkpointer()) as driver:
            processes = tuple(driver.processes(pod))
            if not processes:
                raise RefusedError(f"pod {pod.name}: no process of it uses a card; there is nothing to suspend")
        memory = pod.memory_granted
        return Suspension(Residency.SUSPENDING, time.time(), processes, memory, late_s=_late_s(memory, lock_s))

    def _check_host_memory(self, pod: PodInfo) -> None:
        """Raise RefusedError if what a pod holds does not fit. The caller holds the lock until that is entered."""
        with closing(self._host.checkpointer()) as driver:
            driver.check_host_memory(pod, self._held(Residency.SUSPENDING, besides=pod.name))
        needed = sum(pod.memory_granted.values())
        held = self._held(Residency.SUSPENDED, Residency.SUSPENDING, besides=pod.name)
        if self._most is not None and held + needed > self._most:
            raise RefusedError(
                f"pod {pod.name}: it holds {needed / GIB:.1f} GiB on cards, and suspended pods hold "
                f"{held / GIB:.1f} GiB of the {self._most / GIB:.1f} GiB that they may (suspended_memory); resume one "
                "first, or raise that"
            )

    def _free(self, indexes: Iterable[int]) -> dict[int, int]:
        """Return what is free on pGPUs. The driver may take long to tell: the caller does not hold the lock."""
        with closing(self._host.checkpointer()) as driver:
            return {index: driver.free_memory(index) for index in indexes}

    def _check_card_memory(self, name: str, needs: Mapping[int, int], free: Mapping[int, int]) -> None:
        """Raise RefusedError if a pod finds no room. The caller holds the lock until it is entered."""
        coming = self._coming(besides=name)
        for index, needed in needs.items():
            if (left := max(0, free[index] - coming[index])) < needed:
                raise RefusedError(
                    f"pod {name}: it needs {needed / GIB:.1f} GiB of pGPU {index}, which has {left / GIB:.1f} GiB "
                    "free; suspend or end another pod there first"
                )

    def _coming(self, besides: str) -> Counter[int]:
        """Add up, by pGPU, what other pods take that come to it or move there; some may be there already."""
        uuids = {pgpu.index: pgpu.uuid for pgpu in self._host.pgpus()}
        indexes = {uuid: index for index, uuid in uuids.items()}
        total: Counter[int] = Counter()
        with self._changed:
            found = [each for name, each in self._pods.items() if name != besides]
        for each in found:
            for index, size in each.memory.items():
                target = indexes.get(each.moves.get(uuids.get(index, ""), ""), index)
                if each.residency is Residency.RESUMING or target != index:
                    total[target] += size
        return total

    def _held(self, *where: Residency, besides: str = "") -> int:
        """Add up the memory of pods in these places, but one; of a pod on its way, some may be there already."""
        with self._changed:
            found = [each for name, each in self._pods.items() if name != besides and each.residency in where]
        return sum(sum(each.memory.values()) for each in found)

    @contextmanager
    def _taking(self, name: str, wanted: Residency | None) -> Iterator[bool]:
        """Reserve a pod for an operation; False if the pod is already where that would bring it.

        Raises RefusedError if it is taken.
        """
        with self._changed:
            if name in self._taken:
                raise RefusedError(f"pod {name}: it is being suspended or resumed already; wait until that is done")
            if takes := self.state(name).residency is not wanted:
                self._taken.add(name)
        try:
            yield takes
        except BaseException:
            self._release(name)
            raise

    def _release(self, name: str) -> None:
        with self._changed:
            self._taken.discard(name)
            self._changed.notify_all()

    def _start(self, name: str, entry: Suspension, operation: _Operation) -> None:
        """Write what is about to be done, and begin it. If it raises QgpuError, nothing has changed."""
        before = self.state(name)
        self._enter(name, entry)
        try:
            self._begin(name, operation)
        except RefusedError:
            self._put(name, before)
            raise

    def _begin(self, name: str, operation: _Operation) -> None:
        try:
            threading.Thread(target=self._work, args=(name, operation), name=f"move-{name}", daemon=True).start()
        except RuntimeError as error:
            raise RefusedError(f"pod {name}: no thread is available to move it; see the limits of qgpud") from error

    def _suspend(self, name: str, lock_ms: int, driver: Checkpointer) -> Residency:
        found = self.state(name)
        sequence.suspend(
            driver, found.processes, lock_ms, found.late_s, lambda: self._check_again(self._named(name), driver)
        )
        return Residency.SUSPENDED

    def _check_again(self, pod: PodInfo, driver: Checkpointer) -> float:
        """Check a pod whose calls wait, so that all that it has opened or allocated meanwhile shows.

        Return how long a call that is cut off may still take effect. Raises a QgpuError.
        """
        driver.check_restorable(pod)
        found, memory = self.state(pod.name), pod.memory_granted
        if sum(memory.values()) > sum(found.memory.values()):
            found = replace(found, memory=memory, late_s=max(found.late_s, _late_s(memory)))
            with self._changed:
                self._check_host_memory(pod)
                self._enter(pod.name, found)
        return found.late_s

    def _resume(self, name: str, driver: Checkpointer) -> Residency:
        found = self.state(name)
        sequence.resume(driver, found.processes, found.late_s, found.moves)
        return Residency.RUNNING

    def _relocate(self, name: str, lock_ms: int, driver: Checkpointer) -> Residency:
        self._suspend(name, lock_ms, driver)
        self._enter(name, replace(self.state(name), residency=Residency.RESUMING))
        return self._resume(name, driver)

    def _settle(self, name: str, late_s: float, driver: Checkpointer) -> Residency:
        found = self.state(name)
        resuming = found.residency is Residency.RESUMING
        off = sequence.settle(driver, found.processes, late_s, found.moves, resuming=resuming)
        if off and found.moves:  # it could not go where it should: it runs where it was, if it still can
            self._enter(name, replace(found, residency=Residency.SUSPENDING))
            with suppress(CheckpointError):
                sequence.resume(driver, found.processes, late_s)
                off = False
        return Residency.SUSPENDED if off else Residency.RUNNING

    def _work(self, name: str, operation: _Operation) -> None:
        """Do an operation; if it fails, find out where the pod is, until the driver tells."""
        began_s, found, error = time.monotonic(), self.state(name), ""
        leaves = found.residency is Residency.SUSPENDING and not found.moves
        intent = Residency.SUSPENDED if leaves else Residency.RUNNING
        told = ""
        while not self._stop.is_set():
            try:
                with closing(self._host.checkpointer()) as driver:
                    end = operation(driver)
            except Exception as failure:  # noqa: BLE001 - also after a defect the pod must be found
                if not isinstance(failure, QgpuError):
                    _log.exception("move failed", pod=name)
                if error:
                    if told != str(failure):
                        told = str(failure)
                        _log.error("pod is between its cards and host memory, trying again", pod=name, error=told)
                    self._stop.wait(_RETRY_S)
                error = error or str(failure)
                undone = failure.__cause__ is not None  # if so, it waited for what was cut off
                operation = partial(self._settle, name, 0.0 if undone else self.state(name).late_s)
            else:
                found = self.state(name)
                here = found.residency is Residency.SUSPENDING  # on the cards that it was to leave
                if end is not intent or (found.moves and here):
                    error = error or "it was cut off by the end of qgpud, and undone"
                else:
                    error = ""
                self._finish(name, replace(found, residency=end, error=error), time.monotonic() - began_s)
                return

    def _finish(self, name: str, end: Suspension, seconds: float) -> None:
        totals = self._totals.setdefault(name, PodTotals())
        size = sum(end.memory.values())
        if end.error:
            totals.failed += 1
            _log.warning("pod not moved", pod=name, residency=end.residency.value, reason=end.error)
        else:
            if end.moves:
                moved, event = totals.between, "pod moved"
            elif end.residency is Residency.SUSPENDED:
                moved, event = totals.off, "pod suspended"
            else:
                moved, event = totals.back, "pod resumed"
            moved.count, moved.seconds, moved.bytes = moved.count + 1, moved.seconds + seconds, moved.bytes + size
            _log.info(event, pod=name, bytes=size, seconds=round(seconds, 3))
        end = replace(end, since_s=time.time())
        if end.residency is Residency.RUNNING:
            end = replace(end, processes=(), memory={}, yielded=False)
        if end.moves:
            self._arrived(name, end.moves, not end.error)
        with self._changed:  # whoever sees where it is now may move it
            self._put(name, replace(end, moves={}))
            self._release(name)

    def _put(self, name: str, found: Suspension) -> None:
        """Write where a pod is."""
        with self._changed:
            self._pods[name] = found
            with suppress(QgpuError):  # the file still says that it is on the way: the next daemon looks again
                self._file.save(self._pods)

    def _enter(self, name: str, found: Suspension) -> None:
        """Write what is about to be done. Raises QgpuError if it cannot be written."""
        with self._changed:
            self._file.save(self._pods | {name: found})
            self._pods[name] = found
            self._changed.notify_all()


def _late_s(memory: Mapping[int, int], lock_s: float = 0.0) -> float:
    return _LATE_S + max(lock_s, _LATE_S_PER_GIB * sum(memory.values()) / GIB)


def _check_listed(pod: PodInfo) -> None:
    """Raise RefusedError if processes of a pod may be hidden: they would stay on its cards."""
    try:
        cgroup.pids(*pod.cgroups)
    except OSError as error:
        raise RefusedError(
            f"pod {pod.name}: not all of its processes can be listed: {error.strerror}; remove cgroups below its own "
            "first"
        ) from error


def _ns_per_gib(moves: Iterable[MoveTotals]) -> int:
    """Return the mean time for a GiB; 0 while less than one was moved."""
    moved = list(moves)
    size = sum(each.bytes for each in moved)
    return round(sum(each.seconds for each in moved) * NS_PER_S * GIB / size) if size >= GIB else 0

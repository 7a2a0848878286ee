"""What RM is to be asked a little later: whether objects are still there, and what context-switch records call them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from qgpu.guardian.accounting.object_table import Fact, Key, ObjectTable, RmObject
from qgpu.guardian.gpu.gpu_ops import GpuOps
from qgpu.model import NS_PER_MS
from qgpu.nvidia import abi

#: New channels are dealt with once no pod has made a call for this long: while a program starts it keeps RM's locks
#: busy, and each question would wait for them and make the program wait for us. But not later than _LATEST_NS.
_QUIET_NS = 15 * NS_PER_MS
_LATEST_NS = 250 * NS_PER_MS
#: What may be gone is asked about after this long, and again after twice as long, up to _SELDOM_NS.
_AGAIN_NS = 20 * NS_PER_MS
_SELDOM_NS = 1000 * NS_PER_MS
#: RM is asked about this many objects before the daemon is heard again: a pod may have nearly any number, and the
#: daemon takes a guardian for hung after a third of a second (qgpu.planes.seccomp.hang_detector). Forgetting one object
#: takes as long as asking about several.
AT_ONCE, _FORGETTING = 1000, 4
#: About so many mappings are forgotten before the daemon is heard again.
_MAPPINGS_AT_ONCE = 5000


@dataclass(slots=True)
class _Doubt:
    key: Key
    due_ns: int
    #: Whether it is about memory too, which goes with its client, device or by its own name, and all that is seen here.
    of_memory: bool = False
    wait_ns: int = _AGAIN_NS
    #: What is still to be asked about, from the end, where what hangs on others is; None before it has begun; and
    #: whether it was doubted once more since.
    left: list[RmObject] | None = None
    once_more: bool = False
    #: Whether all of it is known to be gone, and whether that is because it was freed here.
    gone: bool = False
    freed: bool = False


class Reconciler:
    """All that is due, by when."""

    def __init__(
        self,
        table: ObjectTable,
        gpu_ops: GpuOps,
        note: Callable[[Fact], None],
        vanished: Callable[[Key], None],
        dropped: Callable[[Key], None],
        clock: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        self._table = table
        self._gpu_ops = gpu_ops
        self._note = note
        #: Told of what RM has no longer.
        self._vanished = vanished
        #: Told of what was freed here.
        self._dropped = dropped
        self._clock = clock
        #: Told that something became due.
        self._wake = wake
        #: When any pod made its last call.
        self._called_ns = 0
        self._doubts: dict[Key, _Doubt] = {}
        #: When which is due, soonest first; some are out of date.
        self._order: list[tuple[int, Key]] = []
        self._fresh: list[Key] = []
        self._fresh_since_ns = 0

    def doubt(self, keys: Iterable[Key], *, of_memory: bool = False) -> None:
        """Ask RM soon whether objects still exist that something failed on."""
        for key in keys:
            doubt = self._doubt(key, self._clock() + _AGAIN_NS)
            doubt.of_memory |= of_memory
            doubt.once_more = doubt.left is not None
        self._wake()

    def gone(self, key: Key) -> None:
        """Forget an object and all below it, which RM has no longer: not at once, where that is much."""
        self._doubt(key, self._clock()).gone = True
        self._schedule(self._doubts[key], self._clock())
        self._wake()

    def freed(self, key: Key) -> None:
        """Forget an object and all below it, which was freed here: as ``gone`` does, and nothing of it is doubted."""
        self._doubt(key, self._clock()).freed = True
        self.gone(key)

    def _doubt(self, key: Key, due_ns: int) -> _Doubt:
        if key not in self._doubts:
            self._doubts[key] = _Doubt(key, due_ns)
            self._schedule(self._doubts[key], due_ns)
        return self._doubts[key]

    def _schedule(self, doubt: _Doubt, due_ns: int) -> None:
        doubt.due_ns = due_ns
        heappush(self._order, (due_ns, doubt.key))

    def _next(self) -> _Doubt | None:
        """Return what is due first."""
        while self._order:
            due_ns, key = self._order[0]
            if (doubt := self._doubts.get(key)) is not None and doubt.due_ns == due_ns:
                return doubt
            heappop(self._order)
        return None

    def due_ns(self) -> int | None:
        """Return when something is to be done next; None for never."""
        reconciler = [doubt.due_ns] if (doubt := self._next()) is not None else []
        if self._table.allocations.is_forgetting:
            reconciler.append(0)
        if self._fresh_since_ns:
            reconciler.append(self._fresh_due_ns())
        return min(reconciler, default=None)

    def settle(self, now_ns: int) -> bool:
        """Do what is due, or some of it if that is much; True when a TSG or channel came or went."""
        changed, most = False, AT_ONCE
        self._table.allocations.forget_some(_MAPPINGS_AT_ONCE)
        again = []
        while most > 0 and (doubt := self._next()) is not None and doubt.due_ns <= now_ns:
            heappop(self._order)
            gone, most = self._resolve(doubt, now_ns, most - 1)
            changed = changed or gone
            if self._doubts.get(doubt.key) is doubt and doubt.due_ns <= now_ns:
                again.append(doubt)
        for doubt in again:
            self._schedule(doubt, doubt.due_ns)
        if self._fresh_since_ns and self._fresh_due_ns() <= now_ns:
            self._fresh_since_ns, fresh, self._fresh = 0, self._fresh, []
            changed = True
            for key in fresh:
                if (rm := self._table.objects.get(key)) is not None and (context := self._gpu_ops.context(rm)):
                    self._note({"fact": "confirm", "client": key[0], "handle": key[1], "context": context})
        return changed

    def called(self) -> None:
        """Take note that a pod makes a call."""
        self._called_ns = self._clock()

    def made(self, rm: RmObject) -> None:
        """Take note of a new object: channels of compute TSGs are asked for what context-switch records call them."""
        if rm.rm_class in abi.GPFIFO_CLASSES:
            parent = self._table.objects.get((rm.client, rm.parent))
            if parent is not None and self._table.is_compute(parent):
                self._fresh.append(rm.key)
                self.later()
            elif parent is not None and self._table.is_copy(parent):
                self.later()
        elif rm.rm_class == abi.KEPLER_CHANNEL_GROUP_A:
            self.later()

    def later(self) -> None:
        """Take note that TSGs or channels came or went."""
        if not self._fresh_since_ns:
            self._fresh_since_ns = self._called_ns = self._clock()
            self._wake()

    def _fresh_due_ns(self) -> int:
        return min(self._called_ns + _QUIET_NS, self._fresh_since_ns + _LATEST_NS)

    def _resolve(self, doubt: _Doubt, now_ns: int, most: int) -> tuple[bool, int]:
        """Ask RM what is left of an object and all below it; of a client without a process, until it ends.

        What hangs on others comes first, so that little goes with each that is gone. Return whether anything is, and
        how much of ``most`` is left: what is more than that stays due.
        """
        changed = False
        whole_client = doubt.key[0] == doubt.key[1]
        if not doubt.freed and (doubt.gone or (whole_client and doubt.key[0] in self._table.clients)):
            there = self._gpu_ops.exists(doubt.key)
            doubt.of_memory |= doubt.gone and there  # another one of that name: of whom each object is, RM is asked
            doubt.gone = not there
        if doubt.left is None:
            doubt.left = self._table.below(doubt.key)
        while doubt.left and most > 0:
            rm = doubt.left.pop()
            most -= 1
            if self._is_gone(rm, doubt):
                (self._dropped if doubt.freed else self._vanished)(rm.key)
                changed, most = True, most - _FORGETTING
        if doubt.left:
            return changed, most
        doubt.left = None
        if doubt.gone:
            (self._dropped if doubt.freed else self._vanished)(doubt.key)
            self._doubts.pop(doubt.key, None)
            return True, most
        entry = self._table.clients.get(doubt.key[0]) if whole_client else None
        if doubt.once_more or (entry is not None and not entry.users):
            doubt.once_more = False
            doubt.wait_ns = min(2 * doubt.wait_ns, _SELDOM_NS)
            self._schedule(doubt, now_ns + doubt.wait_ns)
        else:
            self._doubts.pop(doubt.key, None)
        return changed, most

    def _is_gone(self, rm: RmObject, doubt: _Doubt) -> bool:
        if self._table.objects.get(rm.key) is not rm:
            return False  # gone since, or another one of that name
        if doubt.gone:
            return True
        seen_here = rm.rm_class == abi.NV01_MEMORY_LOCAL_USER and not doubt.of_memory
        return not seen_here and rm.confirmed and not self._gpu_ops.exists(rm.key)

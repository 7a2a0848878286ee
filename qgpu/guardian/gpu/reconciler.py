"""Asks RM later whether objects still exist, and for contexts that it did not tell when it made the channels."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.rm_object import Fact, Key, RmObject, confirm_fact, gone_fact
from qgpu.guardian.gpu.gpu_ops import GpuOps
from qgpu.model import NS_PER_MS
from qgpu.nvidia import abi

#: New TSGs and channels are looked at once no pod has made a call for this long, but not later than _LATEST_NS. A
#: starting program keeps RM's locks busy, so each call of ours would wait for the program and delay it.
_QUIET_NS = 15 * NS_PER_MS
_LATEST_NS = 250 * NS_PER_MS
#: The first recheck comes after this long, each next one after twice as long, up to _SELDOM_NS.
_AGAIN_NS = 20 * NS_PER_MS
_SELDOM_NS = 1000 * NS_PER_MS
#: RM is asked about at most this many objects before the daemon is served again: a pod may have nearly any number of
#: them, and the daemon takes a guardian for hung after a third of a second (qgpu.planes.seccomp.hang_detector).
#: Forgetting one object takes as long as asking about several. On a busy host RM answers slowly, so a time bounds a
#: pass too.
BATCH, _FORGETTING = 1000, 4
_PASS_NS = 20 * NS_PER_MS
#: About this many mappings are forgotten before the daemon is served again.
_MAPPINGS_AT_ONCE = 5000


@dataclass(slots=True)
class _Recheck:
    key: Key
    due_ns: int
    #: Whether to ask about memory too. Usually not: every call that frees memory passes through the guardian.
    include_memory: bool = False
    wait_ns: int = _AGAIN_NS
    #: Objects still to be asked about, children last (taken from the end first); None before the first pass.
    remaining: list[RmObject] | None = None
    requested_again: bool = False
    #: Whether everything below the key is known to be gone, and whether a call to this guardian freed it.
    gone: bool = False
    freed: bool = False


@dataclass(eq=False)
class Reconciler:
    """All rechecks, by due time."""

    _table: ObjectTable
    _gpu_ops: GpuOps
    _note: Callable[[Fact], None]
    #: Called with objects that RM no longer has, although no call to this guardian freed them.
    _vanished: Callable[[Key], None]
    _clock: Callable[[], int]
    #: Wakes the main loop.
    _wake: Callable[[], None]
    #: When any pod made its last call.
    _called_ns: int = 0
    _rechecks: dict[Key, _Recheck] = field(default_factory=dict)
    #: Due times, soonest first; some entries are outdated.
    _order: list[tuple[int, Key]] = field(default_factory=list)
    _new_channels: deque[Key] = field(default_factory=deque)
    _new_since_ns: int = 0

    def recheck(self, keys: Iterable[Key], *, include_memory: bool = False) -> None:
        """Ask RM soon whether objects still exist on which an operation failed."""
        for key in keys:
            recheck = self._recheck_for(key, self._clock() + _AGAIN_NS)
            recheck.include_memory |= include_memory
            recheck.requested_again = recheck.remaining is not None
        self._wake()

    def recheck_clients(self, clients: Iterable[int], *, include_memory: bool = False) -> None:
        """Do as recheck, for clients."""
        self.recheck([(client, client) for client in clients], include_memory=include_memory)

    def forget_in_steps(self, key: Key, *, freed: bool = False) -> None:
        """Forget an object that RM no longer has, with all below it; in steps if that is much.

        If a call ``freed`` it, RM need not be asked.
        """
        recheck = self._recheck_for(key, self._clock())
        recheck.gone, recheck.freed = True, recheck.freed or freed
        self._schedule(recheck, self._clock())
        self._wake()

    def _recheck_for(self, key: Key, due_ns: int) -> _Recheck:
        if key not in self._rechecks:
            self._rechecks[key] = _Recheck(key, due_ns)
            self._schedule(self._rechecks[key], due_ns)
        return self._rechecks[key]

    def _schedule(self, recheck: _Recheck, due_ns: int) -> None:
        recheck.due_ns = due_ns
        heappush(self._order, (due_ns, recheck.key))

    def _next(self) -> _Recheck | None:
        while self._order:
            due_ns, key = self._order[0]
            if (recheck := self._rechecks.get(key)) is not None and recheck.due_ns == due_ns:
                return recheck
            heappop(self._order)
        return None

    def due_ns(self) -> int | None:
        """Return when the next work is due; None for never."""
        dues_ns = [recheck.due_ns] if (recheck := self._next()) is not None else []
        if self._table.allocations.is_forgetting:
            dues_ns.append(0)
        if self._new_since_ns:
            dues_ns.append(self._new_due_ns())
        return min(dues_ns, default=None)

    def run_due(self, now_ns: int) -> bool:
        """Do work that is due, within a bound; True if a TSG or channel came or went."""
        changed, most, until_ns = False, BATCH, self._clock() + _PASS_NS
        self._table.allocations.forget_some(_MAPPINGS_AT_ONCE)
        while most > 0 and (recheck := self._next()) is not None and recheck.due_ns <= now_ns:
            heappop(self._order)
            gone, most = self._resolve(recheck, now_ns, most - 1, until_ns)
            changed = changed or gone
            if self._rechecks.get(recheck.key) is recheck and recheck.due_ns <= now_ns:  # this was all for this pass
                self._schedule(recheck, recheck.due_ns)
        if self._new_since_ns and self._new_due_ns() <= now_ns:
            changed, until_ns = True, self._clock() + _PASS_NS
            while self._new_channels and self._clock() < until_ns:
                key = self._new_channels.popleft()
                rm = self._table.objects.get(key)
                if rm is not None and not rm.context and (context := self._gpu_ops.context(rm)):
                    self._note(confirm_fact(key, context))
            if not self._new_channels:
                self._new_since_ns = 0
        return changed

    def pod_called(self) -> None:
        """Record that a pod makes a call."""
        self._called_ns = self._clock()

    def object_made(self, rm: RmObject) -> None:
        """Record a new object; RM is asked for the context id of a compute channel if it is still unknown then."""
        tsg = self._table.scheduled_with(rm) if rm.rm_class in abi.GPFIFO_CLASSES else None
        if of_compute := tsg is not None and self._table.is_compute(tsg):
            self._new_channels.append(rm.key)
        of_copies = tsg is not None and self._table.is_copy(tsg)
        if of_compute or of_copies or rm.rm_class == abi.KEPLER_CHANNEL_GROUP_A:
            self.tsgs_changed()

    def is_compute_channel(self, rm: RmObject) -> bool:
        """Tell whether an object is a channel of a compute TSG."""
        parent = self._table.objects.get((rm.client, rm.parent)) if rm.rm_class in abi.GPFIFO_CLASSES else None
        return parent is not None and self._table.is_compute(parent)

    def tsgs_changed(self) -> None:
        """Record that TSGs or channels came or went."""
        if not self._new_since_ns:
            self._new_since_ns = self._called_ns = self._clock()
            self._wake()

    def _new_due_ns(self) -> int:
        return min(self._called_ns + _QUIET_NS, self._new_since_ns + _LATEST_NS)

    def _resolve(self, recheck: _Recheck, now_ns: int, most: int, until_ns: int) -> tuple[bool, int]:
        """Ask RM which objects at and below a key still exist, children first, and drop the rest.

        Return whether any was dropped, and what is left of ``most`` (nothing after ``until_ns``). What was not asked
        stays due. A client that no process uses is asked about again until it is gone.
        """
        changed = False
        whole_client = recheck.key[0] == recheck.key[1]
        if not recheck.freed and (recheck.gone or (whole_client and recheck.key[0] in self._table.clients)):
            there = self._gpu_ops.exists(recheck.key)
            recheck.include_memory |= recheck.gone and there  # the handle was reused: ask RM about each object
            recheck.gone = not there
        if recheck.remaining is None:
            recheck.remaining = list(self._table.below(recheck.key))
        while recheck.remaining and most > 0:
            rm = recheck.remaining.pop()
            most -= 1
            if self._is_gone(rm, recheck):
                self._forget(rm.key, recheck)
                changed, most = True, most - _FORGETTING
            if self._clock() >= until_ns:
                most = 0
        if recheck.remaining:
            return changed, most
        recheck.remaining = None
        if recheck.gone:
            self._forget(recheck.key, recheck)
            self._rechecks.pop(recheck.key, None)
            return True, most
        entry = self._table.clients.get(recheck.key[0]) if whole_client else None
        if recheck.requested_again or (entry is not None and not entry.users):
            recheck.requested_again = False
            recheck.wait_ns = min(2 * recheck.wait_ns, _SELDOM_NS)
            self._schedule(recheck, now_ns + recheck.wait_ns)
        else:
            self._rechecks.pop(recheck.key, None)
        return changed, most

    def _forget(self, key: Key, recheck: _Recheck) -> None:
        if recheck.freed:
            self._note(gone_fact(key))
        else:
            self._vanished(key)

    def _is_gone(self, rm: RmObject, recheck: _Recheck) -> bool:
        if self._table.objects.get(rm.key) is not rm:
            return False  # dropped since, or its handle was reused
        if recheck.gone:
            return True
        is_memory = rm.rm_class in (abi.NV01_MEMORY_LOCAL_USER, abi.NV_MEMORY_FABRIC)
        seen_here = is_memory and not recheck.include_memory
        return not seen_here and rm.confirmed and not self._gpu_ops.exists(rm.key)

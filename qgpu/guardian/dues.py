"""What RM is to be asked a little later: whether objects are still there, and what context-switch records call them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qgpu.guardian.hands import Hands
from qgpu.guardian.register import Fact, Key, Register, RmObject
from qgpu.model import NS_PER_MS
from qgpu.rm import abi

#: New channels are dealt with once no pod has made a call for this long: while a program starts it keeps RM's locks
#: busy, and each question would wait for them and make the program wait for us. But not later than _LATEST_NS.
_QUIET_NS = 15 * NS_PER_MS
_LATEST_NS = 250 * NS_PER_MS
#: What may be gone is asked about after this long, and again after twice as long, up to _SELDOM_NS.
_AGAIN_NS = 20 * NS_PER_MS
_SELDOM_NS = 1000 * NS_PER_MS
#: About so many objects RM is asked before the daemon is heard again: a pod has as many as it likes, nearly, and who
#: does not answer for a third of a second is taken to hang (qgpu.sched.seccomp.silence). To forget one takes as long as
#: asking about several.
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
    #: Whether all of it is known to be gone.
    gone: bool = False


class Dues:
    """All that is due, by when."""

    def __init__(
        self,
        register: Register,
        hands: Hands,
        note: Callable[[Fact], None],
        vanished: Callable[[Key], None],
        clock: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        self._register = register
        self._hands = hands
        self._note = note
        #: Told of what RM has no longer.
        self._vanished = vanished
        self._clock = clock
        #: Told that something became due.
        self._wake = wake
        #: When any pod made its last call.
        self._called_ns = 0
        self._doubts: dict[Key, _Doubt] = {}
        self._fresh: list[Key] = []
        self._fresh_since_ns = 0

    def doubt(self, keys: Iterable[Key], *, of_memory: bool = False) -> None:
        """Ask RM soon whether objects still exist that something failed on."""
        for key in keys:
            doubt = self._doubts.setdefault(key, _Doubt(key, self._clock() + _AGAIN_NS))
            doubt.of_memory |= of_memory
            doubt.once_more = doubt.left is not None
        self._wake()

    def gone(self, key: Key) -> None:
        """Forget an object and all below it, which RM has no longer: not at once, where that is much."""
        doubt = self._doubts.setdefault(key, _Doubt(key, 0))
        doubt.gone, doubt.due_ns = True, self._clock()
        self._wake()

    def due_ns(self) -> int | None:
        """Return when something is to be done next; None for never."""
        dues = [doubt.due_ns for doubt in self._doubts.values()]
        if self._register.holdings.is_forgetting:
            dues.append(0)
        if self._fresh_since_ns:
            dues.append(self._fresh_due_ns())
        return min(dues, default=None)

    def settle(self, now_ns: int) -> bool:
        """Do what is due, or some of it if that is much; True when a TSG or channel came or went."""
        changed, most = False, AT_ONCE
        self._register.holdings.forget_some(_MAPPINGS_AT_ONCE)
        for doubt in [doubt for doubt in self._doubts.values() if doubt.due_ns <= now_ns]:
            if most <= 0:
                break
            gone, most = self._resolve(doubt, now_ns, most - 1)
            changed = changed or gone
        if self._fresh_since_ns and self._fresh_due_ns() <= now_ns:
            self._fresh_since_ns, fresh, self._fresh = 0, self._fresh, []
            changed = True
            for key in fresh:
                if (rm := self._register.objects.get(key)) is not None and (context := self._hands.context(rm)):
                    self._note({"fact": "confirm", "client": key[0], "handle": key[1], "context": context})
        return changed

    def called(self) -> None:
        """Take note that a pod makes a call."""
        self._called_ns = self._clock()

    def made(self, rm: RmObject) -> None:
        """Take note of a new object: channels of compute TSGs are asked for what context-switch records call them."""
        if rm.rm_class in abi.GPFIFO_CLASSES:
            parent = self._register.objects.get((rm.client, rm.parent))
            if parent is not None and self._register.is_compute(parent):
                self._fresh.append(rm.key)
                self.later()
            elif parent is not None and self._register.is_copy(parent):
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
        if doubt.gone or (whole_client and doubt.key[0] in self._register.clients):
            there = self._hands.exists(doubt.key)
            doubt.of_memory |= doubt.gone and there  # another one of that name: of whom each object is, RM is asked
            doubt.gone = not there
        if doubt.left is None:
            doubt.left = self._register.below(doubt.key)
        while doubt.left and most > 0:
            rm = doubt.left.pop()
            most -= 1
            if self._is_gone(rm, doubt):
                self._vanished(rm.key)
                changed, most = True, most - _FORGETTING
        if doubt.left:
            return changed, most
        doubt.left = None
        if doubt.gone:
            self._vanished(doubt.key)
            self._doubts.pop(doubt.key, None)
            return True, most
        entry = self._register.clients.get(doubt.key[0]) if whole_client else None
        if doubt.once_more or (entry is not None and not entry.users):
            doubt.once_more = False
            doubt.wait_ns = min(2 * doubt.wait_ns, _SELDOM_NS)
            doubt.due_ns = now_ns + doubt.wait_ns
        else:
            self._doubts.pop(doubt.key, None)
        return changed, most

    def _is_gone(self, rm: RmObject, doubt: _Doubt) -> bool:
        if self._register.objects.get(rm.key) is not rm:
            return False  # gone since, or another one of that name
        if doubt.gone:
            return True
        seen_here = rm.rm_class == abi.NV01_MEMORY_LOCAL_USER and not doubt.of_memory
        return not seen_here and rm.confirmed and not self._hands.exists(rm.key)

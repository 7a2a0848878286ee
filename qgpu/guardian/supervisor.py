"""Sees what pods ask of RM: keeps the register, answers their calls, refuses what would break their share.

A call is judged while its thread is stopped and then carried out by the kernel for the pod itself. Whether it
succeeded is not seen, so every object is first a claim; shortly after, RM is asked whether it is real.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path

import structlog

from qgpu import cgroup
from qgpu.guardian import calls, notify, rules
from qgpu.guardian.hands import Hands
from qgpu.guardian.journal import Journal
from qgpu.guardian.notify import Listener, Notification
from qgpu.guardian.register import Fact, Key, Register, RmObject, object_fact
from qgpu.model import NS_PER_MS
from qgpu.rm import abi

_log = structlog.get_logger("guardian")

_KEPT = (
    frozenset({abi.NV01_DEVICE_0, abi.NV20_SUBDEVICE_0, abi.KEPLER_CHANNEL_GROUP_A, abi.NV01_MEMORY_LOCAL_USER})
    | abi.GPFIFO_CLASSES
)

#: RM is asked about a claim once the pod has made none for this long: while a program starts it keeps RM's
#: locks busy, and each question would wait for them and make the program wait for us. But not later than _LATEST_NS.
_QUIET_NS = 15 * NS_PER_MS
_LATEST_NS = 250 * NS_PER_MS
#: While RM says no, it is asked again after this long, then twice as long, and so on.
_AGAIN_NS = 20 * NS_PER_MS
_CONFIRM_TRIES = 5
#: RM has made, or refused, what it was asked for within this; what it does not have after that, it refused.
_MAKING_NS = 5 * NS_PER_MS


@dataclass(order=True, slots=True)
class _Claim:
    due_ns: int
    order: int
    rm: RmObject = field(compare=False)
    made_ns: int = field(compare=False)
    tries: int = field(default=0, compare=False)


@dataclass(slots=True)
class _Doubt:
    key: Key
    due_ns: int
    channels: list[Key]


@dataclass(slots=True)
class Supervisor:
    """All pods' listeners and what is learned through them."""

    register: Register
    journal: Journal
    hands: Hands
    #: Told of channels about to be freed, and of those that were not freed after all.
    leave: Callable[[list[Key]], None]
    stayed: Callable[[list[Key]], None]
    #: Told of every new process, with its pidfd.
    watch: Callable[[int, int], None]
    clock: Callable[[], int]
    #: Tells a pod's memory limit on a device instance in bytes; None for no limit.
    limit: Callable[[str, int], int | None] = lambda _pod, _instance: None
    major: int = abi.NV_MAJOR
    listeners: dict[int, tuple[str, Listener]] = field(default_factory=dict)
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)
    _threads: dict[int, int] = field(default_factory=dict)
    _claims: list[_Claim] = field(default_factory=list)  # a heap
    _claimed: int = 0
    _last_claim_ns: int = 0
    _doubts: deque[_Doubt] = field(default_factory=deque)
    _next_listener: int = 1

    def note(self, fact: Fact) -> None:
        """Take a fact into register and journal."""
        self.register.note(fact)
        self.journal.append(fact)
        if self.journal.grown:
            self.journal.compact(self.register.facts())

    def listen(self, pod: str, fd: int, number: int | None = None) -> int:
        """Take over a pod's listener and return the number it goes by."""
        number = self._next_listener if number is None else number
        self._next_listener = max(self._next_listener, number + 1)
        listener = Listener(fd, self.journal.slot)
        self.listeners[number] = (pod, listener)
        return number

    def answer_orphan(self) -> None:
        """Answer the call a dead guardian left in hand: once all listeners are here, and before any is served."""
        orphan = self.journal.unanswered()
        if orphan is not None and orphan[0] in self.listeners:
            self.listeners[orphan[0]][1].proceed(orphan[1])
        self.journal.in_hand(-1)

    def resume(self) -> None:
        """Go on with a register rebuilt from a journal: watch its processes, ask RM about open claims.

        What was freed while nobody looked is found by asking about everything.
        """
        for client in self.register.clients:
            self.doubt([(client, client)])
        for pid in list(self.register.processes):
            try:
                self.watch(pid, self.hands.watch(pid))
            except OSError:
                self.note({"fact": "exit", "pid": pid})
        for rm in self.register.objects.values():
            if not rm.confirmed:
                self._queue(rm)

    def serve(self, number: int) -> None:
        """Receive and answer one call, which its listener must have shown to be there."""
        pod, listener = self.listeners[number]
        self.journal.in_hand(number)
        call = listener.receive()
        if call is not None:
            try:
                if not self._judge(pod, listener, call):
                    listener.proceed(call.id)
            except OSError as error:
                # Its memory cannot be written, or it cannot be watched: nothing is carried out unseen.
                _log.info("call failed", pod=pod, reason=str(error))
                listener.answer_error(call.id, error.errno or errno.EFAULT)
            except Exception:  # noqa: BLE001 - a thread that gets no answer is stopped for good
                _log.exception("call failed", pod=pod)
                listener.answer_error(call.id, errno.EIO)
        self.journal.in_hand(-1)

    def doubt(self, keys: Iterable[Key]) -> None:
        """Ask RM soon whether objects still exist that something failed on."""
        for key in keys:
            self._doubts.append(_Doubt(key, self.clock() + _AGAIN_NS, []))

    def exited(self, pid: int) -> None:
        """Forget a process that has ended."""
        self.note({"fact": "exit", "pid": pid})
        self.hands.unwatch(pid)
        self._threads = {tid: owner for tid, owner in self._threads.items() if owner != pid}

    # -- one call ---------------------------------------------------------------------------------------------

    def _judge(self, pod: str, listener: Listener, call: Notification) -> bool:
        """Learn from a call and say whether it has been answered already.

        Most calls are none of our business, and a starting program makes hundreds: those cost one look.
        """
        asked = calls.decode(
            call.request, call.argument, lambda address, size: notify.read_memory(call.tid, address, size)
        )
        match asked:
            case None:
                return False
            case calls.Control() if asked.command not in rules.REFUSED:
                return False
            case calls.Alloc() if asked.rm_class not in _KEPT:
                return False
        if not self._is_nvidia(call) or not listener.still_waiting(call.id):
            return False
        match asked:
            case calls.Control():
                self._refuse(pod, call, asked)
                listener.answer_ok(call.id)
                return True
            case calls.Alloc() if (status := self._admit(pod, call, asked)) != abi.NV_OK:
                notify.write_memory(call.tid, asked.status_at, status.to_bytes(4, "little"))
                listener.answer_ok(call.id)
                return True
            case calls.Dup() if source := self.register.objects.get((asked.source_client, asked.source)):
                self._dup(pod, call, asked, source)
            case calls.Free():
                self._doubt((asked.client, asked.handle))
        return False

    def _is_nvidia(self, call: Notification) -> bool:
        try:
            status = os.stat(f"/proc/{call.tid}/fd/{call.fd}")
        except OSError:
            return False
        return stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == self.major

    def _refuse(self, pod: str, call: Notification, asked: calls.Control) -> None:
        status = abi.NV_ERR_INSUFFICIENT_PERMISSIONS
        tsg = self.register.objects.get((asked.client, asked.target))
        if asked.command == abi.NVA06C_SET_TIMESLICE and self._first_wish(call, asked, tsg):
            status = abi.NV_OK
        else:
            self.refusals[pod, rules.REFUSED[asked.command]] += 1
        notify.write_memory(call.tid, asked.status_at, status.to_bytes(4, "little"))

    def _first_wish(self, call: Notification, asked: calls.Control, tsg: RmObject | None) -> bool:
        """Remember the timeslice libcuda gives a TSG once at start; it holds when no plan says otherwise."""
        if tsg is None or tsg.wish_us != abi.RM_DEFAULT_TIMESLICE_US:
            return False
        data = notify.read_memory(call.tid, asked.params, 8)
        wish = int.from_bytes(data, "little") if data else 0
        if not abi.RM_DEFAULT_TIMESLICE_US <= wish <= 4 * abi.RM_DEFAULT_TIMESLICE_US:
            return False
        self.note({"fact": "wish", "client": tsg.client, "handle": tsg.handle, "us": wish})
        return True

    def _over_limit(self, key: Key) -> bool:
        """Tell whether memory just claimed takes its pod over the limit, after asking RM about all that is open.

        What a pod freed a moment ago must not count, nor what RM refused it.
        """
        rm = self.register.objects.get(key)
        if rm is None or rm.charged is None or (limit := self.limit(*rm.charged)) is None:
            return False
        pod, instance = rm.charged
        if self.register.memory(pod).get(instance, 0) > limit:
            self._ask_all(key)
        return self.register.memory(pod).get(instance, 0) > limit

    def _admit(self, pod: str, call: Notification, asked: calls.Alloc) -> int:
        """Claim what is asked for, or say with which status of RM's it is refused."""
        key = (asked.client, asked.handle)
        if asked.handle == 0:  # RM would choose one and tell the pod alone; no CUDA library asks for that
            self.refusals[pod, "object without a handle"] += 1
            return abi.NV_ERR_INVALID_ARGUMENT
        if (there := self.register.objects.get(key)) is not None and there.confirmed:
            self._resolve(_Doubt(key, 0, []))  # freed a moment ago, or RM is about to refuse the handle
        if key in self.register.objects and self.register.objects[key].confirmed:
            return abi.NV_OK
        self._claim(pod, call, asked)
        if asked.rm_class == abi.NV01_MEMORY_LOCAL_USER and self._over_limit(key):
            self.note({"fact": "gone", "client": asked.client, "handle": asked.handle})
            self.refusals[pod, "memory over the limit"] += 1
            return abi.NV_ERR_NO_MEMORY
        return abi.NV_OK

    def _ask_all(self, but: Key) -> None:
        while self._doubts:
            self._resolve(self._doubts.popleft())
        now = self.clock()
        waiting = [claim for claim in self._claims if claim.rm.key != but]
        self._claims = [claim for claim in self._claims if claim.rm.key == but]
        for claim in waiting:
            if now - claim.made_ns > _MAKING_NS:
                claim.tries = _CONFIRM_TRIES
        for client in {claim.rm.client for claim in waiting}:
            self._confirm([claim for claim in waiting if claim.rm.client == client], now)

    def _claim(self, pod: str, call: Notification, asked: calls.Alloc) -> None:
        self._know(pod, call, asked.client)
        rm = RmObject(asked.client, asked.handle, asked.parent, asked.rm_class, asked.detail)
        self.note(object_fact(rm))
        self._queue(rm)

    def _dup(self, pod: str, call: Notification, asked: calls.Dup, source: RmObject) -> None:
        """Claim a second handle; it holds no second memory, which stays charged to whoever made it."""
        self._know(pod, call, asked.client)
        if asked.handle and source.rm_class in _KEPT:
            rm = RmObject(asked.client, asked.handle, asked.parent, source.rm_class, 0)
            self.note(object_fact(rm))
            self._queue(rm)

    def _queue(self, rm: RmObject) -> None:
        self._claimed += 1
        now = self._last_claim_ns = self.clock()
        heappush(self._claims, _Claim(now + _QUIET_NS, self._claimed, rm, now))

    def _doubt(self, key: Key) -> None:
        below = self.register.below(key)
        if not below and key[0] != key[1]:
            return
        channels = [rm.key for rm in below if rm.rm_class in abi.GPFIFO_CLASSES]
        if channels:
            self.leave(channels)
        self._doubts.append(_Doubt(key, self.clock() + _AGAIN_NS, channels))

    def _know(self, pod: str, call: Notification, client: int) -> None:
        """Make sure process and client are in the register."""
        pid = self._threads.get(call.tid)
        if pid is None or client not in self.register.clients:
            pid = self._threads[call.tid] = _process_of(call.tid)
        if pid not in self.register.processes:
            self.watch(pid, self.hands.watch(pid))
            self.note({"fact": "process", "pid": pid, "pod": self._pod_by_cgroup(pid) or pod})
        entry = self.register.clients.get(client)
        if entry is None or (pid, call.fd) not in entry.users:
            self.note({"fact": "client", "client": client, "pid": pid, "fd": call.fd})

    def _pod_by_cgroup(self, pid: int) -> str | None:
        path = cgroup.of(pid)
        return next((name for name, pod in self.register.pods.items() if cgroup.within(path, pod.cgroup)), None)

    # -- confirming -------------------------------------------------------------------------------------------

    def due_ns(self) -> int | None:
        """Return when RM is to be asked next; None for never."""
        dues = [claim.due_ns for claim in self._claims[:1]] + [doubt.due_ns for doubt in list(self._doubts)[:1]]
        return min(dues, default=None)

    def settle(self, now_ns: int) -> bool:
        """Ask RM about the claims and doubts that are due; True when a compute TSG or channel came or went."""
        changed = False
        quiet_ns = self._last_claim_ns + _QUIET_NS
        due: dict[int, list[_Claim]] = {}
        while self._claims and self._claims[0].due_ns <= now_ns:
            claim = heappop(self._claims)
            if quiet_ns > now_ns and claim.tries == 0 and claim.made_ns + _LATEST_NS > now_ns:
                claim.due_ns = min(quiet_ns, claim.made_ns + _LATEST_NS)
                heappush(self._claims, claim)
            else:
                due.setdefault(claim.rm.client, []).append(claim)
        for batch in due.values():
            changed |= self._confirm(batch, now_ns)
        while self._doubts and self._doubts[0].due_ns <= now_ns:
            changed |= self._resolve(self._doubts.popleft())
        return changed

    def _confirm(self, batch: list[_Claim], now_ns: int) -> bool:
        changed = False
        wanted = [claim for claim in batch if claim.rm.key in self.register.objects]
        answers = self.hands.real([claim.rm for claim in wanted]) if wanted else {}
        for claim in wanted:
            rm, answer = claim.rm, answers[claim.rm.key]
            if answer is not None and answer[0] == rm.rm_class:
                if answer[1] != rm.parent:  # what is under which TSG is RM's to say
                    rm.parent = answer[1]
                    self.note(object_fact(rm))
                context = self.hands.context(rm) if self._on_compute(rm) else 0
                self.note({"fact": "confirm", "client": rm.client, "handle": rm.handle, "context": context})
                changed |= self._on_compute(rm) or (
                    rm.rm_class == abi.KEPLER_CHANNEL_GROUP_A and rm.detail in abi.GR_ENGINES
                )
            elif answer is None and claim.tries < _CONFIRM_TRIES:
                claim.tries += 1
                claim.due_ns = now_ns + _AGAIN_NS * 2**claim.tries
                heappush(self._claims, claim)
            else:
                self.note({"fact": "gone", "client": rm.client, "handle": rm.handle})
        return changed

    def _on_compute(self, rm: RmObject) -> bool:
        parent = self.register.objects.get((rm.client, rm.parent))
        return rm.rm_class in abi.GPFIFO_CLASSES and parent is not None and parent.detail in abi.GR_ENGINES

    def _resolve(self, doubt: _Doubt) -> bool:
        below = self.register.below(doubt.key)
        if not below:
            return False
        answers = self.hands.real(below)
        whole_client = doubt.key[0] == doubt.key[1]
        for rm in below:
            # Of a whole client, what is only claimed yet may be in the making: its claim will settle it.
            if answers[rm.key] is None and (rm.confirmed or not whole_client):
                self.note({"fact": "gone", "client": rm.client, "handle": rm.handle})
        if whole_client and not self.register.below(doubt.key):
            self.note({"fact": "gone", "client": doubt.key[0], "handle": doubt.key[1]})
        self.stayed([key for key in doubt.channels if key in self.register.objects])
        return True


def _process_of(tid: int) -> int:
    """Return the process a thread belongs to. Raises OSError when it is gone."""
    for line in Path(f"/proc/{tid}/status").read_text().splitlines():
        if line.startswith("Tgid:"):
            return int(line.split()[1])
    raise ProcessLookupError(tid)

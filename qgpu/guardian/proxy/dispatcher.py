"""Handles every call of one pod and answers each of them, whatever happens.

The guardian performs a call in the pod's place (``ioctl_proxy.py``), so RM acts on exactly the arguments that were
checked. Each kind of call has a handler: ``alloc_calls.py``, ``dup_calls.py`` and ``free_calls.py`` for RM objects,
``passthrough.py`` for root clients and first devices, ``control_calls.py`` for RM controls, ``old_memory_calls.py`` for
RM's older calls for memory, ``uvm_calls.py`` for UVM, ``mmap_calls.py`` and ``cpu_mappings.py`` for mappings.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

from qgpu.guardian.failover.journal import Writes
from qgpu.guardian.proxy import fast_path, rm_calls
from qgpu.guardian.proxy.alloc_calls import AllocHandler
from qgpu.guardian.proxy.card_mappings import CardMappings
from qgpu.guardian.proxy.control_calls import ControlHandler
from qgpu.guardian.proxy.cpu_mappings import CpuMappings
from qgpu.guardian.proxy.dma_bufs import DmaBufs
from qgpu.guardian.proxy.dma_mappings import DmaMappings
from qgpu.guardian.proxy.dup_calls import DupHandler
from qgpu.guardian.proxy.file_ties import FileTies
from qgpu.guardian.proxy.free_calls import FreeHandler
from qgpu.guardian.proxy.freed_memory import FreedMemory
from qgpu.guardian.proxy.handler_context import ANSWERED, PROCEED, HandlerContext, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer, IoctlProxy
from qgpu.guardian.proxy.mmap_calls import MmapHandler
from qgpu.guardian.proxy.old_memory_calls import OldMemoryHandler
from qgpu.guardian.proxy.os_events import OsEvents
from qgpu.guardian.proxy.passthrough import Passthrough
from qgpu.guardian.proxy.passthrough_memory import PassthroughMemory
from qgpu.guardian.proxy.registered_channels import RegisteredChannels
from qgpu.guardian.proxy.rm_share import RmShare
from qgpu.guardian.proxy.seccomp_filter import NUMBER_AND_SIZE, is_mapping
from qgpu.guardian.proxy.shared_state import SharedState
from qgpu.guardian.proxy.uvm_calls import UvmHandler
from qgpu.guardian.rules import escapes
from qgpu.linux import fd_budget, proc, seccomp_notify
from qgpu.linux.seccomp_notify import Listener, Notification, UnansweredCall
from qgpu.nvidia import abi, uvm

_log = structlog.get_logger("guardian")

#: RM's calls that the guardian checks, by number and size. A container's filter compares numbers only: RM accepts no
#: other size.
_WATCHED = frozenset(size << 16 | number for number, size in escapes.WATCHED)
_MAPPINGS = frozenset(each for each in _WATCHED if each & 0xFF in escapes.MAPPINGS)
#: Those that libraries wrap, of those that name no object: they wrap no mapping.
_MAY_BE_WRAPPED = frozenset({abi.NV_ESC_REGISTER_FD})
#: How many threads' processes are kept; a full cache starts again. And how many answers: most are of killed threads.
_MOST_THREADS, _MOST_UNDELIVERED = 4096, 256


class Dispatcher:
    """Serves one pod's listeners, one call at a time.

    Calls are serial, because RM's memory figures show the effect of a call only if no other call changes them.
    """

    def __init__(self, shared: SharedState, pod: str) -> None:
        self._shared = shared
        self._pod = pod
        self._turn = threading.Lock()
        self._proxy = IoctlProxy(shared.perform)
        self._ctx = HandlerContext(shared, pod, self._proxy)
        self._fast_path = fast_path.FastPath(shared.perform, self._proxy.memory, self._proxy.answer)
        self._freed_memory, self._passthrough = FreedMemory(self._ctx), Passthrough(self._ctx)
        self._passthrough_memory = PassthroughMemory(self._ctx, self._passthrough)
        self._registered_channels, self._mmap = RegisteredChannels(self._ctx), MmapHandler(self._ctx)
        self._cpu_mappings = CpuMappings(self._ctx)
        self._uvm = UvmHandler(self._ctx, self._passthrough, self._freed_memory, self._mmap)
        frees = FreeHandler(self._ctx, self._freed_memory, self._registered_channels)
        old_memory = OldMemoryHandler(self._ctx, frees, self._passthrough_memory)
        shares, ties, events = RmShare(self._ctx), FileTies(self._ctx, self._passthrough), OsEvents(self._ctx)
        dups, mappings = DupHandler(self._ctx, frees, shares), DmaMappings(self._ctx)
        card_mappings = CardMappings(self._ctx, mappings)
        #: What handles RM's calls: those that name objects, by kind, and others by number.
        self._by_kind: dict[type, Callable[[PodCall, IoctlBuffer, Any], int]] = {
            rm_calls.Control: ControlHandler(self._ctx, frees, dups, mappings).control,
            rm_calls.Alloc: AllocHandler(self._ctx, frees, self._passthrough).alloc,
            rm_calls.Free: frees.free,
            rm_calls.Dup: dups.dup,
            rm_calls.VidHeap: old_memory.heap,
            rm_calls.AllocMemory: old_memory.alloc_memory,
        }
        self._by_number: dict[int, Callable[[PodCall, IoctlBuffer], int]] = {
            **dict.fromkeys(escapes.MAPPINGS, self._cpu_mappings.handle),
            abi.NV_ESC_RM_SHARE: shares.share,
            abi.NV_ESC_REGISTER_FD: ties.register,
            abi.NV_ESC_ATTACH_GPUS_TO_FD: ties.attach_gpus,
            abi.NV_ESC_ALLOC_OS_EVENT: events.handle,
            abi.NV_ESC_FREE_OS_EVENT: events.handle,
            abi.NV_ESC_EXPORT_TO_DMABUF_FD: DmaBufs(self._ctx).export,
            abi.NV_ESC_RM_MAP_MEMORY_DMA: card_mappings.map,
            abi.NV_ESC_RM_UNMAP_MEMORY_DMA: card_mappings.unmap,
            abi.NV_ESC_RM_ALLOC_CONTEXT_DMA2: card_mappings.context_dma,
        }
        #: Process by thread.
        self._threads: dict[int, int] = {}
        #: Calls that were performed but whose answer did not arrive, by thread: the call and its answer.
        self._undelivered: dict[int, tuple[Notification, Writes]] = {}
        #: Calls that a dead guardian received and did not answer, by thread.
        self._unanswered: dict[int, UnansweredCall] = {}

    def resume(self, listener: Listener, left: UnansweredCall | None) -> None:
        """Hold what a dead guardian held of the pod, and finish the call that it received and did not answer.

        If the journal holds its answer, give that answer. Otherwise undo what the dead guardian may have done and
        perform the call again; what cannot be undone is not done twice.
        """
        with self._turn:
            self._shared.claims.settle(self._pod)
            self._shared.pod_uvm_files.hold_all(self._pod)
            self._mmap.charge_unseen()
            self._passthrough_memory.find_left()
            if left is None:
                return
            waits = listener.still_waiting(left.call.id)
            writes = self._shared.journal.answer_to(listener.number, left.call.id)
            if waits and writes is not None:
                self._answer(listener, left.call, self._write_answer(left.call.tid, writes))
                return
            if left.begun or waits:
                self._unanswered[left.call.tid] = left
            if waits:
                self._serve(listener, left.call)

    def serve(self, listener: Listener, call: Notification) -> None:
        """Answer one call, whatever happens: a thread without an answer stays stopped for ever."""
        with self._turn:
            self._serve(listener, call)

    def _serve(self, listener: Listener, call: Notification) -> None:
        self._shared.reconciler.pod_called()
        left = self._unanswered.pop(call.tid, None)
        # It is that call, or its restart after a signal.
        pod_call = PodCall(listener, call, 0, -1, left if left is not None and left.call.asks_as(call) else None)
        try:
            outcome = fd_budget.retry_on_emfile(partial(self._dispatch, pod_call), pod_call.may_be_retried)
            if self._proxy.answer:
                if pod_call.begun:
                    self._shared.record_answer(listener.number, call.id, self._proxy.answer)
                # A call may take as long as the pod likes, and a killed thread's number may be another's by now.
                if pod_call.still_waits():
                    outcome = self._write_answer(call.tid, self._proxy.answer) or outcome
        except OSError as error:
            # Its memory cannot be written, its descriptor is closed, or it has ended: nothing runs unchecked.
            _log.info("call failed", pod=self._pod, reason=str(error))
            outcome = error.errno or errno.EFAULT
        except Exception:  # noqa: BLE001 - see above
            _log.exception("call failed", pod=self._pod)
            outcome = errno.EIO
        self._answer(listener, call, outcome)

    def _write_answer(self, tid: int, writes: Writes) -> int:
        """Write an answer into the caller's memory; return an errno, 0 for success."""
        try:
            self._proxy.memory.write(tid, writes)
        except OSError as error:
            _log.info("answer not written", pod=self._pod, reason=str(error))
            return error.errno or errno.EFAULT
        return 0

    def _answer(self, listener: Listener, call: Notification, outcome: int) -> None:
        if outcome == ANSWERED:
            return
        if outcome == PROCEED:
            listener.proceed(call.id)
        elif outcome:
            listener.answer_error(call.id, outcome)
        elif not listener.answer_ok(call.id):
            # Without WAIT_KILLABLE_RECV a signal makes the thread restart a call that was already performed.
            self._undelivered[call.tid] = (call, list(self._proxy.answer))
            if len(self._undelivered) > _MOST_UNDELIVERED:
                del self._undelivered[next(iter(self._undelivered))]

    def _dispatch(self, pod_call: PodCall) -> int:
        """Perform a call, or let the kernel do so; return an errno, 0, or PROCEED."""
        self._proxy.next_call()
        call = pod_call.call
        pid = pod_call.pid = self._process(call.tid)
        if (kept := self._undelivered.pop(call.tid, None)) is not None and kept[0].asks_as(call):
            self._proxy.answer.extend(kept[1])
            return 0
        self._passthrough.next_call()
        self._ctx.uvm_mappings.remove(call.tid)
        self._ctx.registering.remove(call.tid)
        self._passthrough_memory.next_call(call.tid)
        self._mmap.next_call(call.tid, pid)
        if is_mapping(call):
            return self._mmap.handle(call, pid)
        if (request := call.request) == uvm.REGISTER_CHANNEL and self._uvm.is_sole_user(pod_call):
            return self._registered_channels.register(call, pid)
        rm_call = request & NUMBER_AND_SIZE
        by_number = rm_call & 0xFF in escapes.WATCHED_NUMBERS
        if rm_call not in _WATCHED and request not in uvm.WATCHED and not by_number:
            return PROCEED
        if rm_call in _MAPPINGS and not self._cpu_mappings.concerns(pod_call):
            if rm_call & 0xFF == abi.NV_ESC_RM_MAP_MEMORY:
                self._cpu_mappings.count(pid)
                self._passthrough_memory.before_cpu_mapping(pod_call)
            else:
                self._cpu_mappings.before_look(pod_call)
            return PROCEED
        pod_call.file = self._ctx.take_fd(pod_call, call.fd)
        pod_call.device = proc.device_of(pod_call.file)
        try:
            return self._dispatch_ioctl(pod_call, request)
        finally:
            self._ctx.close_fd(pod_call.file, pod_call.device)

    def _dispatch_ioctl(self, pod_call: PodCall, request: int) -> int:
        major = os.major(pod_call.device) if pod_call.device is not None else None
        if major is not None and major == self._shared.pod_uvm_files.major(request):
            return self._uvm_ioctl(pod_call)
        if major is not None and major == self._shared.major:
            return self._rm_ioctl(pod_call, request)
        if request & 0xFF in escapes.WATCHED_NUMBERS:  # another driver's call; RM has this number at any size
            self._passthrough.continue_on(pod_call)
            return ANSWERED
        return errno.ENOTTY  # The filter saw RM's number and size, but this file is not RM's.

    def _uvm_ioctl(self, pod_call: PodCall) -> int:
        maps = pod_call.call.request in uvm.KERNEL_MAPPINGS
        if maps:
            self._passthrough_memory.before_mapping(pod_call)
        outcome = self._uvm.handle(pod_call)
        if outcome in (PROCEED, ANSWERED) and maps:
            self._ctx.uvm_mappings.add(pod_call.call, pod_call.pid)
        elif outcome == ANSWERED and pod_call.call.request == uvm.REGISTER_CHANNEL:
            self._registered_channels.register(pod_call.call, pod_call.pid)
        return outcome

    def _rm_ioctl(self, pod_call: PodCall, request: int) -> int:
        self._passthrough_memory.look(pod_call, pod_call.file)
        if request == fast_path.REQUEST and pod_call.unanswered is None:
            pod_call.begin_repeatable()
            call = pod_call.call
            if (done := self._fast_path.control(call.tid, pod_call.file, call.argument)) is not None:
                return done
        return self._escape(pod_call)

    def _process(self, tid: int) -> int:
        """Return a thread's process, and enter it in the object table. Raises OSError when it has ended."""
        pid = self._threads.get(tid)
        if pid is None or not seccomp_notify.is_thread_of(pid, tid):
            found = proc.status(tid, "Tgid")
            if not found or not seccomp_notify.is_thread_of(int(found[0]), tid):
                raise ProcessLookupError(errno.ESRCH, "no such thread")
            pid = self._threads[tid] = int(found[0])
        if self._shared.table.processes.get(pid) != self._pod:
            self._shared.clients.register_process(self._pod, pid)
        if len(self._threads) > _MOST_THREADS:
            self._threads = {tid: pid}
        return pid

    def _escape(self, pod_call: PodCall) -> int:
        call = pod_call.call
        escape = rm_calls.unwrap(call.request, call.argument, partial(self._proxy.memory.read, call.tid))
        if escape is None:
            return errno.EFAULT
        number, size, address, wrapped = pod_call.escape = escape
        if wrapped and ((number, size) not in escapes.WATCHED or number == abi.NV_ESC_IOCTL_XFER_CMD):
            return errno.EINVAL  # no library wraps any other call
        if (block := self._proxy.read(call.tid, address, size)) is None:
            return errno.EFAULT
        if (asked := rm_calls.parse(number, block.data)) is not None:
            block.status_at = asked.status_at
            return self._by_kind[type(asked)](pod_call, block, asked)
        refused = (wrapped and number not in _MAY_BE_WRAPPED) or (number in escapes.UNDER_LIMIT and self._ctx.limited())
        if number in self._by_number and not refused:
            return self._by_number[number](pod_call, block)
        # These calls end here. A dma-buf keeps memory without a handle. RM's own mappings take page tables on the card
        # that nobody can count (CUDA uses UVM's mappings). RM_IDLE_CHANNELS reads lists of handles under RM's locks.
        # No library wraps a mapping.
        self._shared.refusals.count(self._pod, escapes.name(number))
        return errno.EOPNOTSUPP

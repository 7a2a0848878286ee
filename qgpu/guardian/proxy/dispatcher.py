"""One pod's calls: what becomes of each, and an answer for every one, whatever happens.

A call is carried out in the pod's place (``standin.py``), so that what was checked is what is done. RM's objects are
judged in ``objects.py``, root clients and first devices in ``letting.py``, RM's controls in ``controlling.py``, its
older heap in ``heap.py``; UVM's calls in ``uvmjudge.py``, mappings in ``mappings.py``.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import structlog

from qgpu.guardian.failover.journal import Writes
from qgpu.guardian.proxy import fast_path, rm_calls
from qgpu.guardian.proxy.alloc import AllocHandler
from qgpu.guardian.proxy.control import ControlHandler
from qgpu.guardian.proxy.free import FreeHandler
from qgpu.guardian.proxy.handler_context import ANSWERED, PROCEED, HandlerContext, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlProxy
from qgpu.guardian.proxy.mmap_calls import MmapHandler
from qgpu.guardian.proxy.passthrough import Passthrough
from qgpu.guardian.proxy.seccomp_filter import is_mapping
from qgpu.guardian.proxy.supervisor import Supervisor
from qgpu.guardian.proxy.uvm_calls import UvmHandler
from qgpu.guardian.proxy.vid_heap import VidHeapHandler
from qgpu.guardian.rules import escapes
from qgpu.linux import fd_budget, proc, seccomp_notify
from qgpu.linux.inflight_syscalls import InflightSyscalls
from qgpu.linux.seccomp_notify import Listener, Notification, UnansweredCall
from qgpu.nvidia import abi, uvm

_log = structlog.get_logger("guardian")

#: How long a mapping of UVM's being made may keep memory from being freed for good.
_MAPPING_PATIENCE_S = 0.02
#: How many threads' processes are remembered; more than that are looked up anew.
_MOST_THREADS = 4096


class Dispatcher:
    """Serves one pod's listeners, one call at a time: what is being made by one process could tell on another's."""

    def __init__(self, supervisor: Supervisor, pod: str) -> None:
        self._supervisor = supervisor
        self._pod = pod
        self._turn = threading.Lock()
        self._proxy = IoctlProxy(supervisor.perform)
        self._ctx = HandlerContext(supervisor, pod, self._proxy)
        self._fast_path = fast_path.FastPath(supervisor.perform)
        #: What UVM is mapping for the pod.
        self._external = InflightSyscalls()
        self._freeing = FreeHandler(supervisor, pod, lambda: self._external.wait(_MAPPING_PATIENCE_S))
        self._passthrough = Passthrough(self._ctx)
        self._objects = AllocHandler(self._ctx, self._freeing, self._passthrough)
        self._controls = ControlHandler(self._ctx, self._objects)
        self._heap = VidHeapHandler(self._ctx, self._objects)
        self._mmap = MmapHandler(self._ctx)
        self._uvm = UvmHandler(supervisor, pod, self._proxy, self._freeing.unmap, self._mmap.are_made)
        #: By thread: its process.
        self._threads: dict[int, int] = {}
        #: Calls that were carried out but whose answer found nobody, by thread: request and argument.
        self._unheard: dict[int, tuple[int, int]] = {}
        #: Calls that a dead guardian had in hand, by thread.
        self._left: dict[int, UnansweredCall] = {}

    def take_up(self, listener: Listener, left: UnansweredCall | None) -> None:
        """Go on where a dead guardian ended: with the call that it had in hand, whatever had become of that.

        What it had written down as the answer is given. What it may have done without coming so far is undone and done
        anew, or, where it cannot be undone, not done again.
        """
        with self._turn:
            self._mmap.look_anew()
            if left is None:
                return
            waits = listener.still_waiting(left.call.id)
            writes = self._supervisor.journal.answer_to(listener.number, left.call.id)
            if waits and writes is not None:
                self._answer(listener, left.call, self._written(left.call.tid, writes))
                return
            if left.begun or waits:
                self._left[left.call.tid] = left
            if waits:
                self._serve(listener, left.call)

    def serve(self, listener: Listener, call: Notification) -> None:
        """Answer one call, whatever happens: a thread that gets no answer is stopped for good."""
        with self._turn:
            self._serve(listener, call)

    def _serve(self, listener: Listener, call: Notification) -> None:
        self._supervisor.reconciler.called()
        case = PodCall(listener, call, 0, -1, self._left_of(call))
        try:
            outcome = self._handle(case)
            if self._proxy.answer:
                if case.begun:
                    self._supervisor.answers(listener.number, call.id, self._proxy.answer)
                outcome = self._written(call.tid, self._proxy.answer) or outcome
        except OSError as error:
            # Its memory cannot be written, its descriptor is none, it is gone: nothing is carried out unseen.
            _log.info("call failed", pod=self._pod, reason=str(error))
            outcome = error.errno or errno.EFAULT
        except Exception:  # noqa: BLE001 - see above
            _log.exception("call failed", pod=self._pod)
            outcome = errno.EIO
        self._answer(listener, call, outcome)

    def _handle(self, case: PodCall) -> int:
        """Handle a call; one that finds no free descriptor waits, and once it has begun it needs none."""

        def once() -> int:
            self._proxy.answer.clear()
            return self._dispatch(case)

        return fd_budget.patiently(once, lambda: not case.begun and case.listener.still_waiting(case.call.id))

    def _left_of(self, call: Notification) -> UnansweredCall | None:
        """Return what a dead guardian had in hand, if this is that call, or is it once more after a signal."""
        left = self._left.pop(call.tid, None)
        same = left is not None and (left.call.request, left.call.argument) == (call.request, call.argument)
        return left if same else None

    def _written(self, tid: int, writes: Writes) -> int:
        """Write an answer into the caller's memory; return an errno, 0 for none."""
        try:
            for address, data in writes:
                self._proxy.memory.write(tid, address, data)
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
            # Where the filter cannot say WAIT_KILLABLE_RECV, a signal makes the thread begin a call anew that was done.
            self._unheard[call.tid] = (call.request, call.argument)
            if len(self._unheard) > _MOST_THREADS:
                self._unheard = {tid: asked for tid, asked in self._unheard.items() if Path(f"/proc/{tid}").exists()}

    def _dispatch(self, case: PodCall) -> int:
        """Carry a call out, or say that it must be; return an errno, 0, or PROCEED."""
        call = case.call
        pid = case.pid = self._process(call.tid)
        if self._unheard.pop(call.tid, None) == (call.request, call.argument):
            return 0
        self._passthrough.next_call(call.tid)
        self._external.ended(call.tid)
        self._mmap.next_call(call.tid, pid)
        if is_mapping(call):
            return self._mmap.handle(call, pid)
        number_and_size = call.request & 0xFF, call.request >> 16 & 0x3FFF
        if number_and_size not in escapes.WATCHED and call.request not in uvm.WATCHED:
            return PROCEED  # a container's filter knows numbers only; RM takes no other size, UVM no other number
        case.file = self._ctx.take(case, call.fd)
        try:
            status = os.fstat(case.file)
            major = os.major(status.st_rdev) if stat.S_ISCHR(status.st_mode) else None
            if major is not None and major == self._supervisor.find_uvm(call.request):
                outcome = self._uvm.handle(case)
                if outcome == PROCEED and call.request == uvm.MAP_EXTERNAL_ALLOCATION:
                    self._external.let(call, pid)
                return outcome
            if major != self._supervisor.major:
                # A call with RM's number and size is for RM's files, whatever else is in the descriptor's place.
                return errno.ENOTTY
            if call.request == fast_path.REQUEST and case.left is None:
                case.listener.begin()
                done = self._fast_path.control(call.tid, case.file, call.argument)
                if done is not None:
                    return done
            return self._escape(case, os.minor(status.st_rdev))
        finally:
            os.close(case.file)

    def _process(self, tid: int) -> int:
        """Return the process of a thread, which is then in the register. Raises OSError when it is gone."""
        pid = self._threads.get(tid)
        if pid is None or not seccomp_notify.is_thread_of(pid, tid):
            pid = self._threads[tid] = _process_of(tid)
        if pid not in self._supervisor.table.processes:
            self._supervisor.know_process(self._pod, pid)
        if len(self._threads) > _MOST_THREADS:
            self._threads = {tid: pid}
        return pid

    def _escape(self, case: PodCall, minor: int) -> int:
        call, memory = case.call, self._proxy.memory
        escape = rm_calls.unwrap(
            call.request, call.argument, lambda address, size: memory.read(call.tid, address, size)
        )
        if escape is None:
            return errno.EFAULT
        if escape.wrapped and (
            (escape.number, escape.size) not in escapes.WATCHED or escape.number == abi.NV_ESC_IOCTL_XFER_CMD
        ):
            return errno.EINVAL  # nothing else has been seen wrapped
        if (block := self._proxy.read(call.tid, escape.address, escape.size)) is None:
            return errno.EFAULT
        match rm_calls.parse(escape.number, block.data):
            case rm_calls.Control() as asked:
                return self._controls.control(case, block, asked)
            case rm_calls.Alloc() as asked:
                if asked.rm_class in abi.ROOT_CLASSES:
                    return self._passthrough.root(case, block, asked, wrapped=escape.wrapped)
                return self._objects.alloc(case, escape, block, asked)
            case rm_calls.Free() as asked:
                return self._objects.free(case, escape.number, block, asked.client, asked.handle, asked.status_at)
            case rm_calls.Dup() as asked:
                return self._objects.dup(case, block, asked)
            case rm_calls.VidHeap() as asked:
                return self._heap.heap(case, block, asked)
            case rm_calls.AllocMemory() as asked:
                return self._objects.alloc_memory(case, block, asked, wrapped=escape.wrapped)
        match escape.number:
            case abi.NV_ESC_REGISTER_FD:
                return self._objects.register_fd(case, block, minor)
            case abi.NV_ESC_EXPORT_TO_DMABUF_FD if not self._ctx.limited() and not escape.wrapped:
                return PROCEED
            case abi.NV_ESC_RM_MAP_MEMORY_DMA if not self._ctx.limited() and not escape.wrapped:
                return PROCEED
        # A dma-buf keeps memory that has no handle any more. RM's own mappings take page tables of the card, which
        # nobody could count; CUDA's are UVM's. Idling channels reads lists of handles under RM's locks.
        self._supervisor.refused(self._pod, escapes.name(escape.number))
        return errno.EOPNOTSUPP


def _process_of(tid: int) -> int:
    """Return the process a thread belongs to. Raises OSError when it is gone."""
    found = proc.status(tid, "Tgid")
    if not found or not seccomp_notify.is_thread_of(int(found[0]), tid):
        raise ProcessLookupError(errno.ESRCH, "no such thread")
    return int(found[0])

"""One pod's calls to RM: which are carried out for it, which refused, and what is learned from RM's answers.

A call is carried out in the pod's place (``standin.py``), so that what was checked is what is done. The kernel carries
out for the pod itself only what RM ties to the calling process, each where no change of its arguments does harm:

- a root client, for RM takes the process for its owner: on a file that has no device, where RM makes nothing else;
- user memory for the card (class 0x71), for its pages are the process's: nothing that a process without CAP_SYS_ADMIN
  can ask for by that call takes memory of the card (rmapi_deprecated_allocmemory.c).

What UVM is asked for is in ``uvmjudge.py``.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from qgpu.guardian import answers, calls, classes, controls, managed, notify, quick, rules
from qgpu.guardian.filter import WATCHED, is_mapping, mapping
from qgpu.guardian.freeing import Freeing
from qgpu.guardian.notify import Listener, Notification
from qgpu.guardian.register import Key, RmObject
from qgpu.guardian.standin import Block, StandIn
from qgpu.guardian.supervisor import Supervisor
from qgpu.guardian.uvmjudge import UvmJudge
from qgpu.rm import abi, uvm
from qgpu.rm.client import take

_log = structlog.get_logger("guardian")

#: Instead of an errno: the kernel is to carry the call out as it then stands.
PROCEED = -1

_U32 = struct.Struct("<I")
_HANDLES_OF_EXPORTS_AT, _COUNT_OF_EXPORTS_AT, _MOST_EXPORTS = 76, 2124, 512
_HANDLES_OF_IMPORTS_AT, _COUNT_OF_IMPORTS_AT, _MOST_IMPORTS = 8, 648, 128
#: How long a root client being made may keep a device from being made.
_ROOT_PATIENCE_S = 0.1
#: How long a mapping being made may keep memory from being freed for good.
_MAPPING_PATIENCE_S = 0.02


@dataclass(frozen=True, slots=True)
class _Loose:
    """A call that the kernel carries out for a pod's thread, as /proc shows it while it lasts."""

    pid: int
    tid: int
    shown: list[str]
    ticks: int
    size: int = 0

    @classmethod
    def of(cls, call: Notification, pid: int, size: int = 0) -> _Loose:
        """Take note of a call before it is let through."""
        shown = [str(call.number), *(f"{argument:#x}" for argument in call.arguments)]
        return cls(pid, call.tid, shown, _user_ticks(pid, call.tid), size)

    def over(self) -> bool:
        """Tell whether the thread is certain to have left the call.

        One that runs could be anywhere; it has left when it has spent time in user mode since.
        """
        try:
            now = Path(f"/proc/{self.pid}/task/{self.tid}/syscall").read_text().split()
        except OSError:
            return True
        if now[0] == "running":
            return _user_ticks(self.pid, self.tid) != self.ticks
        return now[: len(self.shown)] != self.shown


class Judge:
    """Serves one pod's listener, in one thread."""

    def __init__(self, supervisor: Supervisor, pod: str, listener: Listener) -> None:
        self._supervisor = supervisor
        self._pod = pod
        self._listener = listener
        self._hands = supervisor.hands
        self._standin = StandIn(supervisor.perform)
        self._quick = quick.Quick(supervisor.perform)
        self._freeing = Freeing(supervisor, pod, self._no_mapping_is_made)
        self._uvm = UvmJudge(supervisor, pod, self._standin, self._freeing.unmap)
        #: By thread: its process.
        self._threads: dict[int, int] = {}
        #: Root clients, UVM's mappings and mappings of UVM that the kernel is making, by thread.
        self._roots: dict[int, _Loose] = {}
        self._external: dict[int, _Loose] = {}
        self._mappings: dict[int, _Loose] = {}
        #: Calls that were carried out but whose answer found nobody, by thread: request and argument.
        self._unheard: dict[int, tuple[int, int]] = {}

    def serve(self, call: Notification) -> None:
        """Answer one call, whatever happens: a thread that gets no answer is stopped for good."""
        try:
            outcome = self._judge(call)
        except OSError as error:
            # Its memory cannot be written, its descriptor is none, it is gone: nothing is carried out unseen.
            _log.info("call failed", pod=self._pod, reason=str(error))
            outcome = error.errno or errno.EFAULT
        except Exception:  # noqa: BLE001 - see above
            _log.exception("call failed", pod=self._pod)
            outcome = errno.EIO
        if outcome == PROCEED:
            self._listener.proceed(call.id)
        elif outcome:
            self._listener.answer_error(call.id, outcome)
        elif not self._listener.answer_ok(call.id):
            # Where the filter cannot say WAIT_KILLABLE_RECV, a signal makes the thread begin a call anew that was done.
            self._unheard[call.tid] = (call.request, call.argument)

    # -- the call -------------------------------------------------------------------------------------------------

    def _judge(self, call: Notification) -> int:
        """Carry a call out, or say that it must be; return an errno, 0, or PROCEED."""
        pid = self._process(call.tid)
        if self._unheard.pop(call.tid, None) == (call.request, call.argument):
            return 0
        self._roots.pop(call.tid, None)  # its thread makes another call: those are over
        self._external.pop(call.tid, None)
        if (over := self._mappings.pop(call.tid, None)) is not None:
            self._supervisor.look_at_mappings(pid, over.size)
        if is_mapping(call):
            return self._map(call, pid)
        number_and_size = call.request & 0xFF, call.request >> 16 & 0x3FFF
        if number_and_size not in WATCHED and call.request not in uvm.WATCHED:
            return PROCEED  # a container's filter knows numbers only; RM takes no other size, UVM no other number
        file = self._take(call, pid, call.fd)
        try:
            status = os.fstat(file)
            major = os.major(status.st_rdev) if stat.S_ISCHR(status.st_mode) else None
            if major is not None and major == self._supervisor.find_uvm(call.request):
                outcome = self._uvm.judge(call, pid, file)
                if outcome == PROCEED and call.request == uvm.MAP_EXTERNAL_ALLOCATION:
                    self._external[call.tid] = _Loose.of(call, pid)
                return outcome
            if major != self._supervisor.major:
                # A call with RM's number and size is for RM's files, whatever else is in the descriptor's place.
                return errno.ENOTTY
            if call.request == quick.REQUEST:
                done = self._quick.control(call.tid, file, call.argument)
                if done is not None:
                    return done
            return self._escape(call, pid, file, os.minor(status.st_rdev))
        finally:
            os.close(file)

    def _take(self, call: Notification, pid: int, fd: int) -> int:
        """Take a descriptor of the process that makes a call, to be closed again. Raises OSError."""
        taken = take(self._hands.pidfd(pid), fd)
        if not self._listener.still_waiting(call.id):  # it could have been another process of that number
            os.close(taken)
            raise InterruptedError(errno.EINTR, "the caller is gone")
        return taken

    def _process(self, tid: int) -> int:
        """Return the process of a thread, which is then in the register. Raises OSError when it is gone."""
        pid = self._threads.get(tid)
        if pid is None or not notify.is_thread_of(pid, tid):
            pid = self._threads[tid] = _process_of(tid)
        if pid not in self._supervisor.register.processes:
            self._supervisor.know_process(self._pod, pid)
            self._threads = {
                tid: pid for tid, pid in self._threads.items() if pid in self._supervisor.register.processes
            }
        return pid

    def _escape(self, call: Notification, pid: int, file: int, minor: int) -> int:
        memory = self._standin.memory
        escape = calls.unwrap(call.request, call.argument, lambda address, size: memory.read(call.tid, address, size))
        if escape is None:
            return errno.EFAULT
        if escape.wrapped and (
            (escape.number, escape.size) not in WATCHED or escape.number == abi.NV_ESC_IOCTL_XFER_CMD
        ):
            return errno.EINVAL  # nothing else has been seen wrapped
        if (block := self._standin.read(call.tid, escape.address, escape.size)) is None:
            return errno.EFAULT
        match calls.parse(escape.number, block.data):
            case calls.Control() as asked:
                return self._control(call, pid, file, block, asked)
            case calls.Alloc() as asked:
                if asked.rm_class in abi.ROOT_CLASSES:
                    return self._root(call, pid, file, block, asked, wrapped=escape.wrapped)
                return self._alloc(call, pid, file, escape, block, asked)
            case calls.Free() as asked:
                return self._free(file, escape.number, block, asked.client, asked.handle, asked.status_at)
            case calls.Dup() as asked:
                return self._dup(call, pid, file, block, asked)
            case calls.Heap() as asked:
                return self._heap(call, pid, file, block, asked)
            case calls.AllocMemory() as asked:
                return self._alloc_memory(call, pid, file, block, asked, wrapped=escape.wrapped)
        match escape.number:
            case abi.NV_ESC_REGISTER_FD:
                return self._register_fd(call, pid, file, block, minor)
            case abi.NV_ESC_EXPORT_TO_DMABUF_FD if not self._limited() and not escape.wrapped:
                return PROCEED
        # A dma-buf keeps memory that has no handle any more. Idling channels reads lists of handles under RM's locks.
        self._supervisor.refused(self._pod, f"call {escape.number:#x}")
        return errno.EOPNOTSUPP

    def _perform(self, file: int, number: int, block: Block) -> int:
        return self._standin.escape(file, number, block)

    def _answer(self, block: Block, status_at: int, status: int) -> int:
        """Answer in RM's own words without asking it."""
        block.patch_u32(status_at, status)
        block.store()
        return 0

    def _refuse(self, block: Block, status_at: int, status: int, what: str) -> int:
        self._supervisor.refused(self._pod, what)
        return self._answer(block, status_at, status)

    def _limited(self) -> bool:
        return bool(self._supervisor.allowance(self._pod).limits)

    # -- objects ----------------------------------------------------------------------------------------------------

    def _alloc(
        self, call: Notification, pid: int, file: int, escape: calls.Escape, block: Block, asked: calls.Alloc
    ) -> int:
        if asked.serialized:
            return self._answer(block, asked.status_at, abi.NV_ERR_INVALID_ARGUMENT)
        if not classes.allowed(asked.rm_class):
            return self._refuse(block, asked.status_at, abi.NV_ERR_INVALID_CLASS, f"class {asked.rm_class:#x}")
        params = rights = None
        if asked.params:
            if (params := self._standin.read_params(call.tid, asked.params)) is None:
                return self._answer(block, asked.status_at, abi.NV_ERR_INVALID_ADDRESS)
            block.patch_u64(16, params.at)
        if asked.rights:
            if (rights := self._standin.read(call.tid, asked.rights, _U32.size)) is None:
                return self._answer(block, asked.status_at, abi.NV_ERR_INVALID_ADDRESS)
            block.patch_u64(24, rights.at)
        detail = calls.detail(asked.rm_class, params.data) if params else 0
        rm = RmObject(asked.client, asked.handle, asked.parent, asked.rm_class, detail)
        kept = asked.rm_class in classes.KEPT and self._supervisor.know_client(pid, call.fd, file, asked.client)
        if (refusal := self._admit(pid, rm)) or (kept and (refusal := self._claim(rm))):
            block.restore(16, 16)
            return self._answer(block, asked.status_at, refusal)
        try:
            error = self._perform_alloc(call, pid, file, escape.number, block, params, asked)
            status = _status(block, asked.status_at)
            if kept and (error or status != abi.NV_OK):
                self._supervisor.not_made(rm.key)
            elif kept and not self._made(file, rm, params):
                block.patch_u32(asked.status_at, abi.NV_ERR_NO_MEMORY)
            elif status == abi.NV_OK and asked.rm_class == abi.NV50_THIRD_PARTY_P2P:
                self._hands.register_p2p(file, asked.client, asked.handle)
            elif status == abi.NV_OK and (at := classes.HOLDS_MEMORY_AT.get(asked.rm_class)) and params:
                self._supervisor.export(asked.client, [_U32.unpack_from(params.data, at)[0]])
        finally:
            if escape.size > 20:
                block.restore(16, 8)
            if asked.rights:
                block.restore(24, 8)
        if params is not None:
            params.store_changes()
        if not error:
            block.store()
        return error

    def _perform_alloc(
        self,
        call: Notification,
        pid: int,
        file: int,
        number: int,
        block: Block,
        params: Block | None,
        asked: calls.Alloc,
    ) -> int:
        if params is None or asked.rm_class not in classes.WITH_CAPABILITY:
            return self._perform(file, number, block)
        capability = _U32.unpack_from(params.data)[0]
        taken = self._take(call, pid, capability)
        try:
            params.patch_u64(0, taken)
            return self._perform(file, number, block)
        finally:
            params.restore(0, 8)
            os.close(taken)

    def _admit(self, pid: int, rm: RmObject) -> int:
        """Return the status with which an object is refused for what it is; 0 for none."""
        if rm.rm_class == abi.NV01_DEVICE_0:
            minor = self._supervisor.allowance(self._pod).minors.get(rm.detail)
            if minor is None or not _has_open(pid, os.makedev(self._supervisor.major, minor)):
                self._supervisor.refused(self._pod, "card without a grant")
                return abi.NV_ERR_INSUFFICIENT_PERMISSIONS
            return abi.NV_OK if self._no_root_is_made() else abi.NV_ERR_BUSY_RETRY
        if rm.rm_class in abi.GPFIFO_CLASSES:
            parent = self._supervisor.register.objects.get((rm.client, rm.parent))
            if parent is None or parent.rm_class != abi.KEPLER_CHANNEL_GROUP_A:
                self._supervisor.refused(self._pod, "channel outside a TSG")  # RM would make a TSG that nobody can name
                return abi.NV_ERR_INVALID_ARGUMENT
        if rm.rm_class in classes.KEPT and rm.handle == 0:
            self._supervisor.refused(self._pod, "object without a handle")
            return abi.NV_ERR_INVALID_ARGUMENT  # RM would choose one; no CUDA library asks for that
        return abi.NV_OK

    def _claim(self, rm: RmObject, number: int | None = None) -> int:
        """Claim an object; where memory does not fit, look first at what the pod has unmapped meanwhile."""
        status = self._supervisor.claim(rm, number)
        if status == abi.NV_ERR_NO_MEMORY and self._look_at_mappings():
            status = self._supervisor.claim(rm, number)
        if status == abi.NV_ERR_NO_MEMORY:
            self._supervisor.refused(self._pod, "memory over the limit")
        return status

    def _look_at_mappings(self) -> bool:
        looked = [self._supervisor.look_at_mappings(pid) for pid in self._supervisor.mappings_of(self._pod)]
        for tid, loose in [(tid, loose) for tid, loose in self._mappings.items() if loose.over()]:
            del self._mappings[tid]
            looked.append(self._supervisor.look_at_mappings(loose.pid, loose.size))
        return any(looked)

    def _made(self, file: int, rm: RmObject, params: Block | None) -> bool:
        """Book what RM has made; memory at its true size, and freed again where that does not fit."""
        size = None
        if rm.rm_class == abi.NV01_MEMORY_LOCAL_USER and params is not None:
            size = calls.detail(rm.rm_class, params.data)
        if self._supervisor.made(rm.key, size):
            return True
        self._hands.free(file, rm.client, rm.handle)
        self._supervisor.refused(self._pod, "memory over the limit")
        return False

    def _free(self, file: int, number: int, block: Block, client: int, handle: int, status_at: int) -> int:
        key = client, handle
        if self._freeing.is_ours(key) and key in self._supervisor.register.objects:
            return self._answer(block, status_at, abi.NV_ERR_OBJECT_NOT_FOUND)
        channels = self._supervisor.freeing(key)
        gone, error = False, 0

        def carry_out() -> bool:
            nonlocal error
            error = self._perform(file, number, block)
            return not error and _status(block, status_at) == abi.NV_OK

        try:
            gone = self._freeing.free(file, key, carry_out)
        finally:
            self._supervisor.freed(key, channels, gone=gone)
        if not error:
            block.store()
        return error

    def _dup(self, call: Notification, pid: int, file: int, block: Block, asked: calls.Dup) -> int:
        """Make a second handle. What carries a gate has one only; memory is charged once where it is known which."""
        source_key = asked.source_client, asked.source
        source = self._supervisor.register.objects.get(source_key)
        known = self._supervisor.know_client(pid, call.fd, file, asked.client)
        if not known or (source is not None and source.rm_class in classes.GATED):
            return self._refuse(block, asked.status_at, abi.NV_ERR_NOT_SUPPORTED, "second handle")
        with self._supervisor.books:
            before = self._supervisor.number_of(source_key)
            error = self._perform(file, abi.NV_ESC_RM_DUP_OBJECT, block)
        if error or _status(block, asked.status_at) != abi.NV_OK:
            block.store()
            return error
        (handle,) = _U32.unpack_from(block.data, 8)
        after = self._supervisor.number_of(source_key)
        number = before if before == after else None
        if (status := self._arrived(file, (asked.client, handle), asked.parent or asked.client, number)) != abi.NV_OK:
            return self._answer(block, asked.status_at, status)
        block.store()
        return 0

    def _arrived(self, file: int, key: Key, parent: int, number: int | None) -> int:
        """Book what came under a new handle, by RM's word; free it where it cannot stay. Return a status."""
        about = self._hands.about(file, *key)
        if about is None:
            return abi.NV_OK
        if about[0] in classes.GATED | classes.PHYSICAL:
            self._hands.free(file, *key)
            self._supervisor.refused(self._pod, "second handle")
            return abi.NV_ERR_NOT_SUPPORTED
        if about[0] != abi.NV01_MEMORY_LOCAL_USER:
            return abi.NV_OK
        rm = RmObject(*key, about[1] or parent, about[0], self._hands.bytes_of(file, *key))
        if (status := self._claim(rm, number)) != abi.NV_OK:
            self._hands.free(file, *key)
            return status
        self._supervisor.made(key)
        return abi.NV_OK

    # -- what the kernel carries out for the pod -----------------------------------------------------------------------

    def _root(self, call: Notification, pid: int, file: int, block: Block, asked: calls.Alloc, *, wrapped: bool) -> int:
        """Let a root client be made, where that call can make nothing else: on a file that reaches no device."""
        if wrapped:
            return errno.EINVAL
        register = self._supervisor.register
        with self._supervisor.lock:
            devices = {rm.client for rm in register.objects.values() if rm.rm_class == abi.NV01_DEVICE_0}
        for client in devices:
            if self._supervisor.owns(self._pod, client) and self._hands.about(file, client, client) is not None:
                return self._refuse(block, asked.status_at, abi.NV_ERR_INVALID_STATE, "root client beside a device")
        self._roots[call.tid] = _Loose.of(call, pid)
        return PROCEED

    def _no_mapping_is_made(self) -> bool:
        """Wait until UVM is mapping nothing of this pod's: it could in the end map something else than was said."""
        deadline = time.monotonic() + _MAPPING_PATIENCE_S
        while self._external:
            self._external = {tid: loose for tid, loose in self._external.items() if not loose.over()}
            if self._external and time.monotonic() > deadline:
                return False
            if self._external:
                time.sleep(_MAPPING_PATIENCE_S / 100)
        return True

    def _no_root_is_made(self) -> bool:
        """Wait until no root client is being made: what is made in its stead could lie below the new device."""
        deadline = time.monotonic() + _ROOT_PATIENCE_S
        while self._roots:
            self._roots = {tid: root for tid, root in self._roots.items() if not root.over()}
            if self._roots and time.monotonic() > deadline:
                self._supervisor.refused(self._pod, "device beside a root client in the making")
                return False
            if self._roots:
                time.sleep(_ROOT_PATIENCE_S / 100)
        return True

    def _alloc_memory(
        self, call: Notification, pid: int, file: int, block: Block, asked: calls.AllocMemory, *, wrapped: bool
    ) -> int:
        if asked.rm_class == abi.NV01_MEMORY_SYSTEM_OS_DESCRIPTOR:
            return errno.EINVAL if wrapped else PROCEED
        if asked.rm_class != abi.NV01_MEMORY_SYSTEM:
            what = f"memory of class {asked.rm_class:#x}"
            return self._refuse(block, asked.status_at, abi.NV_ERR_INVALID_CLASS, what)
        return self._with_descriptor(call, pid, file, abi.NV_ESC_RM_ALLOC_MEMORY, block, 48)

    def _register_fd(self, call: Notification, pid: int, file: int, block: Block, minor: int) -> int:
        """Tie a card's file to a control file; a control file would take on another one's clients."""
        if minor == abi.NV_CONTROL_MINOR:
            self._supervisor.refused(self._pod, "control file for a control file")
            return errno.EINVAL
        return self._with_descriptor(call, pid, file, abi.NV_ESC_REGISTER_FD, block, 0)

    def _with_descriptor(self, call: Notification, pid: int, file: int, number: int, block: Block, at: int) -> int:
        """Carry out a call that names a descriptor of the pod's, on what it has there."""
        (fd,) = struct.unpack_from("<i", block.data, at)
        taken = self._take(call, pid, fd) if fd >= 0 else -1
        try:
            block.patch_u32(at, taken)
            error = self._perform(file, number, block)
            block.restore(at, 4)
        finally:
            if taken >= 0:
                os.close(taken)
        if not error:
            block.store()
        return error

    # -- controls -----------------------------------------------------------------------------------------------------

    def _control(self, call: Notification, pid: int, file: int, block: Block, asked: calls.Control) -> int:
        command = asked.command
        if (refusal := self._refusal(asked)) is not None:
            if command == abi.NVA06C_SET_TIMESLICE and self._first_wish(call.tid, asked):
                return self._answer(block, asked.status_at, abi.NV_OK)
            return self._refuse(block, asked.status_at, *refusal)
        params = None
        nested: list[Block] | None = []
        if asked.params and asked.size:
            if (params := self._standin.read(call.tid, asked.params, asked.size)) is None:
                return self._answer(block, asked.status_at, abi.NV_ERR_INVALID_ADDRESS)
            block.patch_u64(16, params.at)
            nested = self._standin.read_nested(call.tid, params, controls.NESTED.get(command, ()))
        elif command in controls.NESTED or command in controls.DESCRIPTORS:
            nested = None
        if nested is None:
            block.restore(16, 8)
            return self._answer(block, asked.status_at, abi.NV_ERR_INVALID_ADDRESS)
        error = self._perform_control(call, pid, file, block, params, asked)
        block.restore(16, 8)
        if params is not None:
            if not error and _status(block, asked.status_at) == abi.NV_OK:
                status = self._after(call.tid, file, params, nested, asked)
                block.patch_u32(asked.status_at, status)
            for each in nested:
                each.store()
            for where in controls.NESTED.get(command, ()):
                params.restore(where.pointer_at, 8)
            params.store()
        if not error:
            block.store()
        return error

    def _refusal(self, asked: calls.Control) -> tuple[int, str] | None:
        """Say why a control is refused before RM is asked: its status and how it is counted."""
        command = asked.command
        if command in rules.REFUSED:
            return abi.NV_ERR_INSUFFICIENT_PERMISSIONS, rules.REFUSED[command]
        if asked.serialized:
            return abi.NV_ERR_INVALID_ARGUMENT, "serialized control"
        if command not in controls.ALLOWED:
            return abi.NV_ERR_NOT_SUPPORTED, f"control {command:#x}"
        if command in controls.LEGACY and not self._supervisor.owns(self._pod, asked.client):
            return abi.NV_ERR_INVALID_CLIENT, "control on somebody's client"
        return None

    def _perform_control(
        self, call: Notification, pid: int, file: int, block: Block, params: Block | None, asked: calls.Control
    ) -> int:
        at = controls.DESCRIPTORS.get(asked.command)
        if at is None or params is None:
            if asked.command == abi.NV2080_GPU_GET_PID_INFO and params is not None:
                return self._perform_on_pids(call.tid, file, block, params)
            return self._perform(file, abi.NV_ESC_RM_CONTROL, block)
        (fd,) = struct.unpack_from("<i", params.data, at)
        taken = self._take(call, pid, fd) if fd >= 0 else fd
        try:
            params.patch_u32(at, taken)
            return self._perform(file, abi.NV_ESC_RM_CONTROL, block)
        finally:
            params.restore(at, 4)
            if taken >= 0:
                os.close(taken)

    def _perform_on_pids(self, tid: int, file: int, block: Block, params: Block) -> int:
        """Ask about processes by the numbers that they have out here, and answer with those inside."""
        places = answers.pid_infos(params.data)
        own = {_inside(pid, tid): pid for pid in self._own_pids()}
        asked = [_U32.unpack_from(params.data, at)[0] for at in places]
        for at, pid in zip(places, asked, strict=True):
            params.patch_u32(at, own.get(pid, 0))
        error = self._perform(file, abi.NV_ESC_RM_CONTROL, block)
        answers.hide_others(params.data, set(own.values()))
        for at, pid in zip(places, asked, strict=True):
            params.patch_u32(at, pid)
        return error

    def _own_pids(self) -> list[int]:
        with self._supervisor.lock:
            return [pid for pid, pod in self._supervisor.register.processes.items() if pod == self._pod]

    def _after(self, tid: int, file: int, params: Block, nested: list[Block], asked: calls.Control) -> int:
        """Learn from RM's answer, and fit what it tells of the card; return the status to answer with."""
        match asked.command:
            case abi.NV2080_FB_GET_INFO_V2:
                self._show_memory(asked, params.data, 4, _U32.unpack_from(params.data)[0])
            case abi.NV2080_FB_GET_INFO if nested:
                self._show_memory(asked, nested[0].data, 0, _U32.unpack_from(params.data)[0])
            case abi.NV2080_GPU_GET_PIDS:
                answers.show_pids(params.data, set(self._own_pids()), lambda own: _inside(own, tid))
            case abi.NVA06C_GPFIFO_SCHEDULE | abi.NVA06F_GPFIFO_SCHEDULE:
                self._supervisor.wake()
            case abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD:
                self._supervisor.export(asked.client, [_U32.unpack_from(params.data, 12)[0]])
            case abi.NV0000_OS_UNIX_EXPORT_OBJECTS_TO_FD:
                self._supervisor.export(asked.client, _handles(params.data, _HANDLES_OF_EXPORTS_AT, _MOST_EXPORTS))
            case abi.NV00FD_ATTACH_MEM:
                self._supervisor.export(asked.client, [_U32.unpack_from(params.data, 4)[0]])
            case abi.NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD:
                return self._imported(file, asked.client, [_U32.unpack_from(params.data, 16)[0]])
            case abi.NV0000_OS_UNIX_IMPORT_OBJECTS_FROM_FD:
                return self._imported(file, asked.client, _handles(params.data, _HANDLES_OF_IMPORTS_AT, _MOST_IMPORTS))
        return abi.NV_OK

    def _imported(self, file: int, client: int, handles: list[int]) -> int:
        """Charge what came by a descriptor: nobody here knows whose it was, so it counts as the pod's own."""
        for handle in handles:
            if handle and (status := self._arrived(file, (client, handle), client, None)) != abi.NV_OK:
                for other in handles:
                    self._hands.free(file, client, other)
                    self._supervisor.freed((client, other), [], gone=True)
                return status
        return abi.NV_OK

    def _show_memory(self, asked: calls.Control, entries: bytearray, at: int, count: int) -> None:
        if (shown := self._shown(asked.client, asked.target)) is not None:
            answers.show_memory(entries, at, count, *shown)

    def _shown(self, client: int, handle: int) -> tuple[int, int] | None:
        """Return a pod's limit on the card that an object is on and what is left of it; None for no limit."""
        supervisor = self._supervisor
        rm = supervisor.register.objects.get((client, handle))
        instance = supervisor.register.instance_of(rm) if rm is not None else None
        limit = supervisor.allowance(self._pod).limits.get(instance) if instance is not None else None
        if limit is None or instance is None:
            return None
        self._look_at_mappings()
        with supervisor.lock:
            return limit, max(0, limit - supervisor.used(self._pod, instance))

    def _first_wish(self, tid: int, asked: calls.Control) -> bool:
        """Remember the timeslice libcuda gives a TSG once at start; it holds when no plan says otherwise."""
        tsg = self._supervisor.register.objects.get((asked.client, asked.target))
        if tsg is None or tsg.wish_us != abi.RM_DEFAULT_TIMESLICE_US:
            return False
        data = self._standin.memory.read(tid, asked.params, 8)
        wish = int.from_bytes(data, "little") if data else 0
        if not abi.RM_DEFAULT_TIMESLICE_US <= wish <= 4 * abi.RM_DEFAULT_TIMESLICE_US:
            return False
        with self._supervisor.lock:
            self._supervisor.note({"fact": "wish", "client": tsg.client, "handle": tsg.handle, "us": wish})
        return True

    # -- the old heap interface ---------------------------------------------------------------------------------------

    def _heap(self, call: Notification, pid: int, file: int, block: Block, asked: calls.Heap) -> int:
        match asked.function:
            case calls.HEAP_FREE:
                number = abi.NV_ESC_RM_VID_HEAP_CONTROL
                return self._free(file, number, block, asked.client, asked.handle, asked.status_at)
            case calls.HEAP_INFO:
                error = self._perform(file, abi.NV_ESC_RM_VID_HEAP_CONTROL, block)
                return self._heap_answer(block, asked, error)
            case calls.HEAP_ALLOC_SIZE | calls.HEAP_ALLOC_TILED | calls.HEAP_ALLOC_SIZE_RANGE:
                return self._heap_alloc(call, pid, file, block, asked)
        return self._refuse(block, asked.status_at, abi.NV_ERR_NOT_SUPPORTED, f"heap function {asked.function}")

    def _heap_alloc(self, call: Notification, pid: int, file: int, block: Block, asked: calls.Heap) -> int:
        rm = RmObject(asked.client, asked.handle, asked.parent, abi.NV01_MEMORY_LOCAL_USER, asked.size)
        known = self._supervisor.know_client(pid, call.fd, file, asked.client)
        claimed = known and calls.may_be_video(asked)
        if claimed and (refusal := self._admit(pid, rm) or self._claim(rm)):
            return self._answer(block, asked.status_at, refusal)
        error = self._perform(file, abi.NV_ESC_RM_VID_HEAP_CONTROL, block)
        if claimed and not error and _status(block, asked.status_at) == abi.NV_OK:
            about = self._hands.about(file, *rm.key)
            if about is None or about[0] != abi.NV01_MEMORY_LOCAL_USER:
                self._supervisor.not_made(rm.key)
            elif not self._supervisor.made(rm.key, calls.heap_size(block.data, asked.function)):
                self._hands.free(file, *rm.key)
                return self._refuse(block, asked.status_at, abi.NV_ERR_NO_MEMORY, "memory over the limit")
        elif claimed:
            self._supervisor.not_made(rm.key)
        return self._heap_answer(block, asked, error)

    def _heap_answer(self, block: Block, asked: calls.Heap, error: int) -> int:
        """Every answer tells the card's total and free bytes."""
        if (shown := self._shown(asked.client, asked.parent)) is not None:
            total, free = struct.unpack_from("<QQ", block.data, calls.HEAP_TOTAL_AT)
            struct.pack_into("<QQ", block.data, calls.HEAP_TOTAL_AT, min(total, shown[0]), min(free, shown[1]))
        if not error:
            block.store()
        return error

    # -- mappings -----------------------------------------------------------------------------------------------------

    def _map(self, call: Notification, pid: int) -> int:
        """Judge a mapping that could become managed memory (docs/decisions/0008)."""
        if not self._limited() or not self._supervisor.uses_uvm(pid):
            return PROCEED
        fd, size = mapping(call)
        if not self._is_uvm(pid, fd) and managed.threads(pid) == 1:
            return PROCEED
        fits = self._supervisor.reserve_mapping(self._pod, pid, size)
        if not fits and self._look_at_mappings():
            fits = self._supervisor.reserve_mapping(self._pod, pid, size)
        if not fits:
            self._supervisor.refused(self._pod, "managed memory over the limit")
            return errno.ENOMEM
        self._mappings[call.tid] = _Loose.of(call, pid, size)
        return PROCEED

    def _is_uvm(self, pid: int, fd: int) -> bool:
        status = os.stat(f"/proc/{pid}/fd/{fd}")
        return stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == self._supervisor.uvm_major


def _status(block: Block, at: int) -> int:
    return int(_U32.unpack_from(block.data, at)[0])


def _handles(params: bytearray, at: int, most: int) -> list[int]:
    return [handle for handle in struct.unpack_from(f"<{min(most, (len(params) - at) // 4)}I", params, at) if handle]


def _process_of(tid: int) -> int:
    """Return the process a thread belongs to. Raises OSError when it is gone."""
    for line in Path(f"/proc/{tid}/status").read_text().splitlines():
        if line.startswith("Tgid:"):
            return int(line.split()[1])
    raise ProcessLookupError(errno.ESRCH, "no such thread")


def _has_open(pid: int, device: int) -> bool:
    """Tell whether a process has a device open. Raises OSError when it is gone."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            if os.stat(f"/proc/{pid}/fd/{name}").st_rdev == device:
                return True
        except OSError:  # closed meanwhile
            continue
    return False


def _inside(pid: int, tid: int) -> int:
    """Return the number a process has in the pid namespace of a thread; 0 where it has none."""
    try:
        if os.stat(f"/proc/{tid}/ns/pid").st_ino == os.stat("/proc/self/ns/pid").st_ino:
            return pid
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except OSError:
        pass
    return 0


def _user_ticks(pid: int, tid: int) -> int:
    """Return the time a thread has had in user mode, in clock ticks; -1 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/task/{tid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return int(fields[11])

"""One pod's calls to UVM: which cards it may use, and what card memory its mappings keep.

Memory that UVM has mapped stays on the card when RM's handle is freed. The kernel makes a mapping for the pod itself,
because RM lets UVM use a client's memory only if the client's own process asks (client_resource.c: RS_SHARE_TYPE_PID).
The arguments that we read are therefore only a claim; when memory is freed or unmapped, RM's own figures check it
(``freed_memory.py``). The guardian performs an unmapping in the pod's place, so its arguments are exact.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Set

from qgpu.guardian.accounting.rm_object import Key
from qgpu.guardian.proxy.client_registry import of_others
from qgpu.guardian.proxy.control_files import mark_of
from qgpu.guardian.proxy.freed_memory import FreedMemory
from qgpu.guardian.proxy.handler_context import ANSWERED, PROCEED, Handler, HandlerContext, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.guardian.proxy.mmap_calls import MmapHandler
from qgpu.guardian.proxy.passthrough import Passthrough
from qgpu.linux import fd_budget, kcmp
from qgpu.linux.seccomp_notify import Notification
from qgpu.nvidia import abi, mig, uvm

TOO_MANY_FILES = "too many UVM files"
_OTHERS_RUN = "call while other threads run"
#: How long a process's first UVM file waits for mappings and registrations that other processes have in progress.
_FILE_PATIENCE_S = 1.0
#: How many files a pod may have on which UVM records events; a profiled process has one or two. When a fault of any
#: program on any card is over, UVM goes through all of them with a lock that other faults need (uvm_tools.c).
_MOST_RECORDERS, TOO_MANY_RECORDERS = 256, "too many records of UVM's events"
#: They count under the pod's name with this suffix. A pod's name has no space, so no pod is called that.
_RECORDERS = " records"
#: Stands for an object's handles: no object.
NOTHING = (0, 0)
#: How many mappings, one behind the other, are looked through for the end of a range.
_MOST_PARTS = 64
_U64 = struct.Struct("<Q")
_ATTRIBUTES_AT, _ATTRIBUTES_BYTES = 24, 36

#: Lets the kernel perform a call on the file that was checked.
Continue = Callable[[PodCall], None]


class UvmHandler(Handler):
    """Handles one pod's calls on /dev/nvidia-uvm."""

    def __init__(
        self, ctx: HandlerContext, passthrough: Passthrough, freed_memory: FreedMemory, mmap: MmapHandler
    ) -> None:
        super().__init__(ctx)
        self._passthrough, self._freed_memory, self._mmap = passthrough, freed_memory, mmap

    def handle(self, pod_call: PodCall) -> int:
        """Perform a call, or let the kernel do so; return an errno, 0, or PROCEED."""
        call, pid, file = pod_call.call, pod_call.pid, pod_call.file
        limited = self._ctx.limited()
        match call.request:
            case uvm.REGISTER_CHANNEL:
                return self._continue_on(pod_call, self._passthrough.begin_on)
            case uvm.INITIALIZE:
                return self._initialize(call, pid)
            case uvm.ALLOC_DEVICE_P2P:  # it keeps memory in a way that is not tracked
                return errno.EOPNOTSUPP if limited else PROCEED
            case request if request in uvm.TRACKERS:
                return self._begin_to_record(pod_call)
        if not limited and call.request in {uvm.MAP_EXTERNAL_ALLOCATION, uvm.REGISTER_GPU_VASPACE, *uvm.TABLES_ALONE}:
            return PROCEED  # only a limit needs a record of mappings and files
        layout = self._shared.uvm_layouts.get(call.request)
        if layout is None:  # it has an RM call's number and size; UVM has no such call
            return errno.EINVAL
        if (block := self._proxy.read(call.tid, call.argument, layout.size)) is None:
            return errno.EFAULT
        block.status_at = layout.status_at
        if call.request == uvm.MAP_EXTERNAL_ALLOCATION:
            if refused := self._claim_mapping(pod_call, block, layout.client_at):
                return self._refuse(block, abi.NV_ERR_NO_MEMORY, refused)
            return self._on_checked_file(pod_call, self._passthrough.begin_on, block)
        if call.request == uvm.REGISTER_GPU_VASPACE:  # UVM registers channels of this address space in this file alone
            if not self._others_are_done(pid):
                return block.answer(abi.NV_ERR_BUSY_RETRY)
            if not self._shared.pod_uvm_files.hold(pid, call.fd, file):
                return self._refuse(block, abi.NV_ERR_NO_MEMORY, TOO_MANY_FILES)
            return self._on_checked_file(pod_call, self._passthrough.continue_on, block)
        if call.request == uvm.REGISTER_GPU:
            card = bytes(block.data[: uvm.UUID_BYTES])
            instance = self._shared.uuids.get(card)
            place = self._shared.allowance(self._pod).place_on(instance) if instance is not None else None
            if (status := self._may_register(call, pid, file, place)) != abi.NV_OK:
                return block.answer(status)
            if place is not None and mig.numbers_at(place) is not None:
                # UVM duplicates the pod's subscription, which RM allows to the client's own process alone
                # (nv_gpu_ops.c:getSwizzIdFromUserSmcPartHandle, client_resource.c:cliresShareCallback_IMPL). Another
                # process may change the arguments meanwhile: UVM takes no other pod's subscription, and no card whose
                # node is not open.
                return self._continue_on(pod_call, self._passthrough.continue_on, block)
            if pod_call.is_retry:  # it may be registered already, and UVM takes no second registration: undo the first
                self._proxy.uvm(file, uvm.UNREGISTER_GPU, self._proxy.block(card + bytes(4)))
        elif call.request in uvm.TABLES_ALONE:
            if refused := self._claim_tables(pod_call, block):
                return self._refuse(block, abi.NV_ERR_NO_MEMORY, refused)
        else:
            return self._unmap(pod_call, block)
        pod_call.begin()
        error = self._proxy.uvm(file, call.request, block)
        if not error:
            block.store_changes()
        return error

    def _begin_to_record(self, pod_call: PodCall) -> int:
        """Let UVM record events for a profiler, on a file of its own; such files are counted like control files."""
        mine = f"{self._pod}{_RECORDERS}"
        if not self._shared.control_files.has_room(mine, _MOST_RECORDERS):
            self._count(TOO_MANY_RECORDERS)
            return errno.ENOSPC
        if not self._shared.files.makers.claim(pod_call.file, pod_call.pid, mark_of(mine)):
            return errno.EBUSY
        return self._continue_on(pod_call, self._passthrough.continue_on)

    def _initialize(self, call: Notification, pid: int) -> int:
        """Let UVM be initialised; under a limit, without HMM, which uses memory that no call shows.

        The process can change the flag after our check. Registering a card reveals that.
        """
        self._shared.quota.will_use_uvm(pid)
        if not self._ctx.limited():
            return PROCEED
        if (block := self._proxy.read(call.tid, call.argument, uvm.INITIALIZE_BYTES)) is None:
            return errno.EFAULT
        block.patch_u64(0, uvm.INIT_FLAGS_DISABLE_HMM)
        block.store()
        return PROCEED

    def is_sole_user(self, pod_call: PodCall) -> bool:
        """Tell whether no UVM file of another process can be in a call's descriptor's place, as far as files are held.

        Another process's file would keep memory when this process ends. A thread with a descriptor table of its own may
        have one in its descriptor's place.
        """
        if not self._ctx.limited():
            return True
        same = kcmp.same_table(pod_call.pid, pod_call.call.tid)
        return same and self._shared.uvm_files.has_only_of(self._pod, pod_call.pid)

    def _on_checked_file(self, pod_call: PodCall, continue_on: Continue, block: IoctlBuffer) -> int:
        """Let the kernel perform a call, on the file that was checked where it could find another process's."""
        return PROCEED if self.is_sole_user(pod_call) else self._continue_on(pod_call, continue_on, block)

    def _continue_on(self, pod_call: PodCall, continue_on: Continue, block: IoctlBuffer | None = None) -> int:
        try:
            continue_on(pod_call)
        except OSError as error:
            if error.errno in fd_budget.OUT_OF_FDS:
                raise
            if block is None:
                self._count(_OTHERS_RUN)
                return errno.EPERM
            return self._refuse(block, abi.NV_ERR_INVALID_STATE, _OTHERS_RUN)
        return ANSWERED

    def _others_are_done(self, pid: int) -> bool:
        """Before a process has its first UVM file, wait for calls that were allowed because no other one had any."""
        if not self._shared.uvm_files.has_none(pid):
            return True
        return self._ctx.uvm_mappings.wait(_FILE_PATIENCE_S) and self._ctx.registering.wait(_FILE_PATIENCE_S)

    def _may_register(self, call: Notification, pid: int, file: int, place: int | None) -> int:
        """Return NV_OK if a card may be registered: the pod has a grant on it, and its UVM file is without HMM."""
        if place is None:
            self._count("card without a grant")
            return abi.NV_ERR_INSUFFICIENT_PERMISSIONS
        if not self._ctx.limited():
            return abi.NV_OK
        self._shared.clients.forget_previous_program(self._pod, pid)
        self._shared.quota.will_use_uvm(pid)  # it is then charged itself for what it maps
        if not self._others_are_done(pid) or not self._mmap.charge_made():
            self._count("UVM while a mapping is made")
            return abi.NV_ERR_BUSY_RETRY
        if not self._shared.quota.start_using_uvm(self._pod, pid):
            self._count("managed memory over the limit")
            return abi.NV_ERR_NO_MEMORY
        again = self._proxy.block(_U64.pack(uvm.INIT_FLAGS_DISABLE_HMM) + bytes(8), uvm.STATUS_AT_INITIALIZE)
        if self._proxy.uvm(file, uvm.INITIALIZE, again) or again.status != abi.NV_OK:
            self._count("UVM initialised with other flags")
            return abi.NV_ERR_INVALID_STATE
        if not self._shared.pod_uvm_files.hold(pid, call.fd, file):
            self._count(TOO_MANY_FILES)
            return abi.NV_ERR_INSUFFICIENT_RESOURCES
        return abi.NV_OK

    def _claim_mapping(self, pod_call: PodCall, block: IoctlBuffer, client_at: int | None) -> str | None:
        """Record the mapping that is about to be made; return why it may not be made, or None."""
        assert client_at is not None
        client, memory = uvm.CLIENT_AND_OBJECT.unpack_from(block.data, client_at)
        if not self._shared.clients.owns(self._pod, client):
            return of_others("UVM_MAP_EXTERNAL_ALLOCATION")
        base, length = uvm.BASE_AND_LENGTH.unpack_from(block.data)
        end = block.status_at - 20
        (count,) = _U64.unpack_from(block.data, end)
        places = range(_ATTRIBUTES_AT, min(end, _ATTRIBUTES_AT + count * _ATTRIBUTES_BYTES), _ATTRIBUTES_BYTES)
        uuids = {bytes(block.data[at : at + uvm.UUID_BYTES]) for at in places} & self._shared.uuids.keys()
        return self._claim(pod_call, base, length, uuids, (client, memory))

    def _claim(self, pod_call: PodCall, base: int, length: int, cards: Set[bytes], memory: Key) -> str | None:
        """Record a mapping on cards, or return why it may not be made, as that is counted.

        Its file is held: another process may have registered the cards on it.
        """
        pid = pod_call.pid
        if not self._shared.quota.may_map(self._pod, pid, base, length):
            return "too many mappings of UVM"
        if not self._shared.quota.fits_mapping(self._pod, pid, base, length, cards):
            return "page tables over the limit"
        if not self._shared.pod_uvm_files.hold(pid, pod_call.call.fd, pod_call.file):
            return TOO_MANY_FILES
        self._shared.quota.map(pid, base, length, cards, memory)
        return None

    def _claim_tables(self, pod_call: PodCall, block: IoctlBuffer) -> str | None:
        """Do the same for one without card memory behind it: a sparse region, or semaphores. It takes page tables."""
        base, length = uvm.BASE_AND_LENGTH.unpack_from(block.data)
        cards = set(self._shared.uuids)
        if pod_call.call.request != uvm.ALLOC_SEMAPHORE_POOL:
            cards &= {bytes(block.data[16 : 16 + uvm.UUID_BYTES])}
        refused = self._claim(pod_call, base, length, cards, NOTHING)
        if pod_call.is_retry and refused is None:  # UVM makes no second one where it may exist already: free that
            range_ = self._proxy.block(uvm.BASE_AND_LENGTH.pack(base, length) + bytes(8))
            self._proxy.uvm(pod_call.file, uvm.FREE, range_)
        return refused

    def _unmap(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Perform an unmapping; it is recorded if the mappings that are recorded can only be on this file.

        They are recorded by process. Another file can have mappings at the same addresses, which stay.
        """
        request = pod_call.call.request
        base, length = uvm.BASE_AND_LENGTH.unpack_from(block.data)
        sole = not self._ctx.limited() or self._shared.pod_uvm_files.has_only(pod_call.pid, pod_call.file)
        if sole and block.status_at < uvm.BASE_AND_LENGTH.size:
            length = self._length_at(pod_call, base)
        card = bytes(block.data[16 : 16 + uvm.UUID_BYTES]) if request == uvm.UNMAP_EXTERNAL else None
        error = 0

        def carry_out() -> bool:
            nonlocal error
            error = self._proxy.uvm(pod_call.file, request, block)
            if pod_call.is_retry and not error:  # the dead guardian has unmapped it
                block.status = abi.NV_OK
            return not error and block.status == abi.NV_OK

        if not (sole and length):
            pod_call.begin()
            carry_out()
        else:
            self._freed_memory.unmap(pod_call, base, length, card, carry_out)
        if not error:
            block.store_changes()
        return error

    def _length_at(self, pod_call: PodCall, base: int) -> int:
        """Return the length of UVM's range at an address, where no call names it; 0 if it is unknown.

        UVM confirms a length that is guessed, and programs end a range where a mapping ends.
        """
        layout, end = self._shared.uvm_layouts[uvm.VALIDATE_VA_RANGE], base
        for _ in range(_MOST_PARTS):
            with self._shared.lock:
                reach = self._shared.table.allocations.space_of(pod_call.pid).reaching_into(end, end + 1)
            ends = sorted({each.end for each in reach if base <= each.base <= end < each.end})
            for end in ends:
                block = self._proxy.block(uvm.BASE_AND_LENGTH.pack(base, end - base) + bytes(8), layout.status_at)
                if not self._proxy.uvm(pod_call.file, uvm.VALIDATE_VA_RANGE, block) and block.status == abi.NV_OK:
                    return end - base
            if not ends:
                break
        return 0

"""One pod's objects of RM's: what is made, named again and freed, and what of that is charged.

The kernel carries out for the pod itself only what RM ties to the calling process: root clients and first devices
(``letting.py``), and user memory for the card (class 0x71), whose pages are the process's: nothing that a process
without CAP_SYS_ADMIN can ask for by that call takes memory of the card (rmapi_deprecated_allocmemory.c).
"""

from __future__ import annotations

import errno
import os
import struct

from qgpu.guardian.accounting.object_table import NO_INSTANCE, Key, RmObject
from qgpu.guardian.proxy import client_ownership, rm_calls
from qgpu.guardian.proxy.free import FreeHandler
from qgpu.guardian.proxy.handler_context import PROCEED, HandlerContext, PodCall, status_of
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.guardian.proxy.passthrough import Passthrough
from qgpu.guardian.rules import classes
from qgpu.linux import proc
from qgpu.nvidia import abi

_U32 = struct.Struct("<I")
#: How page tables are counted that would not be.
PAGE_TABLES = "address space with its page tables"
#: The same of memory at an address of the card.
CHOSEN_PLACE = "memory at an address of the card"
#: How many of a pod's exports of one size what it imports is compared with; beyond them it is charged anew.
_MOST_COMPARED = 64


class AllocHandler:
    """Judges calls that make, name or free objects."""

    def __init__(self, ctx: HandlerContext, freeing: FreeHandler, passthrough: Passthrough) -> None:
        self._ctx = ctx
        self._supervisor = ctx.supervisor
        self._gpu_ops = ctx.supervisor.gpu_ops
        self._proxy = ctx.proxy
        self._pod = ctx.pod
        self._freeing = freeing
        self._passthrough = passthrough
        #: TSGs whose compute can be preempted.
        self._preemptible: dict[Key, RmObject] = {}

    def alloc(self, case: PodCall, escape: rm_calls.Escape, block: IoctlBuffer, asked: rm_calls.Alloc) -> int:
        """Make an object, or say no."""
        if asked.serialized:
            return self._ctx.answer(block, asked.status_at, abi.NV_ERR_INVALID_ARGUMENT)
        row = classes.ALLOWED.get(asked.rm_class)
        if row is None:
            return self._ctx.refuse(block, asked.status_at, abi.NV_ERR_INVALID_CLASS, classes.name(asked.rm_class))
        params = rights = None
        if asked.params:
            if (params := self._proxy.read_params(case.call.tid, asked.params)) is None:
                return self._ctx.answer(block, asked.status_at, abi.NV_ERR_INVALID_ADDRESS)
            block.patch_u64(16, params.at)
        if asked.rights:
            if (rights := self._proxy.read(case.call.tid, asked.rights, _U32.size)) is None:
                return self._ctx.answer(block, asked.status_at, abi.NV_ERR_INVALID_ADDRESS)
            block.patch_u64(24, rights.at)
        if params is not None and client_ownership.names_any(
            self._supervisor, self._pod, asked.client, row.clients, params.data
        ):
            block.restore(16, 16)
            return self._ctx.refuse(
                block, asked.status_at, abi.NV_ERR_INVALID_OBJECT_HANDLE, client_ownership.name(row.name)
            )
        self.undo(case, (asked.client, asked.handle))
        detail = rm_calls.detail(asked.rm_class, params.data) if params else 0
        rm = RmObject(asked.client, asked.handle, asked.parent, asked.rm_class, detail)
        if rm.rm_class == abi.NV50_MEMORY_VIRTUAL and rm_calls.takes_tables(detail) and self._ctx.limited():
            block.restore(16, 16)
            return self._ctx.refuse(block, asked.status_at, abi.NV_ERR_NOT_SUPPORTED, PAGE_TABLES)
        placed = rm.rm_class == abi.NV01_MEMORY_LOCAL_USER and params and rm_calls.chooses_place(params.data)
        if placed and self._ctx.limited():
            block.restore(16, 16)
            return self._ctx.refuse(block, asked.status_at, abi.NV_ERR_NOT_SUPPORTED, CHOSEN_PLACE)
        kept = asked.rm_class in classes.KEPT
        if kept and not self._supervisor.know_client(case.pid, case.call.fd, case.file, asked.client):
            block.restore(16, 16)
            return self._ctx.answer(block, asked.status_at, abi.NV_ERR_INVALID_CLIENT)
        if refusal := self.admit(case.pid, rm):
            block.restore(16, 16)
            return self._ctx.answer(block, asked.status_at, refusal)
        if rm.rm_class == abi.NV01_DEVICE_0 and not escape.wrapped and not self._passthrough.has_device(asked.client):
            block.restore(16, 16)
            return self._passthrough.device(case, block, rm, asked.status_at)
        if kept and (refusal := self._ctx.claim(rm)):
            block.restore(16, 16)
            return self._ctx.answer(block, asked.status_at, refusal)
        try:
            error = self._perform_alloc(case, escape.number, block, params, asked)
            status = status_of(block, asked.status_at)
            if kept and (error or status != abi.NV_OK):
                self._supervisor.not_made(rm.key)
            elif kept and not self._made(case.file, rm, params):
                block.patch_u32(asked.status_at, abi.NV_ERR_NO_MEMORY)
            elif rm.rm_class == abi.NV20_SUBDEVICE_0 and (refusal := self._learn_card(case.file, rm)):
                block.patch_u32(asked.status_at, refusal)
            elif status == abi.NV_OK and classes.on_compute_engine(rm.rm_class):
                self._make_preemptible(case.file, rm)
            elif status == abi.NV_OK and asked.rm_class == abi.NV50_THIRD_PARTY_P2P:
                self._gpu_ops.register_p2p(case.file, asked.client, asked.handle)
            elif status == abi.NV_OK and (at := row.holds_memory_at) is not None and params:
                self._supervisor.quota.pin_handles(asked.client, [_U32.unpack_from(params.data, at)[0]])
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
        case: PodCall,
        number: int,
        block: IoctlBuffer,
        params: IoctlBuffer | None,
        asked: rm_calls.Alloc,
    ) -> int:
        if params is None or not classes.ALLOWED[asked.rm_class].capability:
            case.begin()
            return self._proxy.escape(case.file, number, block)
        capability = _U32.unpack_from(params.data)[0]
        taken = self._ctx.take(case, capability)
        try:
            params.patch_u64(0, taken)
            case.begin()
            return self._proxy.escape(case.file, number, block)
        finally:
            params.restore(0, 8)
            os.close(taken)

    def admit(self, pid: int, rm: RmObject) -> int:
        """Return the status with which an object is refused for what it is; 0 for none."""
        if rm.rm_class == abi.NV01_DEVICE_0:
            minor = self._supervisor.allowance(self._pod).minors.get(rm.detail)
            if minor is None or not _has_open(pid, os.makedev(self._supervisor.major, minor)):
                self._supervisor.refused(self._pod, "card without a grant")
                return abi.NV_ERR_INSUFFICIENT_PERMISSIONS
            return abi.NV_OK if self._passthrough.no_root_is_made() else abi.NV_ERR_BUSY_RETRY
        if rm.rm_class in abi.GPFIFO_CLASSES:
            parent = self._supervisor.table.objects.get((rm.client, rm.parent))
            if parent is None or parent.rm_class != abi.KEPLER_CHANNEL_GROUP_A:
                self._supervisor.refused(self._pod, "channel outside a TSG")  # RM would make a TSG that nobody can name
                return abi.NV_ERR_INVALID_ARGUMENT
        if classes.on_compute_engine(rm.rm_class) and not self._in_compute_tsg(rm):
            self._supervisor.refused(self._pod, "compute outside a compute TSG")  # its time would be nobody's
            return abi.NV_ERR_INVALID_ARGUMENT
        if rm.rm_class in classes.KEPT and rm.handle == 0:
            self._supervisor.refused(self._pod, "object without a handle")
            return abi.NV_ERR_INVALID_ARGUMENT  # RM would choose one; no CUDA library asks for that
        return abi.NV_OK

    def _in_compute_tsg(self, rm: RmObject) -> bool:
        objects = self._supervisor.table.objects
        channel = objects.get((rm.client, rm.parent))
        tsg = objects.get((rm.client, channel.parent)) if channel is not None else None
        return tsg is not None and self._supervisor.table.is_compute(tsg)

    def _make_preemptible(self, file: int, rm: RmObject) -> None:
        """Let a TSG that has compute now be preempted in the middle of a kernel, whether its program asks or not."""
        table = self._supervisor.table
        with self._supervisor.lock:
            # A name may be given to another TSG.
            self._preemptible = {key: was for key, was in self._preemptible.items() if table.objects.get(key) is was}
            channel = table.objects.get((rm.client, rm.parent))
            tsg = table.objects.get((rm.client, channel.parent)) if channel is not None else None
            if tsg is None or tsg.key in self._preemptible:
                return
            below = table.below((rm.client, rm.client))
            subdevice = next((each.handle for each in below if each.rm_class == abi.NV20_SUBDEVICE_0), None)
        if subdevice is not None and self._gpu_ops.make_preemptible(file, rm.client, subdevice, tsg.handle):
            self._preemptible[tsg.key] = tsg

    def _made(self, file: int, rm: RmObject, params: IoctlBuffer | None) -> bool:
        """Book what RM has made; memory at its true size, and freed again where that does not fit."""
        size = None
        if rm.rm_class == abi.NV01_MEMORY_LOCAL_USER and params is not None:
            size = rm_calls.detail(rm.rm_class, params.data)
        if self._supervisor.made(rm.key, size):
            return True
        self._gpu_ops.free(file, rm.client, rm.handle)
        self._supervisor.refused(self._pod, "memory over the limit")
        return False

    def free(self, case: PodCall, number: int, block: IoctlBuffer, client: int, handle: int, status_at: int) -> int:
        """Free an object with all below it."""
        key = client, handle
        if self._freeing.is_ours(key) and key in self._supervisor.table.objects:
            return self._ctx.answer(block, status_at, abi.NV_ERR_OBJECT_NOT_FOUND)
        # The heap's own free is for memory: what it says no to, it could be asked for ever.
        channels = self._supervisor.freeing(key, case.file) if number == abi.NV_ESC_RM_FREE else []
        gone, error = False, 0

        def carry_out() -> bool:
            nonlocal error
            error = self._proxy.escape(case.file, number, block)
            if case.again and not error and status_of(block, status_at) in abi.UNKNOWN_TO_RM:
                block.patch_u32(status_at, abi.NV_OK)  # what is freed cannot be freed again
            return not error and status_of(block, status_at) == abi.NV_OK

        try:
            gone = self._freeing.free(case, key, carry_out)
        finally:
            self._supervisor.freed(key, channels, gone=gone)
        if gone and client == handle:  # it was the file's only one
            self._supervisor.files.roots.discard(case.file)
        if not error:
            block.store()
        return error

    def undo(self, case: PodCall, key: Key) -> None:
        """Free what a dead guardian may have made for this very call, which has no answer yet: it is made anew."""
        if not case.again or not self._supervisor.know_client(case.pid, case.call.fd, case.file, key[0]):
            return
        if self._gpu_ops.about(case.file, *key) is None and key not in self._supervisor.table.objects:
            return
        channels = self._supervisor.freeing(key, case.file)
        gone = False

        def carry_out() -> bool:
            self._gpu_ops.free(case.file, *key)
            return self._gpu_ops.about(case.file, *key) is None

        try:
            gone = self._freeing.free(case, key, carry_out)
        finally:
            self._supervisor.freed(key, channels, gone=gone)

    def dup(self, case: PodCall, block: IoctlBuffer, asked: rm_calls.Dup) -> int:
        """Make a second handle. What carries a gate has one only; memory is charged once where it is known which."""
        source_key = asked.source_client, asked.source
        source = self._supervisor.table.objects.get(source_key)
        known = self._supervisor.know_client(case.pid, case.call.fd, case.file, asked.client)
        if not known or (source is not None and source.rm_class in classes.GATED):
            return self._ctx.refuse(block, asked.status_at, abi.NV_ERR_NOT_SUPPORTED, "second handle")
        self.undo(case, (asked.client, asked.handle))
        owner = self._supervisor.table.clients.get(asked.source_client)
        with self._supervisor.books(owner.pod if owner is not None else self._pod):
            before = self._supervisor.quota.number_of(source_key)
            case.begin()
            error = self._proxy.escape(case.file, abi.NV_ESC_RM_DUP_OBJECT, block)
        if error or status_of(block, asked.status_at) != abi.NV_OK:
            block.store()
            return error
        (handle,) = _U32.unpack_from(block.data, 8)
        after = self._supervisor.quota.number_of(source_key)
        # Another pod's memory counts for both: who makes it could have it freed, and the next, and the next.
        same = before == after and self._supervisor.owns(self._pod, asked.source_client)
        number = before if same else None
        if (
            status := self.arrived(case.file, (asked.client, handle), asked.parent or asked.client, number)
        ) != abi.NV_OK:
            return self._ctx.answer(block, asked.status_at, status)
        block.store()
        return 0

    def arrived(self, file: int, key: Key, parent: int, number: int | None) -> int:
        """Book what came under a new handle, by RM's word; free it where it cannot stay. Return a status."""
        about = self._gpu_ops.about(file, *key)
        if about is None:
            return abi.NV_OK
        space = about[0] == abi.FERMI_VASPACE_A and self._ctx.limited()  # it has page tables, and counts by handle
        if space or about[0] in classes.GATED | classes.PHYSICAL:
            self._gpu_ops.free(file, *key)
            self._supervisor.refused(self._pod, "second handle")
            return abi.NV_ERR_NOT_SUPPORTED
        if about[0] != abi.NV01_MEMORY_LOCAL_USER:
            return abi.NV_OK
        rm = RmObject(*key, about[1] or parent, about[0], self._gpu_ops.bytes_of(file, *key))
        if number is None:
            number = self._exported_as(file, rm)
        if (status := self._ctx.claim(rm, number)) != abi.NV_OK:
            self._gpu_ops.free(file, *key)
            return status
        self._supervisor.made(key)
        return abi.NV_OK

    def _exported_as(self, file: int, rm: RmObject) -> int | None:
        """Find which of the pod's own allocations came back by a descriptor, by RM's word; None for none of them."""
        with self._supervisor.lock:
            instance = self._supervisor.table.instance_of(rm)
            mine = self._supervisor.table.exported(self._pod, instance, rm.detail)[:_MOST_COMPARED]
            handles = [(memory.number, next(iter(memory.handles))) for memory in mine]
        for number, other in handles:
            if self._gpu_ops.is_same(file, rm.key, rm.parent, other):
                return number
        return None

    def _learn_card(self, file: int, subdevice: RmObject) -> int:
        """Ask RM which card a device is on, now that it can be asked; return a status: of one that is freed, why."""
        key = subdevice.client, subdevice.parent
        device = self._supervisor.table.objects.get(key)
        if device is None and (self._gpu_ops.about(file, *key) or (0,))[0] == abi.NV01_DEVICE_0:
            # The kernel was making it when a guardian died, or made it under another name than was looked for.
            device = RmObject(*key, subdevice.client, abi.NV01_DEVICE_0, NO_INSTANCE)
        if device is None or device.rm_class != abi.NV01_DEVICE_0 or device.detail != NO_INSTANCE:
            return abi.NV_OK
        instance = self._gpu_ops.instance_of(file, *subdevice.key)
        if instance is not None and instance in self._supervisor.allowance(self._pod).minors:
            if self._supervisor.learned(device, instance):
                return abi.NV_OK
            status, what = abi.NV_ERR_NO_MEMORY, "memory over the limit"
        else:
            status, what = abi.NV_ERR_INSUFFICIENT_PERMISSIONS, "card without a grant"
        self._gpu_ops.free(file, *device.key)
        self._supervisor.freed(device.key, [], gone=True)
        self._supervisor.refused(self._pod, what)
        return status

    def alloc_memory(self, case: PodCall, block: IoctlBuffer, asked: rm_calls.AllocMemory, *, wrapped: bool) -> int:
        """Make memory in the old way: the process's own for the card, or system memory."""
        if asked.rm_class == abi.NV01_MEMORY_SYSTEM_OS_DESCRIPTOR:
            return errno.EINVAL if wrapped else PROCEED
        if asked.rm_class != abi.NV01_MEMORY_SYSTEM:
            what = classes.name(asked.rm_class)
            return self._ctx.refuse(block, asked.status_at, abi.NV_ERR_INVALID_CLASS, what)
        self.undo(case, (asked.client, asked.handle))
        return self._ctx.with_descriptor(case, abi.NV_ESC_RM_ALLOC_MEMORY, block, 48)

    def register_fd(self, case: PodCall, block: IoctlBuffer, minor: int) -> int:
        """Tie a card's file to a control file; a control file would take on another one's clients."""
        if minor == abi.NV_CONTROL_MINOR:
            self._supervisor.refused(self._pod, "control file for a control file")
            return errno.EINVAL
        error = self._ctx.with_descriptor(case, abi.NV_ESC_REGISTER_FD, block, 0)
        return 0 if case.again and error == errno.EINVAL else error  # once is all there can be


def _has_open(pid: int, device: int) -> bool:
    """Tell whether a process has a device open. Raises OSError when it is gone."""
    os.stat(f"/proc/{pid}")
    return any(found == device for _, found in proc.devices(pid))

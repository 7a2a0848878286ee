"""One pod's calls that make RM objects: makes them, and charges their memory.

The kernel performs a call for the pod itself only if RM ties the object to the calling process: a file's first root
client and device (``passthrough.py``), and user memory that the card reads (class 0x71), whose pages belong to the
process. Without CAP_SYS_ADMIN the latter call cannot take card memory (rmapi_deprecated_allocmemory.c).
"""

from __future__ import annotations

import errno
from contextlib import nullcontext
from dataclasses import dataclass

from qgpu.guardian.accounting.client_entries import PEER_ACCESS
from qgpu.guardian.accounting.object_tree import OWN_BOUNDS
from qgpu.guardian.accounting.rm_object import NO_INSTANCE, Key, RmObject, Userd, confirm_fact
from qgpu.guardian.proxy import control_files, rm_calls, virtualize
from qgpu.guardian.proxy.alloc_checks import AllocChecks
from qgpu.guardian.proxy.client_registry import OTHER_PROCESS, of_others
from qgpu.guardian.proxy.dup_calls import UNKNOWN_ON_FABRIC
from qgpu.guardian.proxy.free_calls import FreeHandler
from qgpu.guardian.proxy.handler_context import Handler, HandlerContext, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer, IoctlProxy
from qgpu.guardian.proxy.os_events import TOO_MANY
from qgpu.guardian.proxy.passthrough import Passthrough
from qgpu.guardian.proxy.rm_share import RmShare
from qgpu.guardian.rules import classes
from qgpu.nvidia import abi, mig

#: Offsets of the pointers to parameters and rights in RM_ALLOC's structures.
_PARAMS_AT, _RIGHTS_AT = 16, 24
#: Offset of the new object's handle, which RM writes if it chooses it.
_HANDLE_AT = 8
#: How long an object of the page that RM shares with all waits for UVM's mappings in progress.
_PATIENCE_S = 1.0
# Refusals. Page tables cannot be counted; at a chosen address RM takes more memory than was asked for.
PAGE_TABLES, CHOSEN_PLACE = "address space with its page tables", "memory at an address of the card"
#: All processes that map into none of their own share it.
WHOLE_CARDS = "the whole card's address space"
#: RM never frees such a space, or frees the card's own with it (vaspaceapiDestruct_IMPL, _gvaspaceFlaVaspaceDestruct).
FABRIC_SPACE = "address space of the NVLink fabric"
#: RM cannot take it off the card in the middle of a kernel.
NOT_PREEMPTIBLE = "compute that cannot be preempted"
#: The card would write what a pod may not free, and into memory of others.
OTHER_MEMORY, BEYOND_MEMORY = "notifier, USERD or semaphores in no plain memory", "notifier or USERD beyond its memory"
_USERD_AT, _USERD_OFFSET_AT = (abi.offsetof("NV_CHANNEL_ALLOC_PARAMS", f) for f in ("hUserdMemory", "userdOffset"))
_GPFIFO_ENTRIES_AT = abi.offsetof("NV_CHANNEL_ALLOC_PARAMS", "gpFifoEntries")
_WRITABLE = frozenset({abi.NV01_MEMORY_LOCAL_USER, abi.NV01_MEMORY_SYSTEM})
#: Indices of address spaces (nvos.h) that RM does not have for the whole card.
_OWN_SPACES = (abi.NV_VASPACE_ALLOCATION_INDEX_GPU_NEW, abi.NV_VASPACE_ALLOCATION_INDEX_GPU_DEVICE)


@dataclass(slots=True)  # not frozen: see Notification
class _AllocRequest:
    """One RM_ALLOC: the pod's call, our copies of its structures, and the object that it asks for."""

    pod_call: PodCall
    block: IoctlBuffer
    asked: rm_calls.Alloc
    params: IoctlBuffer | None
    rights: IoctlBuffer | None
    rm: RmObject

    @property
    def tracked(self) -> bool:
        return self.rm.rm_class in classes.KEPT

    @property
    def made(self) -> Key:
        """The object's name, also if RM has chosen its handle."""
        return self.rm.client, self.block.u32(_HANDLE_AT)

    def perform(self, proxy: IoctlProxy) -> int:
        """Call RM, with pointers to our copies meanwhile; return an errno."""
        copies = ((_PARAMS_AT, self.params), (_RIGHTS_AT, self.rights))
        pointers = [(at, copy.at) for at, copy in copies if copy is not None]
        for at, address in pointers:
            self.block.patch_u64(at, address)
        self.pod_call.begin()
        error = proxy.escape(self.pod_call.file, self.pod_call.escape.number, self.block)
        for at, _ in pointers:
            self.block.restore(at, 8)
        return error


class AllocHandler(Handler):
    """Handles calls that make objects."""

    def __init__(self, ctx: HandlerContext, free_handler: FreeHandler, passthrough: Passthrough) -> None:
        super().__init__(ctx)
        self._checks, self._free_handler, self._passthrough = AllocChecks(ctx), free_handler, passthrough
        self._rm_share = RmShare(ctx)
        #: TSGs that were made preemptible.
        self._preemptible: dict[Key, RmObject] = {}

    def alloc(self, pod_call: PodCall, block: IoctlBuffer, asked: rm_calls.Alloc) -> int:
        """Make an object, or refuse it."""
        if asked.rm_class in abi.ROOT_CLASSES:
            return self._root_client(pod_call, block, asked)
        if asked.flags & abi.NVOS64_FLAGS_SERIALIZED:
            return block.answer(abi.NV_ERR_INVALID_ARGUMENT)
        row = classes.ALLOWED_TO_SOME.get(asked.rm_class)
        if row is None or not self._ctx.may(row.why):
            return self._refuse(block, classes.refusal(asked.rm_class), classes.name(asked.rm_class))
        if (request := self._copy_in(pod_call, block, asked)) is None:
            return block.answer(abi.NV_ERR_INVALID_ADDRESS)
        params, names_others = request.params, self._shared.clients.names_others
        # RM looks up a device's client as it first uses the address space: by then the handle may be another pod's, and
        # where two name each other, RM's search ends only with its stack (deviceInitClientShare).
        pod = "" if asked.rm_class == abi.NV01_DEVICE_0 else self._pod
        if params is not None and names_others(pod, asked.client, row.clients, params.data):
            return self._refuse(block, abi.NV_ERR_INVALID_OBJECT_HANDLE, of_others(row.name))
        if row.holds_memory_at is not None and params is not None and not params.u32(row.holds_memory_at):
            # RM would attach any number of pieces to it, and detaches all with its lock held.
            return self._refuse(block, abi.NV_ERR_NOT_SUPPORTED, UNKNOWN_ON_FABRIC)
        if asked.rm_class in classes.EVENTS and not self._free_handler.events.has_room():
            return self._refuse(block, abi.NV_ERR_INSUFFICIENT_RESOURCES, TOO_MANY)
        if asked.rm_class == abi.NV01_CONTEXT_DMA and params is not None:
            area = abi.ffi.from_buffer("NV_CONTEXT_DMA_ALLOCATION_PARAMS *", params.data)
            elsewhere = area.hSubDevice and self._checks.lies_elsewhere(request.rm, area.hSubDevice)
            if elsewhere or not rm_calls.holds_notifier(area.offset, area.limit):
                return self._refuse(block, abi.NV_ERR_INVALID_ARGUMENT, BEYOND_MEMORY)
        if asked.rm_class == abi.FERMI_VASPACE_A and params is not None and (kind := _refused_space(params)):
            return self._refuse(block, abi.NV_ERR_INVALID_ARGUMENT, kind)
        self._free_handler.undo_interrupted(pod_call, request.rm.key)
        if (memory := self._uncounted_memory(request)) is not None:
            return self._refuse(block, abi.NV_ERR_NOT_SUPPORTED, memory)
        known = not request.tracked and self._shared.clients.owns(self._pod, asked.client)
        if not known and not self._register(pod_call, asked.client):  # RM checks that the call's file reaches it
            return block.answer(abi.NV_ERR_INVALID_CLIENT)
        if asked.rm_class in classes.EVENTS:
            refusal = self._shared.claims.vacate(request.rm.key)
        elif asked.rm_class in OWN_BOUNDS:
            refusal = abi.NV_OK
        else:
            refusal = self._untracked.refusal(asked.client, asked.handle, asked.rm_class)
        if refusal:
            return block.answer(refusal)
        if request.rm.written and not self._may_be_written(pod_call.file, request.rm):
            return self._refuse(block, abi.NV_ERR_INVALID_OBJECT_HANDLE, OTHER_MEMORY)
        if request.rm.written and self._is_written_elsewhere(request):
            return self._refuse(block, abi.NV_ERR_INVALID_ARGUMENT, BEYOND_MEMORY)
        if refusal := self._checks.admit(pod_call.pid, request.rm):
            return block.answer(refusal)
        if self._is_first_device(request):
            return self._passthrough.continue_in_kernel(pod_call, block, request.rm)
        if asked.rm_class == abi.RM_USER_SHARED_DATA:
            self._ctx.rare.wait()
            if not self._ctx.uvm_mappings.wait(_PATIENCE_S):
                return block.answer(abi.NV_ERR_BUSY_RETRY)  # a mapping could name the object at once
        kept = None
        if row.holds_memory_at is not None and params is not None:
            kept = self._shared.quota.number_of((asked.client, params.u32(row.holds_memory_at)))
        if request.tracked and (refusal := self._ctx.claim(request.rm, kept)):
            return block.answer(refusal)
        if asked.rm_class == abi.NV50_P2P:
            self._shared.clients.record_unrestorable(asked.client, PEER_ACCESS)
        return self._make(request)

    def _copy_in(self, pod_call: PodCall, block: IoctlBuffer, asked: rm_calls.Alloc) -> _AllocRequest | None:
        """Copy what the call points to; None if the pod's memory is not readable."""
        params = rights = None
        if asked.params and (params := self._proxy.read_params(pod_call.call.tid, asked.params)) is None:
            return None
        if asked.rights and (rights := self._proxy.read(pod_call.call.tid, asked.rights, 4)) is None:
            return None
        rm = RmObject(asked.client, asked.handle, asked.parent, asked.rm_class)
        if params is not None:
            if asked.rm_class == abi.RM_USER_SHARED_DATA:
                virtualize.leave_out_processes(params.data)
            rm.detail = rm_calls.detail(asked.rm_class, params.data)
            rm.uses = rm_calls.handles(rm_calls.USES, asked.rm_class, params.data)
            rm.written = rm_calls.handles(rm_calls.WRITTEN, asked.rm_class, params.data)
            if asked.rm_class in abi.GPFIFO_CLASSES and (memory := params.u32(_USERD_AT)):
                rm.userd = Userd(memory, params.u64(_USERD_OFFSET_AT), params.u32(_GPFIFO_ENTRIES_AT))
        return _AllocRequest(pod_call, block, asked, params, rights, rm)

    def _may_be_written(self, file: int, rm: RmObject) -> bool:
        """Tell whether the card or RM may write what an object names; note the memory, and what that lies below.

        The page that RM shares with all must stay, and so must pages of the process that it may only read. Of a virtual
        address nobody knows the memory. Host memory has the address that the IOMMU gives it for the card that it was
        made for (memdescGetPhysAddr); semaphores there RM writes itself.
        """
        entry, parents = self._shared.table.clients.get(rm.client), set[int]()
        by_card = rm.rm_class != classes.SEMAPHORE_SURFACE
        behind = entry.memory_of if entry is not None and by_card else {}
        memories = (*rm.written, *(behind[each] for each in rm.written if each in behind))
        for each in memories:
            # RM itself looks for what a TSG names only as it makes a channel: what has the handle by then.
            about = self._gpu_ops.object_info(file, rm.client, each)
            if about is None or not behind.get(each, each):
                return False
            if about[0] not in _WRITABLE and (about[0] != abi.NV01_CONTEXT_DMA or each not in behind):
                return False
            parents.add(about[1])
        rm.written = (*memories, *parents - {0, rm.client})
        return not (by_card and self._checks.lies_elsewhere(rm, *parents))

    def _is_written_elsewhere(self, request: _AllocRequest) -> bool:
        """Tell whether the card would write for a TSG or channel on another card, or USERD beyond its memory.

        RM compares neither card nor USERD's place (kchannelCreateUserdMemDesc_GV100): the card would write at any
        address of its own memory.
        """
        rm, params, table = request.rm, request.params, self._shared.table
        behind = table.allocations.behind((rm.client, each) for each in rm.written)
        if any(each.foreign or each.instance != table.instance_of(rm) for each in behind):
            return True
        if rm.rm_class not in abi.GPFIFO_CLASSES or params is None or not (memory := params.u32(_USERD_AT)):
            return False
        known = table.objects.get((rm.client, memory))
        size = known.detail if known else self._gpu_ops.size_by_file(request.pod_call.file, rm.client, memory)
        return params.u64(_USERD_OFFSET_AT) + abi.USERD_BYTES > size

    def _uncounted_memory(self, request: _AllocRequest) -> str | None:
        """Name memory that RM takes without a way to count it: a pod under a limit may not have it."""
        if not self._ctx.limited():
            return None
        rm, params = request.rm, request.params
        if rm.rm_class == abi.NV50_MEMORY_VIRTUAL and rm_calls.takes_tables(rm.detail):
            return PAGE_TABLES
        if rm.rm_class == abi.NV01_MEMORY_LOCAL_USER and params is not None:
            flags, attributes2 = params.u32(rm_calls.MEMORY_FLAGS_AT), params.u32(rm_calls.MEMORY_ATTR2_AT)
            return CHOSEN_PLACE if rm_calls.chooses_place(flags, attributes2) else None
        return None

    def _is_first_device(self, request: _AllocRequest) -> bool:
        """Tell whether this is the first device of its client, which the kernel must make for the pod itself."""
        if request.rm.rm_class != abi.NV01_DEVICE_0 or request.pod_call.escape.wrapped:
            return False
        return not self._passthrough.has_device(request.rm.client) and self._passthrough.makes_devices(request.pod_call)

    def _root_client(self, pod_call: PodCall, block: IoctlBuffer, asked: rm_calls.Alloc) -> int:
        """Make a root client: the kernel makes the first of a file, the guardian any other, from a copy of the call.

        RM then takes the guardian for the owner of the others. So the guardian maps their memory for the CPU, too, and
        shares objects between them and the pod's other clients before it duplicates them.
        """
        if pod_call.escape.wrapped:
            return errno.EINVAL
        if not self._shared.control_files.has_room(self._pod):
            return self._refuse(block, abi.NV_ERR_INSUFFICIENT_RESOURCES, control_files.TOO_MANY)
        if self._passthrough.makes_root_clients(pod_call):
            return self._passthrough.continue_in_kernel(pod_call, block)
        if not self._shared.clients.may_have_another(self._pod):
            return block.answer(abi.NV_ERR_INSUFFICIENT_RESOURCES)
        if not self._shared.files.makers.claim(pod_call.file, pod_call.pid, control_files.mark_of(self._pod)):
            return self._refuse(block, abi.NV_ERR_INVALID_CLIENT, OTHER_PROCESS)
        if (request := self._copy_in(pod_call, block, asked)) is None:
            return block.answer(abi.NV_ERR_INVALID_ADDRESS)
        self._passthrough.end_on(pod_call.file)
        if error := request.perform(self._proxy):
            return error
        client = block.u32(_HANDLE_AT)
        if block.status == abi.NV_OK and not self._register(pod_call, client, made_here=True):
            self._gpu_ops.free(pod_call.file, client, client)
            block.status = abi.NV_ERR_INSUFFICIENT_RESOURCES
        if request.params is not None:
            request.params.store_changes()
        block.store()
        return 0

    def _make(self, request: _AllocRequest) -> int:
        row = classes.ALLOWED_TO_SOME[request.rm.rm_class]
        try:
            error = self._perform_alloc(request, row)
        except OSError:  # RM was not called
            self._shared.claims.cancel(request.rm.key)
            raise
        self._ctx.tell_drivers_refusal(row.why, row.name, request.block.status)
        self._account(request, error)
        if request.params is not None:
            request.params.store_changes()
        if not error:
            request.block.store()
        return error

    def _perform_alloc(self, request: _AllocRequest, row: classes.Class) -> int:
        """Call RM; where the parameters name a capability by descriptor, pass our copy of that descriptor."""
        params = request.params
        # With a mask of figures RM looks through all clients' objects, and once more as the object goes.
        looks = request.rm.rm_class == abi.RM_USER_SHARED_DATA and params is not None and any(params.data)
        if params is None or not row.capability:
            with self._ctx.capability_for(row.why), self._ctx.rare.timed(2) if looks else nullcontext():
                return request.perform(self._proxy)
        with self._ctx.taken(request.pod_call, params.u32()) as taken:
            params.patch_u64(0, taken)
            error = request.perform(self._proxy)
        params.restore(0, 8)
        return error

    def _account(self, request: _AllocRequest, error: int) -> None:
        """Confirm the claim or take it back; free what cannot stay, and answer with the reason."""
        rm, file = request.rm, request.pod_call.file
        made = not error and request.block.status == abi.NV_OK
        if request.tracked and not made:
            self._shared.claims.cancel(rm.key)
        elif request.tracked and not self._confirm(request):
            request.block.status = abi.NV_ERR_NO_MEMORY
        elif rm.rm_class == abi.NV20_SUBDEVICE_0 and (refusal := self._learn_instance(file, rm)):
            request.block.status = refusal
        elif made:
            self._complete(request)

    def _complete(self, request: _AllocRequest) -> None:
        """Do what some classes need once RM has made the object."""
        rm, file = request.rm, request.pod_call.file
        self._untracked.add(*request.made, rm.rm_class, rm.detail if rm.rm_class == abi.NV01_CONTEXT_DMA else None)
        if classes.on_compute_engine(rm.rm_class):
            self._make_preemptible(request)
        elif rm.rm_class in classes.EVENTS:
            self._free_handler.events.add(*request.made)
        elif rm.rm_class == abi.RM_USER_SHARED_DATA:
            self._rm_share.keep_from_all(file, request.made)
        elif rm.rm_class == abi.NV50_THIRD_PARTY_P2P:
            self._gpu_ops.register_p2p(file, rm.client, rm.handle)
        elif self._shared.reconciler.is_compute_channel(rm):
            self._learn_context(file, rm.key)

    def _make_preemptible(self, request: _AllocRequest) -> None:
        """Allow RM to preempt a compute TSG in the middle of a kernel, whether its program asks for that or not.

        Without a subdevice on the TSG's card RM cannot be asked, and nothing would take the TSG's kernels off the card:
        the new object may not stay.
        """
        rm, file, table = request.rm, request.pod_call.file, self._shared.table
        with self._shared.lock:
            # RM may reuse a handle for another TSG.
            self._preemptible = {key: was for key, was in self._preemptible.items() if table.objects.get(key) is was}
            if (tsg := table.tsg_above(rm)) is not None and tsg.key in self._preemptible:
                return
            subdevice = table.subdevice_of((rm.client, tsg.parent)) if tsg is not None else None
        if tsg and subdevice and self._gpu_ops.make_preemptible(file, rm.client, subdevice, tsg.handle):
            self._preemptible[tsg.key] = tsg
            return
        if self._shared.allowance(self._pod).graphics:
            return  # its draws cannot be preempted anyway (docs/decisions/0057-graphics.md)
        self._free_handler.discard(request.pod_call, request.made)
        request.block.status = abi.NV_ERR_INVALID_STATE
        self._count(NOT_PREEMPTIBLE)

    def _learn_context(self, file: int, key: Key) -> None:
        """Ask RM which context a channel has before the pod can use it: it may run and be freed at once."""
        if (channel := self._shared.table.objects.get(key)) is None:
            return
        context = self._gpu_ops.context_by_file(file, channel)
        with self._shared.lock:
            if context and self._shared.table.objects.get(key) is channel:
                self._shared.note(confirm_fact(key, context))

    def _confirm(self, request: _AllocRequest) -> bool:
        """Confirm what RM has made; free memory whose true size does not fit."""
        rm, size = request.rm, None
        if rm.rm_class == abi.NV01_MEMORY_LOCAL_USER and request.params is not None:
            size = rm_calls.detail(rm.rm_class, request.params.data)
        if self._shared.claims.confirm(rm.key, size):
            return True
        self._free_handler.discard(request.pod_call, rm.key)
        self._count("memory over the limit")
        return False

    def _learn_instance(self, file: int, subdevice: RmObject) -> int:
        """Ask RM which card a device is on, now that it has a subdevice; return why if the device was freed again."""
        key = subdevice.client, subdevice.parent
        device = self._shared.table.objects.get(key)
        if device is None and (self._gpu_ops.object_info(file, *key) or (0,))[0] == abi.NV01_DEVICE_0:
            # The kernel made it when a guardian died, or under another handle than expected.
            device = RmObject(*key, subdevice.client, abi.NV01_DEVICE_0, NO_INSTANCE)
        if device is None or device.rm_class != abi.NV01_DEVICE_0 or device.detail != NO_INSTANCE:
            return abi.NV_OK
        found = self._gpu_ops.instance_of(file, *subdevice.key)
        instance = self._shared.allowance(self._pod).place_on(mig.card_of(found)) if found is not None else None
        if instance is not None:
            if self._shared.claims.set_instance(device, instance):
                return abi.NV_OK
            status, what = abi.NV_ERR_NO_MEMORY, "memory over the limit"
        else:
            status, what = abi.NV_ERR_INSUFFICIENT_PERMISSIONS, "card without a grant"
        self._gpu_ops.free(file, *device.key)
        self._shared.claims.freed(device.key)
        self._count(what)
        return status


def _refused_space(params: IoctlBuffer) -> str:
    """Return what kind of address space no pod may make, as parameters ask for it; empty if a pod may."""
    if params.u32() not in _OWN_SPACES:
        return WHOLE_CARDS
    on_fabric = params.u32(abi.NV_VASPACE_PARAMS_FLAGS_AT) & abi.NV_VASPACE_ALLOCATION_FLAGS_IS_FLA
    return FABRIC_SPACE if on_fabric else ""

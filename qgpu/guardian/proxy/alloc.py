"""One pod's RM objects: allocate and free them, and charge their memory.

The kernel performs a call for the pod itself only if RM ties the object to the calling process: a file's first root
client and device (``passthrough.py``), and user memory that the card reads (class 0x71), whose pages belong to the
process. Without CAP_SYS_ADMIN the latter call cannot take card memory (rmapi_deprecated_allocmemory.c).
"""

from __future__ import annotations

import errno
import os
import struct
from contextlib import nullcontext
from dataclasses import dataclass

from qgpu.guardian.accounting.object_table import NO_INSTANCE, PEER_ACCESS
from qgpu.guardian.accounting.rm_object import Key, RmObject, confirm_fact
from qgpu.guardian.proxy import client_ownership, rm_calls
from qgpu.guardian.proxy.continued_memory import ContinuedMemory
from qgpu.guardian.proxy.free import FreeHandler
from qgpu.guardian.proxy.handler_context import PROCEED, Handler, HandlerContext, PodCall, status_of
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.guardian.proxy.os_events import EVENT_OBJECTS, TOO_MANY, PodEvents
from qgpu.guardian.proxy.passthrough import Passthrough
from qgpu.guardian.rules import classes, tools
from qgpu.linux import proc
from qgpu.nvidia import abi, mig

_U32 = struct.Struct("<I")
#: Offsets of the pointers to parameters and rights in RM_ALLOC's structures; NVOS05 has neither.
_POINTERS_AT, _POINTERS_BYTES, _RIGHTS_AT = 16, 16, 24
#: Offset of the new object's handle, which RM writes if it chooses it.
_HANDLE_AT = 8
#: The longest queue of a memory mapper: RM takes 56 bytes of the host's memory for each of its entries.
_MOST_QUEUED = 1 << 16
#: How many devices a client may have on one card. The recorded programs make one. When RM is asked about a process, it
#: looks through all objects of a client once for each of them, under its locks.
_MOST_DEVICES = 128
TOO_MANY_DEVICES = "too many devices of a client"
_BARE_BYTES = abi.sizeof("NVOS05_PARAMETERS")
#: A free of one of these frees a profiler, too.
_ABOVE_PROFILERS = frozenset({abi.NV01_DEVICE_0, abi.NV20_SUBDEVICE_0})
#: The refusal of page tables that cannot be counted.
PAGE_TABLES = "address space with its page tables"
#: The refusal of memory at a chosen address, where RM takes more than was asked for.
CHOSEN_PLACE = "memory at an address of the card"
#: The refusal of an address space that processes share which map into none of their own.
WHOLE_CARDS = "the whole card's address space"
#: The refusal of compute that RM cannot take off the card in the middle of a kernel.
NOT_PREEMPTIBLE = "compute that cannot be preempted"
_OWN_SPACES = (abi.NV_VASPACE_ALLOCATION_INDEX_GPU_NEW, abi.NV_VASPACE_ALLOCATION_INDEX_GPU_DEVICE)


@dataclass(slots=True)  # not frozen: see Notification
class _AllocRequest:
    """One RM_ALLOC: the pod's call, our copies of its structures, and the object that it asks for."""

    pod_call: PodCall
    escape: rm_calls.Escape
    block: IoctlBuffer
    asked: rm_calls.Alloc
    params: IoctlBuffer | None
    rights: IoctlBuffer | None
    rm: RmObject

    @property
    def tracked(self) -> bool:
        """Tell whether the object table keeps objects of this class."""
        return self.rm.rm_class in classes.KEPT

    @property
    def status(self) -> int:
        """Return the status in the call's structure."""
        return status_of(self.block, self.asked.status_at)

    def answer(self, status: int) -> None:
        """Put a status into the call's structure."""
        self.block.patch_u32(self.asked.status_at, status)

    def restore_pointers(self) -> None:
        """Put the pod's own pointers back in the place of ours."""
        if self.escape.size > _BARE_BYTES:
            self.block.restore(_POINTERS_AT, 8)
        if self.asked.rights:
            self.block.restore(_RIGHTS_AT, 8)


class AllocHandler(Handler):
    """Handles calls that make or free objects."""

    def __init__(
        self, ctx: HandlerContext, free_handler: FreeHandler, passthrough: Passthrough, continued: ContinuedMemory
    ) -> None:
        super().__init__(ctx)
        self._continued = continued
        self._free_handler = free_handler
        self._passthrough = passthrough
        #: TSGs that were made preemptible.
        self._preemptible: dict[Key, RmObject] = {}
        self._events = PodEvents(ctx, EVENT_OBJECTS, lambda key: self._gpu_ops.exists(key))

    def alloc(self, pod_call: PodCall, escape: rm_calls.Escape, block: IoctlBuffer, asked: rm_calls.Alloc) -> int:
        """Make an object, or refuse it."""
        if asked.serialized:
            return self._ctx.answer(block, asked.status_at, abi.NV_ERR_INVALID_ARGUMENT)
        row = classes.ALLOWED_TO_SOME.get(asked.rm_class)
        if row is None or not self._ctx.may(row.why):
            return self._ctx.refuse(
                block, asked.status_at, classes.refusal(asked.rm_class), classes.name(asked.rm_class)
            )
        if (request := self._copy_in(pod_call, escape, block, asked)) is None:
            return self._ctx.answer(block, asked.status_at, abi.NV_ERR_INVALID_ADDRESS)
        if self._names_foreign_client(request):
            return self._refuse(request, abi.NV_ERR_INVALID_OBJECT_HANDLE, client_ownership.name(row.name))
        if asked.rm_class in classes.EVENTS and not self._events.has_room():
            return self._refuse(request, abi.NV_ERR_INSUFFICIENT_RESOURCES, TOO_MANY)
        if asked.rm_class == abi.FERMI_VASPACE_A and _is_whole_cards(request.params):
            return self._refuse(request, abi.NV_ERR_INVALID_ARGUMENT, WHOLE_CARDS)
        self.undo_interrupted(pod_call, request.rm.key)
        if (memory := self._uncounted_memory(request)) is not None:
            return self._refuse(request, abi.NV_ERR_NOT_SUPPORTED, memory)
        if not self._is_ours(request):
            return self._refuse(request, abi.NV_ERR_INVALID_CLIENT)
        if refusal := self.admit(pod_call.pid, request.rm):
            return self._refuse(request, refusal)
        if self._is_first_device(request):
            block.restore(_POINTERS_AT, _POINTERS_BYTES)
            return self._passthrough.first_device(pod_call, block, request.rm, asked.status_at)
        if request.tracked and (refusal := self._ctx.claim(request.rm, self._kept_memory(request, row))):
            return self._refuse(request, refusal)
        if asked.rm_class == abi.NV50_P2P:
            self._shared.record_unrestorable(asked.client, PEER_ACCESS)
        return self._make(request)

    def _copy_in(
        self, pod_call: PodCall, escape: rm_calls.Escape, block: IoctlBuffer, asked: rm_calls.Alloc
    ) -> _AllocRequest | None:
        """Copy what the call points to, and point the call at the copies; None if the pod's memory is not readable."""
        params = rights = None
        if asked.params and (params := self._proxy.read_params(pod_call.call.tid, asked.params)) is None:
            return None
        if asked.rights and (rights := self._proxy.read(pod_call.call.tid, asked.rights, _U32.size)) is None:
            return None
        if params is not None:
            block.patch_u64(_POINTERS_AT, params.at)
        if rights is not None:
            block.patch_u64(_RIGHTS_AT, rights.at)
        detail = rm_calls.detail(asked.rm_class, params.data) if params else 0
        rm = RmObject(asked.client, asked.handle, asked.parent, asked.rm_class, detail)
        return _AllocRequest(pod_call, escape, block, asked, params, rights, rm)

    def _refuse(self, request: _AllocRequest, status: int, what: str | None = None) -> int:
        """Answer with a status and the pod's own pointers; count the refusal if it has a name."""
        request.block.restore(_POINTERS_AT, _POINTERS_BYTES)
        if what is None:
            return self._ctx.answer(request.block, request.asked.status_at, status)
        return self._ctx.refuse(request.block, request.asked.status_at, status, what)

    def _names_foreign_client(self, request: _AllocRequest) -> bool:
        """Tell whether the parameters name another pod's client."""
        if request.params is None:
            return False
        places = classes.ALLOWED_TO_SOME[request.rm.rm_class].clients
        return client_ownership.names_any(self._shared, self._pod, request.rm.client, places, request.params.data)

    def _is_ours(self, request: _AllocRequest) -> bool:
        """Tell whether the object's client is the pod's. RM checks that the call's file reaches it."""
        pod_call, client = request.pod_call, request.rm.client
        if not request.tracked and self._shared.owns(self._pod, client):
            return True
        return self._shared.register_client(pod_call.pid, pod_call.call.fd, pod_call.file, client)

    def _uncounted_memory(self, request: _AllocRequest) -> str | None:
        """Name memory that RM takes without a way to count it: a pod under a limit may not have it."""
        if not self._ctx.limited():
            return None
        rm, params = request.rm, request.params
        if rm.rm_class == abi.NV50_MEMORY_VIRTUAL and rm_calls.takes_tables(rm.detail):
            return PAGE_TABLES
        if rm.rm_class == abi.NV01_MEMORY_LOCAL_USER and params and rm_calls.chooses_place(params.data):
            return CHOSEN_PLACE
        return None

    def _kept_memory(self, request: _AllocRequest, row: classes.Class) -> int | None:
        """Return the number of the allocation that the object keeps; None if it keeps none."""
        if row.holds_memory_at is None or request.params is None:
            return None
        (memory,) = _U32.unpack_from(request.params.data, row.holds_memory_at)
        return self._shared.quota.number_of((request.rm.client, memory))

    def _is_first_device(self, request: _AllocRequest) -> bool:
        """Tell whether this is the first device of its client, which the kernel must make for the pod itself."""
        if request.rm.rm_class != abi.NV01_DEVICE_0 or request.escape.wrapped:
            return False
        return not self._passthrough.has_device(request.rm.client) and self._passthrough.makes_devices(request.pod_call)

    def root_client(self, pod_call: PodCall, escape: rm_calls.Escape, block: IoctlBuffer, asked: rm_calls.Alloc) -> int:
        """Make a root client: the kernel makes the first of a file, the guardian any other, from a copy of the call.

        RM then takes the guardian for the owner of the others. So the guardian maps their memory for the CPU, too, and
        shares objects between them and the pod's other clients before it duplicates them.
        """
        if escape.wrapped:
            return errno.EINVAL
        if self._passthrough.makes_root_clients(pod_call):
            return self._passthrough.root_client(pod_call, block, asked)
        if not self._shared.may_have_another_client(self._pod):
            return self._ctx.answer(block, asked.status_at, abi.NV_ERR_INSUFFICIENT_RESOURCES)
        if not self._shared.files.makers.claim(pod_call.file, pod_call.pid):
            return self._ctx.refuse(block, asked.status_at, abi.NV_ERR_INVALID_CLIENT, client_ownership.OTHER_PROCESS)
        if (request := self._copy_in(pod_call, escape, block, asked)) is None:
            return self._ctx.answer(block, asked.status_at, abi.NV_ERR_INVALID_ADDRESS)
        self._passthrough.end_on(pod_call.file)
        try:
            pod_call.begin()
            error = self._proxy.escape(pod_call.file, escape.number, block)
        finally:
            request.restore_pointers()
        if error:
            return error
        (client,) = _U32.unpack_from(block.data, _HANDLE_AT)
        if request.status == abi.NV_OK and not self._shared.register_client(
            pod_call.pid, pod_call.call.fd, pod_call.file, client, made_here=True
        ):
            self._gpu_ops.free(pod_call.file, client, client)
            request.answer(abi.NV_ERR_INSUFFICIENT_RESOURCES)
        if request.params is not None:
            request.params.store_changes()
        block.store()
        return 0

    def _make(self, request: _AllocRequest) -> int:
        """Have RM make the object, account for the result, and write the answer back."""
        try:
            try:
                error = self._perform_alloc(request)
            except OSError:  # RM was not called
                self._shared.cancel_claim(request.rm.key)
                raise
            row = classes.ALLOWED_TO_SOME[request.rm.rm_class]
            self._ctx.tell_drivers_refusal(row.why, row.name, request.status)
            self._account(request, error)
        finally:
            request.restore_pointers()
        if request.params is not None:
            request.params.store_changes()
        if not error:
            request.block.store()
        return error

    def _perform_alloc(self, request: _AllocRequest) -> int:
        """Call RM; where the parameters name a capability by descriptor, pass our copy of that descriptor."""
        pod_call, params = request.pod_call, request.params
        row = classes.ALLOWED_TO_SOME[request.rm.rm_class]
        if params is None or not row.capability:
            pod_call.begin()
            with self._ctx.capability_for(row.why):
                return self._proxy.escape(pod_call.file, request.escape.number, request.block)
        capability = _U32.unpack_from(params.data)[0]
        taken = self._ctx.take_fd(pod_call, capability)
        try:
            params.patch_u64(0, taken)
            pod_call.begin()
            return self._proxy.escape(pod_call.file, request.escape.number, request.block)
        finally:
            params.restore(0, 8)
            self._ctx.close_fd(taken, proc.device_of(taken))

    def _account(self, request: _AllocRequest, error: int) -> None:
        """Confirm the claim or take it back; free what cannot stay, and answer with the reason."""
        rm, file = request.rm, request.pod_call.file
        made = not error and request.status == abi.NV_OK
        if request.tracked and not made:
            self._shared.cancel_claim(rm.key)
        elif request.tracked and not self._confirm(request):
            request.answer(abi.NV_ERR_NO_MEMORY)
        elif rm.rm_class == abi.NV20_SUBDEVICE_0 and (refusal := self._learn_instance(file, rm)):
            request.answer(refusal)
        elif request.status == abi.NV_OK:
            self._complete(request)

    def _complete(self, request: _AllocRequest) -> None:
        """Do what some classes need once RM has made the object."""
        rm, file = request.rm, request.pod_call.file
        if classes.on_compute_engine(rm.rm_class):
            self._make_preemptible(request)
        elif rm.rm_class in classes.EVENTS:
            self._events.add(rm.client, *_U32.unpack_from(request.block.data, _HANDLE_AT))
        elif rm.rm_class == abi.NV50_THIRD_PARTY_P2P:
            self._gpu_ops.register_p2p(file, rm.client, rm.handle)
        elif self._shared.reconciler.is_compute_channel(rm):
            self._learn_context(file, rm.key)

    def admit(self, pid: int, rm: RmObject) -> int:
        """Return the status with which an object's class, parent or card is refused; 0 if it may be made."""
        if rm.rm_class == abi.NV01_DEVICE_0:
            allowance = self._shared.allowance(self._pod)
            place = allowance.place_on(rm.detail)
            if place is None or not _has_open(pid, os.makedev(self._shared.major, allowance.minors[place])):
                self._shared.refusals.count(self._pod, "card without a grant")
                return abi.NV_ERR_INSUFFICIENT_PERMISSIONS
            if self._devices_of(rm.client, place) >= _MOST_DEVICES:
                self._shared.refusals.count(self._pod, TOO_MANY_DEVICES)
                return abi.NV_ERR_INSUFFICIENT_RESOURCES
            rm.detail = place
            return abi.NV_OK
        if rm.rm_class == abi.KEPLER_CHANNEL_GROUP_A and not self._is_metered(rm):
            self._shared.refusals.count(self._pod, "TSG whose time RM counts as the guardian's")
            return abi.NV_ERR_INVALID_ARGUMENT
        if rm.rm_class in classes.MIG_SUBSCRIPTIONS and not self._is_own_instance(rm):
            self._shared.refusals.count(self._pod, "MIG instance without a grant")
            return abi.NV_ERR_INSUFFICIENT_PERMISSIONS
        if rm.rm_class in abi.GPFIFO_CLASSES:
            parent = self._shared.table.objects.get((rm.client, rm.parent))
            in_tsg = parent is not None and parent.rm_class == abi.KEPLER_CHANNEL_GROUP_A
            if not in_tsg and not self._may_stand_alone(rm):
                self._shared.refusals.count(self._pod, "compute channel outside a TSG")
                return abi.NV_ERR_INVALID_ARGUMENT
        if classes.on_compute_engine(rm.rm_class) and not self._in_compute_tsg(rm):
            self._shared.refusals.count(self._pod, "compute outside a compute TSG")  # nobody would pay for its time
            return abi.NV_ERR_INVALID_ARGUMENT
        if rm.rm_class == abi.NV_MEMORY_MAPPER and rm.detail > _MOST_QUEUED:
            self._shared.refusals.count(self._pod, "long queue of memory mappings")
            return abi.NV_ERR_INVALID_ARGUMENT
        if rm.rm_class in classes.KEPT and rm.handle == 0:
            self._shared.refusals.count(self._pod, "object without a handle")
            return abi.NV_ERR_INVALID_ARGUMENT  # RM would choose one; no CUDA library asks for that
        return abi.NV_OK

    def _devices_of(self, client: int, place: int) -> int:
        """Return how many devices of a client may be on a card."""
        with self._shared.lock:
            table = self._shared.table
            found = [table.objects[client, handle].detail for handle in table.devices.get(client, ())]
        return sum(each in (place, NO_INSTANCE) for each in found)

    def _is_metered(self, rm: RmObject) -> bool:
        """Tell whether a TSG's time can be told: by its channels' contexts, or by the process that made its client."""
        entry = self._shared.table.clients.get(rm.client)
        return self._gpu_ops.knows_contexts or entry is None or not entry.made_here

    def _is_own_instance(self, rm: RmObject) -> bool:
        """Tell whether a subscription is to the pod's own MIG instance, or below a whole card, where RM refuses it."""
        if (place := self._shared.table.instance_of(rm)) is None:
            return False
        own = mig.numbers_at(place)
        return own is None or rm.detail == own[classes.MIG_SUBSCRIPTIONS.index(rm.rm_class)]

    def _may_stand_alone(self, rm: RmObject) -> bool:
        """Tell whether a channel may be made below a device: RM makes a TSG for it, which has no handle.

        Compute always needs a TSG, whose timeslice can be set. Video and checkpoints use such channels.
        """
        return self._shared.table.stands_alone(rm) and rm.detail != 0 and rm.detail not in abi.GR_ENGINES

    def _tsg_of(self, rm: RmObject) -> RmObject | None:
        """Return the TSG of an object that lies below a channel; None if the channel has none."""
        objects = self._shared.table.objects
        channel = objects.get((rm.client, rm.parent))
        return objects.get((rm.client, channel.parent)) if channel is not None else None

    def _in_compute_tsg(self, rm: RmObject) -> bool:
        return (tsg := self._tsg_of(rm)) is not None and self._shared.table.is_compute(tsg)

    def _make_preemptible(self, request: _AllocRequest) -> None:
        """Allow RM to preempt a compute TSG in the middle of a kernel, whether its program asks for that or not.

        Without a subdevice on the TSG's card RM cannot be asked, and nothing would take the TSG's kernels off the card:
        the new object may not stay.
        """
        rm, file, table = request.rm, request.pod_call.file, self._shared.table
        with self._shared.lock:
            # RM may reuse a handle for another TSG.
            self._preemptible = {key: was for key, was in self._preemptible.items() if table.objects.get(key) is was}
            if (tsg := self._tsg_of(rm)) is not None and tsg.key in self._preemptible:
                return
            subdevice = table.subdevice_of((rm.client, tsg.parent)) if tsg is not None else None
        if tsg and subdevice and self._gpu_ops.make_preemptible(file, rm.client, subdevice, tsg.handle):
            self._preemptible[tsg.key] = tsg
            return
        if self._shared.allowance(self._pod).graphics:
            return  # its draws cannot be preempted anyway (docs/decisions/0057-graphics.md)
        (handle,) = _U32.unpack_from(request.block.data, _HANDLE_AT)
        self.discard(request.pod_call, (rm.client, handle))
        request.answer(abi.NV_ERR_INVALID_STATE)
        self._shared.refusals.count(self._pod, NOT_PREEMPTIBLE)

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
        if self._shared.confirm(rm.key, size):
            return True
        self.discard(request.pod_call, rm.key)
        self._shared.refusals.count(self._pod, "memory over the limit")
        return False

    def free(self, pod_call: PodCall, number: int, block: IoctlBuffer, client: int, handle: int, status_at: int) -> int:
        """Free an object and all below it."""
        key = client, handle
        if self._free_handler.is_ours(key) and key in self._shared.table.objects:
            return self._ctx.answer(block, status_at, abi.NV_ERR_OBJECT_NOT_FOUND)
        was, channels = self._shared.table.objects.get(key), list[Key]()
        gone, error, patched = False, 0, False
        holds_others = client == handle or (was is not None and was.rm_class in _ABOVE_PROFILERS)
        unbinds = self._shared.monitors.unbinds(self._pod, client, handle, holds_others=holds_others)

        def carry_out() -> bool:
            nonlocal error, patched
            # Not before: a pod decides how long it takes to look at the rest. And not for the heap's free: it takes
            # memory only, and RM refuses it for channels, so a pod could use it to open gates.
            if number == abi.NV_ESC_RM_FREE:
                channels.extend(self._shared.begin_free(key, pod_call.file))
            error = self._proxy.escape(pod_call.file, number, block)
            if pod_call.is_retry and not error and status_of(block, status_at) in abi.UNKNOWN_TO_RM:
                patched = True
                block.patch_u32(status_at, abi.NV_OK)  # the dead guardian has freed it
            return not error and status_of(block, status_at) == abi.NV_OK

        try:
            with self._shared.monitors.turn(self._pod, client) if unbinds else nullcontext():
                gone = self._free_handler.free(pod_call, key, carry_out)
        finally:
            self._shared.end_free(key, was, channels, gone=gone)
        if gone:
            self._events.discard(client, handle)
        if gone and unbinds:
            self._shared.monitors.unbound(self._pod, client)
        if gone and client == handle and not patched:  # RM has freed it, so the file has no other root client
            self._shared.files.forget_root(pod_call.file)
        if not error:
            block.store()
        return error

    def undo_interrupted(self, pod_call: PodCall, key: Key) -> None:
        """Free what a dead guardian may have made for this call; the call then makes it again."""
        if not pod_call.is_retry or not self._shared.register_client(
            pod_call.pid, pod_call.call.fd, pod_call.file, key[0]
        ):
            return
        if self._gpu_ops.object_info(pod_call.file, *key) is None and key not in self._shared.table.objects:
            return
        self.discard(pod_call, key)

    def discard(self, pod_call: PodCall, key: Key) -> None:
        """Free what RM has made and the pod may not have. Memory that something else keeps by now stays charged."""
        was, channels = self._shared.table.objects.get(key), self._shared.begin_free(key, pod_call.file)
        gone = False

        def carry_out() -> bool:
            self._gpu_ops.free(pod_call.file, *key)
            return self._gpu_ops.object_info(pod_call.file, *key) is None

        try:
            gone = self._free_handler.free(pod_call, key, carry_out)
        finally:
            self._shared.end_free(key, was, channels, gone=gone)

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
            if self._shared.set_instance(device, instance):
                return abi.NV_OK
            status, what = abi.NV_ERR_NO_MEMORY, "memory over the limit"
        else:
            status, what = abi.NV_ERR_INSUFFICIENT_PERMISSIONS, "card without a grant"
        self._gpu_ops.free(file, *device.key)
        self._shared.end_free(device.key, self._shared.table.objects.get(device.key), [], gone=True)
        self._shared.refusals.count(self._pod, what)
        return status

    def alloc_memory(self, pod_call: PodCall, block: IoctlBuffer, asked: rm_calls.AllocMemory, *, wrapped: bool) -> int:
        """Make memory by the old call: the process's own memory for the card, or system memory.

        With a descriptor RM also prepares the mapping, which it does for the process alone that made the client
        (osapi.c, rm_create_mmap_context). So the kernel performs these calls for the clients that it made. What it
        makes is looked for among the pod's clients (``continued_memory.py``), so the file must have no others.
        """
        entry = self._shared.table.clients.get(asked.client)
        if entry is not None and entry.pod != self._pod:
            what = client_ownership.name(classes.name(asked.rm_class))
            return self._ctx.refuse(block, asked.status_at, abi.NV_ERR_INVALID_CLIENT, what)
        by_kernel = entry is None or not entry.made_here
        if asked.rm_class == abi.NV01_MEMORY_SYSTEM_OS_DESCRIPTOR or (
            asked.rm_class == abi.NV01_MEMORY_SYSTEM and asked.fd >= 0 and by_kernel
        ):
            if wrapped:
                return errno.EINVAL
            if not self._shared.files.makers.is_by(pod_call.file, pod_call.pid):
                what = client_ownership.OTHER_PROCESS
                return self._ctx.refuse(block, asked.status_at, abi.NV_ERR_INVALID_CLIENT, what)
            self._continued.begin(pod_call)
            return PROCEED
        row = classes.CLASSES.get(asked.rm_class)
        empty = row is not None and row.empty_by_alloc_memory
        if asked.rm_class != abi.NV01_MEMORY_SYSTEM and not empty:
            what = classes.name(asked.rm_class)
            return self._ctx.refuse(block, asked.status_at, abi.NV_ERR_INVALID_CLASS, what)
        self.undo_interrupted(pod_call, (asked.client, asked.handle))
        if empty:
            return self._make_empty(pod_call, block)
        return self._ctx.with_descriptor(pod_call, abi.NV_ESC_RM_ALLOC_MEMORY, block, rm_calls.MEMORY_FD_AT)

    def _make_empty(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Make an object without memory by the old call, instead of one that reaches the whole card.

        OpenGL and Vulkan make both to learn whether they may, and use neither. RM does the same for who is not root.
        """
        block.patch_u32(rm_calls.MEMORY_CLASS_AT, abi.NV01_MEMORY_VIRTUAL)
        block.patch_u32(rm_calls.MEMORY_FD_AT, -1)
        pod_call.begin()
        error = self._proxy.escape(pod_call.file, abi.NV_ESC_RM_ALLOC_MEMORY, block)
        block.restore(rm_calls.MEMORY_CLASS_AT, 4)
        block.restore(rm_calls.MEMORY_FD_AT, 4)
        if not error:
            block.store()
        return error

    def register_fd(self, pod_call: PodCall, block: IoctlBuffer, minor: int) -> int:
        """Tie a file to a control file, whose clients it then reaches.

        Debuggers tie a control file, on which RM then tells them of events. Only pods that may profile do so, and the
        kernel makes nothing more on either file.
        """
        by_debugger = minor == abi.NV_CONTROL_MINOR
        if by_debugger and not self._ctx.may_profile():
            self._shared.refusals.count(self._pod, tools.LINKED)
            return errno.EINVAL

        def before(control_file: int) -> None:
            # RM refuses any other file, and a file of another kind may not return from its poll.
            if proc.device_of(control_file) == os.makedev(self._shared.major, abi.NV_CONTROL_MINOR):
                self._tie(pod_call, control_file, by_debugger=by_debugger)

        error = self._ctx.with_descriptor(pod_call, abi.NV_ESC_REGISTER_FD, block, 0, before)
        if pod_call.is_retry and error == errno.EINVAL:
            error = 0  # RM accepts it only once
        return error

    def _tie(self, pod_call: PodCall, control_file: int, *, by_debugger: bool) -> None:
        """Note that a file is about to reach a control file's clients. Raises OSError if it may not.

        A process may make clients on one file and use them through the other only if it makes the clients of both. A
        device's file may be tied to that of another process of the pod; then nobody makes anything on it.
        """
        files, pid = self._shared.files, pod_call.pid
        if by_debugger:
            self._passthrough.end_on(pod_call.file)
            self._passthrough.end_on(control_file)
        files.tied.add(control_file)
        files.tied.add(pod_call.file)
        if files.makers.claim(control_file, pid) and files.makers.claim(pod_call.file, pid):
            return
        of_pod = any(files.makers.is_by(control_file, each) for each in self._shared.table.pids_of(self._pod))
        if by_debugger or not of_pod:
            self._shared.refusals.count(self._pod, client_ownership.OTHER_PROCESS)
            raise OSError(errno.EINVAL, client_ownership.OTHER_PROCESS)
        files.makers.rule_out(pod_call.file)


def _is_whole_cards(params: IoctlBuffer | None) -> bool:
    """Tell whether an address space is one that RM has for the whole card, by its index (nvos.h)."""
    return params is not None and _U32.unpack_from(params.data)[0] not in _OWN_SPACES


def _has_open(pid: int, device: int) -> bool:
    """Tell whether a process has a device open. Raises OSError when the process has ended."""
    os.stat(f"/proc/{pid}")
    return any(found == device for _, found in proc.devices(pid))

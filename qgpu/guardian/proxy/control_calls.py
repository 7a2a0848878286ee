"""One pod's RM controls: refuse some, ask RM, learn from its answer, and adapt what the pod sees of it."""

from __future__ import annotations

import os
import struct
from contextlib import nullcontext
from dataclasses import dataclass

from qgpu.guardian.accounting.client_entries import ALL_OBJECTS, IMPORTED
from qgpu.guardian.accounting.rm_object import Key
from qgpu.guardian.proxy import bound_monitors, rm_calls, virtualize
from qgpu.guardian.proxy.alloc_checks import OTHER_RUNLIST, AllocChecks
from qgpu.guardian.proxy.client_registry import of_others
from qgpu.guardian.proxy.dma_mappings import DmaMappings
from qgpu.guardian.proxy.dup_calls import DupHandler
from qgpu.guardian.proxy.free_calls import FreeHandler
from qgpu.guardian.proxy.handler_context import Handler, HandlerContext, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.guardian.proxy.os_events import OF_SURFACES, PodEvents
from qgpu.guardian.proxy.os_events import TOO_MANY as TOO_MANY_EVENTS
from qgpu.guardian.proxy.rm_share import SHARED_PAGE, TOO_MANY, RmShare, beyond_process
from qgpu.guardian.rules import allowed_controls, controls, profiling, rows, scheduling
from qgpu.linux import proc
from qgpu.nvidia import abi
from qgpu.nvidia.abi import ffi

_U16, _SHARE_TYPE_AT = struct.Struct("<H"), abi.offsetof("RS_SHARE_POLICY", "type")
#: Where NVOS54 points to the parameters.
_PARAMS_AT = abi.offsetof("NVOS54_PARAMETERS", "params")
_PREEMPT = "NVA06C_CTRL_PREEMPT_PARAMS"
#: Controls that are kept rare. One that binds monitors counts twice: RM unbinds them once more when their process dies.
_RARE = bound_monitors.HOLDING | {
    *(abi.NVA06C_PREEMPT, abi.NV2080_FB_FLUSH_GPU_CACHE, abi.NV00DE_REQUEST_DATA_POLL),
    *(abi.NV2080_GPU_GET_PIDS, abi.NV2080_GPU_GET_PID_INFO),
}
#: About so many processes RM is asked at once: for each it looks through all of its objects, once for each device.
_MOST_PIDS = 16
_EXPORTS, _IMPORTS = (
    frozenset(row.number for row in controls.ROWS if row.module is action)
    for action in (rows.InModule.EXPORT, rows.InModule.IMPORT)
)
#: GET_EXPORT_OBJECT_INFO: its sizes since 545, and before, and where RM says the card; it has fewer.
_INFO_BYTES, _CARD_AT, _NO_CARD = (80, 76), 4, 32
#: The refusal of memory of a card that RM would take for another one's (thirdpartyp2pCtrlCmdRegisterVidmem_IMPL).
OTHER_CARD = "another card's memory for network cards"
#: Where an export names the device of which RM tells importers.
_EXPORTED_DEVICE_AT = abi.offsetof("NV0000_CTRL_OS_UNIX_EXPORT_OBJECT_TO_FD_PARAMS", "hDevice")
#: Controls that add a reference to memory, in the kernel or in a client.
_REFERENCES = _EXPORTS | _IMPORTS
#: What follows the handles in an import of several objects: a byte for the type of each, 0 for none, and their number.
_PLACES = controls.ALLOWED[abi.NV0000_OS_UNIX_IMPORT_OBJECTS_FROM_FD].handles[-1]
_TYPES_AT = _PLACES.at + 4 * _PLACES.number
_COUNT_AT = _TYPES_AT + _PLACES.number


@dataclass(slots=True)  # not frozen: see Notification
class _ControlRequest:
    """One control: the pod's call, and our copies of its structure, its parameters and what these point to."""

    pod_call: PodCall
    block: IoctlBuffer
    asked: rm_calls.Control
    params: IoctlBuffer | None
    nested: list[IoctlBuffer]
    #: Of an import, the card of what the descriptor carries.
    card: int | None = None


class ControlHandler(Handler):
    """Handles controls."""

    def __init__(
        self, ctx: HandlerContext, free_handler: FreeHandler, dup_handler: DupHandler, mappings: DmaMappings
    ) -> None:
        super().__init__(ctx)
        self._checks, self._free_handler, self._dup_handler = AllocChecks(ctx), free_handler, dup_handler
        self._rm_share, self._mappings = RmShare(ctx), mappings
        #: Channels bound to semaphore surfaces: the surface's handle, then the channel's.
        self._bound = PodEvents(ctx, OF_SURFACES, lambda key: self._gpu_ops.exists((key[0], key[1] >> 32)))

    def control(self, pod_call: PodCall, block: IoctlBuffer, asked: rm_calls.Control) -> int:
        """Handle a control."""
        if (refusal := self._refusal(asked)) is not None:
            if asked.command == abi.NVA06C_SET_TIMESLICE and self._record_timeslice_request(pod_call.call.tid, asked):
                return block.answer(abi.NV_OK)
            return self._refuse(block, *refusal)
        if (request := self._copy_in(pod_call, block, asked)) is None:
            return block.answer(abi.NV_ERR_INVALID_ADDRESS)
        params = request.params
        if (refusal := self._refused_by_params(pod_call.file, asked, params)) is not None:
            return self._refuse(block, *refusal)
        if asked.command == abi.NV0000_CLIENT_SET_INHERITED_SHARE_POLICY and beyond_process(_share_type(params)):
            return self._share_all(pod_call, block, asked)
        for key in _named_by_import(request):
            self._free_handler.undo_interrupted(pod_call, key)
        if self._imports_over(request):
            return block.answer(abi.NV_ERR_INSERT_DUPLICATE_NAME)
        taken = self._take_descriptor(pod_call, asked.command, params)
        try:
            try:
                self._record_export(pod_call, asked, params, taken)
            except OSError as why:
                return self._refuse(block, abi.NV_ERR_INSUFFICIENT_RESOURCES, str(why.strerror))
            error = self._perform(request, taken)
            if asked.command in _IMPORTS and taken is not None and not error:
                request.card = self._card_behind(pod_call.file, asked.client, taken)
        finally:
            if taken is not None and taken >= 0:
                os.close(taken)  # no lock is held: the close may take as long as its owner likes
        return self._write_back(request, error)

    def _share_all(self, pod_call: PodCall, block: IoctlBuffer, asked: rm_calls.Control) -> int:
        """Note that a client shares all its objects with all: RM does not hear of that (``rm_share.py``)."""
        if not self._register(pod_call, asked.client):
            return block.answer(abi.NV_ERR_INVALID_CLIENT)
        if self._shared.clients.share_with_all(asked.client, ALL_OBJECTS, there=True):
            return block.answer(abi.NV_OK)
        return self._refuse(block, abi.NV_ERR_INSUFFICIENT_RESOURCES, TOO_MANY)

    def _copy_in(self, pod_call: PodCall, block: IoctlBuffer, asked: rm_calls.Control) -> _ControlRequest | None:
        """Copy what the call points to; None if that is missing or not readable."""
        row = controls.ALLOWED_TO_SOME[asked.command]
        if asked.params and asked.size < row.least:
            return None
        if not asked.params or not asked.size:
            missing = row.pointers or row.descriptor_at is not None
            return None if missing else _ControlRequest(pod_call, block, asked, None, [])
        if (params := self._proxy.read(pod_call.call.tid, asked.params, asked.size)) is None:
            return None
        if asked.command == abi.NV00DE_REQUEST_DATA_POLL:
            virtualize.leave_out_processes(params.data)
        nested = self._proxy.read_nested(pod_call.call.tid, params, row.pointers)
        return _ControlRequest(pod_call, block, asked, params, nested) if nested is not None else None

    def _imports_over(self, request: _ControlRequest) -> bool:
        """Tell whether an import names a handle that is in use in this client of the file's.

        RM skips places without an export, and if a later one fails it frees what stands in all places before.
        """
        mine = self._shared.table.objects if self._shared.clients.owns(self._pod, request.asked.client) else {}
        file, about = request.pod_call.file, self._gpu_ops.object_info
        return any(key in mine or about(file, *key) is not None for key in _named_by_import(request))

    def _perform(self, request: _ControlRequest, taken: int | None) -> int:
        """Call RM with our copies, under the owner's lock if that makes a handle on its memory; return an errno."""
        pod_call, block, asked = request.pod_call, request.block, request.asked
        if request.params is not None:
            block.patch_u64(_PARAMS_AT, request.params.at)
        owner = self._shared.table.clients.get(asked.client)
        pod = owner.pod if owner is not None else self._pod
        row = controls.ALLOWED_TO_SOME[asked.command]
        with self._shared.pod_lock(pod) if asked.command in _REFERENCES else nullcontext():
            pod_call.begin_repeatable()
            with self._ctx.capability_for(row.why):
                error = self._perform_control(request, taken)
        self._ctx.tell_drivers_refusal(row.why, controls.name(asked.command), block.status)
        if pod_call.is_retry and not error and _was_done(asked.command, block.status):
            block.status = abi.NV_OK
        return error

    def _write_back(self, request: _ControlRequest, error: int) -> int:
        block, asked, params = request.block, request.asked, request.params
        block.restore(_PARAMS_AT, 8)
        if params is not None:
            if not error and block.status == abi.NV_OK:
                block.status = self._handle_answer(request, params)
            for each in request.nested:
                each.store()
            for where in controls.ALLOWED_TO_SOME[asked.command].pointers:
                params.restore(where.at, 8)
            params.store()
        if not error:
            block.store()
        return error

    def _refusal(self, asked: rm_calls.Control) -> tuple[int, str] | None:
        """Return why a control is refused before RM is asked: its status and the name it is counted under."""
        command = asked.command
        row = controls.ALLOWED_TO_SOME.get(command)
        if row is None or not self._ctx.may(row.why):
            return controls.refusal(command), controls.name(command)
        if asked.flags & abi.NVOS54_FLAGS_SERIALIZED:
            return abi.NV_ERR_INVALID_ARGUMENT, "serialized control"
        if row.firmware and not self._shared.clients.owns(self._pod, asked.client):
            return abi.NV_ERR_INVALID_CLIENT, "control on another pod's client"
        return None

    def _refused_by_params(
        self, file: int, asked: rm_calls.Control, params: IoctlBuffer | None
    ) -> tuple[int, str] | None:
        """Return why a control is refused for its parameters: its status and the name it is counted under."""
        command = asked.command
        row = controls.ALLOWED_TO_SOME[command]
        channel, data = (asked.client, asked.target), params.data if params is not None else b""
        if row.module is rows.InModule.BIND and not self._checks.may_run_on(channel, int.from_bytes(data, "little")):
            return abi.NV_ERR_INVALID_ARGUMENT, OTHER_RUNLIST
        match command:
            case allowed_controls.RESET_CHANNEL if not self._checks.may_reset(channel, data):
                return abi.NV_ERR_INVALID_ARGUMENT, OTHER_RUNLIST
            case abi.NV2080_GR_SET_CTXSW_PREEMPTION_MODE if params is not None and self._changes_preemption(params):
                return abi.NV_ERR_INSUFFICIENT_PERMISSIONS, row.name
            case abi.NVA06C_PREEMPT if params is None or not self._ends_own_turn(asked, params):
                return abi.NV_ERR_INSUFFICIENT_PERMISSIONS, row.name
            case abi.NV0000_CLIENT_SET_INHERITED_SHARE_POLICY if _share_type(params) == abi.RS_SHARE_TYPE_CLIENT:
                return abi.NV_ERR_INSUFFICIENT_PERMISSIONS, row.name
            case abi.NV00FD_ATTACH_MEM if not self._mappings.fits(asked.client):
                return abi.NV_ERR_INSUFFICIENT_RESOURCES, row.name
            case allowed_controls.REGISTER_VIDMEM if self._lies_elsewhere(asked.client, data):
                return abi.NV_ERR_INVALID_ARGUMENT, OTHER_CARD
            case allowed_controls.BIND_CHANNEL if not self._bound.has_room():
                return abi.NV_ERR_INSUFFICIENT_RESOURCES, TOO_MANY_EVENTS
        if asked.command == allowed_controls.ALLOC_STREAM and params is not None:
            named = filter(None, rows.handles(row.handles, params.data))
            if any(self._rm_share.is_shared_page((asked.client, each), file) for each in named):
                return abi.NV_ERR_INVALID_OBJECT_HANDLE, SHARED_PAGE
        if row.why is rows.Why.PROFILING and profiling.refuses(command, data):
            return abi.NV_ERR_INSUFFICIENT_PERMISSIONS, f"{controls.name(command)} with other arguments"
        names_others = self._shared.clients.names_others
        if params is not None and names_others(self._pod, asked.client, row.clients, params.data):
            return abi.NV_ERR_INVALID_OBJECT_HANDLE, of_others(row.name)
        return None

    def _lies_elsewhere(self, client: int, params: bytes | bytearray) -> bool:
        """Tell whether memory lies on another card than its handle: RM gives network cards addresses of the latter."""
        table, key = self._shared.table, (client, int.from_bytes(params[:4], "little"))
        memory, rm = table.allocations.by_handle.get(key), table.objects.get(key)
        return memory is not None and rm is not None and memory.instance != table.instance_of(rm)

    def _changes_preemption(self, params: IoctlBuffer) -> bool:
        asked = params.data.ljust(abi.sizeof("NV2080_CTRL_GR_SET_CTXSW_PREEMPTION_MODE_PARAMS"), b"\0")
        flags, _, graphics, compute = struct.unpack_from("<IIII", asked)
        if scheduling.gives_up_preemption(flags, compute):
            return True
        return self._ctx.limited() and scheduling.takes_graphics_buffers(flags, graphics)

    def _ends_own_turn(self, asked: rm_calls.Control, params: IoctlBuffer) -> bool:
        tsg = self._shared.table.objects.get((asked.client, asked.target))
        if tsg is None or tsg.rm_class != abi.KEPLER_CHANNEL_GROUP_A or asked.size != abi.sizeof(_PREEMPT):
            return False
        said, own = abi.ffi.cast(f"{_PREEMPT} *", params.pointer), self._shared.clients.owns(self._pod, tsg.client)
        return own and scheduling.ends_turn(said.bWait, said.bManualTimeout)

    def _take_descriptor(self, pod_call: PodCall, command: int, params: IoctlBuffer | None) -> int | None:
        """Take the descriptor that a control names, if it is NVIDIA's; -1 for another file, None for none."""
        if params is None or (at := controls.ALLOWED_TO_SOME[command].descriptor_at) is None:
            return None
        (fd,) = struct.unpack_from("<i", params.data, at)
        if fd < 0:
            return int(fd)
        taken = self._ctx.take_fd(pod_call, fd)
        device = proc.device_of(taken)
        if device is not None and os.major(device) == self._shared.major:
            return taken
        self._ctx.close_fd(taken, device)
        return -1

    def _record_export(
        self, pod_call: PodCall, asked: rm_calls.Control, params: IoctlBuffer | None, file: int | None
    ) -> None:
        """Charge memory while the file is open by which it is exported. Raises OSError if that cannot be watched."""
        if params is None or file is None or file < 0 or asked.command not in _EXPORTS:
            return
        if not self._gpu_ops.reaches(pod_call.file, asked.client):
            return
        handles = list(filter(None, _of_memory(asked.command, params.data)))
        self._dup_handler.check_exports(pod_call.file, asked.client, handles, params.u32(_EXPORTED_DEVICE_AT))
        self._shared.quota.export(asked.client, handles, file)

    def _perform_control(self, request: _ControlRequest, taken: int | None) -> int:
        pod_call, block, asked, params = request.pod_call, request.block, request.asked, request.params
        if params is None or taken is None:
            if asked.command == abi.NV2080_GPU_GET_PID_INFO and params is not None:
                return self._perform_on_pids(request, params)
            if asked.command in _RARE:
                return self._perform_rarely(request)
            return self._proxy.escape(pod_call.file, abi.NV_ESC_RM_CONTROL, block)
        row = controls.ALLOWED_TO_SOME[asked.command]
        if asked.command in _REFERENCES:
            pod_call.begin()
        at = row.descriptor_at
        assert at is not None
        params.patch_u32(at, taken)
        try:
            return self._proxy.escape(pod_call.file, abi.NV_ESC_RM_CONTROL, block)
        finally:
            params.restore(at, 4)

    def _perform_rarely(self, request: _ControlRequest) -> int:
        """Perform a control that gates and neighbours wait for: not too often; some in the pod's turn.

        It preempts the pod's own TSG, flushes the cache, binds monitors, or has RM look at all clients of the system.
        """
        pod_call, block, asked = request.pod_call, request.block, request.asked
        self._ctx.rare.wait()
        in_turn, times = asked.command in bound_monitors.HOLDING, 1 + (asked.command == abi.NVB0CC_BIND_PM_RESOURCES)
        turn = self._shared.monitors.turn(self._pod, asked.client) if in_turn else nullcontext()
        with turn, self._ctx.rare.timed(times):
            error = self._proxy.escape(pod_call.file, abi.NV_ESC_RM_CONTROL, block)
        if not error and block.status == abi.NV_OK:
            match asked.command:
                case abi.NVB0CC_BIND_PM_RESOURCES:
                    self._shared.monitors_bound(self._pod, pod_call.pid, asked.client, asked.target, pod_call.file)
                case abi.NVB0CC_UNBIND_PM_RESOURCES:
                    self._shared.monitors.unbound(self._pod, asked.client)
        return error

    def _perform_on_pids(self, request: _ControlRequest, params: IoctlBuffer) -> int:
        """Ask RM about host pids, about each once, and answer with the pids of the pod's namespace.

        For an entry with pid 0 RM looks for nothing, and answers that there is no such process.
        """
        own = {_inside(pid, request.pod_call.call.tid): pid for pid in self._own_pids()}
        asked = {at: params.u32(at) for at in virtualize.pid_infos(params.data)}
        pids = {at: own.get(pid, 0) if virtualize.asks_for_memory(params.data, at) else 0 for at, pid in asked.items()}
        about = list({pid: at for at, pid in pids.items() if pid}.values())
        answers: dict[int, bytes] = {}
        for begin in range(0, max(1, len(about)), _MOST_PIDS):
            now = about[begin : begin + _MOST_PIDS]
            for at, pid in pids.items():
                params.patch_u32(at, pid if at in now else 0)
            if error := self._perform_rarely(request):
                break
            answers |= {pids[at]: virtualize.pid_info(params.data, at) for at in now}
        for at, pid in pids.items():
            virtualize.show_pid_info(params.data, at, answers.get(pid))
            params.patch_u32(at, asked[at])
        return error

    def _own_pids(self) -> set[int]:
        return set(self._shared.table.pids_of(self._pod))

    def _handle_answer(self, request: _ControlRequest, params: IoctlBuffer) -> int:
        """Learn from RM's answer, and adapt what it says of the card; return the status to answer with."""
        pod_call, asked, nested = request.pod_call, request.asked, request.nested
        match asked.command:
            case abi.NV2080_FB_GET_INFO_V2:
                self._show_memory(asked, params.data, 4, params.u32())
            case abi.NV2080_FB_GET_INFO if nested:
                self._show_memory(asked, nested[0].data, 0, params.u32())
            case abi.NV2080_GPU_GET_PIDS:
                virtualize.show_pids(params.data, self._own_pids(), lambda own: _inside(own, pod_call.call.tid))
            case abi.NV2080_PERF_GET_UTIL_SAMPLES:
                virtualize.show_samples(params.data, self._own_pids(), lambda own: _inside(own, pod_call.call.tid))
            case abi.NV0000_GPU_GET_PROBED_IDS | abi.NV0000_GPU_GET_ATTACHED_IDS:
                virtualize.show_gpus(params.data, self._gpu_ops.gpu_ids(self._shared.allowance(self._pod).minors))
            case allowed_controls.ALLOC_STREAM:
                named = rows.handles(controls.ALLOWED_TO_SOME[asked.command].handles, params.data)
                memories = ((asked.client, each) for each in named)
                self._shared.monitors.streams(self._pod, memories, self._gpu_ops.exists)
            case allowed_controls.DETACH_MEM:
                self._mappings.detached(asked, params.data)
            case allowed_controls.BIND_CHANNEL:
                self._bound.add(asked.client, _binding(asked, params.data))
            case allowed_controls.UNBIND_CHANNEL:
                self._bound.discard(asked.client, _binding(asked, params.data))
            case abi.NVA06C_GPFIFO_SCHEDULE | abi.NVA06F_GPFIFO_SCHEDULE:
                self._shared.wake()
            case abi.NV00FD_ATTACH_MEM | abi.NVC56F_GET_KMB:
                if asked.command == abi.NV00FD_ATTACH_MEM:
                    self._mappings.attached(asked, params.data)
                # Of the latter kernel_channel.c makes a duplicate under a handle that it tells nobody.
                self._shared.quota.pin_handles(asked.client, _of_memory(asked.command, params.data))
            case command if command in _IMPORTS:
                return self._imported(request, _imported(command, params.data))
        return abi.NV_OK

    def _card_behind(self, file: int, client: int, carrier: int) -> int | None:
        """Ask RM on which card memory lies that a descriptor has carried; None if it does not say."""
        for size in _INFO_BYTES:
            params = self._proxy.block(struct.pack("<iI", carrier, _NO_CARD).ljust(size, b"\0"))
            call = ffi.new("NVOS54_PARAMETERS *", [client, client, allowed_controls.EXPORT_INFO, 0, params.at, size])
            block = self._proxy.block(bytes(ffi.buffer(call)))
            said = block.view("NVOS54_PARAMETERS")
            if not self._proxy.escape(file, abi.NV_ESC_RM_CONTROL, block) and said.status == abi.NV_OK:
                return card if (card := params.u32(_CARD_AT)) < _NO_CARD else None
        return None

    def _imported(self, request: _ControlRequest, handles: list[int]) -> int:
        """Charge imported memory: the pod's own memory once, and any other as if the pod had made it."""
        pod_call, client = request.pod_call, request.asked.client
        self._shared.clients.record_unrestorable(client, IMPORTED)
        for handle in handles:
            if status := self._dup_handler.admit_handle(pod_call, (client, handle), client, None, request.card):
                for other in handles:
                    self._free_handler.discard(pod_call, (client, other))
                return status
        return abi.NV_OK

    def _show_memory(self, asked: rm_calls.Control, entries: bytearray, at: int, count: int) -> None:
        if (shown := self._ctx.visible_memory(asked.client, asked.target)) is not None:
            virtualize.show_memory(entries, at, count, *shown)

    def _record_timeslice_request(self, tid: int, asked: rm_calls.Control) -> bool:
        """Record the timeslice that libcuda sets once per TSG at start; it applies while no plan sets another."""
        tsg = self._shared.table.objects.get((asked.client, asked.target))
        own = self._shared.clients.owns(self._pod, asked.client)
        if tsg is None or not own or tsg.requested_us != abi.RM_DEFAULT_TIMESLICE_US:
            return False
        data = self._proxy.memory.read(tid, asked.params, 8)
        requested_us = int.from_bytes(data, "little") if data else 0
        if not abi.RM_DEFAULT_TIMESLICE_US <= requested_us <= 4 * abi.RM_DEFAULT_TIMESLICE_US:
            return False
        self._shared.note({"fact": "timeslice", "client": tsg.client, "handle": tsg.handle, "us": requested_us})
        return True


def _was_done(command: int, status: int) -> bool:
    """Tell from RM's answer to a repeated control whether the first attempt had succeeded."""
    gone = controls.ALLOWED_TO_SOME[command].unregisters and status == abi.NV_ERR_OBJECT_NOT_FOUND
    return gone or status in {abi.NV_ERR_INSERT_DUPLICATE_NAME, abi.NV_ERR_STATE_IN_USE}


def _named_by_import(request: _ControlRequest) -> list[Key]:
    if request.params is None or request.asked.command not in _IMPORTS:
        return []
    asked = request.asked
    return [(asked.client, handle) for handle in _import_places(asked.command, request.params.data) if handle]


def _imported(command: int, params: bytearray) -> list[int]:
    """List the handles that an import has made."""
    found = _import_places(command, params)
    if command == abi.NV0000_OS_UNIX_IMPORT_OBJECTS_FROM_FD:
        found = [handle for handle, kind in zip(found, params[_TYPES_AT:], strict=False) if kind]
    return [handle for handle in found if handle]


def _import_places(command: int, params: bytearray) -> list[int]:
    """List the handles in an import's parameters that RM looks at. It refuses parameters of another size."""
    found = _of_memory(command, params)
    if command == abi.NV0000_OS_UNIX_IMPORT_OBJECTS_FROM_FD:
        (count,) = _U16.unpack_from(params.ljust(_COUNT_AT + 2, b"\0"), _COUNT_AT)
        found = found[:count]
    return found


def _of_memory(command: int, params: bytearray) -> list[int]:
    """List the handles of memory in the parameters of an export or import."""
    return list(rows.handles(controls.ALLOWED_TO_SOME[command].handles[-1:], params))


def _binding(asked: rm_calls.Control, params: bytearray) -> int:
    """Return the number of a channel's binding to a semaphore surface."""
    named = rows.handles(controls.ALLOWED_TO_SOME[asked.command].handles, params)
    return asked.target << 32 | [0, *named][-1]


def _share_type(params: IoctlBuffer | None) -> int:
    """Return with whom a policy shares a client's objects; NONE without parameters."""
    data = params.data if params is not None else bytearray()
    return int(_U16.unpack_from(data.ljust(_SHARE_TYPE_AT + 2, b"\0"), _SHARE_TYPE_AT)[0])


def _inside(pid: int, tid: int) -> int:
    """Return a process's pid in the pid namespace of a thread; 0 if it has none."""
    try:
        if os.stat(f"/proc/{tid}/ns/pid").st_ino == os.stat("/proc/self/ns/pid").st_ino:
            return pid
    except OSError:
        return 0
    return int((proc.status(pid, "NSpid") or ["0"])[-1])

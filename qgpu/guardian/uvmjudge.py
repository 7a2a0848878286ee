"""One pod's calls to UVM that name an RM client, or that decide what memory stays on a card.

UVM takes any client's handles from anybody (its own sources say that the check is still to come), so that is
checked here; and what it maps stays on the card when RM's handle is freed, so that is kept in the register. Carried
out in the pod's place, like RM's calls, but for UVM_INITIALIZE, with which UVM takes the caller's memory for its own.
"""

from __future__ import annotations

import errno
import struct

from qgpu.guardian.notify import Notification
from qgpu.guardian.standin import Block, StandIn
from qgpu.guardian.supervisor import Supervisor
from qgpu.rm import abi, uvm

PROCEED = -1

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_ATTRIBUTES_AT, _ATTRIBUTES_BYTES = 24, 36


class UvmJudge:
    """Serves one pod's calls on /dev/nvidia-uvm."""

    def __init__(self, supervisor: Supervisor, pod: str, standin: StandIn) -> None:
        self._supervisor = supervisor
        self._pod = pod
        self._standin = standin

    def judge(self, call: Notification, pid: int, file: int) -> int:
        """Carry a call out, or say that it must be; return an errno, 0, or PROCEED."""
        limited = bool(self._supervisor.allowance(self._pod).limits)
        match call.request:
            case uvm.INITIALIZE:
                return self._initialize(call, pid, limited=limited)
            case uvm.ALLOC_DEVICE_P2P:  # it would keep memory in a way that is not known here
                return errno.EOPNOTSUPP if limited else PROCEED
        layout = self._supervisor.uvm_layouts.get(call.request)
        if layout is None:  # a call with the number and size of one of RM's: UVM has none such
            return errno.EINVAL
        if (block := self._standin.read(call.tid, call.argument, layout.size)) is None:
            return errno.EFAULT
        memory = None
        if call.request == uvm.REGISTER_GPU:
            if (status := self._may_register(file, block, limited=limited)) != abi.NV_OK:
                return self._answer(block, layout, status)
        elif layout.client_at is not None:
            memory = uvm.CLIENT_AND_OBJECT.unpack_from(block.data, layout.client_at)
            if not self._supervisor.owns(self._pod, memory[0]):
                self._supervisor.refused(self._pod, "somebody's client for UVM")
                return self._answer(block, layout, abi.NV_ERR_INVALID_CLIENT)
        if error := self._standin.uvm(file, call.request, block):
            return error
        if _U32.unpack_from(block.data, layout.status_at)[0] == abi.NV_OK:
            self._learn(call.request, pid, block, memory, layout)
        block.store()
        return 0

    def _answer(self, block: Block, layout: uvm.Layout, status: int) -> int:
        block.patch_u32(layout.status_at, status)
        block.store()
        return 0

    def _initialize(self, call: Notification, pid: int, *, limited: bool) -> int:
        """Let UVM be initialised, under a limit without the ways to memory that no call shows.

        That the process does not set them after all is seen when it registers a card.
        """
        self._supervisor.will_use_uvm(pid)
        if not limited:
            return PROCEED
        if (block := self._standin.read(call.tid, call.argument, uvm.INITIALIZE_BYTES)) is None:
            return errno.EFAULT
        block.patch_u64(0, uvm.INIT_FLAGS_DISABLE_HMM)
        block.store()
        return PROCEED

    def _may_register(self, file: int, block: Block, *, limited: bool) -> int:
        """Tell whether a card may be registered: one that the pod was granted, on a file without those ways."""
        instance = self._supervisor.uuids.get(bytes(block.data[: uvm.UUID_BYTES]))
        if instance not in self._supervisor.allowance(self._pod).minors:
            self._supervisor.refused(self._pod, "card without a grant")
            return abi.NV_ERR_INSUFFICIENT_PERMISSIONS
        if not limited:
            return abi.NV_OK
        again = self._standin.block(_U64.pack(uvm.INIT_FLAGS_DISABLE_HMM) + bytes(8))
        error = self._standin.uvm(file, uvm.INITIALIZE, again)
        if error or _U32.unpack_from(again.data, uvm.STATUS_AT_INITIALIZE)[0] != abi.NV_OK:
            self._supervisor.refused(self._pod, "UVM initialised in another way")
            return abi.NV_ERR_INVALID_STATE
        return abi.NV_OK

    def _learn(self, request: int, pid: int, block: Block, memory: tuple[int, int] | None, layout: uvm.Layout) -> None:
        if request == uvm.MAP_EXTERNAL_ALLOCATION and memory is not None:
            base, length = uvm.BASE_AND_LENGTH.unpack_from(block.data)
            (count,) = _U64.unpack_from(block.data, layout.status_at - 20)
            places = range(_ATTRIBUTES_AT, _ATTRIBUTES_AT + count * _ATTRIBUTES_BYTES, _ATTRIBUTES_BYTES)
            uuids = [bytes(block.data[at : at + uvm.UUID_BYTES]) for at in places if at < layout.status_at - 20]
            self._supervisor.map(pid, base, length, uuids, memory)
        elif request == uvm.UNMAP_EXTERNAL:
            base, length = uvm.BASE_AND_LENGTH.unpack_from(block.data)
            self._supervisor.unmap(pid, base, length, bytes(block.data[16 : 16 + uvm.UUID_BYTES]))
        elif request == uvm.FREE:
            base, length = uvm.BASE_AND_LENGTH.unpack_from(block.data)
            self._supervisor.unmap(pid, base, length, None)

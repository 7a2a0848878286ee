"""Has UVM let go of a pod's channels once RM has freed them.

UVM duplicates the TSG of a channel that it is told of (nv_gpu_ops.c: nvGpuOpsGetChannelTsgInfo). The TSG's context
buffers then stay on the card when RM's handles are freed, until the registration ends: programs end it with their
address space, after they have freed the channels. A pod could leave it, and make the next TSG. So the guardian ends the
registrations of channels that RM has freed. That could come too soon for one that is in progress: if it does not end,
the TSG stays charged until the pod has ended.

UVM takes a channel in the one file in which its address space is registered, and that file is held (``uvm_calls.py``).

If a client's file is closed instead, its TSGs stay charged as memory does (``ClientRegistry.forget_at_once``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from qgpu.guardian.accounting.allocations import Allocation
from qgpu.guardian.accounting.rm_object import Key
from qgpu.guardian.proxy.handler_context import PROCEED, Handler
from qgpu.linux.seccomp_notify import Notification
from qgpu.nvidia import abi, uvm

#: How long a free waits for registrations in progress, and searches files; one registration takes 1 to 2 ms on an H200.
_PATIENCE_S = 1.0


class RegisteredChannels(Handler):
    """Follows the registrations that the kernel makes, and ends them."""

    def register(self, call: Notification, pid: int) -> int:
        """Let the kernel register a channel: RM lets UVM duplicate a TSG for its own process alone."""
        if self._ctx.limited():
            self._ctx.registering.add(call, pid)
        return PROCEED

    def keep(self, channels: Sequence[Key]) -> list[int]:
        """Charge the TSGs of a client's channels on, before these are forgotten, and return their numbers."""
        entry = self._shared.table.clients.get(channels[0][0]) if channels else None
        if entry is None or not self._shared.uvm_files.count(entry.pod):
            return []
        with self._shared.lock:
            found = {memory.number: memory for key in channels if (memory := self._charged_for(key)) is not None}
            self._shared.clients.charge_on(entry, found.values())
        return list(found)

    def freed(self, channels: Sequence[Key], numbers: list[int]) -> None:
        """End the registrations of channels that RM has freed, and then the charges that ``keep`` left."""
        ended = not numbers or self._end(channels)
        for number in numbers:
            if not ended:
                self._shared.quota.pin(number)
            self._shared.quota.unmap_memory(number)

    def _end(self, channels: Sequence[Key]) -> bool:
        """End registrations in the pod's UVM files, where each is in one at most; False if one may be left."""
        table, until = self._shared.table, time.monotonic() + _PATIENCE_S
        if self._shared.pod_uvm_files.moved.get(self._pod) or not self._ctx.registering.wait(_PATIENCE_S):
            return False
        left = {key for key in channels if key not in table.objects or not self._gpu_ops.exists(key)}
        entry = table.clients.get(channels[0][0])
        pids = dict.fromkeys([*([entry.maker] if entry is not None else ()), *table.pids_of(self._pod)])
        try:
            for file in self._shared.uvm_files.copies(pids):
                left -= {key for key in left if self._unregister(file, key)}
                if not left or time.monotonic() > until:
                    return not left
        except OSError:  # no descriptor is free
            return False
        return True

    def _unregister(self, file: int, channel: Key) -> bool:
        layout = self._shared.uvm_layouts[uvm.UNREGISTER_CHANNEL]
        block = self._proxy.block(bytes(layout.size), layout.status_at)
        block.data[layout.client_at : layout.status_at] = uvm.CLIENT_AND_OBJECT.pack(*channel)
        return not self._proxy.uvm(file, uvm.UNREGISTER_CHANNEL, block) and block.status == abi.NV_OK

    def _charged_for(self, channel: Key) -> Allocation | None:
        """Return what a channel's TSG is charged as; a channel that stands alone is charged itself."""
        rm, by_handle = self._shared.table.objects.get(channel), self._shared.table.allocations.by_handle
        return by_handle.get(channel) or by_handle.get((rm.client, rm.parent)) if rm is not None else None

"""Maps memory for the CPU where the guardian made the client: RM does it only for the process that made the client.

The mapping belongs to the file that the pod then gives to mmap; the guardian maps nothing. The kernel performs the same
calls for the clients that it made. RM holds its lock while it undoes all mappings of a client, so a process of a pod
with a memory limit makes a bounded number of them while it has clients. Nothing tells whether the kernel has removed
one, so those are counted, too. A compute program maps each object once. Programs with graphics, which may map over and
over, run without a limit.
"""

from __future__ import annotations

import errno

from qgpu.guardian.accounting.client_entries import RmClientEntry
from qgpu.guardian.proxy.client_registry import of_others
from qgpu.guardian.proxy.handler_context import Handler, HandlerContext, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.guardian.proxy.object_claims import TOO_MANY
from qgpu.guardian.proxy.passthrough_memory import UNSEEN
from qgpu.guardian.rules import escapes
from qgpu.nvidia import abi

_DESCRIPTOR_AT = abi.offsetof("NVOS33_PARAMETERS_WITH_FD", "fd")
#: How many mappings a process makes; a CUDA program makes about 30. RM undoes one in 1.4 µs (``bench/rm_mappings.py``).
_MOST = 1 << 16
#: With so many, RM may look through all of them to find one, with the card's lock held, and so long for each.
_MANY, _LOOK_NS = 1 << 12, 20
#: The journal has the number in steps.
_STEP = 1 << 8


class CpuMappings(Handler):
    """Handles RM's calls that map memory, unmap it, and tell RM its address."""

    def __init__(self, ctx: HandlerContext) -> None:
        super().__init__(ctx)
        #: How many each process has made beyond what the journal says.
        self._more: dict[int, int] = {}

    def _made(self, pid: int) -> int:
        return self._shared.table.cpu_mappings.get(pid, 0) + self._more.get(pid, 0)

    def before_look(self, pod_call: PodCall) -> None:
        """Wait before the kernel has RM look for a mapping, if there may be many. Raises OSError if it may not.

        RM tells its address to whoever has the number of the process that made it, on any file.
        """
        owner, tells = self._client_of(pod_call), abi.NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO
        if pod_call.call.request & 0xFF == tells and owner is not None and owner.pod != self._pod:
            self._count(of_others(escapes.name(tells)))
            raise OSError(errno.EPERM, "another pod's client")
        if (made := self._made(pod_call.pid)) >= _MANY and self._ctx.limited():
            self._ctx.rare.wait()
            self._ctx.rare.expect(made * _LOOK_NS)

    def count(self, pid: int) -> None:
        """Count a mapping that a process is about to make. Raises OSError if it has made the most."""
        made = self._made(pid)
        if made >= _MOST and self._ctx.limited():
            self._count(TOO_MANY)
            raise OSError(errno.ENOMEM, TOO_MANY)
        if pid not in self._more:
            mine = set(self._shared.table.pids_of(self._pod))
            self._more = {each: more for each, more in self._more.items() if each in mine}
        self._more[pid] = self._more.get(pid, 0) + 1
        if self._more[pid] == _STEP:
            del self._more[pid]
            self._shared.note({"fact": "cpu_mappings", "pid": pid, "count": made + 1})

    def _is_made_here(self, entry: RmClientEntry | None) -> bool:
        """Tell whether the guardian made a client, for this pod."""
        return entry is not None and entry.pod == self._pod and entry.made_here

    def _client_of(self, pod_call: PodCall) -> RmClientEntry | None:
        data = self._proxy.memory.read(pod_call.call.tid, pod_call.call.argument, 4)
        return self._shared.table.clients.get(int.from_bytes(data, "little")) if data is not None else None

    def concerns(self, pod_call: PodCall) -> bool:
        """Tell whether a mapping call names a client that the guardian made; the kernel performs all others."""
        return self._is_made_here(self._client_of(pod_call))

    def handle(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Perform a mapping call on the pod's own file."""
        client = block.u32()
        if not self._is_made_here(self._shared.table.clients.get(client)):
            return errno.EBUSY  # another thread has changed it
        if pod_call.escape.number == abi.NV_ESC_RM_MAP_MEMORY:
            block.view("NVOS33_PARAMETERS_WITH_FD")
            if self._shared.table.clients[client].maker != pod_call.pid:  # as RM: it would count to who may end first
                return block.answer(abi.NV_ERR_INVALID_CLIENT)
            self.count(pod_call.pid)
            if client in self._ctx.unseen:
                return self._refuse(block, abi.NV_ERR_INSUFFICIENT_PERMISSIONS, UNSEEN)
            error = self._ctx.with_descriptor(pod_call, block, _DESCRIPTOR_AT)
            if (status := block.status) != abi.NV_OK:
                self._count(f"mapping by the driver, status {status:#x}")
            return error
        self._ctx.rare.wait()
        with self._ctx.rare.worked(_MANY * _LOOK_NS):
            return self._ctx.perform(pod_call, block)

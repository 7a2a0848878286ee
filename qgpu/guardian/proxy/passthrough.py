"""What the kernel carries out for one pod itself: root clients, and the first device of a file.

RM ties both to the calling process, for it takes that for their owner. So they are made on a file that has no device,
where RM makes nothing that matters in their stead, whatever becomes of the call's arguments.
"""

from __future__ import annotations

import errno

import structlog

from qgpu.guardian.accounting.object_table import NO_INSTANCE, RmObject
from qgpu.guardian.proxy import rm_calls
from qgpu.guardian.proxy.handler_context import ANSWERED, HandlerContext, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.linux import cgroup, fd_budget, thread_freezer
from qgpu.linux.inflight_syscalls import InflightSyscalls
from qgpu.nvidia import abi

_log = structlog.get_logger("guardian")

#: How long root clients and devices being made may keep a device from being made: many processes may start at once,
#: and each waits for RM. Only the pod's own calls wait.
_ROOT_PATIENCE_S = 2.0


class Passthrough:
    """Lets root clients and first devices be made, and takes note of them."""

    def __init__(self, ctx: HandlerContext) -> None:
        self._ctx = ctx
        self._supervisor = ctx.supervisor
        self._gpu_ops = ctx.supervisor.gpu_ops
        self._pod = ctx.pod
        #: Root clients and first devices that the kernel is making; the devices by thread.
        self._roots = InflightSyscalls()
        self._devices: dict[int, RmObject] = {}
        #: Clients that may have a device of a name that is not known.
        self._doubtful: set[int] = set()

    def next_call(self, tid: int) -> None:
        """Take note that a thread makes another call: what the kernel was making for it is made, or was not."""
        self._roots.ended(tid)
        if self._devices:
            self._roots.take_over()
            for maker in [maker for maker in self._devices if maker not in self._roots.calls]:
                self._settle_device(self._devices.pop(maker))

    def root(self, case: PodCall, block: IoctlBuffer, asked: rm_calls.Alloc, *, wrapped: bool) -> int:
        """Let a root client be made, where that call can make nothing else: on a file that reaches no device."""
        if wrapped:
            return errno.EINVAL
        if case.left is not None:  # it waits for an answer: the file has no client of it yet
            self._supervisor.files.roots.discard(case.file)
        if self._supervisor.files.devices.has(case.file):
            return self._ctx.refuse(block, asked.status_at, abi.NV_ERR_INVALID_STATE, "root client beside a device")
        if self._supervisor.files.roots.has(case.file):
            return self._ctx.refuse(block, asked.status_at, abi.NV_ERR_INVALID_STATE, "second root client of a file")
        return self._let(case, block, asked.status_at)

    def device(self, case: PodCall, block: IoctlBuffer, rm: RmObject, status_at: int) -> int:
        """Let the first device of a file be made: RM notes the process that asks for it.

        Which card it is on is asked of RM when it has a subdevice; until then nothing below it can be charged, or made.
        """
        rm.detail = NO_INSTANCE
        return self._let(case, block, status_at, rm)

    def no_root_is_made(self) -> bool:
        """Wait until no root client is being made: what is made in its stead could lie below the new device."""
        if self._roots.wait(_ROOT_PATIENCE_S):
            return True
        self._supervisor.refused(self._pod, "device beside a root client in the making")
        return False

    def has_device(self, client: int) -> bool:
        """Tell whether a client has a device, or may have one of a name that is not known."""
        with self._supervisor.lock:
            self._doubtful &= self._supervisor.table.clients.keys()
            return client in self._supervisor.table.devices or client in self._doubtful

    def _let(self, case: PodCall, block: IoctlBuffer, status_at: int, device: RmObject | None = None) -> int:
        """Let the kernel carry a call out on a file that reaches no device; nobody can exchange it for one that does.

        That takes keeping the process's other threads still. The arguments can be anything by then, for other processes
        may write them: so a file gets one root client, and what is made in its stead needs one that is there.
        """
        try:
            refusal = thread_freezer.apart(lambda: self._let_alone(case, device))
        except OSError as error:
            if error.errno in fd_budget.NONE_LEFT:  # it is not begun, and waits
                raise
            _log.warning("a call cannot be let through", pod=self._pod, pid=case.pid, reason=str(error))
            return self._ctx.refuse(block, status_at, abi.NV_ERR_INVALID_STATE, "call beside threads that move")
        return ANSWERED if refusal == abi.NV_OK else self._ctx.answer(block, status_at, refusal)

    def _let_alone(self, case: PodCall, device: RmObject | None) -> int:
        """Let a call through while nobody else moves; return the status with which its device is refused, if it is."""
        pod = self._supervisor.table.pods.get(self._pod)
        files = self._supervisor.files.roots if device is None else self._supervisor.files.devices
        with thread_freezer.held(case.pid, case.call.tid, cgroup.pids(pod.cgroup) if pod is not None else ()):
            if not self._ctx.has_still(case) or not self._is_harmless(case, device):
                raise OSError(errno.EBUSY, "another file is in the descriptor's place")
            if not files.add(case.file) and device is None:
                raise OSError(errno.EBUSY, "the file has a client")
            if (refusal := self._note_let(case, device)) == abi.NV_OK:
                if not case.listener.proceed(case.call.id) and device is None:  # it begins anew, or has ended
                    files.discard(case.file)
                thread_freezer.wait_until_over(self._roots.calls[case.call.tid])
            return refusal

    def _is_harmless(self, case: PodCall, device: RmObject | None) -> bool:
        """Tell whether nothing made through a call's file could lie below a device.

        A file has one client: with none it reaches nothing; with the one that is to get a device, only what that has.
        """
        if device is None:
            return not self._supervisor.files.devices.has(case.file)
        mine = self._gpu_ops.about(case.file, device.client, device.client) is not None
        return mine and not self.has_device(device.client)

    def _note_let(self, case: PodCall, device: RmObject | None) -> int:
        """Take note of a call that is let through now; return the status with which its device is refused, if it is."""
        if device is not None:
            if (refusal := self._ctx.claim(device)) != abi.NV_OK:
                return refusal
            self._devices[case.call.tid] = device
        self._roots.let(case.call, case.pid)
        return abi.NV_OK

    def _settle_device(self, rm: RmObject) -> None:
        """Book a device that the kernel has made; where it made none, it could have made one of another name."""
        found = self._gpu_ops.real(rm)
        if found is not None and found[0] == abi.NV01_DEVICE_0:
            self._supervisor.made(rm.key)
        else:
            self._supervisor.not_made(rm.key)
            self._doubtful.add(rm.client)

"""What a pod's judges work with: its memory and files, answers in RM's own words, claims against its limits."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from qgpu.guardian.accounting.object_table import RmObject
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer, IoctlProxy
from qgpu.guardian.proxy.supervisor import Supervisor
from qgpu.linux import kcmp
from qgpu.linux.seccomp_notify import Listener, Notification, UnansweredCall
from qgpu.nvidia import abi
from qgpu.nvidia.rm_client import take

#: Instead of an errno: the kernel is to carry the call out as it then stands.
PROCEED = -1
#: The call has its answer already.
ANSWERED = -2

_U32 = struct.Struct("<I")


@dataclass(slots=True)
class PodCall:
    """A call that is being judged: whose it is, and the file it is on, which is ours for as long as that takes."""

    listener: Listener
    call: Notification
    pid: int
    file: int
    #: Where a dead guardian had it in hand.
    left: UnansweredCall | None = None
    begun: bool = False

    @property
    def again(self) -> bool:
        """Tell whether a dead guardian had begun to carry it out."""
        return self.left is not None and self.left.begun

    def begin(self, before: int | None = None) -> None:
        """Take note that what must not be done twice is done now, ``before`` which RM gave a figure or none."""
        self.begun = True
        self.listener.begin(before)


@dataclass(slots=True)
class HandlerContext:
    """One pod's."""

    supervisor: Supervisor
    pod: str
    proxy: IoctlProxy
    #: Finds out what the pod's processes have unmapped; True when that is anything.
    look_at_mappings: Callable[[], bool] = field(default=lambda: False)

    def take(self, case: PodCall, fd: int) -> int:
        """Take a descriptor of the process that makes a call, to be closed again. Raises OSError."""
        taken = take(self.supervisor.gpu_ops.pidfd(case.pid), fd)
        if not case.listener.still_waiting(case.call.id):  # it could have been another process of that number
            os.close(taken)
            raise InterruptedError(errno.EINTR, "the caller is gone")
        return taken

    def has_still(self, case: PodCall) -> bool:
        """Tell whether the descriptor of a call means the file that was taken from there. Raises OSError."""
        taken = self.take(case, case.call.fd)
        try:
            return kcmp.same_file(os.getpid(), taken, os.getpid(), case.file)
        finally:
            os.close(taken)

    def answer(self, block: IoctlBuffer, status_at: int, status: int) -> int:
        """Answer in RM's own words without asking it."""
        block.patch_u32(status_at, status)
        block.store()
        return 0

    def refuse(self, block: IoctlBuffer, status_at: int, status: int, what: str) -> int:
        """Answer as ``answer`` does, and count it."""
        self.supervisor.refused(self.pod, what)
        return self.answer(block, status_at, status)

    def limited(self) -> bool:
        """Tell whether the pod has a memory limit anywhere."""
        return self.supervisor.allowance(self.pod).limited

    def claim(self, rm: RmObject, number: int | None = None) -> int:
        """Claim an object; where memory does not fit, look first at what the pod has unmapped and closed meanwhile."""
        status = self.supervisor.claim(rm, number)
        for make_room in (self.look_at_mappings, lambda: self.supervisor.empty_closed(self.pod)):
            if status == abi.NV_ERR_NO_MEMORY and make_room():
                status = self.supervisor.claim(rm, number)
        if status == abi.NV_ERR_NO_MEMORY:
            self.supervisor.refused(self.pod, "memory over the limit")
        return status

    def shown(self, client: int, handle: int) -> tuple[int, int] | None:
        """Return the pod's limit on the card that an object is on and what is left of it; None for no limit."""
        table = self.supervisor.table
        rm = table.objects.get((client, handle))
        instance = table.instance_of(rm) if rm is not None else None
        limit = self.supervisor.allowance(self.pod).limits.get(instance) if instance is not None else None
        if limit is None or instance is None:
            return None
        self.look_at_mappings()
        with self.supervisor.lock:
            return limit, max(0, limit - self.supervisor.quota.used(self.pod, instance))

    def with_descriptor(self, case: PodCall, number: int, block: IoctlBuffer, at: int) -> int:
        """Carry out a call that names a descriptor of the pod's, on what it has there."""
        (fd,) = struct.unpack_from("<i", block.data, at)
        taken = self.take(case, fd) if fd >= 0 else -1
        try:
            block.patch_u32(at, taken)
            case.begin()
            error = self.proxy.escape(case.file, number, block)
            block.restore(at, 4)
        finally:
            if taken >= 0:
                os.close(taken)
        if not error:
            block.store()
        return error


def status_of(block: IoctlBuffer, at: int) -> int:
    """Read RM's answer."""
    return int(_U32.unpack_from(block.data, at)[0])

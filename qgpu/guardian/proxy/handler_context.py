"""What the handlers of a pod's calls share: its memory and files, answers in RM's form, claims against its limits."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from qgpu.guardian.accounting.rm_object import RmObject
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer, IoctlProxy
from qgpu.guardian.proxy.rare_calls import RareCalls
from qgpu.guardian.proxy.rm_calls import Escape
from qgpu.guardian.proxy.shared_state import SharedState
from qgpu.guardian.proxy.untracked_objects import UntrackedObjects
from qgpu.guardian.rules.rows import Why
from qgpu.linux import capabilities, kcmp, proc
from qgpu.linux.inflight_syscalls import InflightSyscalls
from qgpu.linux.seccomp_notify import Listener, Notification, UnansweredCall
from qgpu.nvidia import abi
from qgpu.nvidia.rm_client import take

#: Instead of an errno: let the kernel perform the call with the arguments in the pod's memory.
PROCEED = -1
#: Instead of an errno: the call has been answered.
ANSWERED = -2
#: Before RM's call is found.
_NONE = Escape(0, 0, 0)


@dataclass(slots=True)
class PodCall:
    """A call that is being handled: its process, our copy of the file it is on, that file's device, and RM's call."""

    listener: Listener
    call: Notification
    pid: int
    file: int
    #: What a dead guardian recorded of this call, if it left it unanswered.
    unanswered: UnansweredCall | None = None
    begun: bool = False
    device: int | None = None
    escape: Escape = _NONE

    @property
    def is_retry(self) -> bool:
        """Tell whether a dead guardian had begun to perform it."""
        return self.unanswered is not None and self.unanswered.begun

    @property
    def still_unanswered(self) -> bool:
        """Tell whether the caller waited all the time since a dead guardian received the call."""
        return self.unanswered is not None and self.unanswered.call.id == self.call.id

    def still_waits(self) -> bool:
        """Tell whether the caller still waits; if not, its numbers may be another's by now."""
        return self.listener.still_waiting(self.call.id)

    def may_be_retried(self) -> bool:
        """Tell whether it can be handled again from the start."""
        return not self.begun and self.still_waits()

    def begin(self, before: int | None = None) -> None:
        """Mark the call as begun: it must not be done twice. ``before`` is the memory figure that RM gave before it."""
        self.begun = True
        self.listener.begin(before)

    def begin_repeatable(self) -> None:
        """Mark the call as begun; it may be done twice, so its answer is not recorded."""
        self.listener.begin()


@dataclass(slots=True)
class HandlerContext:
    """One pod's context."""

    shared: SharedState
    pod: str
    proxy: IoctlProxy
    #: Looks for mappings that the pod's processes have removed; True if there are any.
    rescan_mappings: Callable[[], bool] = field(default=lambda: False)
    untracked: UntrackedObjects = field(init=False)
    #: Clients that may have what no pod may have: they were not looked at (``passthrough_memory.py``).
    unseen: set[int] = field(default_factory=set)
    #: UVM's calls that the kernel is making for the pod: mappings, and registrations of channels.
    uvm_mappings: InflightSyscalls = field(default_factory=InflightSyscalls)
    registering: InflightSyscalls = field(default_factory=InflightSyscalls)
    rare: RareCalls = field(default_factory=RareCalls)

    def __post_init__(self) -> None:
        self.untracked = UntrackedObjects(self.shared, self.pod)

    def take_fd(self, pod_call: PodCall, fd: int) -> int:
        """Take a descriptor of the calling process, for ``close_fd``. Raises OSError."""
        gpu_ops = self.shared.gpu_ops
        if gpu_ops.closer.is_full(self.pod):
            raise OSError(errno.EMFILE, "too many files of the pod wait to be closed")
        taken = take(gpu_ops.pidfd(pod_call.pid), fd)
        if not pod_call.still_waits():  # the pid may belong to another process by now
            self.close_fd(taken, None)
            raise InterruptedError(errno.EINTR, "the caller is gone")
        return taken

    def close_fd(self, fd: int, device: int | None) -> None:
        """Close a file that was taken, given its device; a thread for the pod closes one that is not the driver's.

        A file on FUSE asks its server at each close, and nothing but an answer ends that, not even SIGKILL.
        """
        if device is not None and os.major(device) in (self.shared.major, self.shared.uvm_major):
            os.close(fd)
        else:
            self.shared.gpu_ops.closer.close(self.pod, fd)

    @contextmanager
    def taken(self, pod_call: PodCall, fd: int) -> Iterator[int]:
        """Take a descriptor of the calling process for the block. Raises OSError."""
        taken = self.take_fd(pod_call, fd)
        try:
            yield taken
        finally:
            self.close_fd(taken, proc.device_of(taken))

    def fd_is_unchanged(self, pod_call: PodCall) -> bool:
        """Tell whether the call's descriptor still means the file that was taken. Raises OSError."""
        with self.taken(pod_call, pod_call.call.fd) as taken:
            return kcmp.same_file(os.getpid(), taken, os.getpid(), pod_call.file)

    def may(self, why: Why) -> bool:
        """Tell whether the pod is one of those to which a call is allowed for this reason."""
        match why:
            case Why.PROFILING:
                return self.shared.allowance(self.pod).profiling
            case Why.INSTANCE:
                return self.shared.allowance(self.pod).on_instance
            case Why.GRAPHICS:
                return self.shared.allowance(self.pod).graphics
        return why.allowed

    def tell_drivers_refusal(self, why: Why, what: str, status: int) -> None:
        """Count a profiler's call that the driver refuses for lack of permission, as if we had refused it."""
        if why is Why.PROFILING and status == abi.NV_ERR_INSUFFICIENT_PERMISSIONS:
            self.shared.refusals.count(self.pod, f"{what} by the driver, for lack of permission")

    def capability_for(self, why: Why) -> AbstractContextManager[None]:
        """Let the capability that RM asks of a profiler take effect, for a call that is allowed for that reason."""
        return capabilities.with_one(capabilities.CAP_PERFMON) if why is Why.PROFILING else nullcontext()

    def limited(self) -> bool:
        """Tell whether the pod has a memory limit anywhere."""
        return self.shared.allowance(self.pod).limited

    def claim(self, rm: RmObject, number: int | None = None) -> int:
        """Claim an object; if memory does not fit, account for what the pod unmapped and closed, and retry."""
        status = self.shared.claims.claim(rm, number)
        for make_room in (self.rescan_mappings, lambda: self.shared.pod_uvm_files.release_closed(self.pod)):
            if status == abi.NV_ERR_NO_MEMORY and make_room():
                status = self.shared.claims.claim(rm, number)
        if status == abi.NV_ERR_NO_MEMORY:
            self.shared.refusals.count(self.pod, "memory over the limit")
        return status

    def visible_memory(self, client: int, handle: int) -> tuple[int, int] | None:
        """Return the pod's limit on an object's card and what is left of it; None without a limit."""
        table = self.shared.table
        rm = table.objects.get((client, handle))
        instance = table.instance_of(rm) if rm is not None else None
        limit = self.shared.allowance(self.pod).limits.get(instance) if instance is not None else None
        if limit is None or instance is None:
            return None
        self.rescan_mappings()
        with self.shared.lock:
            return limit, max(0, limit - self.shared.quota.used(self.pod, instance))

    def perform(self, pod_call: PodCall, block: IoctlBuffer, *ours: int, repeatable: bool = False) -> int:
        """Perform a call on its file and store the answer, with the pod's own numbers at the offsets of ``ours``."""
        (pod_call.begin_repeatable if repeatable else pod_call.begin)()
        error = self.proxy.escape(pod_call.file, pod_call.escape.number, block)
        for at in ours:
            block.restore(at, 4)
        if not error:
            block.store()
        return error

    def with_descriptor(
        self, pod_call: PodCall, block: IoctlBuffer, at: int, before: Callable[[int], object] = lambda _file: None
    ) -> int:
        """Perform a call on the file that a descriptor in it means; before RM, ``before`` gets our copy of the file."""
        (fd,) = struct.unpack_from("<i", block.data, at)
        if fd < 0:
            block.patch_u32(at, -1)
            return self.perform(pod_call, block, at)
        with self.taken(pod_call, fd) as taken:
            before(taken)
            block.patch_u32(at, taken)
            return self.perform(pod_call, block, at)


class Handler:
    """What every handler of one pod's calls uses."""

    def __init__(self, ctx: HandlerContext) -> None:
        self._ctx, self._pod, self._proxy = ctx, ctx.pod, ctx.proxy
        self._shared, self._gpu_ops, self._untracked = ctx.shared, ctx.shared.gpu_ops, ctx.untracked

    def _count(self, what: str) -> None:
        self._shared.refusals.count(self._pod, what)

    def _refuse(self, block: IoctlBuffer, status: int, what: str) -> int:
        self._count(what)
        return block.answer(status)

    def _register(self, pod_call: PodCall, client: int, *, made_here: bool = False) -> bool:
        """Enter a client, named in a call, in the object table; False if it is not the pod's on the call's file."""
        call = pod_call.call
        return self._shared.clients.register(pod_call.pid, call.fd, pod_call.file, client, made_here=made_here)

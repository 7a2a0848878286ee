"""What the kernel performs for one pod itself: the first root client of a file, and its first device.

RM takes the calling process for the owner of both. The kernel makes them only on a file that reaches no device. On
such a file RM can make nothing else that matters, even if the call's arguments change after the check. The guardian
makes a file's further clients and their devices itself.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from qgpu.guardian.accounting.rm_object import NO_INSTANCE, RmObject
from qgpu.guardian.proxy.control_files import mark_of
from qgpu.guardian.proxy.handler_context import ANSWERED, Handler, HandlerContext, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.guardian.rules import tools
from qgpu.linux import fd_budget, pod_processes, proc, thread_freezer
from qgpu.linux.descriptor_tables import DescriptorTables
from qgpu.linux.inflight_syscalls import InflightSyscall
from qgpu.nvidia import abi

_log = structlog.get_logger("guardian")

#: How often a device that was made is looked for again, and after how long.
_TRIES, _RETRY_S = 3, 0.02
#: How many calls the kernel performs at once while the pod's next ones are served. Each takes a thread of ours.
_MOST_FOLLOWING = 8


class Passthrough(Handler):
    """Lets the kernel make root clients and first devices, and records them."""

    def __init__(self, ctx: HandlerContext) -> None:
        super().__init__(ctx)
        #: First devices that the kernel was to make and that were not looked at since.
        self._devices: list[RmObject] = []
        #: Clients that may have a device whose handle is unknown.
        self._may_have_device: set[int] = set()
        self._tables = DescriptorTables()
        #: The thread that follows a process's call and keeps its other threads stopped, by process.
        self._following: dict[int, threading.Thread] = {}

    def next_call(self) -> None:
        """Record that a thread of the pod makes a call: the devices that the kernel was to make are there, or not."""
        while self._devices:
            self._settle_device(self._devices.pop())

    def makes_root_clients(self, pod_call: PodCall) -> bool:
        """Tell whether the kernel may make a root client on this file: it has none, and reaches no device."""
        files = self._shared.files
        if pod_call.is_retry and pod_call.still_unanswered:  # it marked the file, and has made no client there
            files.forget_root(pod_call.file)
        return not (files.devices.has(pod_call.file) or files.roots.has(pod_call.file))

    def makes_devices(self, pod_call: PodCall) -> bool:
        """Tell whether the kernel may make a device on this file: no other client and no device is reached by it."""
        return not self._shared.files.devices.has(pod_call.file)

    def end_on(self, file: int) -> None:
        """Let the kernel make nothing more on this file: it is about to reach another client, or a device."""
        self._shared.files.devices.add(file)

    def continue_on(self, pod_call: PodCall) -> None:
        """Let the kernel perform a call, the process's other threads stopped. Raises OSError if its file changed."""
        self._begin_on(pod_call).join()

    def begin_on(self, pod_call: PodCall) -> None:
        """Do as ``continue_on``, but return while the kernel performs the call, unless the pod has several of them."""
        self._following = {pid: thread for pid, thread in self._following.items() if thread.is_alive()}
        thread = self._begin_on(pod_call)
        if len(self._following) >= _MOST_FOLLOWING:
            thread.join()
        self._following[pod_call.pid] = thread

    def _begin_on(self, pod_call: PodCall) -> threading.Thread:
        def steps() -> Iterator[None]:
            with self._frozen_siblings(pod_call):
                if not self._ctx.fd_is_unchanged(pod_call):
                    raise OSError(errno.EBUSY, "another file is in the descriptor's place")
                begun = InflightSyscall.of(pod_call.call, pod_call.pid)
                pod_call.listener.proceed(pod_call.call.id)
                yield
                begun.wait()

        return thread_freezer.begin_as_tracer(pod_call.pid, steps())

    def has_device(self, client: int) -> bool:
        """Tell whether a client has a device, or may have one whose handle is unknown."""
        with self._shared.lock:
            return client in self._shared.table.devices or self.may_have_device(client)

    def may_have_device(self, client: int) -> bool:
        """Tell whether a client may have a device whose handle is unknown."""
        self._may_have_device &= self._shared.table.clients.keys()
        return client in self._may_have_device

    def continue_in_kernel(self, pod_call: PodCall, block: IoctlBuffer, device: RmObject | None = None) -> int:
        """Let the kernel make a root client, or a device, on a file without one, with the pod's other threads stopped.

        They are stopped so that none can exchange the file for one with a device. Other processes can still change the
        arguments. So the kernel makes one root client on a file, and any other object needs a client that exists. The
        device's card is unknown until RM can be asked about its subdevice, and nothing below it is made before that.
        """
        if device is not None:
            device.detail = NO_INSTANCE
        try:
            refusal = thread_freezer.run_as_tracer(pod_call.pid, lambda: self._continue_while_frozen(pod_call, device))
        except OSError as error:
            if error.errno in fd_budget.OUT_OF_FDS:  # the call has not begun; it is retried
                raise
            _log.warning("call not passed to the kernel", pod=self._pod, pid=pod_call.pid, reason=str(error))
            tracers = (proc.status(tid, "TracerPid") for tid in proc.threads(pod_call.pid))
            traced = any((tracer or ["0"]) != ["0"] for tracer in tracers)
            what = tools.DEBUGGED if traced else "call while other threads run"
            return self._refuse(block, abi.NV_ERR_INVALID_STATE, what)
        return ANSWERED if refusal == abi.NV_OK else block.answer(refusal)

    def _continue_while_frozen(self, pod_call: PodCall, device: RmObject | None) -> int:
        """Continue a call while its sibling threads are stopped; return the status of a refused device, or NV_OK."""
        files = self._shared.files
        chosen = files.roots if device is None else files.devices
        with self._frozen_siblings(pod_call):
            if not self._ctx.fd_is_unchanged(pod_call) or not self._is_harmless(pod_call, device):
                raise OSError(errno.EBUSY, "another file is in the descriptor's place")
            if device is None:
                pod_call.begin()
            if not chosen.add(pod_call.file) and device is None:
                raise OSError(errno.EBUSY, "the file has a client")
            if device is None and not files.makers.claim(pod_call.file, pod_call.pid, mark_of(self._pod)):
                raise OSError(errno.EBUSY, "the file has clients of another process")
            if (refusal := self._ctx.claim(device) if device is not None else abi.NV_OK) == abi.NV_OK:
                self._devices += [device] if device is not None else []
                if not pod_call.listener.proceed(pod_call.call.id) and device is None:  # it restarts, or has ended
                    files.forget_root(pod_call.file)
                InflightSyscall.of(pod_call.call, pod_call.pid).wait()
            return refusal

    @contextmanager
    def _frozen_siblings(self, pod_call: PodCall) -> Iterator[None]:
        pid, tid = pod_call.pid, pod_call.call.tid
        if (last := self._following.get(pid)) is not None:  # its last call is over
            last.join()
        with thread_freezer.frozen_siblings(pid, tid, self._processes, self._tables):
            yield

    def _processes(self) -> set[int]:
        """List the pod's processes, also those that made calls and have left its cgroups. Raises OSError."""
        pod = self._shared.table.pods.get(self._pod)
        known = self._shared.table.pids_of(self._pod)
        return pod_processes.processes_of(pod.cgroups if pod is not None else (), known)

    def _is_harmless(self, pod_call: PodCall, device: RmObject | None) -> bool:
        """Tell whether nothing that is made through a call's file could lie below a device.

        A file has one client. Without a client it reaches nothing. With the client that is about to get a device, it
        reaches only what that client has.
        """
        if device is None:
            return self.makes_devices(pod_call)
        mine = self._gpu_ops.reaches(pod_call.file, device.client)
        return mine and not self.has_device(device.client)

    def _settle_device(self, rm: RmObject) -> None:
        """Confirm a device that the kernel has made; if it is missing, free the one under another handle."""
        there, found = True, self._gpu_ops.find_object(rm)
        for _ in range(_TRIES):  # a file of the pod may be out of reach for a moment
            if found is not None or not (there := self._gpu_ops.exists(rm.key)):
                break
            time.sleep(_RETRY_S)
            found = self._gpu_ops.find_object(rm)
        if found is not None and found[0] == abi.NV01_DEVICE_0:
            self._shared.claims.confirm(rm.key)
            return
        self._shared.claims.cancel(rm.key)
        unsure = there or rm.client in self._shared.table.devices
        if unsure or self._gpu_ops.free_children(rm.client, [rm.client], [abi.CLASS_ID_DEVICE]) is None:
            self._may_have_device.add(rm.client)

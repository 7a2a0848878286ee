"""One pod's calls that let a file of it reach more: the clients of a control file, or cards."""

from __future__ import annotations

import errno
import os

from qgpu.guardian.proxy import control_files
from qgpu.guardian.proxy.client_registry import OTHER_PROCESS
from qgpu.guardian.proxy.handler_context import Handler, HandlerContext, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.guardian.proxy.passthrough import Passthrough
from qgpu.guardian.rules import tools
from qgpu.guardian.rules.rows import Why
from qgpu.linux import proc
from qgpu.nvidia import abi

_WORD = 4


class FileTies(Handler):
    """Handles REGISTER_FD, and the call that attaches cards to a control file."""

    def __init__(self, ctx: HandlerContext, passthrough: Passthrough) -> None:
        super().__init__(ctx)
        self._passthrough = passthrough

    def register(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Tie a file to a control file, whose clients it then reaches.

        Debuggers tie a control file, on which RM then tells them of events. Only pods that may profile do so, and the
        kernel makes nothing more on either file.
        """
        control_device = os.makedev(self._shared.major, abi.NV_CONTROL_MINOR)
        by_debugger = pod_call.device == control_device
        if by_debugger and not self._ctx.may(Why.PROFILING):
            self._count(tools.LINKED)
            return errno.EINVAL

        def before(control_file: int) -> None:
            # RM refuses any other file, and a file of another kind may not return from its poll.
            if proc.device_of(control_file) == control_device:
                self._tie(pod_call, control_file, by_debugger=by_debugger)

        error = self._ctx.with_descriptor(pod_call, block, 0, before)
        return 0 if pod_call.is_retry and error == errno.EINVAL else error  # RM accepts it only once

    def _tie(self, pod_call: PodCall, control_file: int, *, by_debugger: bool) -> None:
        """Note that a file is about to reach a control file's clients. Raises OSError if it may not.

        A process may make clients on one file and use them through the other only if it makes the clients of both. A
        device's file may be tied to that of another process of the pod; then nobody makes anything on it.
        """
        files, pid, mark = self._shared.files, pod_call.pid, control_files.mark_of(self._pod)
        if not self._shared.control_files.has_room(self._pod):
            self._count(control_files.TOO_MANY)
            raise OSError(errno.ENOSPC, control_files.TOO_MANY)
        makes = files.makers.claim(control_file, pid, mark) and files.makers.claim(pod_call.file, pid, mark)
        if not makes:
            of_pod = any(files.makers.is_by(control_file, each) for each in self._shared.table.pids_of(self._pod))
            if by_debugger or not of_pod:
                self._count(OTHER_PROCESS)
                raise OSError(errno.EINVAL, OTHER_PROCESS)
            files.makers.rule_out(pod_call.file, mark)
        if by_debugger:
            self._passthrough.end_on(pod_call.file)
            self._passthrough.end_on(control_file)
        files.tied.add(control_file)
        files.tied.add(pod_call.file)

    def attach_gpus(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Attach the pod's own cards, by RM's GPU ids, of which the call names as many as fit; it has no status.

        The driver attaches any card of the host, whatever device nodes there are.
        """
        if len(block.data) % _WORD:
            return errno.EINVAL
        named = set(memoryview(block.data).cast("I")) - {0}
        if not named <= self._gpu_ops.gpu_ids(self._shared.allowance(self._pod).minors):
            self._count("card without a grant")
            return errno.EPERM
        error = self._ctx.perform(pod_call, block)
        return 0 if pod_call.is_retry and error == errno.EINVAL else error  # the driver attaches once

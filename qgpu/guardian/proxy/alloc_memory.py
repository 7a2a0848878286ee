"""One pod's old calls for memory: the process's own memory for the card, or system memory."""

from __future__ import annotations

import errno

from qgpu.guardian.proxy import client_ownership, rm_calls
from qgpu.guardian.proxy.free_calls import FreeHandler
from qgpu.guardian.proxy.handler_context import PROCEED, Handler, HandlerContext, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.guardian.proxy.passthrough_memory import PassthroughMemory
from qgpu.guardian.rules import classes
from qgpu.nvidia import abi


class AllocMemoryHandler(Handler):
    """Handles RM_ALLOC_MEMORY."""

    def __init__(self, ctx: HandlerContext, free_handler: FreeHandler, passthrough_memory: PassthroughMemory) -> None:
        super().__init__(ctx)
        self._free_handler, self._passthrough_memory = free_handler, passthrough_memory

    def alloc_memory(self, pod_call: PodCall, block: IoctlBuffer, asked: rm_calls.AllocMemory, *, wrapped: bool) -> int:
        """Make memory by the old call: the process's own memory for the card, or system memory.

        With a descriptor RM also prepares the mapping, which it does for the process alone that made the client
        (osapi.c, rm_create_mmap_context). So the kernel performs these calls for the clients that it made. What it
        makes is looked for among the pod's clients (``passthrough_memory.py``), so the file must have no others.
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
            if refusal := self._refusal_by_kernel(asked):
                return self._ctx.answer(block, asked.status_at, refusal)
            self._passthrough_memory.begin(pod_call, (asked.client, asked.handle), asked.rm_class)
            return PROCEED
        row = classes.CLASSES.get(asked.rm_class)
        empty = row is not None and row.empty_by_alloc_memory
        if asked.rm_class != abi.NV01_MEMORY_SYSTEM and not empty:
            what = classes.name(asked.rm_class)
            return self._ctx.refuse(block, asked.status_at, abi.NV_ERR_INVALID_CLASS, what)
        self._free_handler.undo_interrupted(pod_call, (asked.client, asked.handle))
        if refusal := self._refusal(asked):
            return self._ctx.answer(block, asked.status_at, refusal)
        if empty:
            error = self._make_empty(pod_call, block)
        else:
            error = self._ctx.with_descriptor(pod_call, abi.NV_ESC_RM_ALLOC_MEMORY, block, rm_calls.MEMORY_FD_AT)
        if not error and block.u32(asked.status_at) == abi.NV_OK:
            made = abi.NV01_MEMORY_VIRTUAL if empty else asked.rm_class
            self._untracked.add(asked.client, block.u32(rm_calls.MEMORY_HANDLE_AT), made)
        return error

    def _refusal_by_kernel(self, asked: rm_calls.AllocMemory) -> int:
        """Return the same for an object that the kernel makes: afterwards RM must tell whether it made this one."""
        if not asked.handle:
            return abi.NV_ERR_INVALID_ARGUMENT  # RM would choose one that nobody here learns of
        if refusal := self._refusal(asked):
            return refusal
        if self._gpu_ops.exists((asked.client, asked.handle)):
            return abi.NV_ERR_INSERT_DUPLICATE_NAME
        return abi.NV_OK if self._untracked.may_make_unnamed() else abi.NV_ERR_INSUFFICIENT_RESOURCES

    def _refusal(self, asked: rm_calls.AllocMemory) -> int:
        """Return why a client may have no other such object, or NV_OK.

        The call comes on a card's file, on which RM tells nothing about clients. So the client must be known: it has a
        device, which was made on its control file.
        """
        return self._untracked.refusal(asked.client, asked.handle, asked.rm_class)

    def _make_empty(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Make an object without memory by the old call, instead of one that reaches the whole card.

        OpenGL and Vulkan make both to learn whether they may, and use neither. RM does the same for who is not root.
        """
        block.patch_u32(rm_calls.MEMORY_CLASS_AT, abi.NV01_MEMORY_VIRTUAL)
        block.patch_u32(rm_calls.MEMORY_FD_AT, -1)
        ours = rm_calls.MEMORY_CLASS_AT, rm_calls.MEMORY_FD_AT
        return self._ctx.perform(pod_call, abi.NV_ESC_RM_ALLOC_MEMORY, block, *ours)

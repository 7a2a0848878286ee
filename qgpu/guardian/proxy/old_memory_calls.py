"""One pod's calls to RM's two older interfaces for memory.

RM_ALLOC_MEMORY makes the process's own memory for the card, or system memory. No current CUDA library uses the heap
(NVOS32), but RM still answers it.
"""

from __future__ import annotations

import errno
import struct

from qgpu.guardian.accounting.rm_object import RmObject
from qgpu.guardian.proxy import rm_calls
from qgpu.guardian.proxy.alloc_calls import CHOSEN_PLACE, PAGE_TABLES
from qgpu.guardian.proxy.alloc_checks import OTHER_SPACE, AllocChecks
from qgpu.guardian.proxy.client_registry import OTHER_PROCESS, of_others
from qgpu.guardian.proxy.free_calls import FreeHandler
from qgpu.guardian.proxy.handler_context import PROCEED, Handler, HandlerContext, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.guardian.proxy.passthrough_memory import PassthroughMemory
from qgpu.guardian.rules import classes
from qgpu.nvidia import abi

#: The classes that a pod may make from the heap. From 550 on RM makes NV_MEMORY_EXTENDED_USER there, too.
_MADE = frozenset({abi.NV01_MEMORY_LOCAL_USER, abi.NV01_MEMORY_SYSTEM, abi.NV50_MEMORY_VIRTUAL})


class OldMemoryHandler(Handler):
    """Handles RM_ALLOC_MEMORY, and calls to the heap."""

    def __init__(self, ctx: HandlerContext, free_handler: FreeHandler, passthrough_memory: PassthroughMemory) -> None:
        super().__init__(ctx)
        self._checks, self._free_handler, self._passthrough_memory = AllocChecks(ctx), free_handler, passthrough_memory

    def alloc_memory(self, pod_call: PodCall, block: IoctlBuffer, asked: rm_calls.AllocMemory) -> int:
        """Make memory, or refuse it.

        With a descriptor RM also prepares the mapping, which it does for the process alone that made the client
        (osapi.c, rm_create_mmap_context). So the kernel performs these calls for the clients that it made. What it
        makes is looked for among the pod's clients (``passthrough_memory.py``), so the file must have no others.
        """
        entry = self._shared.table.clients.get(asked.client)
        if entry is not None and entry.pod != self._pod:
            return self._refuse(block, abi.NV_ERR_INVALID_CLIENT, of_others(classes.name(asked.rm_class)))
        by_kernel = entry is None or not entry.made_here
        if asked.rm_class == abi.NV01_MEMORY_SYSTEM_OS_DESCRIPTOR or (
            asked.rm_class == abi.NV01_MEMORY_SYSTEM and asked.fd >= 0 and by_kernel
        ):
            if pod_call.escape.wrapped:
                return errno.EINVAL
            if not self._shared.files.makers.is_by(pod_call.file, pod_call.pid):
                return self._refuse(block, abi.NV_ERR_INVALID_CLIENT, OTHER_PROCESS)
            if refusal := self._refusal_by_kernel(asked):
                return block.answer(refusal)
            self._passthrough_memory.begin(pod_call, (asked.client, asked.handle), asked.rm_class)
            return PROCEED
        row = classes.CLASSES.get(asked.rm_class)
        empty = row is not None and row.empty_by_alloc_memory
        if asked.rm_class != abi.NV01_MEMORY_SYSTEM and not empty:
            return self._refuse(block, abi.NV_ERR_INVALID_CLASS, classes.name(asked.rm_class))
        self._free_handler.undo_interrupted(pod_call, (asked.client, asked.handle))
        # On a card's file RM tells nothing about clients. So the client must be known: it has a device, which was made
        # on its control file.
        if refusal := self._untracked.refusal(asked.client, asked.handle, asked.rm_class):
            return block.answer(refusal)
        if empty:
            error = self._make_empty(pod_call, block)
        else:
            error = self._ctx.with_descriptor(pod_call, block, rm_calls.MEMORY_FD_AT)
        if not error and block.status == abi.NV_OK:
            made = abi.NV01_MEMORY_VIRTUAL if empty else asked.rm_class
            self._untracked.add(asked.client, block.u32(rm_calls.MEMORY_HANDLE_AT), made)
        return error

    def _refusal_by_kernel(self, asked: rm_calls.AllocMemory) -> int:
        """Return why the kernel may make no such object, or NV_OK: afterwards RM must tell whether it made this one."""
        if not asked.handle:
            return abi.NV_ERR_INVALID_ARGUMENT  # RM would choose one that nobody here learns of
        if refusal := self._untracked.refusal(asked.client, asked.handle, asked.rm_class):
            return refusal
        if self._gpu_ops.exists((asked.client, asked.handle)):
            return abi.NV_ERR_INSERT_DUPLICATE_NAME
        return abi.NV_OK if self._untracked.may_make_unnamed() else abi.NV_ERR_INSUFFICIENT_RESOURCES

    def _make_empty(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Make an object without memory by the old call, instead of one that reaches the whole card.

        OpenGL and Vulkan make both to learn whether they may, and use neither. RM does the same for who is not root.
        """
        ours = {rm_calls.MEMORY_CLASS_AT: abi.NV01_MEMORY_VIRTUAL, rm_calls.MEMORY_FD_AT: -1}
        for at, number in ours.items():
            block.patch_u32(at, number)
        return self._ctx.perform(pod_call, block, *ours)

    def heap(self, pod_call: PodCall, block: IoctlBuffer, asked: rm_calls.VidHeap) -> int:
        """Handle a call to the heap."""
        match asked.function:
            case rm_calls.HEAP_FREE if not self._may_be_memory(asked):
                return block.answer(abi.NV_ERR_OBJECT_NOT_FOUND)
            case rm_calls.HEAP_FREE:
                return self._free_handler.free(pod_call, block, asked)
            case rm_calls.HEAP_INFO:
                error = self._proxy.escape(pod_call.file, abi.NV_ESC_RM_VID_HEAP_CONTROL, block)
                return self._shown(block, asked, error)
            case rm_calls.HEAP_ALLOC_SIZE:
                return self._alloc_from_heap(pod_call, block, asked)
        return self._refuse(block, abi.NV_ERR_NOT_SUPPORTED, f"heap function {asked.function}")

    def _may_be_memory(self, asked: rm_calls.VidHeap) -> bool:
        """Tell whether a handle may be one of memory. RM frees nothing else here, and a search below it takes long."""
        rm = self._shared.table.objects.get((asked.client, asked.handle))
        memory = rm is None or rm.rm_class == abi.NV01_MEMORY_LOCAL_USER
        return memory and asked.handle != asked.client

    def _alloc_from_heap(self, pod_call: PodCall, block: IoctlBuffer, asked: rm_calls.VidHeap) -> int:
        rm = RmObject(asked.client, asked.handle, asked.parent, abi.NV01_MEMORY_LOCAL_USER, asked.size)
        if not self._register(pod_call, asked.client):
            return block.answer(abi.NV_ERR_INVALID_CLIENT)
        if rm_calls.is_virtual(asked) and asked.space and self._checks.lies_elsewhere(rm, asked.space):
            return self._refuse(block, abi.NV_ERR_INVALID_ARGUMENT, OTHER_SPACE)
        if rm_calls.is_virtual(asked) and rm_calls.takes_tables(asked.flags) and self._ctx.limited():
            return self._refuse(block, abi.NV_ERR_NOT_SUPPORTED, PAGE_TABLES)
        claimed = rm_calls.may_be_video(asked)
        if claimed and rm_calls.chooses_place(asked.flags, asked.attributes2) and self._ctx.limited():
            return self._refuse(block, abi.NV_ERR_NOT_SUPPORTED, CHOSEN_PLACE)
        self._free_handler.undo_interrupted(pod_call, (asked.client, asked.handle))
        if refusal := self._untracked.refusal(asked.client, asked.handle, abi.NV01_MEMORY_SYSTEM):
            return block.answer(refusal)
        if claimed and (refusal := self._checks.admit(pod_call.pid, rm) or self._ctx.claim(rm)):
            return block.answer(refusal)
        if asked.handle:  # RM would make it under another handle than the one that was claimed
            block.patch_u32(rm_calls.HEAP_FLAGS_AT, asked.flags | rm_calls.HEAP_FLAG_HANDLE_PROVIDED)
        pod_call.begin()
        error = self._proxy.escape(pod_call.file, abi.NV_ESC_RM_VID_HEAP_CONTROL, block)
        block.restore(rm_calls.HEAP_FLAGS_AT, 4)
        if claimed and not error and block.status == abi.NV_OK:
            about = self._gpu_ops.object_info(pod_call.file, *rm.key)
            if about is not None and about[0] not in _MADE:
                self._shared.claims.cancel(rm.key)
                self._gpu_ops.free(pod_call.file, *rm.key)
                return self._refuse(block, abi.NV_ERR_NOT_SUPPORTED, f"class {about[0]:#x}")
            if about is None or about[0] != abi.NV01_MEMORY_LOCAL_USER:
                self._shared.claims.cancel(rm.key)
            elif not self._shared.claims.confirm(rm.key, block.u64(rm_calls.HEAP_SIZE_AT)):
                self._free_handler.discard(pod_call, rm.key)
                return self._refuse(block, abi.NV_ERR_NO_MEMORY, "memory over the limit")
        elif claimed:
            self._shared.claims.cancel(rm.key)
        made = asked.client, block.u32(rm_calls.HEAP_HANDLE_AT)
        kept = claimed and made in self._shared.table.objects
        if not error and block.status == abi.NV_OK and not kept:
            self._untracked.add(*made, abi.NV01_MEMORY_SYSTEM)
        return self._shown(block, asked, error)

    def _shown(self, block: IoctlBuffer, asked: rm_calls.VidHeap, error: int) -> int:
        """Bound the card's total and free bytes, which every answer contains, to the pod's limit."""
        if (shown := self._ctx.visible_memory(asked.client, asked.parent)) is not None:
            total, free = struct.unpack_from("<QQ", block.data, rm_calls.HEAP_TOTAL_AT)
            struct.pack_into("<QQ", block.data, rm_calls.HEAP_TOTAL_AT, min(total, shown[0]), min(free, shown[1]))
        if not error:
            block.store()
        return error

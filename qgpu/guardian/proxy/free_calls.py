"""One pod's calls that free RM objects, and frees of what RM made for a call and the pod may not have."""

from __future__ import annotations

from contextlib import nullcontext

from qgpu.guardian.accounting.rm_object import Key, RmObject
from qgpu.guardian.proxy.freed_memory import FreedMemory
from qgpu.guardian.proxy.handler_context import Handler, HandlerContext, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.guardian.proxy.os_events import EVENT_OBJECTS, PodEvents
from qgpu.guardian.proxy.registered_channels import RegisteredChannels
from qgpu.guardian.proxy.rm_calls import Free, VidHeap
from qgpu.guardian.rules import classes
from qgpu.nvidia import abi

#: A free of one of these frees a profiler, too.
_ABOVE_PROFILERS = frozenset({abi.NV01_DEVICE_0, abi.NV20_SUBDEVICE_0})


class FreeHandler(Handler):
    """Handles calls that free objects."""

    def __init__(self, ctx: HandlerContext, freed_memory: FreedMemory, registered_channels: RegisteredChannels) -> None:
        super().__init__(ctx)
        self._freed_memory, self._registered_channels = freed_memory, registered_channels
        #: The pod's event objects.
        self.events = PodEvents(ctx, EVENT_OBJECTS, lambda key: self._gpu_ops.exists(key))

    def free(self, pod_call: PodCall, block: IoctlBuffer, asked: Free | VidHeap) -> int:
        """Free an object and all below it."""
        number = pod_call.escape.number
        key = client, handle = asked.client, asked.handle
        ours = self._freed_memory.is_ours(key) and key in self._shared.table.objects
        if ours or self._is_made_for_channels(pod_call.file, key):
            return block.answer(abi.NV_ERR_OBJECT_NOT_FOUND)
        if is_page := handle in self._shared.table.others(abi.RM_USER_SHARED_DATA).of(client):
            self._ctx.rare.wait()  # RM looks through all clients' objects
        if not self._free_writers(pod_call, key):
            return block.answer(abi.NV_ERR_STATE_IN_USE)
        was, channels = self._shared.table.objects.get(key), list[Key]()
        gone, error, patched = False, 0, False
        holds_others = client == handle or (was is not None and was.rm_class in _ABOVE_PROFILERS)
        unbinds = self._shared.monitors.unbinds(self._pod, client, handle, holds_others=holds_others)

        def carry_out() -> bool:
            nonlocal error, patched
            # Not before: a pod decides how long it takes to look at the rest. The heap's free gets here for memory that
            # no channel goes with.
            if number == abi.NV_ESC_RM_FREE:
                channels.extend(self._shared.claims.begin_free(key, pod_call.file))
            with self._ctx.rare.timed() if is_page else nullcontext():
                error = self._proxy.escape(pod_call.file, number, block)
            refused = not error and block.status in abi.UNKNOWN_TO_RM
            if refused and pod_call.is_retry and self._is_gone(key):
                patched = True
                block.status = abi.NV_OK  # the dead guardian has freed it
                channels.extend(self._shared.table.channels_freed_with(key))
            return not error and block.status == abi.NV_OK

        try:
            with self._shared.monitors.turn(self._pod, client) if unbinds else nullcontext():
                gone = self._freed_memory.free(pod_call, key, carry_out)
        finally:
            self._end_free(key, was, channels, gone=gone)
        if gone:
            self.events.discard(client, handle)
        if gone and unbinds:
            self._shared.monitors.freed(self._pod, self._gpu_ops.exists)
        if gone and client == handle and not patched:  # RM has freed it, so the file has no other root client
            self._shared.files.forget_root(pod_call.file)
        if not error:
            block.store()
        return error

    def _free_writers(self, pod_call: PodCall, key: Key) -> bool:
        """Free the TSGs and channels for which the card writes memory that goes with an object; False if one stays.

        RM keeps them, and the card would write into memory that may be another pod's by then. libcuda frees memory
        before channels when a process is suspended.
        """
        table = self._shared.table
        if not (writers := table.writers_of(key)) or self._gpu_ops.object_info(pod_call.file, *key) is None:
            return True
        for each in writers:
            if each in table.objects:  # else it went with its TSG
                self.discard(pod_call, each)
        return not any(self._gpu_ops.exists(each) for each in writers)

    def _is_made_for_channels(self, file: int, key: Key) -> bool:
        """Tell whether RM made an object by itself for a TSG or channel: no program frees it.

        RM would free channels with it, and wait under its lock for their work behind a closed gate.
        """
        table = self._shared.table
        if key[0] not in table.channel_handles or key in table.objects or self._untracked.has(key):
            return False
        about = self._gpu_ops.object_info(file, *key)
        return about is not None and about[0] in classes.MADE_FOR_CHANNELS

    def _is_gone(self, key: Key) -> bool:
        """Tell whether RM no longer has an object, which is no other pod's: it refuses frees by other files, too."""
        entry = self._shared.table.clients.get(key[0])
        return (entry is None or entry.pod == self._pod) and not self._gpu_ops.exists(key)

    def undo_interrupted(self, pod_call: PodCall, key: Key) -> None:
        """Free what a dead guardian may have made for this call; the call then makes it again."""
        if not pod_call.is_retry or not self._register(pod_call, key[0]):
            return
        if self._gpu_ops.object_info(pod_call.file, *key) is None and key not in self._shared.table.objects:
            return
        self.discard(pod_call, key)

    def discard(self, pod_call: PodCall, key: Key) -> None:
        """Free what RM has made and the pod may not have. Memory that something else keeps by now stays charged."""
        was, channels = self._shared.table.objects.get(key), self._shared.claims.begin_free(key, pod_call.file)
        gone = False

        def carry_out() -> bool:
            self._gpu_ops.free(pod_call.file, *key)
            return not self._gpu_ops.exists(key)

        try:
            gone = self._freed_memory.free(pod_call, key, carry_out)
        finally:
            self._end_free(key, was, channels, gone=gone)

    def _end_free(self, key: Key, was: RmObject | None, channels: list[Key], *, gone: bool) -> None:
        numbers = self._registered_channels.keep(channels) if gone else []
        self._shared.claims.end_free(key, was, channels, gone=gone)
        self._registered_channels.freed(channels, numbers)
        if gone:
            self._untracked.discard(key)

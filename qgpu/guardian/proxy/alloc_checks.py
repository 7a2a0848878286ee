"""Which objects a pod may make, judged by their class, parent and card before RM is asked."""

from __future__ import annotations

import os

from qgpu.guardian.accounting.rm_object import NO_INSTANCE, Key, RmObject
from qgpu.guardian.proxy.handler_context import Handler
from qgpu.guardian.rules import classes, scheduling
from qgpu.linux import proc
from qgpu.nvidia import abi, mig

#: The longest queue of a memory mapper: RM takes 56 bytes of the host's memory for each of its entries.
_MOST_QUEUED = 1 << 16
#: How many devices a client may have on one card, with a limit and without; the recorded programs make one. When RM is
#: asked about a process, it looks through all objects of a client once for each of them, under its locks
#: (_gpuCollectMemInfo). A pod asks rarely, but under a limit the guardian asks twice as it frees memory.
_MOST_DEVICES = {True: 4, False: 16}
TOO_MANY_DEVICES = "too many devices of a client"
#: And how many subdevices a device may have; the recorded programs make one. For each piece of memory that RM frees, it
#: looks through all of them, and what each has for third-party P2P (CliUnregisterMemoryFromThirdPartyP2P).
_MOST_SUBDEVICES, TOO_MANY_SUBDEVICES = 8, "too many subdevices of a device"
#: And how many handles of the page that RM shares with all a client may have; programs make one for each card. As it
#: frees one, RM looks through all objects of all clients (_gpushareddataRequestDataPoll).
_MOST_PAGES, TOO_MANY_PAGES = 16, "too many handles of the driver's shared page"
#: The refusal of a TSG or channel that no gate and no timeslice would bound.
OTHER_ENGINE = "channel of an engine that no program uses"
#: RM does not compare its card with that of what uses it, nor a TSG's with that of its second handle
#: (vaspaceGetByHandleOrDeviceDefault, kchangrpapiCopyConstruct_IMPL).
OTHER_SPACE = "address space of another card"
#: The refusal of what would put a channel on a runlist that is shared otherwise than its TSG's.
OTHER_RUNLIST = "channel on another engine than its TSG"


class AllocChecks(Handler):
    """Judges objects of one pod."""

    def admit(self, pid: int, rm: RmObject) -> int:
        """Return the status with which an object's class, parent or card is refused; 0 if it may be made."""
        status, why = self._judge(pid, rm)
        if why:
            self._count(why)
        return status

    def _judge(self, pid: int, rm: RmObject) -> tuple[int, str]:
        """Return the status of a refusal and why, or NV_OK; give a device the pod's place on its card."""
        table = self._shared.table
        if rm.rm_class == abi.NV01_DEVICE_0:
            allowance = self._shared.allowance(self._pod)
            place = allowance.place_on(rm.detail)
            if place is None or not _has_open(pid, os.makedev(self._shared.major, allowance.minors[place])):
                return abi.NV_ERR_INSUFFICIENT_PERMISSIONS, "card without a grant"
            if self._devices_of(rm.client, place) >= _MOST_DEVICES[self._ctx.limited()]:
                return abi.NV_ERR_INSUFFICIENT_RESOURCES, TOO_MANY_DEVICES
            rm.detail = place
            return abi.NV_OK, ""
        if rm.rm_class == abi.NV20_SUBDEVICE_0 and len(table.subdevices.of((rm.client, rm.parent))) >= _MOST_SUBDEVICES:
            return abi.NV_ERR_INSUFFICIENT_RESOURCES, TOO_MANY_SUBDEVICES
        if rm.rm_class == abi.RM_USER_SHARED_DATA and len(table.others(rm.rm_class).of(rm.client)) >= _MOST_PAGES:
            return abi.NV_ERR_INSUFFICIENT_RESOURCES, TOO_MANY_PAGES
        if rm.rm_class == abi.KEPLER_CHANNEL_GROUP_A and not self._is_metered(rm):
            return abi.NV_ERR_INVALID_ARGUMENT, "TSG whose time RM counts as the guardian's"
        if table.is_scheduled(rm) and rm.detail != 0 and rm.detail not in scheduling.ENGINES:
            return abi.NV_ERR_INVALID_ARGUMENT, OTHER_ENGINE
        if rm.same_as is None and self.lies_elsewhere(rm, *rm.uses):
            return abi.NV_ERR_INVALID_ARGUMENT, OTHER_SPACE
        if rm.rm_class in classes.MIG_SUBSCRIPTIONS and not self._is_own_instance(rm):
            return abi.NV_ERR_INSUFFICIENT_PERMISSIONS, "MIG instance without a grant"
        if rm.rm_class in abi.GPFIFO_CLASSES:
            parent = table.objects.get((rm.client, rm.parent))
            in_tsg = parent is not None and parent.rm_class == abi.KEPLER_CHANNEL_GROUP_A
            # Below a device, RM makes a TSG without a handle. Where kernels run, the timeslice must be set.
            if not in_tsg and not (table.stands_alone(rm) and table.shared_as(rm) != "compute"):
                return abi.NV_ERR_INVALID_ARGUMENT, "compute channel outside a TSG"
        if classes.on_compute_engine(rm.rm_class) and not self.may_run_on((rm.client, rm.parent), abi.GR_ENGINES[0]):
            return abi.NV_ERR_INVALID_ARGUMENT, "compute outside a compute TSG"  # nobody would pay for its time
        if rm.rm_class in classes.COPIES and not self.may_run_on((rm.client, rm.parent), rm.detail):
            return abi.NV_ERR_INVALID_ARGUMENT, OTHER_RUNLIST
        if rm.rm_class == abi.NV_MEMORY_MAPPER and rm.detail > _MOST_QUEUED:
            return abi.NV_ERR_INVALID_ARGUMENT, "long queue of memory mappings"
        if rm.rm_class in classes.KEPT and rm.handle == 0:  # RM would choose one; no CUDA library asks for that
            return abi.NV_ERR_INVALID_ARGUMENT, "object without a handle"
        return abi.NV_OK, ""

    def _devices_of(self, client: int, place: int) -> int:
        """Return how many devices of a client may be on a card."""
        with self._shared.lock:
            table = self._shared.table
            found = [table.objects[client, handle].detail for handle in table.devices.of(client)]
        return sum(each in (place, NO_INSTANCE) for each in found)

    def lies_elsewhere(self, rm: RmObject, *handles: int) -> bool:
        """Tell whether something else of its client, given its handle, may be on another card than an object."""
        table, card = self._shared.table, self._shared.table.instance_of(rm)
        others = (table.objects.get((rm.client, each)) for each in handles)
        return any(card is None or other is None or table.instance_of(other) != card for other in others)

    def may_run_on(self, key: Key, engine: int) -> bool:
        """Tell whether a channel may be put on an engine's runlist."""
        channel = self._channel(key)
        alike = channel is not None and self._shared.table.is_shared_alike(channel, engine)
        return alike and engine in scheduling.ENGINES

    def may_reset(self, key: Key, params: bytes | bytearray) -> bool:
        """Tell whether a channel may be reset with the engine that its reset's parameters name: only with its TSG's.

        RM judges what is no engine of programs.
        """
        channel, engine = self._channel(key), int.from_bytes(params[:4], "little")
        tsg = self._shared.table.scheduled_with(channel) if channel is not None else None
        return engine not in scheduling.ENGINES or (tsg is not None and engine == (tsg.detail or abi.GR_ENGINES[0]))

    def _channel(self, key: Key) -> RmObject | None:
        table = self._shared.table
        return table.objects.get(key) if key[1] in table.channel_handles.of(key[0]) else None

    def _is_metered(self, rm: RmObject) -> bool:
        """Tell whether a TSG's time can be told: by its channels' contexts, or by the process that made its client."""
        entry = self._shared.table.clients.get(rm.client)
        return self._gpu_ops.knows_contexts or entry is None or not entry.made_here

    def _is_own_instance(self, rm: RmObject) -> bool:
        """Tell whether a subscription is to the pod's own MIG instance, or below a whole card, where RM refuses it."""
        if (place := self._shared.table.instance_of(rm)) is None:
            return False
        own = mig.numbers_at(place)
        return own is None or rm.detail == own[classes.MIG_SUBSCRIPTIONS.index(rm.rm_class)]


def _has_open(pid: int, device: int) -> bool:
    """Tell whether a process has a device open. Raises OSError when the process has ended."""
    os.stat(f"/proc/{pid}")
    return any(found == device for _, found in proc.devices(pid))

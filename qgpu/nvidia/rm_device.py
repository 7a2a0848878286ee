"""One card opened by our own client, with the gate over other clients' channels.

FIFO_DISABLE_CHANNELS takes channels of any client from a root caller, and when it returns none of them is running
(kernel_fifo_ctrl.c:subdeviceCtrlCmdFifoDisableChannels_IMPL). It took 0.2-0.9 ms on an H200, and 10-40 ms over a kernel
that reads host memory without end.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from qgpu.errors import RmError
from qgpu.model.plane_api import MigInstance
from qgpu.nvidia import abi, mig
from qgpu.nvidia.abi import ffi
from qgpu.nvidia.rm_client import CardInfo, RmClient

_log = structlog.get_logger("rm")


@dataclass(frozen=True, slots=True)
class RmDevice:
    """Our Device and Subdevice on one card, which stand for one MIG instance if the card is divided."""

    client: RmClient
    #: The number of its pGPU: of a card its place among all cards in PCI order.
    index: int
    #: RM's device instance: what a pod names in NV0080_ALLOC_PARAMETERS.deviceId; of a MIG instance its place there.
    instance: int
    minor: int
    pci: str
    device: int
    subdevice: int
    gpu_id: int
    mig: MigInstance | None = None

    def time_ns(self) -> int:
        """Read the card's clock, which stamps context-switch records; it was set once, and drifts from the host's."""
        params = ffi.new("NV2080_CTRL_TIMER_GET_TIME_PARAMS *")
        self.client.control(self.subdevice, abi.NV2080_TIMER_GET_TIME, params)
        return int(params.time_nsec)

    def uuid(self) -> bytes:
        """Return the card's UUID, which UVM uses. Raises RmError."""
        params = ffi.new("NV2080_CTRL_GPU_GET_GID_INFO_PARAMS *", {"flags": abi.NV2080_GPU_GID_FORMAT_BINARY})
        self.client.control(self.subdevice, abi.NV2080_GPU_GET_GID_INFO, params)
        return bytes(ffi.buffer(params.data, params.length))

    def grces(self) -> frozenset[int]:
        """Return the types of the card's copy engines that are on the compute engine's runlist."""
        found: set[int] = set()
        for kinds in abi.COPY_ENGINE_TYPES:
            params = ffi.new("NV2080_CTRL_CE_GET_CAPS_V2_PARAMS *", {"ceEngineType": kinds[0]})
            with suppress(RmError):  # the card has no such engine
                self.client.control(self.subdevice, abi.NV2080_CE_GET_CAPS_V2, params)
                found.update(kinds if params.capsTbl[0] & abi.NV2080_CE_CAPS_GRCE else ())
        return frozenset(found)

    def see_all_instances(self) -> None:
        """Subscribe to all MIG instances of the card: its log tells of none otherwise. Raises RmError.

        RM lets one client at a time do this, for example a profiler of the whole card (gisubscriptionConstruct_IMPL).
        """
        every = ffi.new("NVC637_ALLOCATION_PARAMETERS *", {"swizzId": abi.NVC637_DEVICE_PROFILING_SWIZZID})
        self.client.alloc(self.subdevice, abi.AMPERE_SMC_PARTITION_REF, every)

    def private_bytes(self, pid: int) -> int:
        """Return how much of this card's memory only this process refers to, by RM's count. Raises RmError."""
        params = ffi.new("NV2080_CTRL_GPU_GET_PID_INFO_PARAMS *", {"pidInfoListCount": 1})
        params.pid = pid
        self.client.control(self.subdevice, abi.NV2080_GPU_GET_PID_INFO, params)
        return int(params.memPrivate)

    def set_channels(self, channels: Sequence[tuple[int, int]], *, disabled: bool, preempt: bool = True) -> None:
        """Disable or enable channels given as (client, channel) handles. Raises RmError on a stale handle.

        RM counts: a channel that was disabled twice runs only after it was enabled twice, and enabling an enabled
        channel changes nothing. When RM refuses a call, the channels before the stale one are disabled or enabled all
        the same (measured on an H200: docs/decisions/0028-counted.md).

        Without ``preempt`` a running channel may finish its timeslice. That takes the card half as long, and takes no
        time from a third context. The channel leaves the engine only when another TSG wants it.
        """
        for at in range(0, len(channels), abi.MAX_DISABLE_CHANNELS):
            part = channels[at : at + abi.MAX_DISABLE_CHANNELS]
            params = ffi.new("NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS *")
            params.bDisable, params.numChannels = disabled, len(part)
            params.bOnlyDisableScheduling = disabled and not preempt
            for i, (client, channel) in enumerate(part):
                params.hClientList[i], params.hChannelList[i] = client, channel
            self.client.control(self.subdevice, abi.NV2080_FIFO_DISABLE_CHANNELS, params)


def open_devices(client: RmClient) -> list[RmDevice]:
    """Open every card in PCI order, the order of nvidia-smi and of pGPU numbers; an excluded card keeps its number.

    A card that MIG divides is listed once for each instance that has a GPU instance to itself.
    """
    devices = []
    for index, card in enumerate(client.cards()):
        try:
            device = _open_device(client, index, card)
            instances = mig.on_card(index, card.minor)
            in_use = Counter(each.gpu_instance for each in instances)
            alone = [_on(device, each) for each in instances if in_use[each.gpu_instance] == 1]
            devices += alone if instances else [device]
        except (RmError, OSError) as error:
            _log.error("card excluded: it cannot be opened", pci=card.pci, reason=str(error))
    return devices


def gpu_instance_uuid(device: RmDevice) -> bytes:
    """Return the UUID by which UVM knows the GPU instance that a device stands for. Raises RmError, OSError.

    RM tells it to who subscribes, and a Subdevice subscribes once, so a client of its own asks.
    """
    assert device.mig is not None
    if (files := mig.capabilities(device.minor, device.mig)) is None:
        raise FileNotFoundError(errno.ENOENT, "the MIG instance is gone")
    client = RmClient()
    capability = -1
    try:
        own = _open_device(client, device.index, CardInfo(device.pci, device.gpu_id, device.minor))
        capability = os.open(mig.node(files[0]), os.O_RDONLY | os.O_CLOEXEC)
        which = {"capDescriptor": capability, "swizzId": device.mig.gpu_instance}
        subscription = client.alloc(
            own.subdevice, abi.AMPERE_SMC_PARTITION_REF, ffi.new("NVC637_ALLOCATION_PARAMETERS *", which)
        )
        params = ffi.new("NVC637_CTRL_GET_UUID_PARAMS *")
        client.control(subscription, abi.NVC637_GET_UUID, params)
        return bytes(ffi.buffer(params.uuid))
    finally:
        if capability >= 0:
            os.close(capability)
        client.close()


def _on(device: RmDevice, instance: MigInstance) -> RmDevice:
    return replace(device, index=instance.index, instance=mig.place_of(device.instance, instance), mig=instance)


def _open_device(client: RmClient, index: int, card: CardInfo) -> RmDevice:
    client.open_card(card.minor, card.gpu_id)
    info = ffi.new("NV0000_CTRL_GPU_GET_ID_INFO_V2_PARAMS *", {"gpuId": card.gpu_id})
    client.control(client.handle, abi.NV0000_GPU_GET_ID_INFO_V2, info)
    ours = ffi.new("NV0080_ALLOC_PARAMETERS *", {"deviceId": info.deviceInstance, "hClientShare": client.handle})
    device = client.alloc(client.handle, abi.NV01_DEVICE_0, ours)
    which = ffi.new("NV2080_ALLOC_PARAMETERS *", {"subDeviceId": info.subDeviceInstance})
    subdevice = client.alloc(device, abi.NV20_SUBDEVICE_0, which)
    return RmDevice(client, index, info.deviceInstance, card.minor, card.pci, device, subdevice, card.gpu_id)

"""One card opened by our own client, with the gate over other clients' channels.

FIFO_DISABLE_CHANNELS takes channels of any client from a root caller, and when it returns none of them is running
(kernel_fifo_ctrl.c:subdeviceCtrlCmdFifoDisableChannels_IMPL). It took 0.2-0.9 ms on an H200, and 10-40 ms over a kernel
that reads host memory without end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from qgpu.errors import RmError
from qgpu.nvidia import abi
from qgpu.nvidia.abi import ffi
from qgpu.nvidia.rm_client import CardInfo, RmClient

_log = structlog.get_logger("rm")


@dataclass(frozen=True, slots=True)
class RmDevice:
    """Our Device and Subdevice on one card."""

    client: RmClient
    #: Its place among all cards in PCI order: the number of its pGPU.
    index: int
    #: RM's device instance: what a pod names in NV0080_ALLOC_PARAMETERS.deviceId.
    instance: int
    minor: int
    pci: str
    device: int
    subdevice: int
    gpu_id: int

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
    """Open every card in PCI order, the order of nvidia-smi and of pGPU numbers; an excluded card keeps its number."""
    devices = []
    for index, card in enumerate(client.cards()):
        try:
            devices.append(_open_device(client, index, card))
        except (RmError, OSError) as error:
            _log.error("card excluded: it cannot be opened", pci=card.pci, reason=str(error))
    return devices


def _open_device(client: RmClient, index: int, card: CardInfo) -> RmDevice:
    client.open_card(card.minor, card.gpu_id)
    info = ffi.new("NV0000_CTRL_GPU_GET_ID_INFO_V2_PARAMS *", {"gpuId": card.gpu_id})
    client.control(client.handle, abi.NV0000_GPU_GET_ID_INFO_V2, info)
    ours = ffi.new("NV0080_ALLOC_PARAMETERS *", {"deviceId": info.deviceInstance, "hClientShare": client.handle})
    device = client.alloc(client.handle, abi.NV01_DEVICE_0, ours)
    which = ffi.new("NV2080_ALLOC_PARAMETERS *", {"subDeviceId": info.subDeviceInstance})
    subdevice = client.alloc(device, abi.NV20_SUBDEVICE_0, which)
    return RmDevice(client, index, info.deviceInstance, card.minor, card.pci, device, subdevice, card.gpu_id)

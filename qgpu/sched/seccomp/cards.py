"""What NVML tells of this machine's cards: whether they are whole, their names and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pynvml

from qgpu.errors import NoGpuError, NotSupportedError
from qgpu.sched.backend import Pgpu


def check_cards() -> None:
    """Make sure that no card is in MIG mode, which divides it in another way. Raises NotSupportedError."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoGpuError(f"NVML: {error}; is the NVIDIA driver's user-space part installed?") from error
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                current, _ = pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByIndex(index))
            except pynvml.NVMLError:  # a card without MIG, or one that cannot be asked: the guardian leaves that out
                continue
            if current == pynvml.NVML_DEVICE_MIG_ENABLE:
                raise NotSupportedError(
                    f"GPU {index}: MIG mode is on, and qgpu shares whole cards; switch it off with "
                    f"`nvidia-smi -i {index} -mig 0`, or leave that card to MIG on another host"
                )
    finally:
        pynvml.nvmlShutdown()


def describe(cards: Sequence[Mapping[str, Any]]) -> list[Pgpu]:
    """Ask NVML for names and sizes; cards are matched by PCI address."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoGpuError(f"NVML: {error}; is the NVIDIA driver's user-space part installed?") from error
    try:
        found = []
        for card in cards:
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(card["pci"].encode())
            found.append(
                Pgpu(
                    card["index"],
                    _text(pynvml.nvmlDeviceGetUUID(handle)),
                    _text(pynvml.nvmlDeviceGetName(handle)),
                    int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    card["minor"],
                )
            )
        return found
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

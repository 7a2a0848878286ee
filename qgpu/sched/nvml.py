"""What NVML tells of this machine's cards: whether they are whole, their names and sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pynvml

from qgpu.errors import NoGpuError, NotSupportedError
from qgpu.sched.backend import Pgpu


def check_cards() -> None:
    """Make sure that no card is in MIG mode, which divides it in another way. Raises NoGpuError, NotSupportedError."""
    with _nvml():
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


def describe(cards: Iterable[tuple[int, str]]) -> list[Pgpu]:
    """Ask for names and sizes of cards given as (number, PCI address). Raises NoGpuError."""
    with _nvml():
        return [_described(index, pynvml.nvmlDeviceGetHandleByPciBusId(pci.encode())) for index, pci in cards]


def _described(index: int, handle: object) -> Pgpu:
    return Pgpu(
        index,
        _text(pynvml.nvmlDeviceGetUUID(handle)),
        _text(pynvml.nvmlDeviceGetName(handle)),
        int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        int(pynvml.nvmlDeviceGetMinorNumber(handle)),
    )


@contextmanager
def _nvml() -> Iterator[None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoGpuError(f"NVML: {error}; is the NVIDIA driver's user-space part installed?") from error
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

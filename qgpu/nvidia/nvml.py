"""What NVML reports about this machine's cards: MIG mode, names, sizes, utilisation."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import pynvml

from qgpu.errors import NoGpuError, NotSupportedError
from qgpu.model import NS_PER_MS
from qgpu.model.plane_api import ExcludedCard, Pgpu

#: NVML has a new figure about five times a second.
_FRESH_NS = 100 * NS_PER_MS


def cards_in_mig_mode() -> list[ExcludedCard]:
    """List the cards that MIG divides, which qgpu leaves alone (docs/decisions/0041-mig.md).

    Raises NoGpuError, and NotSupportedError if no other card is there.
    """
    found = []
    with _nvml():
        count = pynvml.nvmlDeviceGetCount()
        for index in range(count):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            try:
                current, _ = pynvml.nvmlDeviceGetMigMode(handle)
            except pynvml.NVMLError:  # no MIG, or no answer: the guardian leaves a card without an answer out
                continue
            if current == pynvml.NVML_DEVICE_MIG_ENABLE:
                pci = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()
                found.append(ExcludedCard(index, pci, f"MIG mode is on; to share it: nvidia-smi -i {index} -mig 0"))
    if found and len(found) == count:
        raise NotSupportedError(
            "MIG mode is on for every GPU here, and qgpu shares whole cards; switch it off for one with "
            f"`nvidia-smi -i {found[0].index} -mig 0`"
        )
    return found


def describe(cards: Iterable[tuple[int, str]]) -> list[Pgpu]:
    """Return names and sizes of cards given as (number, PCI address). Raises NoGpuError."""
    with _nvml():
        return [_described(index, pynvml.nvmlDeviceGetHandleByPciBusId(pci.encode())) for index, pci in cards]


def processes(uuid: str) -> frozenset[int]:
    """List the processes with a compute or graphics context on a card. Raises NoGpuError."""
    with _nvml():
        try:
            card = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            found = [
                *pynvml.nvmlDeviceGetComputeRunningProcesses(card),
                *pynvml.nvmlDeviceGetGraphicsRunningProcesses(card),
            ]
        except pynvml.NVMLError as error:
            raise NoGpuError(f"NVML: {error}; it does not list the card's processes") from error
    return frozenset(int(process.pid) for process in found)


def mps_clients(uuid: str) -> frozenset[int]:
    """List the processes that use a card through MPS; none where NVML cannot tell. Raises NoGpuError."""
    with _nvml():
        try:
            card = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            found = pynvml.nvmlDeviceGetMPSComputeRunningProcesses(card)
        except pynvml.NVMLError:
            return frozenset()
    return frozenset(int(process.pid) for process in found)


def free_memory(uuid: str) -> int:
    """Return how many bytes of a card are free. Raises NoGpuError."""
    with _nvml():
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).free)
        except pynvml.NVMLError as error:
            raise NoGpuError(f"NVML: {error}; it does not tell how much of the card is free") from error


class Utilization:
    """The fraction of time in which a card runs any kernel."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._card: object | None = None
        self._looked_ns = 0
        self._used: float | None = None

    def read(self) -> float | None:
        """Return the fraction over about the last 200 ms, 0 to 1; None if NVML gives none."""
        now_ns = time.monotonic_ns()
        if self._looked_ns and now_ns - self._looked_ns < _FRESH_NS * 9 // 10:
            return self._used
        self._looked_ns = now_ns
        try:
            if self._card is None:
                self._card = _opened(self._uuid)
            self._used = pynvml.nvmlDeviceGetUtilizationRates(self._card).gpu / 100
        except pynvml.NVMLError:
            self._used = None
            self.close()
        return self._used

    def close(self) -> None:
        """Shut NVML down."""
        if self._card is not None:
            self._card = None
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()


def _opened(uuid: str) -> object:
    pynvml.nvmlInit()
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        pynvml.nvmlShutdown()
        raise


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

"""What NVML reports about this machine's cards: MIG mode, names, sizes, utilization."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import pynvml

from qgpu.errors import NoGpuError, NotSupportedError
from qgpu.model import NS_PER_MS
from qgpu.model.plane_api import ExcludedCard, MigInstance, Pgpu

#: NVML has a new figure about five times a second.
_FRESH_NS = 100 * NS_PER_MS


class MigCards(NamedTuple):
    """What MIG divides: what is left alone, and why; the instances that are shared, and their cards' addresses."""

    excluded: list[ExcludedCard]
    instances: list[Pgpu]
    pci: dict[int, str]


def cards_in_mig_mode() -> list[ExcludedCard]:
    """List the cards that MIG divides, to leave them all alone. Raises NoGpuError, NotSupportedError."""
    return mig_cards(()).excluded


def mig_cards(shared: Collection[int | str]) -> MigCards:
    """List the cards that MIG divides, with the instances of those to be ``shared``, given by number or UUID.

    A GPU instance with several compute instances is left alone: they have its memory in common
    (docs/decisions/0041-mig.md). Raises NoGpuError, and NotSupportedError if nothing is left to share.
    """
    found = MigCards([], [], {})
    with _nvml():
        count = pynvml.nvmlDeviceGetCount()
        for card in range(count):
            handle = pynvml.nvmlDeviceGetHandleByIndex(card)
            if not _in_mig_mode(handle):
                continue
            pci, why = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower(), []
            if not {card, _text(pynvml.nvmlDeviceGetUUID(handle))} & set(shared):
                why = [f"MIG mode is on; to share it: nvidia-smi -i {card} -mig 0"]
            else:
                instances, found.pci[card] = _instances(card, handle), pci
                by_gpu = Counter(each.mig.gpu_instance for each in instances if each.mig is not None)
                found.instances.extend(each for each in instances if each.mig and by_gpu[each.mig.gpu_instance] == 1)
                why = [
                    f"GPU instance {number} has {many} compute instances with one memory; qgpu shares those with one"
                    for number, many in sorted(by_gpu.items())
                    if many > 1
                ] or ([] if instances else ["MIG mode is on, and it has no compute instance: nvidia-smi mig -cgi"])
            found.excluded.extend(ExcludedCard(card, pci, each) for each in why)
    if not found.instances and count and len({card.index for card in found.excluded}) == count:
        if shared:
            raise NotSupportedError("; ".join(f"GPU {card.index}: {card.why}" for card in found.excluded))
        raise NotSupportedError(
            "MIG mode is on for every GPU here, and qgpu shares whole cards; switch it off for one with "
            f"`nvidia-smi -i {found.excluded[0].index} -mig 0`"
        )
    return found


def _in_mig_mode(handle: object) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE)
    except pynvml.NVMLError:  # no MIG, or no answer: the guardian leaves a card without an answer out
        return False


def _instances(card: int, handle: object) -> list[Pgpu]:
    """Return the compute instances of a card, each with its GPU instance's memory."""
    minor, found = int(pynvml.nvmlDeviceGetMinorNumber(handle)), []
    for place in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            each = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
            numbers = pynvml.nvmlDeviceGetGpuInstanceId(each), pynvml.nvmlDeviceGetComputeInstanceId(each)
        except pynvml.NVMLError:  # no instance has this place
            continue
        found.append(_described(MigInstance(card, *map(int, numbers)), each, minor))
    return found


def describe(cards: Iterable[tuple[int, str]]) -> list[Pgpu]:
    """Return names and sizes of cards given as (number, PCI address). Raises NoGpuError."""
    with _nvml():
        handles = [(index, pynvml.nvmlDeviceGetHandleByPciBusId(pci.encode())) for index, pci in cards]
        return [_described(index, each, int(pynvml.nvmlDeviceGetMinorNumber(each))) for index, each in handles]


def whole_cards() -> list[str]:
    """List the UUIDs of the cards that MIG does not divide, shared or not. Raises NoGpuError."""
    with _nvml():
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles if not _in_mig_mode(handle)]
        except pynvml.NVMLError as error:
            raise NoGpuError(f"NVML: {error}; it does not list the cards") from error


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


def _described(which: int | MigInstance, handle: object, minor: int) -> Pgpu:
    return Pgpu(
        which if isinstance(which, int) else which.index,
        _text(pynvml.nvmlDeviceGetUUID(handle)),
        _text(pynvml.nvmlDeviceGetName(handle)),
        int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        minor,
        None if isinstance(which, int) else which,
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

"""Composes the kmod plane: the module's host, GPU time from context switches, and names from NVML.

The module cannot see kernels run. As on the seccomp plane, GPU time comes from the card's own log of context switches.
A process's time counts for its first compute TSG, which may be that of the MPS server of its share group.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from qgpu.errors import BackendGoneError, NoGpuError, RmError
from qgpu.model import TsgSample
from qgpu.nvidia import nvml
from qgpu.nvidia.ctxsw_log import CtxswLog
from qgpu.nvidia.gpu_time import NOTHING
from qgpu.nvidia.gpu_time_reader import GpuTimeReader
from qgpu.nvidia.rm_client import RmClient
from qgpu.nvidia.rm_device import open_devices
from qgpu.planes.kmod.backend import Reading, TsgRef
from qgpu.planes.kmod.device import Card
from qgpu.planes.kmod.host import KmodHost


class CtxswSource:
    """GPU time on one card by process, from the log of context switches."""

    def __init__(self, reader: GpuTimeReader) -> None:
        self.detailed = False
        self._reader = reader

    def read(self, tsgs: Sequence[TsgRef]) -> Reading:
        """Return what each TSG did since the last call. Raises BackendGoneError if the card fails."""
        firsts = {tgid: ref for ref in reversed(tsgs) for tgid in ref.tgids}
        try:
            self._reader.drain()
            seen = self._reader.read(lambda who: firsts.get(_pid(who)), detailed=self.detailed)
        except (RmError, OSError) as error:
            raise BackendGoneError(f"card {self._reader.device.pci}: {error}; dmesg may say why") from error
        samples = {}
        for ref in set(firsts.values()):
            use, ran = seen.uses.get(ref, NOTHING), tuple(seen.runs.get(ref, ()))
            samples[ref.ident] = TsgSample(ref.name, use.run_ns, use.starts, ref == seen.resident, ran, use.longest_ns)
        return Reading(samples, {(a.ident, b.ident): count for (a, b), count in seen.handovers.items()})

    @property
    def lost(self) -> int:
        """Return how many context switches did not fit into the card's log."""
        return self._reader.log.dropped

    def close(self) -> None:
        """Release the card's log."""
        self._reader.device.client.close()


def open_gpu_time(card: Card) -> CtxswSource:
    """Start to measure a card. Raises NoGpuError if the driver does not list it."""
    client = RmClient()
    for device in open_devices(client):
        if device.pci == card.pci:
            return CtxswSource(GpuTimeReader(device, CtxswLog(device)))
    client.close()
    raise NoGpuError(f"{card.pci}: the driver does not list this card")


def open_host() -> KmodHost:
    """Open the module. Raises NoGpuError, NotSupportedError, PermissionDeniedError."""
    return KmodHost(
        open_gpu_time,
        lambda cards: nvml.describe(enumerate(card.pci for card in cards)),
        lambda pgpu: nvml.Utilization(pgpu.uuid).read,
        nvml.cards_in_mig_mode,
    )


def _pid(who: Hashable) -> int:
    """Return the pid of a (context, pid); 0 if the engine was idle."""
    return int(who[1]) if isinstance(who, tuple) else 0

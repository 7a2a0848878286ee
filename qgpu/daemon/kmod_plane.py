"""The kmod plane put together: the module's host, true GPU time from context switches, and names from NVML.

The module sees no kernel run, so the time comes from the card's own record of context switches, as on the seccomp
plane; a process's time counts for its first compute TSG.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pynvml

from qgpu.errors import NoGpuError
from qgpu.guardian.meter import Event, Meter
from qgpu.rm.client import RmClient
from qgpu.rm.device import open_devices
from qgpu.rm.switches import START, SwitchLog
from qgpu.sched.backend import Pgpu
from qgpu.sched.kmod import Card, KmodHost, TsgRef, Used


class SwitchMeter:
    """True GPU time on one card, by process."""

    def __init__(self, card: Card) -> None:
        self.detailed = False
        self._client = RmClient()
        devices = [device for device in open_devices(self._client) if device.pci == card.pci]
        if not devices:
            self._client.close()
            raise NoGpuError(f"{card.pci}: the driver does not list this card")
        self._log = SwitchLog(devices[0])
        self._meter = Meter()

    def read(self, tsgs: Sequence[TsgRef]) -> Mapping[int, Used]:
        """Return each TSG's totals so far."""
        events = [Event(switch.at_ns, switch.pid, switch.tag == START) for switch in self._log.read()]
        self._meter.advance(events, time.time_ns())
        ahead_ns = time.time_ns() - time.monotonic_ns()
        spans = self._meter.record(self.detailed)
        first = {ref.tgid: ref.ident for ref in reversed(tsgs)}
        return {
            ident: Used(
                use.run_ns,
                use.starts,
                self._meter.resident == tgid,
                tuple((start_ns - ahead_ns, end_ns - ahead_ns) for start_ns, end_ns in spans.get(tgid, ())),
            )
            for tgid, ident in first.items()
            if (use := self._meter.totals.get(tgid))
        }

    @property
    def lost(self) -> int:
        """Count the context switches that the card's record had no room for."""
        return self._log.dropped

    def close(self) -> None:
        """Let go of the card's record."""
        self._client.close()


def describe(cards: Sequence[Card]) -> list[Pgpu]:
    """Ask NVML for names and sizes; cards are matched by PCI address."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoGpuError(f"NVML: {error}; is the NVIDIA driver's user-space part installed?") from error
    try:
        found = []
        for index, card in enumerate(cards):
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(card.pci.encode())
            memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            uuid, name = _text(pynvml.nvmlDeviceGetUUID(handle)), _text(pynvml.nvmlDeviceGetName(handle))
            found.append(Pgpu(index, uuid, name, memory, int(pynvml.nvmlDeviceGetMinorNumber(handle))))
        return found
    finally:
        pynvml.nvmlShutdown()


def open_host() -> KmodHost:
    """Open the module. Raises NoGpuError, NotSupportedError, PermissionDeniedError."""
    return KmodHost(SwitchMeter, describe)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

"""A recording as a Perfetto trace: protobuf track events, written without a library.

Each pod has a track with its runs as the hardware switched them, and below it its gate, its share, and where it was if
it was suspended. Each pGPU has a track with the plans. Only the few fields in use are known here
(perfetto/trace/trace_packet.proto, track_event/track_descriptor.proto, track_event/track_event.proto); tests read the
result with the real schema.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qgpu.model import NS_PER_MS
from qgpu.trace.recording import GpuTrack, PodTrack, Recording, shares
from qgpu.trace.wakeups import wakeups

_VARINT, _FIXED64, _BYTES = 0, 1, 2
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
#: perfetto's BuiltinClock: the clock of all timestamps, and further clocks to relate it to.
_CLOCKS = {1: time.CLOCK_REALTIME, 3: time.CLOCK_MONOTONIC, 6: time.CLOCK_BOOTTIME}
_MONOTONIC = 3
_SEQUENCE = 1
_UNIT_SHARE = "share of the pGPU, %"
_EXPLICIT_ORDER = 3
#: Each share is taken over this time, which is long enough to see.
_SHARE_NS = 100 * NS_PER_MS


def encode(recording: Recording) -> bytes:
    """Return the recording as the content of a trace file."""
    writer = _Writer()
    writer.clocks()
    for gpu in recording.gpus.values():
        _gpu(writer, gpu)
    return bytes(writer.data)


def _gpu(writer: _Writer, gpu: GpuTrack) -> None:
    root = writer.track(f"pGPU {gpu.index} {gpu.name}")
    plans = writer.track("plans", root)
    for at_ns, plan in gpu.plans:
        if gpu.first_ns <= at_ns <= gpu.last_ns:
            writer.instant(plans, at_ns, "plan", _plan_notes(plan))
    for order, pod in enumerate(gpu.online_first):
        track = writer.track(_title(pod), root, order=order + 1)
        for start_ns, end_ns in pod.runs:
            writer.slice(track, start_ns, end_ns, pod.pod)
        if pod.closed:
            gate = writer.track("gate", track)
            for start_ns, end_ns in pod.closed:
                writer.slice(gate, start_ns, end_ns, "closed")
        if pod.suspended:
            state = writer.track("state", track)
            for start_ns, end_ns, name in pod.stays:
                if end_ns > start_ns:
                    writer.slice(state, start_ns, end_ns, name)
        if pod.pod_class == "online":
            online = writer.track("wake-ups", track)
            for wakeup in wakeups(gpu, pod):
                notes = {"took the engine from": wakeup.took_from, "rested ms": f"{wakeup.rested_ns / NS_PER_MS:.3f}"}
                writer.instant(online, wakeup.at_ns, "wake-up", notes)
        share = writer.track("share", track, counter=_UNIT_SHARE)
        for at_ns, value in shares(pod.runs, gpu.first_ns, gpu.last_ns, _SHARE_NS):
            writer.counter(share, at_ns, value * 100)


def _title(pod: PodTrack) -> str:
    return f"{pod.pod} ({pod.pod_class}{'' if pod.cores is None else f', {pod.cores} %'})"


def _plan_notes(plan: Mapping[str, Any]) -> dict[str, str]:
    notes = {"period ms": f"{plan['period_ns'] / NS_PER_MS:g}"}
    for part in plan["pods"]:
        windows = part["windows"]
        turns = ", ".join(f"{start / NS_PER_MS:g}-{end / NS_PER_MS:g} ms ({on})" for start, end, on in windows or ())
        gate = "open" if windows is None else turns or "closed"
        notes[part["pod"]] = f"timeslice {part['timeslice_us']} µs, gate {gate}"
    return notes


@dataclass(slots=True)
class _Writer:
    """Writes packets one after the other."""

    data: bytearray = field(default_factory=bytearray)
    _tracks: int = 0

    def clocks(self) -> None:
        """Write how the clocks relate to each other, so that the trace can be merged with others of this host."""
        clocks = b"".join(
            _field(1, _field(1, number) + _field(2, time.clock_gettime_ns(clock))) for number, clock in _CLOCKS.items()
        )
        self._packet(_field(6, clocks), None)

    def track(self, name: str, parent: int | None = None, *, counter: str = "", order: int | None = None) -> int:
        """Begin a track and return its id."""
        self._tracks += 1
        descriptor = _field(1, self._tracks) + _field(2, name.encode())
        if parent is not None:
            descriptor += _field(5, parent)
        if counter:
            descriptor += _field(8, _field(6, counter.encode()))
        if order is not None:
            descriptor += _field(12, order)
        else:
            descriptor += _field(11, _EXPLICIT_ORDER)
        self._packet(_field(60, descriptor), None)
        return self._tracks

    def slice(self, track: int, start_ns: int, end_ns: int, name: str) -> None:
        """Write an event with a duration."""
        self._packet(_field(11, _field(9, _BEGIN) + _field(11, track) + _field(23, name.encode())), start_ns)
        self._packet(_field(11, _field(9, _END) + _field(11, track)), end_ns)

    def instant(self, track: int, at_ns: int, name: str, notes: Mapping[str, str]) -> None:
        """Write an event without duration, with annotations."""
        event = _field(9, _INSTANT) + _field(11, track) + _field(23, name.encode())
        for key, value in notes.items():
            event += _field(4, _field(10, key.encode()) + _field(6, value.encode()))
        self._packet(_field(11, event), at_ns)

    def counter(self, track: int, at_ns: int, value: float) -> None:
        """Write a value that holds from ``at_ns`` on."""
        whole = round(value * 100) / 100
        self._packet(_field(11, _field(9, _COUNTER) + _field(11, track) + _double(44, whole)), at_ns)

    def _packet(self, content: bytes, at_ns: int | None) -> None:
        if at_ns is not None:
            content += _field(8, at_ns) + _field(58, _MONOTONIC)
        self.data += _field(1, content + _field(10, _SEQUENCE))


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return _varint(number << 3 | _BYTES) + _varint(len(value)) + value
    return _varint(number << 3 | _VARINT) + _varint(value)


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | _FIXED64) + struct.pack("<d", value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)

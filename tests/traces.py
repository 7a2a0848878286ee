"""Recorded ioctls of real CUDA programs (an H200, driver 580.159.04): rows of JSON, and memory to read from.

Traces are complete and can be replayed. The recordings in ``data/calls`` (bench/compatibility.py --record) have at most
three calls of a kind, without the parameters after the call: they show what programs ask for.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qgpu.guardian.proxy import rm_calls
from qgpu.guardian.proxy.rm_calls import Reader
from qgpu.nvidia import abi

_DATA = Path(__file__).parent / "data"
TRACES = sorted((_DATA / "traces").glob("*.jsonl.xz"))
#: Of a profiler and debuggers, which ask for what pods are refused.
TOOLS = sorted((_DATA / "tools").glob("*.jsonl.xz"))
RECORDINGS = [*TRACES, *sorted((_DATA / "calls").glob("*.jsonl.xz"))]

#: Where the argument of a replayed call is said to lie; its parameters lie where the call itself says.
ARGUMENT = 0x1000


@dataclass(frozen=True, slots=True)
class Row:
    """One recorded ioctl on an NVIDIA device of major 195."""

    seq: int
    fd: int
    dev: str
    request: int
    before: bytes
    after: bytes
    params: bytes

    @property
    def number(self) -> int:
        return self.request & 0xFF

    def reader(self) -> Reader:
        """Read the argument as it was before the call, and the parameters it points to."""
        pointer_at = 16
        pointer = int.from_bytes(self.before[pointer_at : pointer_at + 8], "little")

        def read(address: int, size: int) -> bytes | None:
            for base, data in ((ARGUMENT, self.before), (pointer, self.params)):
                if base <= address and address + size <= base + len(data):
                    return data[address - base : address - base + size]
            return None

        return read


def decode(request: int, argument: int, read: Reader) -> rm_calls.Call | None:
    """Decode an ioctl for RM as the dispatcher does; None if it is no call that is tracked or checked."""
    escape = rm_calls.unwrap(request, argument, read)
    if escape is None or escape.number == abi.NV_ESC_IOCTL_XFER_CMD or escape.size > abi.sizeof("NVOS32_PARAMETERS"):
        return None
    data = read(escape.address, escape.size)
    return rm_calls.parse(escape.number, data) if data is not None and len(data) == escape.size else None


def rows(trace: Path) -> Iterator[Row]:
    """Read the ioctls of one trace that went to nvidiactl or a card."""
    with lzma.open(trace, "rt") as lines:
        for line in lines:
            data = json.loads(line)
            if data["op"] == "ioctl" and data["dev"] != "/dev/nvidia-uvm":
                before = bytes.fromhex(data["in"])
                yield Row(
                    data["seq"],
                    data["fd"],
                    data["dev"],
                    data["req"],
                    before,
                    bytes.fromhex(data.get("out", data["in"])),
                    bytes.fromhex(data.get("pin", "")),
                )


def allocated(trace: Path) -> dict[tuple[int, int], tuple[int, int]]:
    """Say what RM made in a trace: (client, handle) -> (class, parent), from the answers alone."""
    made: dict[tuple[int, int], tuple[int, int]] = {}
    for row in rows(trace):
        if row.number == abi.NV_ESC_RM_ALLOC:
            call = abi.ffi.from_buffer("NVOS64_PARAMETERS *", row.after)
            if call.status == abi.NV_OK:
                client = call.hRoot or call.hObjectNew
                made[client, call.hObjectNew] = (call.hClass, call.hObjectParent)
        elif row.number == abi.NV_ESC_RM_FREE:
            call = abi.ffi.from_buffer("NVOS00_PARAMETERS *", row.after)
            if call.status == abi.NV_OK:
                made.pop((call.hRoot, call.hObjectOld), None)
    return made

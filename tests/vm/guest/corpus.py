"""What random calls are made from: calls of recorded programs, and a few that no program made."""

from __future__ import annotations

import json
import lzma
import struct
from collections.abc import Iterable
from pathlib import Path


def record(nr: int, data: bytes, params: bytes) -> bytes:
    pad = [part + bytes(-len(part) % 4) for part in (data, params)]
    return struct.pack("III", nr, len(data), len(params)) + b"".join(pad)


def corpus(traces: Iterable[Path]) -> bytes:
    """Records as fuzz.c reads them."""
    client, device, memory = 0xC1D00001, 0x5C000001, 0x5C00000E
    tsg, further, compute = 0x5C0000E1, 0x5C0000E2, struct.pack("12xI4x", 1)
    out = [
        record(0x2B, struct.pack("IIIIQQIIII", 0, 0, 0, 0x41, 0, 0, 0, 0, 0, 0), b""),
        record(0x2B, struct.pack("IIIIQQIIII", client, client, device, 0x80, 1, 0, 0, 0, 0, 0), bytes(56)),
        record(0x34, struct.pack("7I", client, device, 0x5C0000AA, client, 0x5C00000E, 0, 0), b""),
        # a TSG, its duplicates, channels below them, and their ends
        record(0x2B, struct.pack("IIIIQQIIII", client, device, tsg, 0xA06C, 1, 0, 0, 0, 0, 0), compute),
        *(record(0x34, struct.pack("7I", client, device, second, client, tsg, 0, 0), b"") for second in (further, 0)),
        *(
            record(0x2B, struct.pack("IIIIQQIIII", client, below, 0, 0x906F, 1, 0, 0, 0, 0, 0), bytes(368))
            for below in (tsg, further)
        ),
        *(record(0x29, struct.pack("IIII", client, 0, handle, 0), b"") for handle in (tsg, further)),
        record(0x29, struct.pack("IIII", client, client, client, 0), b""),
        record(0x29, struct.pack("IIII", client, client, device, 0), b""),
        record(0x2A, struct.pack("IIIIQII", client, 0x5C000015, 0xA06C0101, 0, 1, 3, 0), b"\1\0\0"),
        record(0x2A, struct.pack("IIIIQII", client, 0x5C000003, 0x2080110B, 0, 1, 536, 0), bytes(536)),
    ]
    for cls, params in (
        (0x40, struct.pack("64xQ56x", 1 << 20)),
        (0x50A0, struct.pack("8xI52xQ56x", 0x80400, 1 << 30)),
        (0xA06C, struct.pack("12xI4x", 1)),
        (0x906F, bytes(368)),
        (0xDA, struct.pack("I20x", memory)),
        (0xF8, struct.pack("40xI20x", memory)),
    ):
        out += [record(0x2B, struct.pack("IIIIQQIIII", client, device, 0, cls, 1, 0, 0, 0, 0, 0), params)]
    for cmd, params in (  # a file of the four that are open keeps what is exported
        (0x3D05, struct.pack("IIIIiI", 1, device, device, memory, 4, 0)),
        (0x3D0B, struct.pack("iIH66x512IHH", 4, device, 1, memory, *bytes(511), 1, 0)),
        (0x3D06, struct.pack("iIIII", 4, 1, device, device, 0x5C0000CC)),
        (0x3D0C, struct.pack("iI128I128xHH", 4, device, 0, *bytes(127), 1, 0)),
    ):
        out += [record(0x2A, struct.pack("IIIIQII", client, client, cmd, 0, 1, len(params), 0), params)]
    out += [record(0x57, struct.pack("16I", client, device, 0x5C0000DD, memory, *bytes(12)), b"")]
    out += [record(0x58, struct.pack("6IQQII", client, device, 0x5C0000DD, memory, 0, 0, 0, 1 << 16, 0, 0), b"")]
    for function, size_at in ((2, 88), (3, 88), (5, 88), (6, 88), (14, 80)):
        heap = bytearray(184)
        struct.pack_into("III", heap, 0, client, device, function)
        struct.pack_into("I", heap, 44, 0x5C0000BB)
        struct.pack_into("Q", heap, size_at, 1 << 20)
        out.append(record(0x4A, bytes(heap), b""))
    for trace in traces:
        with lzma.open(trace, "rt") as lines:
            for line in lines:
                call = json.loads(line)
                if call["op"] == "ioctl" and call["dev"] != "/dev/nvidia-uvm":
                    pin = bytes.fromhex(call.get("pin", ""))
                    out.append(record(call["req"] & 0xFF, bytes.fromhex(call["in"]), pin))
    return b"".join(out)

"""Recorded CUDA programs, call by call, on descriptors of one's own.

A trace is JSON lines of ioctls and mmaps with their structs before and after (see docs/kmod-tests.md). Client handles
are the driver's to choose, so they are translated; the descriptors inside structs likewise.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import lzma
import os
import struct
from pathlib import Path

import nv

from qgpu.guardian.rules import classes, controls

FOLDER = Path(os.environ.get("QGPU_TRACES", "/nonexistent"))
TRACES = sorted(FOLDER.glob("*.jsonl.xz"))
NR_ALLOC, NR_CONTROL, NR_FREE = 0x2B, 0x2A, 0x29
STATUS_AT = {NR_ALLOC: 40, NR_CONTROL: 28, NR_FREE: 12, 0x27: 40}
PARAMS_AT = {NR_ALLOC: 16, NR_CONTROL: 16}
#: Where client handles and descriptors stand in the struct itself.
CLIENTS_AT = {
    NR_ALLOC: (0, 4, 8),
    NR_CONTROL: (0, 4),
    NR_FREE: (0, 4, 8),
    0x27: (0,),
    0x4E: (0,),
    0x5E: (0,),
    0xCE: (0,),
}
FDS_AT = {0x4E: 48, 0x27: 48, 0xC9: 0, 0xCE: 8}
FB_GET_INFO_V2, HEAP_FREE = 0x20801303, 0x16
UVM = "/dev/nvidia-uvm"
UVM_SIZE_MAX = 16384


class Replay:
    """One process's calls, replayed on its own descriptors."""

    def __init__(self) -> None:
        self.fds: dict[int, int] = {}
        self.clients: dict[int, int] = {}
        #: What was not answered as it was recorded, in words; and every answer: result, errno, RM's status.
        self.unexplained: list[str] = []
        self.answers: list[tuple[int, int, int | None]] = []

    def fd(self, recorded: int, device: str) -> int:
        key = hash((recorded, device))
        if key not in self.fds:
            self.fds[key] = os.open(device, os.O_RDWR)
        return self.fds[key]

    def step(self, record: dict) -> dict | None:
        """Do one recorded call; what a memory query of it said, if it was one."""
        if record["op"] != "ioctl":
            return None
        fd = self.fd(record["fd"], record["dev"])
        data = bytearray.fromhex(record["in"])
        if record["dev"] == UVM:  # its request says no size, and what was recorded may be shorter than what it writes
            return self.plain(record, fd, data.ljust(UVM_SIZE_MAX, bytes(1)))
        nr = record["req"] & 0xFF
        want = bytes.fromhex(record.get("out", record["in"]))
        for at in CLIENTS_AT.get(nr, ()):
            (handle,) = struct.unpack_from("I", data, at)
            struct.pack_into("I", data, at, self.clients.get(handle, handle))
        if nr in FDS_AT:
            self.descriptor(data, FDS_AT[nr])
        params = ctypes.create_string_buffer(bytes.fromhex(record.get("pin", "")), 16384)
        if nr in PARAMS_AT:
            (pointer,) = struct.unpack_from("Q", data, PARAMS_AT[nr])
            struct.pack_into("Q", data, PARAMS_AT[nr], ctypes.addressof(params) if pointer else 0)
            number = struct.unpack_from("I", data, 12 if nr == NR_ALLOC else 8)[0]
            if nr == NR_ALLOC and number == nv.DEVICE:
                struct.pack_into("I", params, 0, 0)  # this card, whatever its number was there
            row = (classes.ALLOWED if nr == NR_ALLOC else controls.ALLOWED).get(number)
            for place in row.clients if row else ():
                (handle,) = struct.unpack_from("I", params, place.at)
                struct.pack_into("I", params, place.at, self.clients.get(handle, handle))
        self.plain(record, fd, data)
        if nr == NR_ALLOC and struct.unpack_from("I", want, 12)[0] == nv.ROOT:  # RM writes the class it made back
            self.clients[struct.unpack_from("I", want, 8)[0]] = struct.unpack_from("I", data, 8)[0]
        if nr in STATUS_AT and data[STATUS_AT[nr] : STATUS_AT[nr] + 4] != want[STATUS_AT[nr] : STATUS_AT[nr] + 4]:
            self.unexplained.append(f"{record['seq']}: status {data[STATUS_AT[nr] :][:4].hex()}")
        if nr in STATUS_AT:
            self.answers[-1] = *self.answers[-1][:2], struct.unpack_from("I", data, STATUS_AT[nr])[0]
        if nr == NR_CONTROL and struct.unpack_from("I", data, 8)[0] == FB_GET_INFO_V2:
            return free_of(params.raw), free_of(bytes.fromhex(record["pout"]))
        return None

    def plain(self, record: dict, fd: int, data: bytearray) -> None:
        try:
            result, error = fcntl.ioctl(fd, record["req"], data, True), 0
        except OSError as failed:
            result, error = -1, failed.errno
        self.answers.append((result, error, None))
        if (result, error) != (record["ret"], record["errno"]):
            self.unexplained.append(f"{record['seq']}: {record['req']:#x} {result} errno {error}")

    def descriptor(self, data: bytearray, at: int) -> None:
        (recorded,) = struct.unpack_from("i", data, at)
        for device in ("/dev/nvidiactl", "/dev/nvidia0"):
            if hash((recorded, device)) in self.fds:
                struct.pack_into("i", data, at, self.fds[hash((recorded, device))])
                return


def free_of(params: bytes) -> int | None:
    """The free memory in KiB that an FB_GET_INFO_V2 answer names, if it does."""
    (count,) = struct.unpack_from("I", params)
    pairs = [struct.unpack_from("II", params, 4 + 8 * i) for i in range(count)]
    return dict(pairs).get(HEAP_FREE)


def name_of(trace: Path) -> str:
    """The program that was recorded."""
    return trace.name.partition(".jsonl")[0].rpartition("-")[2]


def records_of(trace: Path) -> list[dict]:
    """The calls of a trace, with one name for a card, whatever its number was."""
    with lzma.open(trace, "rt") as lines:
        records = [json.loads(line) for line in lines]
    for record in records:
        record["dev"] = "/dev/nvidia0" if record["dev"].startswith("/dev/nvidia0") else record["dev"]
    return records

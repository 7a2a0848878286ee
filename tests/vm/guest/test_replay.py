"""Recorded CUDA programs, call by call, as pods on the simulated driver.

A trace is JSON lines of ioctls and mmaps with their structs before and after (see docs/kmod.md). Client handles
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
import pytest
import qg

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
CREATES_CONTEXT = (nv.DEVICE, nv.VASPACE, nv.TSG, nv.CHANNEL, 0xC8B5, 0xCBC0)


class Replay:
    """One process's calls, replayed on its own descriptors."""

    def __init__(self) -> None:
        self.fds: dict[int, int] = {}
        self.clients: dict[int, int] = {}
        self.unexplained: list[str] = []

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
        if record["dev"] == UVM:
            return self.plain(record, fd, data)
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
        if nr == NR_CONTROL and struct.unpack_from("I", data, 8)[0] == FB_GET_INFO_V2:
            return free_of(params.raw), free_of(bytes.fromhex(record["pout"]))
        return None

    def plain(self, record: dict, fd: int, data: bytearray) -> None:
        try:
            result, error = fcntl.ioctl(fd, record["req"], data, True), 0
        except OSError as failed:
            result, error = -1, failed.errno
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


def start(state):
    state["replay"] = Replay()


def steps(state, records):
    """Replay up to and with the next memory query; how far it came, and what the query said here and there."""
    replay = state["replay"]
    for done, record in enumerate(records, 1):
        answer = replay.step(record)
        if answer and answer[0] is not None:
            return done, answer
    return len(records), None


@pytest.fixture(scope="module", autouse=True)
def _uvm():
    qg.insmod("nvidia-uvm.ko")
    yield
    qg.rmmod("nvidia_uvm")


@pytest.mark.skipif(not TRACES, reason="QGPU_TRACES names no folder of traces")
@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.name.partition(".jsonl")[0])
def test_recorded_programs_run_as_pods(qgpu, pod, figure, trace):
    web = pod("web", memory=143771 << 20)
    process = web.process()
    process.run(start)
    with lzma.open(trace, "rt") as lines:
        records = [json.loads(line) for line in lines]
    for record in records:
        record["dev"] = "/dev/nvidia0" if record["dev"].startswith("/dev/nvidia0") else record["dev"]
    told: list[tuple[int, int]] = []
    at, settled, told_there, used_here = 0, False, 0, 0
    while at < len(records):
        done, answer = process.run(steps, records[at:])
        made = [
            struct.unpack_from("I", bytes.fromhex(record["in"]), 12)[0]
            for record in records[at : at + done]
            if record["op"] == "ioctl" and record["req"] & 0xFF == NR_ALLOC
        ]
        # managed memory is the one kind that no RM call shows: see docs/kmod.md
        chunk = records[at : at + done]
        managed_kib = sum(r["len"] for r in chunk if (r["op"], r["dev"], r.get("off")) == ("mmap", UVM, r["ret"])) >> 10
        at += done
        settled = settled and not set(made) & set(CREATES_CONTEXT)
        if answer:
            used_kib = web.usage().memory >> 10
            assert answer[0] == (143771 << 10) - used_kib, "the pod is shown what it was charged"
            if settled:
                told.append((answer[1] - told_there + managed_kib, used_here - used_kib))
            told_there, used_here = answer[1], used_kib
            settled = True
    unexplained = process.run(lambda state: state["replay"].unexplained)
    process.stop()
    name = trace.name.partition(".jsonl")[0].rpartition("-")[2]
    figure(f"replay_calls_{name}", len(records))
    figure(f"replay_unexplained_calls_{name}", len(unexplained))
    figure(f"replay_leaked_objects_{name}", qgpu.info().nr_objects)

    assert unexplained == []
    assert all(there == here for there, here in told), "free memory moved there by what was charged here"
    assert qgpu.info().nr_objects == 0

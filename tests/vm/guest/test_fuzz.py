"""Random calls from both sides at once; the lane fails if the kernel's log says anything about it.

The default number is a smoke test; the sanitizer lane asks for a million (QGPU_VM_FUZZ).
"""

from __future__ import annotations

import json
import lzma
import os
import struct
import subprocess
from pathlib import Path

import nv
import pytest
import qg

CALLS = int(os.environ.get("QGPU_VM_FUZZ", "20000"))
ROUND = 20000
FUZZ = str(qg.BUILD / "fuzz")
TRACES = sorted(Path(os.environ.get("QGPU_TRACES", "/nonexistent")).glob("*.jsonl.xz"))


def record(nr: int, data: bytes, params: bytes) -> bytes:
    pad = [part + bytes(-len(part) % 4) for part in (data, params)]
    return struct.pack("III", nr, len(data), len(params)) + b"".join(pad)


def corpus() -> bytes:
    """Calls of recorded programs, and a few that no program made."""
    client, device = 0xC1D00001, 0x5C000001
    out = [
        record(0x2B, struct.pack("IIIIQQIIII", 0, 0, 0, 0x41, 0, 0, 0, 0, 0, 0), b""),
        record(0x2B, struct.pack("IIIIQQIIII", client, client, device, 0x80, 1, 0, 0, 0, 0, 0), bytes(56)),
        record(0x34, struct.pack("7I", client, device, 0x5C0000AA, client, 0x5C00000E, 0, 0), b""),
        record(0x29, struct.pack("IIII", client, client, client, 0), b""),
        record(0x29, struct.pack("IIII", client, client, device, 0), b""),
        record(0x2A, struct.pack("IIIIQII", client, 0x5C000015, 0xA06C0101, 0, 1, 3, 0), b"\1\0\0"),
        record(0x2A, struct.pack("IIIIQII", client, 0x5C000003, 0x2080110B, 0, 1, 536, 0), bytes(536)),
    ]
    for function, size_at in ((2, 88), (3, 88), (5, 88), (6, 88), (14, 80)):
        heap = bytearray(184)
        struct.pack_into("III", heap, 0, client, device, function)
        struct.pack_into("I", heap, 44, 0x5C0000BB)
        struct.pack_into("Q", heap, size_at, 1 << 20)
        out.append(record(0x4A, bytes(heap), b""))
    for trace in TRACES:
        with lzma.open(trace, "rt") as lines:
            for line in lines:
                call = json.loads(line)
                if call["op"] == "ioctl" and call["dev"] != "/dev/nvidia-uvm":
                    pin = bytes.fromhex(call.get("pin", ""))
                    out.append(record(call["req"] & 0xFF, bytes.fromhex(call["in"]), pin))
    return b"".join(out)


def a_round(number, calls):
    """Load, ``calls`` random calls by four processes, unload; what the processes ended with, and what was left."""
    cgroups = [qg.CGROUPS / f"fuzz{i}" for i in range(3)]
    for cgroup in cgroups:
        cgroup.mkdir()
    qg.insmod("qgpu.ko")
    share, seeds = str(calls // 4), [str(4 * number + i) for i in range(1, 5)]
    runs = [subprocess.Popen([FUZZ, seed, share, "qgpu", *map(str, cgroups)]) for seed in seeds[:2]]
    runs += [
        subprocess.Popen([FUZZ, seed, share, "nvidia", "/tmp/corpus", str(cgroup)])
        for seed, cgroup in zip(seeds[2:], cgroups, strict=False)
    ]
    codes = [run.wait() for run in runs]
    device = qg.Qgpu()
    for pod in device.pods():
        device.ioctl("POD_REMOVE", pod=pod.pod)
    qg.until(lambda: device.info().nr_clients == 0, 60)
    left = device.info().nr_objects
    device.close()
    qg.rmmod("qgpu")
    for cgroup in cgroups:
        cgroup.rmdir()
    return codes, left, qg.sim()["clients"], qg.sim()["objects"]


@pytest.mark.timeout(4 * 3600)
def test_random_calls_from_pods_and_daemons_harm_nothing(figure):
    Path("/tmp/corpus").write_bytes(corpus())
    gate = Path("/sys/module/nvidia/parameters/gate_us")
    was = gate.read_text()
    gate.write_text("0")
    for number, done in enumerate(range(0, CALLS, ROUND)):
        calls = min(ROUND, CALLS - done)
        assert a_round(number, calls) == ([0] * 4, 0, 0, 0)
        figure("fuzz_calls", done + calls)
    gate.write_text(was)
    outside = nv.Program()
    outside.close()

"""Random calls from both sides at once; the lane fails if the kernel's log says anything about it.

The default number is a smoke test (QGPU_VM_FUZZ); a million under a sanitizer is ../million.py's.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import corpus
import nv
import pytest
import qg

CALLS = int(os.environ.get("QGPU_VM_FUZZ", "20000"))
ROUND = 20000
FUZZ = str(qg.BUILD / "fuzz")
TRACES = sorted(Path(os.environ.get("QGPU_TRACES", "/nonexistent")).glob("*.jsonl.xz"))


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
    Path("/tmp/corpus").write_bytes(corpus.corpus(TRACES))
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

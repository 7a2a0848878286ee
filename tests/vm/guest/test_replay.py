"""Recorded CUDA programs, call by call, as pods on the simulated driver."""

from __future__ import annotations

import struct

import nv
import pytest
import qg
from replay import NR_ALLOC, TRACES, UVM, Replay, name_of, records_of

CREATES_CONTEXT = (nv.DEVICE, nv.VASPACE, nv.TSG, nv.CHANNEL, 0xC8B5, 0xCBC0)


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
@pytest.mark.parametrize("trace", TRACES, ids=name_of)
def test_recorded_programs_run_as_pods(qgpu, pod, figure, trace):
    web = pod("web", memory=143771 << 20)
    process = web.process()
    process.run(start)
    records = records_of(trace)
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
    name = name_of(trace)
    figure(f"replay_calls_{name}", len(records))
    figure(f"replay_unexplained_calls_{name}", len(unexplained))
    figure(f"replay_leaked_objects_{name}", qgpu.info().nr_objects)

    assert unexplained == []
    assert all(there == here for there, here in told), "free memory moved there by what was charged here"
    assert qgpu.info().nr_objects == 0

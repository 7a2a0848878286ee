"""The rollback drill of docs/kmod.md, step by step, under a pod whose program goes on all the while."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nv
import programs
import pytest
import qg

MIB = programs.MIB
REFERENCES = Path("/sys/module/nvidia/refcnt")


def qgpuctl_module(what):
    subprocess.run([sys.executable, "-m", "qgpu.cli.main", "module", what], check=True, capture_output=True)


def flood(state):
    p = state["p"] = nv.Program()
    _, (channel,) = p.compute()
    p.submit(channel, 1000)
    state["channel"] = channel


def kernels(state):
    return state["p"].query(state["channel"])["kernels"]


def goes_on(process):
    before = process.run(kernels)
    qg.until(lambda: process.run(kernels) > before)


@pytest.mark.usefixtures("_driver")
def test_rollback_drill_leaves_programs_and_driver_alone():
    references = int(REFERENCES.read_text())
    qg.insmod("qgpu.ko")
    device = qg.Qgpu()
    web = qg.Pod(device, "web", memory=64 * MIB)
    process = web.process()
    process.run(flood)
    device.plan((web.id, 5000, []))
    assert [tsg["off"] for tsg in qg.sim_tsgs()] == [1]

    qgpuctl_module("off")  # step 1: nothing is enforced any more
    assert [(tsg["off"], tsg["slice_ns"]) for tsg in qg.sim_tsgs()] == [(0, 1_024_000)]
    goes_on(process)
    assert process.run(programs.take, 100 * MIB) > 0

    device.close()  # step 2: the daemon has ended, and the module goes
    qg.rmmod("qgpu")
    assert not Path("/dev/qgpu").exists()
    assert int(REFERENCES.read_text()) == references + 2  # the program's two files; the module keeps none
    goes_on(process)

    qg.insmod("qgpu.ko")  # step 3: the module that was there before; the daemon makes its pods again
    web.qgpu = device = qg.Qgpu()
    web.id = web.add()
    web.grant(memory=64 * MIB)
    goes_on(process)
    new = web.process()
    new.run(programs.program)
    assert new.run(programs.take, 100 * MIB) == -nv.NO_MEMORY
    assert web.info().flags == qg.N["QGPU_POD_LATE"]
    web.close()
    device.close()
    qg.rmmod("qgpu")
    assert int(REFERENCES.read_text()) == references

"""Loading and unloading while NVIDIA's own modules are in use: what runs goes on, and nothing is left."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import modules
import pytest
import qg
import real_uvm as uvm
from real_uvm import MIB

CYCLES = int(os.environ.get("QGPU_VM_CYCLES", "20"))


def churn(_state):
    """Map, use and unmap managed memory for ever; at times UVM is away, and at times the module says no."""
    while True:
        state = {}
        try:
            status = uvm.start(state)
        except OSError:  # no UVM just now
            time.sleep(0.001)
            continue
        assert status == uvm.OK
        kept = [at for at in (uvm.take(state, 4 * MIB) for _ in range(3)) if at > 0]
        for at in kept:
            assert uvm.touch(state, at, 64 << 10) == 0
            uvm.give_back(state, at + MIB, MIB)
        uvm.semaphores(state)
        for at in kept[1:]:
            uvm.give_back(state, at, 4 * MIB)
        os.close(state["uvm"])
        for at in kept[:1]:  # this one outlives its descriptor
            uvm.give_back(state, at, 4 * MIB)
        time.sleep(0.02)  # UVM can only go while nobody has it open


@pytest.fixture
def cgroup():
    made = qg.CGROUPS / "load"
    made.mkdir()
    yield made
    qg.until(lambda: not (made / "cgroup.procs").read_text())
    made.rmdir()


@pytest.fixture
def load(cgroup):
    """Processes that call RM and UVM all the time, in the cgroup and outside."""
    hammer = str(qg.BUILD / "hammer")
    hammers = [subprocess.Popen([hammer, "0", *more]) for more in ([], [str(cgroup / "cgroup.procs")])]
    churners = [qg.Process(where) for where in (cgroup, None)]
    for each in churners:
        each.start(churn)
    time.sleep(0.1)
    yield
    alive = [each.poll() is None for each in hammers] + [each.process.is_alive() for each in churners]
    for each in hammers:
        each.kill()
        each.wait()
    for each in churners:
        each.kill()
    assert all(alive)


def pod(device, cgroup):
    fd = os.open(cgroup, os.O_RDONLY)
    number = device.ioctl("POD_ADD", cgroup_fd=fd, name=b"load").pod
    os.close(fd)
    device.ioctl("GRANT_SET", pod=number, memory=uvm.cost(9 * MIB))
    return number


@pytest.fixture
def uvm_stays():
    with modules.uvm():
        yield


@pytest.mark.timeout(900)
def test_module_comes_and_goes_under_load(figure, uvm_stays, cgroup, load):
    for _ in range(CYCLES):
        modules.load()
        device = qg.Qgpu()
        number = pod(device, cgroup)
        qg.until(lambda: device.ioctl("USAGE", pod=number).peak_memory > 0)  # noqa: B023
        device.close()
        modules.unload()
    figure("real_load_unload_cycles", CYCLES)


@pytest.fixture
def uvm_goes():
    yield
    if qg.loaded("nvidia_uvm"):
        qg.rmmod("nvidia_uvm")


@pytest.mark.timeout(900)
def test_uvm_comes_and_goes_under_the_module(figure, qgpu, uvm_goes, cgroup, load):
    number = pod(qgpu, cgroup)
    for _ in range(CYCLES):
        modules.load_uvm()
        qg.until(lambda: qgpu.ioctl("USAGE", pod=number).memory > 0)
        qg.until(gone, 60)
    figure("real_uvm_load_unload_cycles", CYCLES)

    assert not modules.flags(qgpu, "MANAGED")
    assert qgpu.ioctl("USAGE", pod=number).memory == 0


def gone():
    """Unload UVM, which succeeds between two processes that have it open."""
    try:
        qg.rmmod("nvidia_uvm")
    except BlockingIOError:
        return False
    return True


def test_nothing_holds_the_driver_afterwards():
    assert Path("/sys/module/nvidia/refcnt").read_text().strip() == "0"

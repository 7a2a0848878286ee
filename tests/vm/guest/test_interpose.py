"""The interposer: who is seen, who is not, and that the driver's own answers come through untouched."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import subprocess
import threading
from pathlib import Path

import nv
import programs
import pytest
import qg


def program(state, **how):
    state["p"] = nv.Program(**how)
    return state["p"].client


def test_module_enforces_on_a_known_driver(qgpu):
    info = qgpu.info()

    assert (info.abi, info.state, info.nr_gpus) == (qg.uapi.NUMBERS["QGPU_ABI_VERSION"], 1, 1)
    assert qg.uapi.ffi.string(info.driver) == b"580.105.08"
    assert info.flags == qg.N["QGPU_INFO_SEALED"] | qg.N["QGPU_INFO_HELD"] | qg.N["QGPU_INFO_GROUPS"]
    assert info.missing == 0


def test_processes_outside_pods_are_not_registered(qgpu, pod):
    pod("web")
    outside = nv.Program()
    outside.memory(1 << 20)

    assert qgpu.info().nr_clients == 0
    outside.close()


def test_a_pods_objects_are_registered_and_go_with_the_file(qgpu, pod):
    web = pod("web")
    process = web.process()
    process.run(program)

    assert (qgpu.info().nr_clients, web.info().nr_clients, web.info().nr_files) == (1, 1, 2)
    process.stop()
    assert (qgpu.info().nr_clients, web.info().nr_files) == (0, 0)


def test_children_in_cgroups_below_belong_to_the_pod(pod):
    web = pod("web")
    below = web.cgroup / "below"
    below.mkdir()
    child = qg.Process(below)
    child.run(program)

    assert web.info().nr_clients == 1
    child.stop()
    qg.until(lambda: not (below / "cgroup.procs").read_text())
    below.rmdir()


def test_device_allocation_passes_the_drivers_identity_check(pod):
    """From 550 RM compares f_op with its own table: a copied table would fail here."""
    assert pod("web").process().run(program)


def _raw(state, nr, size):
    fd = os.open(nv.CTL, os.O_RDWR)
    try:
        nv.call(fd, nr, bytearray(size))
    except OSError as error:
        return error.errno
    finally:
        os.close(fd)
    return 0


@pytest.mark.parametrize(
    ("nr", "size"), [(0x77, 8), (0x2B, 4), (0x2B, 40), (0x2A, 31), (0x29, 15), (211, 8), (0x4E, 56)]
)
def test_errno_of_pods_is_that_of_others(pod, nr, size):
    assert pod("web").process().run(_raw, nr, size) == _raw({}, nr, size)


def test_wrapped_calls_are_seen_as_what_they_wrap(qgpu, pod):
    web = pod("web", memory=1 << 20)

    def wrapped(state):
        state["p"] = nv.Program(send=nv.xfer)
        with pytest.raises(nv.RmError) as refused:
            state["p"].memory(2 << 20)
        return refused.value.status

    assert web.process().run(wrapped) == nv.NO_MEMORY
    assert web.info().nr_clients == 1


def test_a_wrap_in_a_wrap_is_refused(pod):
    def nested(state):
        fd = os.open(nv.CTL, os.O_RDWR)
        try:
            nv.xfer(fd, 211, bytearray(struct.pack("IIQ", 0x29, 16, 0)))
        except OSError as error:
            return error.errno
        return 0

    assert pod("web").process().run(nested) == errno.EINVAL


def test_files_open_before_the_module_are_reported():
    cgroup = qg.CGROUPS / "early"
    cgroup.mkdir()
    process = qg.Process(cgroup)
    process.run(program)
    qg.insmod("qgpu.ko")
    device = qg.Qgpu()
    fd = os.open(cgroup, os.O_RDONLY)
    device.ioctl("POD_ADD", cgroup_fd=fd, name=b"early")
    os.close(fd)
    process.run(lambda state: state["p"].fb_info(8))

    assert device.pods()[0].flags == qg.uapi.NUMBERS["QGPU_POD_LATE"]
    assert qg.uapi.NUMBERS["QGPU_EVENT_LATE_FILE"] in [event.type for event in device.events()]
    process.stop()
    device.close()
    qg.rmmod("qgpu")
    cgroup.rmdir()


def test_switching_off_lets_go_of_the_driver_at_once(qgpu, pod):
    web = pod("web", memory=1 << 20)
    process = web.process()
    process.run(program)
    enforce = "/sys/module/qgpu/parameters/enforce"
    with open(enforce, "w") as file:
        file.write("0")
    process.run(lambda state: state["p"].memory(2 << 20))

    assert (qgpu.info().state, qgpu.info().nr_clients) == (qg.uapi.NUMBERS["QGPU_STATE_OFF"], 0)
    with open(enforce, "w") as file:
        file.write("1")
    assert qgpu.info().state == qg.uapi.NUMBERS["QGPU_STATE_ENFORCING"]


def test_driver_cannot_leave_while_interposed(qgpu):
    with pytest.raises(BlockingIOError):
        qg.rmmod("nvidia")

    assert qg.loaded("nvidia")


def opened(state):
    return os.open(nv.CTL, os.O_RDWR), os.open(nv.GPU.format(0), os.O_RDWR)


def program_on(state, pid, ctl, card):
    """Be a program on files that somebody else has opened."""
    state["p"] = p = nv.Program.__new__(nv.Program)
    p.send, p.last, p.client = nv.call, 0x5C000000, 0
    p.ctl, p.card = qg.take_descriptor(pid, ctl), qg.take_descriptor(pid, card)
    p.client = p.alloc(0, nv.ROOT, handle=0)
    p.device = p.alloc(p.client, nv.DEVICE, struct.pack("I52x", 0))
    p.subdevice = p.alloc(p.device, nv.SUBDEVICE, bytes(4))


@pytest.mark.parametrize("where", [None, "other"])
def test_a_file_that_a_pod_opened_is_its_own_wherever_it_goes(web, pod, where):
    """A process outside, or in another pod, is held to the limit of the one that opened the file."""
    (process,) = web.processes
    ctl, card = process.run(opened)
    other = pod(where).process() if where else qg.Process(None)
    other.run(program_on, process.pid, ctl, card)

    assert other.run(programs.take, 16 * programs.MIB) > 0
    assert web.held() == 16 * programs.MIB
    assert other.run(programs.take, 64 * programs.MIB) == -nv.NO_MEMORY
    other.stop()


def test_a_cgroup_added_again_keeps_files_and_charges(qgpu, web):
    """What its processes allocated before, and in between, counts against the new limit; its TSGs have gates."""
    (process,) = web.processes
    assert process.run(programs.take, 24 * programs.MIB) > 0
    qgpu.ioctl("POD_REMOVE", pod=web.id)
    assert process.run(programs.take, 24 * programs.MIB) > 0
    process.run(lambda state: state["p"].compute())
    before, web.id = web.id, web.add()
    web.grant(memory=64 * programs.MIB + programs.ROOM + (32 << 20))

    assert web.id > before
    assert (web.info().flags, web.info().nr_files, web.usage().nr_tsgs) == (0, 2, 1)
    assert web.held() >= 48 * programs.MIB
    assert process.run(programs.take, 40 * programs.MIB) == -nv.NO_MEMORY


def test_a_former_pods_cgroup_may_come_back_under_another_name(qgpu, web):
    qgpu.ioctl("POD_REMOVE", pod=web.id)
    web.name = "other"
    web.id = web.add()

    assert [qg.uapi.ffi.string(found.name) for found in qgpu.pods()] == [b"other"]
    with pytest.raises(OSError, match="exists"):
        web.add()


ENFORCE = "/sys/module/qgpu/parameters/enforce"


def switch(value):
    with open(ENFORCE, "w") as file:
        file.write(value)


def test_another_interposer_in_front_is_not_bypassed(qgpu, web):
    """It came after the module, so it calls the module; letting go must not write over its pointer."""
    (process,) = web.processes
    with qg.rival("table=1"):
        switch("0")
        before = int(CALLS.read_text())
        process.run(lambda state: state["p"].fb_info(8))
        assert int(CALLS.read_text()) > before
        free = web.process()
        free.run(programs.program)
        assert free.run(programs.take, 100 * programs.MIB) > 0
        free.stop()
        switch("1")
        new = web.process()
        new.run(programs.program)
        assert new.run(programs.take, 100 * programs.MIB) == -nv.NO_MEMORY
        switch("0")
    process.run(lambda state: state["p"].fb_info(8))
    switch("1")

    assert qgpu.info().state == qg.N["QGPU_STATE_ENFORCING"]
    assert "another module has put its functions in front" in qg.kernel_log()


CALLS = Path("/sys/module/rival/parameters/calls")


@pytest.mark.usefixtures("_driver")
def test_module_stays_while_another_interposer_calls_it():
    """Unloading waits, for the other one would call into nothing."""
    outside = nv.Program()
    qg.insmod("qgpu.ko")
    qg.insmod("rival.ko", "table=1")
    unloading = threading.Thread(target=qg.rmmod, args=("qgpu",))
    unloading.start()
    qg.until(lambda: "cannot be unloaded while" in qg.kernel_log())
    outside.fb_info(8)
    assert unloading.is_alive()
    qg.rmmod("rival")
    unloading.join(30)

    assert not qg.loaded("qgpu")
    outside.fb_info(8)
    outside.close()


def test_cards_that_come_later_are_found(qgpu, pod):
    path = Path("/sys/module/nvidia/parameters/gpus")
    assert qgpu.info().nr_gpus == 1
    path.write_text("2")
    try:
        with contextlib.suppress(FileExistsError):
            os.mknod("/dev/nvidia1", 0o020666, os.makedev(195, 1))
        web = pod("web")
        process = web.process()
        process.run(lambda state: state.update(p=nv.Program(1)))
        assert process.run(programs.take, programs.MIB) > 0

        assert qgpu.info().nr_gpus == 2
        assert web.usage(1).memory >= programs.MIB
        process.stop()
    finally:
        path.write_text("1")


def sleeps_as(pid):
    """S: a signal wakes it; D: none does."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def give_up_switching_off(qgpu, process, linger):
    """Keep one of a process's calls in the driver, and end whoever switches the module off meanwhile."""
    linger(8_000_000)
    process.start(lambda state: state["p"].fb_info(8))
    qg.until(lambda: sleeps_as(process.pid) == "D")
    writer = subprocess.Popen(["/bin/sh", "-c", f"echo 0 >{ENFORCE}"])
    qg.until(lambda: qgpu.info().state == qg.N["QGPU_STATE_OFF"] and sleeps_as(writer.pid) == "S", 7)
    writer.kill()
    writer.wait()
    linger(0)


def test_switching_off_can_be_given_up_while_a_call_is_stuck(qgpu, web, linger):
    """A pod's file system can keep one of its calls as long as it likes; whoever switches off is not kept with it."""
    (process,) = web.processes
    give_up_switching_off(qgpu, process, linger)
    outside = nv.Program()
    outside.close()
    stuck = not process.pipe.poll()

    assert (stuck, qgpu.info().state) == (True, qg.N["QGPU_STATE_OFF"])
    process.result()
    switch("1")
    assert qgpu.info().state == qg.N["QGPU_STATE_ENFORCING"]
    assert process.run(programs.take, 100 * programs.MIB) == -nv.NO_MEMORY


def test_files_that_end_while_letting_go_are_forgotten(qgpu, web, linger):
    """Else another file at the same address would be taken for the one that ended."""
    (process,) = web.processes
    other = web.process()
    other.run(programs.program)
    give_up_switching_off(qgpu, process, linger)
    other.stop()
    stuck = not process.pipe.poll()
    process.result()
    switch("1")
    info = web.info()

    assert (stuck, info.nr_files, info.nr_clients) == (True, 2, 1)
    assert info.flags & qg.N["QGPU_POD_UNCHECKED"]

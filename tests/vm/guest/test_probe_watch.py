"""Limits are refused while a hook in the driver is missing, and whoever has one already is marked."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import programs
import pytest
import qg
from qg import FTRACE, KPROBES, N, switched_off

MIB = 1 << 20


@pytest.fixture
def uvm(_driver):
    qg.insmod("nvidia-uvm.ko")
    yield
    qg.rmmod("nvidia_uvm")


def refusal(pod, **grant):
    try:
        pod.grant(**grant)
    except OSError as error:
        return error.errno
    return 0


def missing_told(qgpu):
    return [event.value for event in qgpu.events() if event.type == N["QGPU_EVENT_MISSING"]]


@pytest.mark.parametrize("switch", [KPROBES, FTRACE], ids=["kprobes", "ftrace"])
def test_limits_are_refused_while_probes_are_off(qgpu, pod, switch):
    web = pod("web")
    with switched_off(switch):
        info = qgpu.info()
        answers = [refusal(web, memory=MIB), refusal(web, cores=50), refusal(web, pod_class=1)]

    assert info.missing & N["QGPU_MISSING_PROBES"]
    assert info.flags & (N["QGPU_INFO_SEALED"] | N["QGPU_INFO_HELD"]) == 0
    assert answers == [errno.EOPNOTSUPP, errno.EOPNOTSUPP, 0]
    assert (qgpu.info().missing, refusal(web, memory=MIB, cores=50)) == (0, 0)


def test_probes_going_off_is_told_by_the_module_itself(qgpu, pod):
    """Nobody asks it anything: it looks once a second."""
    limited, free = pod("limited", memory=MIB), pod("free", pod_class=1)
    qgpu.events()
    with switched_off(KPROBES):
        (value,) = qg.until(lambda: missing_told(qgpu))
    qg.until(lambda: 0 in missing_told(qgpu))

    assert value & N["QGPU_MISSING_PROBES"]
    assert limited.info().flags & N["QGPU_POD_UNCHECKED"]
    assert not free.info().flags & N["QGPU_POD_UNCHECKED"]
    assert "limits are not safe" in qg.kernel_log()


def test_a_limit_that_a_pod_has_is_granted_again(pod):
    web = pod("web", memory=MIB, cores=50)
    with switched_off(KPROBES):
        same = refusal(web, memory=MIB, cores=50, pod_class=1)
        more = refusal(web, memory=2 * MIB, cores=50)
        less = refusal(web, cores=50)

    assert (same, more, less) == (0, errno.EOPNOTSUPP, 0)


MMAP = "symbol=nvidia_uvm:uvm_mmap_entry"


def test_no_other_module_redirects_what_the_module_hooks(qgpu, uvm):
    """A live patch or a BPF trampoline on the same function would bypass the refusal of a mapping."""
    assert qgpu.info().flags & N["QGPU_INFO_MANAGED"]
    with pytest.raises(OSError, match="busy"), qg.rival(MMAP):
        pass


def test_managed_memory_without_hooks_refuses_limits(uvm):
    """Somebody else was first; so it is too where a function has another name."""
    with qg.rival(MMAP):
        qg.insmod("qgpu.ko")
        device = qg.Qgpu()
        web = qg.Pod(device, "web")
        info, answer = device.info(), refusal(web, memory=MIB)
    try:
        qg.until(lambda: device.info().missing == 0, 60)
        later = refusal(web, memory=MIB)
    finally:
        web.close()
        device.close()
        qg.rmmod("qgpu")

    assert (info.flags & N["QGPU_INFO_MANAGED"], info.missing) == (0, N["QGPU_MISSING_MANAGED"])
    assert (answer, later) == (errno.EOPNOTSUPP, 0)
    assert "managed memory: cannot probe nvidia_uvm:uvm_mmap_entry" in qg.kernel_log()


def test_uvm_that_comes_without_hooks_marks_limited_pods(qgpu, pod):
    """Limits were granted while UVM was not loaded, and then it came in a form that cannot be hooked."""
    limited = pod("limited", memory=MIB)
    with switched_off(FTRACE):
        qg.insmod("nvidia-uvm.ko")
        qg.until(lambda: limited.info().flags & N["QGPU_POD_UNCHECKED"])
        qg.rmmod("nvidia_uvm")


def test_uvm_that_goes_marks_no_pod(qgpu, pod):
    """Its probes go before it does."""
    limited = pod("limited", memory=MIB)
    for _ in range(5):
        qg.insmod("nvidia-uvm.ko")
        leaving = threading.Thread(target=qg.rmmod, args=("nvidia_uvm",))
        leaving.start()
        while leaving.is_alive():
            qgpu.info()
        leaving.join()

    assert not limited.info().flags & N["QGPU_POD_UNCHECKED"]


def test_a_call_that_no_probe_saw_marks_its_pod(qgpu, pod):
    """Between two looks of the module: the call itself shows that it was not sealed."""
    web = pod("web", memory=64 * MIB)
    process = web.process()
    process.run(programs.program)
    before = web.info().flags
    with switched_off(KPROBES):
        process.run(programs.take, MIB)
    qg.until(lambda: web.info().flags & N["QGPU_POD_UNCHECKED"])

    assert before == 0


#: Has the kernel wait for its readers by interrupts, in less time than it needs to turn a probe's jump back.
EXPEDITED = Path("/sys/kernel/rcu_expedited")


@pytest.mark.usefixtures("_driver")
def test_module_that_goes_fast_leaves_no_probe_behind():
    """Its probe by breakpoint is to be there again, at the same address."""
    missing = []
    EXPEDITED.write_text("1")
    try:
        for _ in range(4):
            qg.insmod("qgpu.ko")
            time.sleep(0.5)  # the kernel turns a probe into a jump some jiffies after its start
            device = qg.Qgpu()
            missing.append(device.info().missing)
            device.close()
            qg.rmmod("qgpu")
    finally:
        EXPEDITED.write_text("0")

    assert missing == [0] * 4

"""``qgpuctl module`` and the doctor's check, on the module in each of its states."""

from __future__ import annotations

import json
import subprocess
import sys

import nv
import pytest
import qg
import simcard
import structlog
from faults import cleared, fault, inject

from qgpu.config import GpuSettings
from qgpu.daemon.gpu_loop import GpuLoop
from qgpu.doctor.module import check_module
from qgpu.doctor.report import Verdict
from qgpu.errors import RefusedError
from qgpu.model import Grant

GPU_IS_LOST = 0x0F


def off():
    return [tsg["off"] for tsg in qg.sim_tsgs()]


def ctl(*arguments):
    command = [sys.executable, "-m", "qgpu.cli.main", "module", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def flood(state):
    p = state["p"] = nv.Program()
    _, (channel,) = p.compute()
    p.submit(channel, 1000)


def test_qgpuctl_switches_the_module_off_and_on_at_once(qgpu, pod):
    a = pod("a")
    a.process().run(flood)
    qgpu.plan((a.id, 5000, []))
    closed = off()
    ended = ctl("off")
    opened = [(tsg["off"], tsg["slice_ns"]) for tsg in qg.sim_tsgs()]
    check = check_module()
    shown = json.loads(ctl("show", "-o", "json").stdout)
    again = ctl("on")

    assert (closed, ended.returncode, opened) == ([1], 0, [(0, 1_024_000)])
    assert (check.verdict, "switched off" in check.found) == (Verdict.WARN, True)
    assert "switched off" in shown["enforcing"]
    assert (again.returncode, check_module().verdict) == (0, Verdict.OK)
    assert "enforcing on driver" in check_module().found


def test_daemon_reports_module_off_and_resumes_when_on(qgpu):
    host = simcard.open_host()
    host.admit("a", {0: Grant(cores=30)})
    process = qg.Process(None)
    host.attach("a", process.pid, ())
    gpu_loop = GpuLoop(host, 0, GpuSettings("fixed-share"))
    qg.until(lambda: gpu_loop.ledger.now_ns)
    ctl("off")
    qg.until(lambda: "switched off" in gpu_loop.problem)
    known = [pod.name for pod in host.pods()]
    ctl("on")
    process.run(flood)
    qg.until(lambda: not gpu_loop.problem and off() == [1])
    gpu_loop.stop()
    released = off()
    process.kill()
    host.retire("a")
    host.close()

    assert (known, released) == (["a"], [0])


def test_a_stalled_card_is_shown_by_qgpuctl_doctor_and_daemon(qgpu):
    host = simcard.open_host()
    host.admit("a", {0: Grant(cores=30)})
    process = qg.Process(None)
    host.attach("a", process.pid, ())
    process.run(flood)
    inject([fault("any", GPU_IS_LOST)])
    qgpu.plan((qgpu.pods()[0].pod, 5000, []))
    with structlog.testing.capture_logs() as logs:
        backend = host.backend(0)
        backend.sample()
        shown, check = json.loads(ctl("show", "-o", "json").stdout), check_module()
        cleared()
        qgpu.plan()
        qg.until(lambda: not qgpu.info().stalled)
        backend.sample()
    backend.close()
    process.kill()
    host.retire("a")
    host.close()

    assert (shown["stalled_cards"], check.verdict) == (["00000000:01:00.0"], Verdict.FAIL)
    assert "00000000:01:00.0" in check.found
    assert [(each["log_level"], each["pci"]) for each in logs] == [
        ("warning", "00000000:01:00.0"),
        ("info", "00000000:01:00.0"),
    ]


@pytest.mark.usefixtures("_driver")
def test_without_the_module_qgpuctl_says_what_to_load():
    ended = [ctl(what) for what in ("show", "off", "on")]

    assert [each.returncode for each in ended] == [9, 9, 9]
    assert all(each.stderr.count("\n") == 1 and "is qgpu.ko loaded?" in each.stderr for each in ended)


def test_missing_probes_are_said_wherever_limits_are(qgpu):
    """By the admission of a pod, to who asks for it; by doctor, ``module show`` and the pods that have limits."""
    host = simcard.open_host()
    host.admit("a", {0: Grant(cores=30)})
    try:
        with qg.switched_off(qg.KPROBES):
            with pytest.raises(RefusedError) as refused:
                host.admit("b", {0: Grant(memory=1 << 20)})
            host.admit("c", {0: Grant()})
            check, shown = check_module(), json.loads(ctl("show", "-o", "json").stdout)
            problem = {pod.name: pod.problem for pod in host.pods()}
        after = check_module()
    finally:
        for name in ("a", "c"):
            host.retire(name)
        host.close()

    assert str(refused.value).startswith("pGPU 0: no limit can be enforced now: the kernel's probes do not work")
    assert check.verdict is Verdict.FAIL
    assert "kprobes/enabled" in check.remedy
    assert "probes do not work" in shown["limits_refused"]
    assert "may hold more than its limit" in problem["a"]
    assert (problem["c"], after.verdict) == ("", Verdict.OK)

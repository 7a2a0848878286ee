"""``make gputest-kmod`` on the simulated driver: whatever becomes of it, the module is gone and every gate open."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import qg

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

import gputest_kmod
import module_host

ROOT = Path(__file__).parents[3]
RUNNER = [sys.executable, str(ROOT / "bench" / "gputest_kmod.py"), "--simulated"]


def runner(*options, out):
    command = [*RUNNER, "--built", str(qg.BUILD), "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def unpacked(out):
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        return {Path(member.name).name: tar.extractfile(member).read().decode() for member in tar if member.isfile()}


def use_the_module(then):
    """Python code of a stage: a process that holds the module's device and a closed gate, and another that is its."""
    folder = str(Path(__file__).parent)
    return "\n".join(
        [
            f"import sys, time; sys.path.insert(0, {folder!r})",
            "import nv, qg, programs",
            "device = qg.Qgpu(); pod = qg.Pod(device, 'web'); process = pod.process()",
            "process.run(programs.program)",
            "process.run(programs.flood)",
            "device.plan((pod.id, 1000, []))",
            "qg.until(lambda: [tsg['off'] for tsg in qg.sim_tsgs()] == [1])",
            "print('its gate is closed', flush=True)",
            then,
        ]
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Make a run of given stages, as the runner does with its own."""

    def make(*stages):
        monkeypatch.setattr(gputest_kmod, "stages", lambda _folder, *, simulated: stages)
        options = argparse.Namespace(
            built=qg.BUILD, simulated=True, accept_driver=False, only=[stage.name for stage in stages]
        )
        host = module_host.examine(None, None, build=False, driver=gputest_kmod.SIMULATED.read_text().strip())
        return gputest_kmod.Run(options, host, tmp_path)

    yield make
    folder = qg.CGROUPS / "web"
    qg.until(lambda: not folder.exists() or not (folder / "cgroup.procs").read_text())
    if folder.exists():
        folder.rmdir()


def verdicts(made):
    return {outcome.stage: outcome.held for outcome in made.outcomes}


def test_runner_loads_unloads_and_packs_what_it_found(tmp_path):
    done = runner("--only", "suite", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr

    found = unpacked(tmp_path)
    stages = {each["stage"]: each["held"] for each in json.loads(found["summary.json"])}
    left_out = {"suite": None}
    assert stages == left_out | dict.fromkeys(("built", "loaded", "unloaded", "kernel log", "afterwards"), True)
    assert "all held" in found["summary.md"]
    assert "loads qgpu.ko" in found["dmesg"]
    assert json.loads(found["versions.json"])["modules"]["qgpu.ko"]
    assert not qg.loaded("qgpu")


def test_runner_refuses_in_one_line_where_the_module_is_in_use(qgpu, tmp_path):
    done = runner(out=tmp_path)

    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (3, "", 1)
    assert "rmmod qgpu" in done.stderr
    assert (qgpu.info().state, list(tmp_path.iterdir())) == (1, [])


def test_runner_refuses_in_one_line_without_headers(tmp_path):
    command = [*RUNNER, "--headers", str(tmp_path), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)
    assert "install those of kernel" in done.stderr
    assert not qg.loaded("qgpu")


def test_module_goes_after_stages_that_do_not_hold(run):
    made = run(
        gputest_kmod.Stage("fails", (sys.executable, "-c", use_the_module("sys.exit(1)")), 100),
        gputest_kmod.Stage("hangs", (sys.executable, "-c", "import time; time.sleep(1000)"), 2),
        gputest_kmod.Stage("skips", (sys.executable, "-c", "print('17 skipped in 0.1s')"), 60),
        gputest_kmod.Stage("next", (sys.executable, "-c", "print('there')"), 60),
    )
    made.all()

    said = {outcome.stage: outcome.said for outcome in made.outcomes}
    assert {stage for stage, held in verdicts(made).items() if not held} == {"fails", "hangs", "skips"}
    assert (said["fails"], said["next"]) == ("its gate is closed", "there")
    assert said["hangs"].startswith("not done after 2 s")
    assert not gputest_kmod.held(made.outcomes)
    assert not qg.loaded("qgpu")


def test_module_that_does_not_load_is_told_and_gone(run, tmp_path):
    made = run()
    made._options.built = tmp_path
    (tmp_path / "qgpu.ko").write_bytes(b"\x7fELF no module")
    with pytest.raises(gputest_kmod.QgpuError, match="refuses qgpu"):
        made.all()

    assert verdicts(made)["unloaded"]
    assert not qg.loaded("qgpu")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_runner_leaves_no_module_and_no_closed_gate(run, tmp_path, how):
    made = run(gputest_kmod.Stage("long", (sys.executable, "-c", use_the_module("time.sleep(1000)")), 600))
    pid = os.fork()
    if not pid:
        try:
            made.all()
        finally:
            os._exit(0)
    log = tmp_path / "long.log"
    try:
        qg.until(lambda: log.exists() and "closed" in log.read_text(), 200)
    finally:
        os.kill(pid, how)
        os.waitpid(pid, 0)
        qg.until((tmp_path / "unloaded.json").exists, 60)

    assert not qg.loaded("qgpu")
    assert not [tsg for tsg in qg.sim_tsgs() if tsg["off"]]
    qg.until(lambda: qg.sim()["clients"] == 0, 60)

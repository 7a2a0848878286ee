"""The runner of ``make gputest-kmod`` without a module: refuses in one line, judges, lets nothing run on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gputest_kmod
import module_host
import pytest
from gputest_kmod import Outcome

ROOT = Path(__file__).parents[2]


def test_unable_host_is_refused_in_one_line(tmp_path):
    command = [sys.executable, str(ROOT / "bench/gputest_kmod.py"), "--headers", str(tmp_path / "none")]
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=False)

    assert (done.returncode in (3, 4, 9), done.stdout, len(done.stderr.splitlines())) == (True, "", 1)
    assert done.stderr.startswith("gputest-kmod: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("verdicts", "holds"), [((True, None), True), ((True, False, None), False), ((), True)], ids=str
)
def test_summary_says_whether_all_held(verdicts, holds):
    outcomes = [Outcome(f"stage-{i}", held, 3, "a|b") for i, held in enumerate(verdicts)]
    host = module_host.Host("6.1", "580.1.2", "/usr/src", "off", "", None)
    about = gputest_kmod.versions(host, ()) | {"signed": "not signed: no key"}
    page = gputest_kmod.summary(about, outcomes)

    assert gputest_kmod.held(outcomes) is holds
    assert ("NOT all held" in page) is not holds
    assert page.count("| 3 | a/b |") == len(outcomes)


def test_every_stage_can_be_asked_for_and_runs_on_the_module(tmp_path):
    for simulated in (False, True):
        stages = gputest_kmod.stages(tmp_path, simulated=simulated)
        assert [stage.name for stage in stages] == ["contract", "attacks", "moments", "suite"]
        assert all(any("kmod" in word for word in stage.command) for stage in stages if stage.name != "contract")
        assert ("vm" if simulated else "kmod_gpu") in stages[0].command
        assert all((ROOT / stage.command[1]).exists() for stage in stages if stage.command[1] != "-m")


@pytest.mark.skipif(Path("/sys/module/qgpu").exists(), reason="it would unload the module of this machine")
def test_stage_ends_with_the_runner(tmp_path):
    """What unloads the module ends a stage that still runs, however its runner ended."""
    stage = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    ended = tmp_path / "ended"
    theirs, ours = os.pipe()
    command = [sys.executable, module_host.__file__, str(theirs), str(ended)]
    unloader = subprocess.Popen(command, pass_fds=[theirs], env=os.environ | {"PYTHONPATH": str(ROOT)})
    os.close(theirs)
    os.write(ours, f"{stage.pid}\n".encode())
    assert (unloader.poll(), stage.poll()) == (None, None)
    os.close(ours)

    assert (stage.wait(), unloader.wait()) == (-9, 0)
    assert json.loads(ended.read_text())["unloaded"]

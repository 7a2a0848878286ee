"""A share group as an operator makes it, on the module: ``qgpuctl group create``, ``run --group``; MPS stood in for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import qg

from tests.groups import stand_in

ROOT = Path(__file__).resolve().parents[3]
RUNTIME = Path("/run/qgpu")
TIMEOUT_S = 240  # the machine is emulated, and Python starts in seconds
#: The server makes a TSG with a channel, and each member duplicates it and makes another below its handle.
SERVER = """#!{python}
import json, os, pathlib, signal, sys
sys.path.insert(0, "{guest}")
import nv
p = nv.Program()
tsg, (channel,) = p.compute()
p.submit(channel, 100)
pathlib.Path("/run/named.new").write_text(json.dumps([p.client, tsg]))
os.rename("/run/named.new", "/run/named")
signal.pause()
"""
MEMBER = """
import json, pathlib, signal, sys
sys.path.insert(0, "{guest}")
import nv
p = nv.Program()
p.submit(p.channel(p.dup(*json.loads(pathlib.Path("/run/named").read_text()))), 100)
pathlib.Path("/run/member").touch()
signal.pause()
"""


def ctl(*arguments):
    command = [sys.executable, "-m", "qgpu.cli.main", "--timeout", "60", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


@pytest.fixture
def daemon(module, tmp_path, monkeypatch):
    """The daemon on plane kmod, with stand-ins for MPS's two programs."""
    guest = Path(__file__).resolve().parent
    control = stand_in.install(tmp_path / "mps")
    # Its children are in the pod, as MPS's are: the pod is a cgroup.
    control.write_text(
        control.read_text().replace('[*run, "--group", pipe.parent.name, "--", *program]', '["env", *program]')
    )
    server = control.with_name("nvidia-cuda-mps-server")
    server.write_text(SERVER.format(python=sys.executable, guest=guest))
    monkeypatch.setenv("PATH", f"{server.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("QGPU_RUNTIME_DIR", str(RUNTIME))
    command = [sys.executable, str(guest / "simcard.py"), "--plane", "kmod", "--runtime-dir", str(RUNTIME)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said = []
    while '"ready"' not in (line := process.stderr.readline()):
        said.append(line)
        assert line, f"the daemon did not start: {said}"
    yield process
    ctl("group", "remove", "llm", "--force")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_S)


# On an emulated machine eight programs in Python start one after the other.
@pytest.mark.timeout(1200)
def test_a_groups_server_and_member_are_one_tsg_of_its_pod(daemon):
    made = ctl("group", "create", "llm", "--cores", "60")
    assert made.returncode == 0, made.stderr
    program = MEMBER.format(guest=Path(__file__).resolve().parent)
    run = [sys.executable, "-m", "qgpu.cli.main", "run", "--group", "llm", "--", sys.executable, "-c", program]
    qg.until(Path("/run/named").exists, TIMEOUT_S)
    member = subprocess.Popen(run)
    qg.until(Path("/run/member").exists, TIMEOUT_S)
    shown = json.loads(ctl("pod", "list", "-o", "json").stdout)["pods"]
    tsgs = len(qg.sim_tsgs())
    device = qg.Qgpu()
    (pod,) = device.pods()
    usage = device.ioctl("USAGE", pod=pod.pod, gpu=0)
    device.close()
    member.terminate()
    member.wait(TIMEOUT_S)
    removed = ctl("group", "remove", "llm")
    qg.until(lambda: not qg.sim_tsgs())

    assert [each["name"] for each in shown] == ["llm"]
    assert (tsgs, usage.nr_tsgs, usage.nr_channels) == (1, 1, 2)
    assert removed.returncode == 0, removed.stderr

"""``make gputest-kmod`` from sources to archive, on the simulated driver: all holds, nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import qg

ROOT = Path(__file__).parents[3]
STAGES = os.environ.get("QGPU_GPUTEST_ONLY") or "contract,attacks,moments,suite"
_CERTIFICATE = ("openssl", "req", "-new", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=rehearsal")


@pytest.mark.timeout(3600)
def test_all_holds_and_nothing_is_left(driver, tmp_path):
    key, cert = tmp_path / "key", tmp_path / "cert"
    subprocess.run([*_CERTIFICATE, "-outform", "DER", "-out", str(cert), "-keyout", str(key)], check=True)
    command = [sys.executable, str(ROOT / "bench/gputest_kmod.py"), "--simulated", "--only", STAGES]
    command += ["--headers", os.environ["QGPU_VM_HEADERS"], "--key", str(key), "--cert", str(cert)]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)

    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        found = {Path(member.name).name: tar.extractfile(member).read().decode() for member in tar if member.isfile()}
    print(found["summary.md"])
    outcomes = {each["stage"]: each["held"] for each in json.loads(found["summary.json"])}
    assert [stage for stage, held in outcomes.items() if held is False] == []
    assert {stage for stage, held in outcomes.items() if held is None} <= {"suite"}
    assert set(STAGES.split(",")) <= set(outcomes)
    assert json.loads(found["versions.json"])["signed"] == f"signed with {key}"
    assert done.returncode == 0
    assert not qg.loaded("qgpu")
    assert qg.sim()["clients"] == 0

"""The driver as a service of the node."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.deploy.tools import ROOT

UNIT = ROOT / "deploy/systemd/qgpu-k8s.service"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_the_drivers_service_is_confined() -> None:
    result = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=25", "--no-pager", str(UNIT)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stdout


def test_the_drivers_service_is_tried_again_for_ever() -> None:
    """It starts before qgpud, the kubelet's folders and the API server are there."""
    text = UNIT.read_text()

    assert "\nRestart=always\n" in text
    assert "\nStartLimitIntervalSec=0\n" in text

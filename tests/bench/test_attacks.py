"""The attackers of bench/attacks build from the ABI that qgpu declares."""

from __future__ import annotations

import shutil

import pytest
from attacks import build


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_every_attacker_builds(tmp_path):
    build.build(tmp_path)

    assert {"raw", "race", "cuda", "fault", "control"} <= {each.name for each in tmp_path.iterdir()}

"""The attackers of bench/isolation.py build here, against RM's ABI as it is declared; they run where a card is."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_every_attacker_builds_and_every_case_has_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    for name in [name for name in sys.modules if name.split(".")[0] == "attacks"]:
        monkeypatch.delitem(sys.modules, name)
    from attacks import build, cases

    build.build(tmp_path)

    assert {case.program for case in cases.CASES} - {path.name for path in tmp_path.iterdir()} <= {"raw-musl"}

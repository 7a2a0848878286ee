"""Recorded CUDA programs, replayed through a guardian over emulated RM."""

from __future__ import annotations

import importlib.util
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from qgpu.guardian.proxy.refusals import Refusals
from qgpu.nvidia import abi
from tests.guardian.fake_rm import FakeRm
from tests.traces import TRACES

# tests/vm has a call_cost.py too, and other tests put folders on the path
_FILE = Path(__file__).parents[2] / "bench" / "call_cost.py"
_SPEC = importlib.util.spec_from_file_location("bench_call_cost", _FILE)
call_cost = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(call_cost)


class StrictRm(FakeRm):
    """RM that answers questions about clients through control files alone, as the driver does."""

    def object_info(self, file, client, handle):
        on_card = os.fstat(file).st_rdev == os.stat(call_cost._RM).st_rdev
        return None if on_card else super().object_info(file, client, handle)


#: The replay takes a descriptor for the same file for ever, but nvidia-smi opens others under its number.
_PROGRAMS = [trace for trace in TRACES if "-smi." not in trace.name]


@pytest.mark.parametrize("trace", _PROGRAMS, ids=[trace.name.split(".")[2].split("-")[1] for trace in _PROGRAMS])
def test_a_recorded_program_is_refused_nothing(trace, monkeypatch):
    """Its files are open files of their own, so what goes by a file shows here."""
    refused: Counter[str] = Counter()
    count = Refusals.count

    def noted(self, pod, what):
        refused[what] += 1
        count(self, pod, what)

    monkeypatch.setattr(Refusals, "count", noted)
    said, _ = call_cost.start(["--replay", str(trace)], None, StrictRm(call_cost.there(trace)))

    assert refused == {"card without a grant": 1}  # the card's UUID is another one
    failed = {number for number, *_ in json.loads(said)["failed"]}
    assert failed <= {abi.NV_ESC_RM_CONTROL, abi.NV_ESC_RM_FREE}  # this RM knows few controls

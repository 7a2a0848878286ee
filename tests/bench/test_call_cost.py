"""A recorded CUDA program, replayed through a guardian over emulated RM."""

from __future__ import annotations

from collections import Counter

import call_cost

from qgpu.guardian.proxy.refusals import Refusals
from tests.guardian.fake_rm import FakeRm


def test_a_recorded_program_is_refused_nothing(monkeypatch):
    """Its files are open files of their own, so what goes by a file shows here."""
    refused: Counter[str] = Counter()
    count = Refusals.count

    def noted(self, pod, what):
        refused[what] += 1
        count(self, pod, what)

    monkeypatch.setattr(Refusals, "count", noted)
    call_cost.start(["--replay"], None, FakeRm(call_cost.there()))

    assert refused == {"card without a grant": 1}  # the card's UUID is another one

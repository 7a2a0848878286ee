"""How bench/isolation.py adds up what several tries of one attack came to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def judge(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    for name in [name for name in sys.modules if name.split(".")[0] == "attacks"]:
        monkeypatch.delitem(sys.modules, name)
    from attacks import judge

    return judge


def come_to(judge, monkeypatch, *tries, kernel_faults=False):
    """Judge an attack whose tries come to these: steps missing during it, after it, bytes over its quota, pauses."""

    def tried(during, after, over, pause_ms=0.0):
        figures = {"longest_pause_ms": pause_ms, "pause_after_ms": pause_ms, "after_over_before": 1.0}
        return judge.Row("raw", "x", bytes_over_quota=over, **figures), during, after

    left = [tried(*one) for one in tries]
    monkeypatch.setattr(judge, "_once", lambda *_: left.pop(0))
    case = judge.Case("raw", "x", "raw", "x", kernel_faults=kernel_faults)
    row = judge.judge(None, None, case, 1000.0, 0.5)
    assert not left, "it was not tried again"
    return row


def test_what_costs_nothing_is_tried_once(judge, monkeypatch):
    row = come_to(judge, monkeypatch, (0, 0, 0))

    assert (row.passed, row.neighbour_steps_lost, row.tries, row.windows_short) == (True, 0, 1, 0)


def test_steps_lost_once_after_attack_are_reported_not_failed(judge, monkeypatch):
    row = come_to(judge, monkeypatch, (0, 20, 0), (0, 0, 0))

    assert (row.passed, row.neighbour_steps_lost, row.tries, row.windows_short) == (True, 0, 2, 1)
    assert "20 0" in row.said


def test_bytes_over_quota_count_even_if_retry_is_inconclusive(judge, monkeypatch):
    row = come_to(judge, monkeypatch, (0, 20, 4096), (0, 0, None))

    assert (row.passed, row.bytes_over_quota) == (False, 4096)


def test_kernel_that_faults_is_tried_as_often_as_without_qgpu(judge, monkeypatch):
    row = come_to(judge, monkeypatch, (0, 0, 0, 12.0), (0, 0, 0, 41.0), (0, 0, 0, 8.0), kernel_faults=True)

    assert (row.passed, row.tries, row.longest_pause_ms) == (True, 3, 41.0)


def test_of_pauses_the_longest_of_all_tries_is_told(judge, monkeypatch):
    row = come_to(judge, monkeypatch, (0, 20, 0, 41.0), (0, 0, 0, 0.0))

    assert (row.longest_pause_ms, row.pause_after_ms) == (41.0, 41.0)


def test_steps_missing_after_every_try_are_lost(judge, monkeypatch):
    row = come_to(judge, monkeypatch, (0, 20, 0), (0, 7, 0), (0, 12, 0))

    assert (row.passed, row.neighbour_steps_lost, row.windows_short) == (False, 7, 3)


def test_steps_lost_from_guarantee_always_fail(judge, monkeypatch):
    row = come_to(judge, monkeypatch, (9, 20, 0), (0, 0, 0))

    assert (row.passed, row.neighbour_steps_lost) == (False, 9)


def test_bytes_over_the_quota_count_whenever_that_was(judge, monkeypatch):
    row = come_to(judge, monkeypatch, (0, 20, 4096), (0, 0, 0))

    assert (row.passed, row.bytes_over_quota) == (False, 4096)


@pytest.mark.parametrize("began", [0.0, 0.013, 0.05, 0.077])
def test_the_rate_of_turns_is_that_of_whole_turns(judge, began):
    """By turns of 50 ms in 100 a step a millisecond is 500 a second, whenever it is looked at."""

    def steps(at: float) -> float:
        turns, rest = divmod(at, 0.1)
        return 50 * turns + min(50, rest * 1000)

    watch = judge.Watch(world=None)
    for number in range(100):
        at = began + 0.0207 * number
        watch.seen.append(judge.StepReading(at, at + 1e-5, steps(at)))

    assert watch.rate(began, began + 1.86, 0.1) == pytest.approx(500, rel=0.004)

"""Who has not answered is given up for time it had, not for time that others took from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from qgpu.planes.seccomp import hang_detector
from qgpu.planes.seccomp.hang_detector import LOOK_MS, HangDetector

_LOOK_NS = LOOK_MS * 1_000_000


@dataclass
class Process:
    """Ours by its number; what it does is said here, look by look."""

    now_ns: int = 0
    ran_ns: int = 1
    waited_ns: int = 0
    state: str = "S"

    def pass_time(self, ran_ns: int = 0, waited_ns: int = 0) -> None:
        self.now_ns += _LOOK_NS
        self.ran_ns += ran_ns
        self.waited_ns += waited_ns


@pytest.fixture
def process(monkeypatch):
    made = Process()
    monkeypatch.setattr(hang_detector, "time", SimpleNamespace(monotonic=lambda: made.now_ns / 1e9))
    monkeypatch.setattr(hang_detector, "_stat", lambda pid: [made.state, *["0"] * 20])
    monkeypatch.setattr(hang_detector, "_spent", lambda pid: (made.ran_ns, made.waited_ns))
    monkeypatch.setattr(hang_detector, "is_in_driver", lambda pid, before: False)
    return made


def _looks(process, **each) -> int:
    """Return how many looks it takes until it is given up."""
    watched = HangDetector(os.getpid())
    for count in range(1, 100):
        process.pass_time(**each)
        try:
            watched.look()
        except TimeoutError:
            return count
    raise AssertionError("never")


@pytest.mark.parametrize(("state", "ran_ns"), [("S", 0), ("R", _LOOK_NS)])
def test_hung_guardian_is_given_up_long_before_a_starved_one(process, state, ran_ns):
    process.state = state
    hangs = _looks(process, ran_ns=ran_ns)
    process.state = "R"
    starved = _looks(process)

    assert starved >= 4 * hangs


def test_what_it_waited_is_not_counted_when_it_sleeps_again(process):
    alone = _looks(process)
    busy = _looks(process, waited_ns=_LOOK_NS * 3 // 4)

    assert busy >= 3 * alone


def test_on_a_kernel_that_counts_no_waiting_all_time_is_its_own(process):
    process.ran_ns = 0
    process.state = "R"
    uncounted = _looks(process)
    process.ran_ns, process.state = 1, "S"

    assert uncounted == _looks(process)


def test_one_that_is_frozen_is_given_up_first(process, monkeypatch):
    hangs = _looks(process)
    monkeypatch.setattr(hang_detector.cgroup, "is_frozen", lambda pid: True)

    assert _looks(process) < hangs

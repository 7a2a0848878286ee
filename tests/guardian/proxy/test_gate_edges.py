"""A pod's call waits while a gate moves, for a bounded time."""

from types import SimpleNamespace

import pytest

from qgpu.guardian.proxy import shared_state

MS = 1_000_000
EDGE_NS = 1000 * MS


class Clock:
    """A clock that only sleeps move; at ``moved_ns`` the gate has moved."""

    def __init__(self, shared, now_ns, moved_ns):
        self.shared, self.now_ns, self.moved_ns, self.slept = shared, now_ns, moved_ns, 0

    def monotonic_ns(self):
        return self.now_ns

    def sleep(self, seconds):
        self.now_ns += round(seconds * 1e9)
        self.slept += 1
        if self.now_ns >= self.moved_ns:
            self.shared.edge_ns = EDGE_NS + 50 * MS


@pytest.fixture
def waited(on_card, monkeypatch):
    """Give way at so many ns after the edge, which is done at ``moved_ns``; return for how long it waited, in ns."""

    def waited(since_ns, moved_ns=EDGE_NS + MS):
        shared = on_card.shared
        shared.edge_ns = EDGE_NS
        clock = Clock(shared, EDGE_NS + since_ns, moved_ns)
        monkeypatch.setattr(shared_state, "time", SimpleNamespace(monotonic_ns=clock.monotonic_ns, sleep=clock.sleep))
        shared.give_way()
        return clock.now_ns - EDGE_NS - since_ns if clock.slept else 0

    return waited


def test_a_call_before_an_edge_waits_until_the_gate_moved(waited):
    assert MS <= waited(-MS // 5) <= 2 * MS


@pytest.mark.parametrize("since_ns", [-MS, 4 * MS], ids=["long before", "long after"])
def test_a_call_away_from_edges_does_not_wait(waited, since_ns):
    assert waited(since_ns) == 0


def test_a_call_does_not_wait_for_a_gate_that_is_stuck(waited):
    assert 0 < waited(0, moved_ns=EDGE_NS + 1000 * MS) < 4 * MS

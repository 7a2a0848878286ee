"""Gates beside channels that die: closed once and open at the first word, whatever RM refused meanwhile."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.errors import RmError
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.rm_object import RmObject
from qgpu.guardian.gpu import gpu_ops as gpu_ops_module
from qgpu.guardian.gpu.gpu_ops import GpuOps, Moved


class Card:
    """Channels as RM keeps them: it counts how often each was disabled, and stops at the first it does not know."""

    instance = 0

    def __init__(self, *alive):
        self.closed = dict.fromkeys(alive, 0)
        self.calls = 0
        #: Channels that are found dead from the n-th call on.
        self.dying = {}
        #: From this call on it answers nothing in time; what it was asked it does all the same.
        self.silent_from = math.inf
        self.refuses_to_close = False

    def set_channels(self, channels, *, disabled, preempt=True):
        self.calls += 1
        for key in [key for key, call in self.dying.items() if call <= self.calls]:
            self.closed.pop(key, None)
        for key in channels:
            if key not in self.closed:
                raise RmError("gate", 0x21)
            self.closed[key] = self.closed[key] + 1 if disabled else max(0, self.closed[key] - 1)
        if disabled and self.refuses_to_close:
            raise RmError("gate", 0x21)
        if self.calls >= self.silent_from:
            raise RmError("gate", 0x65)

    def running(self):
        return {key for key, count in self.closed.items() if not count}


def gpu_ops(card):
    table = ObjectTable()
    client = SimpleNamespace(knows=lambda client, handle: (client, handle) in card.closed)
    return GpuOps(table, None, client, [card])


def channels(*clients):
    return [(client, handle) for client in clients for handle in (40, 41, 42)]


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_pod_closed_together_with_dying_client_can_reopen(dead):
    live_pods = [client for client in range(3) if client != dead]
    card = Card(*channels(*live_pods))

    moved = gpu_ops(card).gate(card, channels(0, 1, 2), closed=True)

    assert moved == Moved(gone=frozenset(channels(dead)))
    assert not card.running()
    gpu_ops(card).gate(card, channels(*live_pods), closed=False)
    assert card.running() == set(channels(*live_pods))


@given(
    dying=st.dictionaries(st.sampled_from(channels(1, 2)), st.integers(1, 12)),
    moves=st.lists(st.booleans(), max_size=8),
)
def test_dying_client_leaves_living_gates_as_last_requested(dying, moves):
    card = Card(*channels(1, 2, 3))
    card.dying = dying
    closed, known = set(), set(channels(1, 2, 3))

    for close in [*moves, True, False]:
        asked = known - closed if close else set(closed)
        moved = gpu_ops(card).gate(card, sorted(asked), closed=close)
        known -= moved.gone
        closed = (closed | (asked - moved.stuck) if close else closed - (asked - moved.stuck)) & known

        # what would not move is where it can be moved from: open, or closed once
        assert {key for key, count in card.closed.items() if count} <= closed | (moved.stuck if not close else set())
        assert all(count <= 1 for count in card.closed.values())
        assert card.running() & set(channels(3)) == set(channels(3)) - closed


@given(
    others=st.sets(st.sampled_from(channels(0, 1, 2, 3)), max_size=5), closed=st.booleans(), was_closed=st.booleans()
)
def test_handles_of_other_objects_stop_no_gate(others, closed, was_closed):
    """RM has freed the channels with their address space, and given their handles to objects that are no channels."""
    card = Card(*channels(0, 1, 2, 3))
    card.closed = {key: int(was_closed and not closed) for key in card.closed if key not in others}
    known, told = gpu_ops(card), []
    known._client.knows = lambda client, handle: True
    known._table.objects.update({key: RmObject(*key, 2, 0xC86F, 0) for key in channels(0, 1, 2, 3)})
    known.find_object, known.on_replaced = lambda rm: (0x2081, 2), told.append

    moved = known.gate(card, channels(0, 1, 2, 3), closed=closed)

    assert moved == Moved(gone=frozenset(others))
    assert {rm.key for rm in told} == others
    assert set(card.closed.values()) == {int(closed)}
    assert card.calls <= 3 + 8 * len(others)


def test_a_channel_that_rm_only_refuses_stays_known():
    """It may be on its way out; whether it is gone, RM is asked later."""
    card = Card(*channels(0))
    key, known, told = channels(0)[0], gpu_ops(card), []
    del card.closed[key]
    known._client.knows = lambda client, handle: True
    known._table.objects[key] = RmObject(*key, 2, 0xC86F, 0)
    known.find_object, known.on_replaced = lambda rm: (rm.rm_class, 2), told.append

    assert known.gate(card, channels(0), closed=True) == Moved(gone=frozenset([key]))
    assert told == []


@pytest.mark.parametrize("closed", [False, True])
def test_very_many_other_handles_take_several_moves(monkeypatch, closed):
    monkeypatch.setattr(gpu_ops_module, "_MOST_OTHERS", 4)
    card, known = Card(*channels(99)), gpu_ops(Card())
    card.closed = dict.fromkeys(card.closed, int(not closed))
    known._client.knows = lambda client, handle: True
    listed, moves = [*channels(*range(4)), *channels(99)], 0
    while (moved := known.gate(card, listed, closed=closed)).stuck:
        listed, moves = [key for key in listed if key not in moved.gone], moves + 1
        assert not closed or card.running() <= moved.stuck

    assert (moves, card.running()) == (3, set() if closed else set(channels(99)))


def test_what_will_not_close_is_left_open():
    card = Card(*channels(1))
    card.refuses_to_close = True

    moved = gpu_ops(card).gate(card, channels(1), closed=True)

    assert moved == Moved(stuck=frozenset(channels(1)))
    assert card.running() == set(card.closed)


def test_unresponsive_card_is_not_asked_per_channel():
    card = Card(*channels(*range(20)))
    card.silent_from = 1

    gpu_ops(card).gate(card, channels(*range(20)), closed=True)

    assert card.calls == 2


def test_one_dead_pod_among_many_costs_two_calls_more():
    card = Card(*channels(*range(39)))

    gpu_ops(card).gate(card, channels(*range(40)), closed=True)

    assert card.calls == 3


@pytest.mark.parametrize("silent_from", range(1, 5))
def test_channel_maybe_closed_reopens_when_card_answers_again(silent_from):
    card = Card(*channels(2, 3))  # 1 has died
    card.silent_from = silent_from
    moved = gpu_ops(card).gate(card, channels(1, 2, 3), closed=True)
    card.silent_from = math.inf
    closed = set(channels(1, 2, 3)) - moved.gone - moved.stuck
    gpu_ops(card).gate(card, sorted(closed), closed=False)

    assert card.running() == set(channels(2, 3))

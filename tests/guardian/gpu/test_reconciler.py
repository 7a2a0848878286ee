"""What RM is to be asked a little later, when that is much."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.rm_object import RmObject, object_fact
from qgpu.guardian.gpu import reconciler
from qgpu.guardian.gpu.reconciler import Reconciler
from qgpu.model import NS_PER_MS
from qgpu.nvidia import abi

_CLIENT, _MANY, _LATER = 5, 3 * reconciler.BATCH, 1 << 62


@pytest.fixture
def asked():
    """What RM was asked about; ``gone`` is no more."""
    return SimpleNamespace(keys=[], gone=set(), now_ns=0, answer_ns=0)


@pytest.fixture
def due(asked):
    table = ObjectTable()
    table.note({"fact": "pod", "name": "web", "cgroup": "/web", "grants": {}})
    table.note({"fact": "process", "pid": 1, "pod": "web"})
    table.note({"fact": "client", "client": _CLIENT, "pid": 1, "fd": 3})
    for handle in range(10, 10 + _MANY):
        table.note(object_fact(RmObject(_CLIENT, handle, _CLIENT, abi.NV01_MEMORY_LOCAL_USER, 1)))
        table.note({"fact": "confirm", "client": _CLIENT, "handle": handle, "context": 0})

    def exists(key):
        asked.keys.append(key)
        asked.now_ns += asked.answer_ns
        return key not in asked.gone

    def vanished(key):
        table.note({"fact": "gone", "client": key[0], "handle": key[1]})

    gpu_ops = SimpleNamespace(exists=exists)
    made = Reconciler(table, gpu_ops, table.note, vanished, lambda: asked.now_ns, lambda: None)
    made.recheck([(_CLIENT, _CLIENT)], include_memory=True)
    return made


def _settle(due, asked):
    """Settle until nothing is due; return about how many objects RM was asked each time."""
    counts = []
    while (now_ns := due.due_ns()) is not None:
        before = len(asked.keys)
        due.run_due(now_ns)
        counts.append(len(asked.keys) - before)
    return counts


def test_settling_many_objects_does_not_block_main_loop(due, asked):
    asked.gone = {(_CLIENT, 10), (_CLIENT, 9 + _MANY)}
    counts = _settle(due, asked)

    assert max(counts) <= reconciler.BATCH + 1
    assert sorted(set(asked.keys) - {(_CLIENT, _CLIENT)}) == [(_CLIENT, 10 + n) for n in range(_MANY)]
    assert len(due._table.objects) == _MANY - 2


def test_slow_rm_does_not_block_main_loop_either(due, asked):
    asked.answer_ns = NS_PER_MS
    counts = _settle(due, asked)

    assert max(counts) <= reconciler._PASS_NS // NS_PER_MS + 1
    assert sum(counts) >= _MANY


def test_slow_answers_about_new_channels_do_not_either(due, asked):
    made, asked.now_ns = due._table, 1
    made.note(object_fact(RmObject(_CLIENT, 5000, _CLIENT, abi.NV01_DEVICE_0, 0)))
    made.note(object_fact(RmObject(_CLIENT, 5001, 5000, abi.KEPLER_CHANNEL_GROUP_A, 1)))
    known = []

    def context(channel):
        asked.now_ns += NS_PER_MS
        known.append(channel.handle)
        return channel.handle

    due._gpu_ops.context = context
    for handle in range(6000, 6100):
        made.note(object_fact(RmObject(_CLIENT, handle, 5001, 0xC86F)))
        due.object_made(made.objects[_CLIENT, handle])
    counts = []
    while (now_ns := due.due_ns()) is not None:
        before = len(known)
        due.run_due(now_ns)
        counts.append(len(known) - before)

    assert max(counts) <= reconciler._PASS_NS // NS_PER_MS
    assert known == list(range(6000, 6100))


def test_many_clients_do_not_either(due, asked):
    for client in range(100, 100 + _MANY):
        due._table.note({"fact": "client", "client": client, "pid": 1, "fd": 3})
        due.recheck([(client, client)])
    counts = _settle(due, asked)

    assert max(counts) <= reconciler.BATCH + 1
    assert {(client, client) for client in range(100, 100 + _MANY)} <= set(asked.keys)


def test_object_doubted_again_during_check_is_checked_again(due, asked):
    due.run_due(_LATER)
    first = asked.keys[-1]
    asked.gone = {first}
    due.recheck([(_CLIENT, _CLIENT)])
    _settle(due, asked)

    assert first not in due._table.objects


def test_client_gone_during_check_takes_its_objects_with_it(due, asked):
    due.run_due(_LATER)
    asked.gone = {(_CLIENT, _CLIENT)}
    _settle(due, asked)

    assert due._table.objects == {}


@pytest.mark.parametrize("told", [True, False])
def test_large_gone_client_is_forgotten_in_bounded_steps(due, asked, told):
    asked.gone = {(_CLIENT, handle) for handle in (_CLIENT, *range(10, 10 + _MANY))}
    if told:
        due.forget_in_steps((_CLIENT, _CLIENT))
    left = [len(due._table.objects)]
    while (now_ns := due.due_ns()) is not None:
        due.run_due(now_ns)
        left.append(len(due._table.objects))

    assert max(before - after for before, after in pairwise(left)) <= reconciler.BATCH
    assert due._table.objects == {}
    assert _CLIENT not in due._table.clients


def test_what_hangs_on_others_is_forgotten_first(due, asked):
    due._table.note({"fact": "gone", "client": _CLIENT, "handle": _CLIENT})
    due._table.note({"fact": "client", "client": _CLIENT, "pid": 1, "fd": 3})
    due._table.note(object_fact(RmObject(_CLIENT, 9, _CLIENT, abi.NV01_DEVICE_0)))
    for handle in range(10, 10 + _MANY):
        due._table.note(object_fact(RmObject(_CLIENT, handle, 9, abi.NV01_MEMORY_LOCAL_USER, 1)))
    asked.gone = {(_CLIENT, _CLIENT)}
    due.run_due(_LATER)

    assert 9 in {handle for _, handle in due._table.objects}
    assert 0 < _MANY + 1 - len(due._table.objects) <= reconciler.BATCH


def test_reused_client_handle_loses_only_objects_that_are_gone(due, asked):
    asked.gone = {(_CLIENT, 10)}
    due.forget_in_steps((_CLIENT, _CLIENT))
    _settle(due, asked)

    assert _CLIENT in due._table.clients
    assert set(due._table.objects) == {(_CLIENT, 10 + n) for n in range(1, _MANY)}


@pytest.mark.parametrize(("engine", "changed"), [(1, True), (9, True), (0x13, False)])
def test_a_new_channel_that_may_be_gated_or_not_is_told_of(due, engine, changed):
    due.run_due(_LATER)
    due._gpu_ops.context = lambda rm: 0
    for rm in (
        RmObject(_CLIENT, 8, _CLIENT, abi.KEPLER_CHANNEL_GROUP_A, engine),
        RmObject(_CLIENT, 9, 8, min(abi.GPFIFO_CLASSES)),
    ):
        due._table.note(object_fact(rm))
    due._clock = lambda: 1
    due.object_made(due._table.objects[_CLIENT, 9])

    assert due.run_due(_LATER) is changed

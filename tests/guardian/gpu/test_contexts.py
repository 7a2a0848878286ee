"""RM is asked which context a new compute channel has before the pod can use it: afterwards it may run and be freed."""

from __future__ import annotations

import os
import struct
from types import SimpleNamespace

import pytest

from qgpu.errors import RmError
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.rm_object import RmObject
from qgpu.guardian.gpu.gpu_ops import GpuOps
from qgpu.nvidia import abi, rm_client
from tests.guardian.asked import TSG, TSG_PARAMS, alloc, free
from tests.guardian.gpu.test_sample import GUARDIAN, grant, used

_CHANNEL, _CHANNEL_CLASS = 20, 0xC86F
_COPY_PARAMS = struct.pack("<IIIII", 0, 0, 0, min(abi.COPY_ENGINES), 0)
#: What a fact says of a channel that RM has not made yet.
_CLAIM = {"parent": TSG, "class": _CHANNEL_CLASS, "detail": 0}


def make_channel(pod, tsg_params=TSG_PARAMS):
    """Let the pod make a TSG with one channel; return what the table says about the channel."""
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), tsg_params)
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(_CHANNEL, TSG, _CHANNEL_CLASS), bytes(368))
    return pod.shared.table.objects[7, _CHANNEL]


def test_context_of_a_compute_channel_is_known_when_it_is_made(on_card):
    channel = make_channel(on_card)

    assert channel.confirmed
    assert channel.context == on_card.rm.context(channel)


def test_time_of_a_tsg_that_is_freed_at_once_is_its_pods(on_card):
    """RM names the guardian for a client that the guardian made."""
    table = on_card.shared.table
    for name in ("web", "batch"):
        grant(table, name, 30)
    table.clients[7].made_here = True
    context = make_channel(on_card).context
    on_card.call(abi.NV_ESC_RM_FREE, free(TSG))

    assert (7, TSG) not in table.objects
    assert used(table, context, GUARDIAN) == {"web": 4000, "batch": 0}


def test_contexts_of_other_channels_are_not_asked_for(on_card):
    """They are in no record."""
    assert make_channel(on_card, _COPY_PARAMS).context == 0


def test_a_channel_that_was_freed_meanwhile_gets_no_context(on_card, monkeypatch):
    """The handle may mean another channel by the time RM has answered."""

    def replaced(file, channel):
        on_card.shared.note({"fact": "gone", "client": 7, "handle": _CHANNEL})
        on_card.shared.note({"fact": "object", "client": 7, "handle": _CHANNEL} | _CLAIM)
        return 0x100

    monkeypatch.setattr(on_card.rm, "context_by_file", replaced)

    assert make_channel(on_card).context == 0


def test_main_loop_asks_only_about_contexts_that_are_unknown(on_card, monkeypatch):
    asked = []
    monkeypatch.setattr(on_card.rm, "context", lambda channel: asked.append(channel.key) or 0x100)
    make_channel(on_card)
    on_card.settle()
    assert asked == []

    on_card.rm.context_by_file = lambda file, channel: 0
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(21, TSG, _CHANNEL_CLASS), bytes(368))
    on_card.settle()
    assert asked == [(7, 21)]


@pytest.fixture
def rm(monkeypatch):
    """RM as the controls find it, which says that every channel has context 0x100."""
    made = SimpleNamespace(asked=[], error=None)

    def control(file, client, handle, command, params):
        made.asked.append((file, client, handle, command))
        if made.error is not None:
            raise made.error
        params.contextId = 0x100

    monkeypatch.setattr(rm_client, "control", control)
    return made


def ops(*, context_ids):
    """Make the operations for a driver branch."""
    return GpuOps(ObjectTable(), SimpleNamespace(context_ids=context_ids), SimpleNamespace(), [])


@pytest.mark.parametrize(("known", "context"), [(True, 0x100), (False, 0)])
def test_rm_is_asked_for_contexts_only_where_it_tells_them(rm, known, context):
    channel = RmObject(7, _CHANNEL, TSG, _CHANNEL_CLASS)

    assert ops(context_ids=known).context_by_file(5, channel) == context
    assert rm.asked == [(5, 7, _CHANNEL, abi.NVA06F_GET_CONTEXT_ID)] * known


@pytest.mark.parametrize("error", [OSError(5, os.strerror(5)), RmError("no", 0x57)], ids=["errno", "status"])
def test_a_context_that_rm_does_not_tell_is_unknown(rm, error):
    rm.error = error

    assert ops(context_ids=True).context_by_file(5, RmObject(7, _CHANNEL, TSG, _CHANNEL_CLASS)) == 0

"""OS events: a pod makes and frees those of its own clients, and only so many, because RM checks neither."""

from __future__ import annotations

import struct

import pytest

from qgpu.guardian.proxy import os_events
from qgpu.guardian.rules.allowed_controls import BIND_CHANNEL, UNBIND_CHANNEL
from qgpu.guardian.rules.classes import SEMAPHORE_SURFACE
from qgpu.nvidia import abi
from tests.guardian.asked import control, status
from tests.guardian.failover.test_successors import successor_of

OWN, NEIGHBOURS, NOBODYS = 7, 9, 99
MAKE, FREE = abi.NV_ESC_ALLOC_OS_EVENT, abi.NV_ESC_FREE_OS_EVENT


@pytest.fixture
def beside(on_card):
    """The pod, beside another one whose client is 9."""
    for fact in (
        {"fact": "pod", "name": "other", "grants": {}},
        {"fact": "process", "pid": 1, "pod": "other"},
        {"fact": "client", "client": NEIGHBOURS, "pid": 1, "fd": 3},
    ):
        on_card.shared.note(fact)
    on_card.rm.seen.clear()
    return on_card


def call(pod, number, client, event=5):
    return struct.unpack_from("<I", pod.call(number, struct.pack("<4I", client, 2, event, 0))[2], 12)[0]


@pytest.mark.parametrize("number", [MAKE, FREE])
def test_events_are_of_the_pods_own_clients(beside, number):
    assert call(beside, number, OWN) == abi.NV_OK
    assert [asked for asked, _ in beside.rm.seen] == [number]

    beside.rm.seen.clear()
    assert [call(beside, number, client) for client in (NEIGHBOURS, NOBODYS)] == [abi.NV_ERR_INVALID_CLIENT] * 2
    assert beside.rm.seen == []


def test_a_free_after_its_client_is_no_attack(beside):
    call(beside, FREE, NOBODYS)
    assert not any("another pod" in what for _, what in beside.shared.refusals.counts)

    call(beside, FREE, NEIGHBOURS)
    assert beside.shared.refusals.counts["web", "NV_ESC_FREE_OS_EVENT on another pod's client"] == 1


def test_events_are_bounded_and_go_with_their_client(beside, monkeypatch):
    monkeypatch.setattr(os_events, "_MOST_EVENTS", 2)
    assert [call(beside, MAKE, OWN, event) for event in (1, 2, 3)] == [0, 0, abi.NV_ERR_INSUFFICIENT_RESOURCES]

    assert [call(beside, FREE, OWN, 1), call(beside, MAKE, OWN, 3)] == [0, 0]
    beside.shared.table.clients[OWN].pod = "other"
    beside.shared.note({"fact": "client", "client": 8, "pid": beside.process.pid, "fd": 9})
    assert call(beside, MAKE, 8, 1) == abi.NV_ERR_INSUFFICIENT_RESOURCES
    assert beside.rm.freed_events == []  # they may be the other pod's

    del beside.rm.objects[OWN, OWN]
    assert call(beside, MAKE, 8, 1) == 0
    assert sorted(beside.rm.freed_events) == [(OWN, 2), (OWN, 3)]  # RM keeps them while their file is open


@pytest.mark.parametrize("compacted", [False, True])
def test_a_successor_knows_a_pods_events(beside, monkeypatch, compacted):
    """RM keeps them, whichever guardian called it."""
    monkeypatch.setattr(os_events, "_MOST_EVENTS", 2)
    made = [call(beside, MAKE, OWN, event) for event in (1, 2)]
    if compacted:
        beside.shared.journal.compact(beside.shared.table.facts())
    successor_of(beside)
    more = call(beside, MAKE, OWN, 3)
    freed = [call(beside, FREE, OWN, 1), call(beside, MAKE, OWN, 3)]

    assert (made, more, freed) == ([0, 0], abi.NV_ERR_INSUFFICIENT_RESOURCES, [0, 0])


def test_event_objects_are_counted_by_themselves(on_card, monkeypatch):
    monkeypatch.setattr(os_events, "_MOST_EVENTS", 1)
    kinds = os_events.EVENT_OBJECTS, "other"
    objects, others = (os_events.PodEvents(on_card.dispatcher._ctx, kind, on_card.rm.exists) for kind in kinds)
    objects.add(OWN, 90)
    on_card.rm.objects[OWN, 90] = (0x79, 2)
    full = objects.has_room(), others.has_room()
    del on_card.rm.objects[OWN, 90]

    assert (full, objects.has_room()) == ((False, True), True)


def test_events_end_with_their_pod(on_card):
    call(on_card, MAKE, OWN)
    on_card.shared.note({"fact": "pod_retired", "name": "web"})

    assert not on_card.shared.table.events("web", "os")


def test_a_client_without_other_objects_has_events(pod):
    assert call(pod, MAKE, OWN) == abi.NV_OK
    assert call(pod, MAKE, NOBODYS) == abi.NV_ERR_INVALID_CLIENT


@pytest.mark.parametrize("resumed", [False, True])
def test_bindings_of_semaphore_surfaces_are_bounded(on_card, monkeypatch, resumed):
    """RM makes events for each, of which no call tells, and calls them in interrupts."""
    monkeypatch.setattr(os_events, "_MOST_EVENTS", 2)
    on_card.rm.objects |= {(OWN, 30): (SEMAPHORE_SURFACE, 3), (OWN, 31): (SEMAPHORE_SURFACE, 3)}

    def ask(command, surface, channel):
        params = struct.pack("<III28x", channel, 1, 12)
        return status(on_card.call(abi.NV_ESC_RM_CONTROL, control(command, surface, 40, OWN), params)[2])

    made = [ask(BIND_CHANNEL, 30, 50), ask(BIND_CHANNEL, 31, 50)]
    if resumed:
        successor_of(on_card)
    full = ask(BIND_CHANNEL, 30, 51)
    undone = [ask(UNBIND_CHANNEL, 31, 50), ask(BIND_CHANNEL, 30, 51)]
    del on_card.rm.objects[OWN, 30]

    assert (made, full, undone) == ([0, 0], abi.NV_ERR_INSUFFICIENT_RESOURCES, [0, 0])
    assert ask(BIND_CHANNEL, 31, 50) == 0

"""Up to branch 565 a multicast object keeps memory that shows nowhere else, so it stays where its pod pays for it."""

from __future__ import annotations

import struct

import pytest

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.proxy import dma_mappings, shared_table
from qgpu.guardian.proxy.dup_calls import MULTICAST
from qgpu.guardian.rules.allowed_controls import DETACH_MEM
from qgpu.nvidia import abi
from tests.guardian.asked import alloc, alloc_status, control, dup, dup_status, free, status
from tests.guardian.charges import charged
from tests.guardian.pod import MOST, allocate, device_of
from tests.guardian.proxy.test_exports import export, take_in
from tests.guardian.proxy.test_memory import someone_elses
from tests.guardian.proxy.test_moved_clients import pass_on

#: The pod's memory and multicast object, a copy of one, and the object of another pod's client 9.
MEMORY, OBJECT, COPY, THEIRS = 10, 40, 41, 42


@pytest.fixture
def attached(on_card):
    """A pod with memory that only a multicast object keeps."""
    made = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(OBJECT, 7, abi.NV_MEMORY_MULTICAST_FABRIC), bytes(96))
    assert alloc_status(made[2]) == abi.NV_OK
    allocate(on_card, MEMORY, MOST)
    params = struct.pack("<IIQQQI4x", 3, MEMORY, 0, 0, MOST, 0)
    asked = control(abi.NV00FD_ATTACH_MEM, OBJECT, len(params))
    assert status(on_card.call(abi.NV_ESC_RM_CONTROL, asked, params)[2]) == abi.NV_OK
    on_card.rm.mapped.add((7, MEMORY))
    on_card.call(abi.NV_ESC_RM_FREE, free(MEMORY))
    return on_card


@pytest.fixture
def beside(on_card):
    """A pod beside one with a multicast object, whose file it has."""
    someone_elses(on_card)
    on_card.rm.objects[9, THEIRS] = (abi.NV_MEMORY_MULTICAST_FABRIC, 9)
    fact = {"fact": "object", "client": 9, "handle": THEIRS, "parent": 9, "class": abi.NV_MEMORY_MULTICAST_FABRIC}
    on_card.shared.note(fact | {"detail": 0})
    on_card.shared.note({"fact": "confirm", "client": 9, "handle": THEIRS})
    return on_card


def memory(pod):
    pod.shared.table.allocations.forget_some(1000)
    return charged(pod.shared.table, "web").get(0, 0)


def copy(pod, source, source_client):
    return dup_status(pod.call(abi.NV_ESC_RM_DUP_OBJECT, dup(COPY, source, 7, source_client=source_client))[2])


def end(pod):
    """End the pod's processes."""
    pod.shared.exited(pod.process.pid)
    pod.settle()
    pod.shared.listener_closed(pod.number)


def test_attached_memory_stays_charged_while_its_client_exists(attached):
    """Another pod may have the client's file, and make no call."""
    end(attached)
    between = memory(attached)
    attached.shared.note({"fact": "gone", "client": 7, "handle": 7})

    assert (between, memory(attached)) == (MOST, 0)


def test_a_successor_charges_for_what_a_client_left_may_keep(attached):
    end(attached)
    again = ObjectTable()
    for fact in attached.shared.table.facts():
        again.note(fact)
    between = charged(again, "web")
    again.note({"fact": "gone", "client": 7, "handle": 7})
    again.allocations.forget_some(1000)

    assert (between, charged(again, "web")) == ({0: MOST}, {})


def test_client_that_goes_during_compaction_frees_its_memory(attached):
    end(attached)
    again, facts = ObjectTable(), attached.shared.table.facts()
    for fact in facts:
        again.note(fact)
        if fact["fact"] == "kept" and fact["pinned"]:
            break
    for table in (attached.shared.table, again):
        table.note({"fact": "gone", "client": 7, "handle": 7})
        table.allocations.forget_some(1000)
    for fact in facts:
        again.note(fact)

    assert charged(again, "web") == charged(attached.shared.table, "web") == {}


def test_multicast_object_is_not_exported_under_a_limit(attached):
    assert status(export(attached, OBJECT)[2]) == abi.NV_ERR_INSUFFICIENT_RESOURCES
    assert attached.shared.refusals.counts["web", MULTICAST] == 1


@pytest.mark.parametrize("free_to", ["unlimited pod", "later branch"])
def test_multicast_object_leaves_where_nobody_pays_for_it(attached, free_to):
    if free_to == "unlimited pod":
        attached.limits.clear()
    else:
        attached.shared.multicast_keeps = False

    assert status(export(attached, OBJECT)[2]) == abi.NV_OK


def test_another_pods_multicast_object_is_not_exported(beside):
    beside.limits.clear()
    params = struct.pack("<IIIIiI", 1, 2, 2, THEIRS, device_of(beside), 0)
    asked = control(abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD, 9, len(params), client=9)

    assert status(beside.call(abi.NV_ESC_RM_CONTROL, asked, params)[2]) == abi.NV_ERR_INSUFFICIENT_RESOURCES
    assert beside.shared.refusals.counts["web", MULTICAST] == 1


def test_multicast_object_that_comes_in_is_freed_under_a_limit(attached, monkeypatch):
    def arrives(command, client, params):
        attached.rm.objects[client, COPY] = (abi.NV_MEMORY_MULTICAST_FABRIC, client)

    monkeypatch.setattr(attached.rm, "_hand_over", arrives)

    assert take_in(attached, COPY) == abi.NV_ERR_NOT_SUPPORTED
    assert (7, COPY) not in attached.rm.objects


def test_another_pods_multicast_object_is_not_copied(beside):
    beside.limits.clear()

    assert copy(beside, THEIRS, 9) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
    assert (7, COPY) not in beside.rm.objects


def test_a_copy_of_ones_own_multicast_object_is_kept(attached):
    assert copy(attached, OBJECT, 7) == abi.NV_OK
    assert attached.shared.table.objects[7, COPY].confirmed


@pytest.mark.parametrize("keeps", [True, False])
def test_a_client_moves_without_a_multicast_object_that_keeps(beside, monkeypatch, keeps):
    monkeypatch.setattr(shared_table, "_FORGETTING_S", 0)
    beside.shared.multicast_keeps = keeps

    assert pass_on(beside, 9) is not keeps
    assert beside.shared.table.clients[9].pod == ("other" if keeps else "web")


def attach(pod, offset, memory=MEMORY):
    params = struct.pack("<IIQQQI4x", 3, memory, offset, 0, 2 << 20, 0)
    return status(pod.call(abi.NV_ESC_RM_CONTROL, control(abi.NV00FD_ATTACH_MEM, OBJECT, len(params)), params)[2])


@pytest.fixture(params=[True, False], ids=["up to 565", "from 570 on"])
def few(request, on_card, monkeypatch):
    """A pod with a multicast object and memory, whose client may attach three pieces."""
    on_card.shared.multicast_keeps = request.param
    monkeypatch.setattr(dma_mappings, "_MOST", 3)
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(OBJECT, 7, abi.NV_MEMORY_MULTICAST_FABRIC), bytes(96))
    allocate(on_card, MEMORY, MOST)
    assert [attach(on_card, at << 21) for at in range(4)] == [0, 0, 0, abi.NV_ERR_INSUFFICIENT_RESOURCES]
    return on_card


def test_a_detached_piece_makes_room(few):
    """RM holds its lock while it detaches all."""
    params = struct.pack("<I4xQI4x", 3, 1 << 21, 0)
    few.call(abi.NV_ESC_RM_CONTROL, control(DETACH_MEM, OBJECT, len(params)), params)

    assert [attach(few, 1 << 21), attach(few, 5 << 21)] == [0, abi.NV_ERR_INSUFFICIENT_RESOURCES]


@pytest.mark.parametrize("freed", [OBJECT, MEMORY])
def test_pieces_go_with_their_object_or_memory_it_does_not_keep(few, freed):
    del few.rm.objects[7, freed]
    kept = freed == MEMORY and few.shared.multicast_keeps

    assert attach(few, 9 << 21) == (abi.NV_ERR_INSUFFICIENT_RESOURCES if kept else 0)

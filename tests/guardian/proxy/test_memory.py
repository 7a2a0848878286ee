"""A limit on memory: what counts, whose it is, and what is said where it is full."""

from __future__ import annotations

import struct

import pytest

from qgpu.guardian.accounting.memory_quota import NO_POD
from qgpu.guardian.accounting.rm_object import RmObject
from qgpu.guardian.proxy import client_registry, shared_state, shared_table
from qgpu.nvidia import abi
from tests.guardian import fake_rm
from tests.guardian.asked import (
    alloc,
    alloc_status,
    device,
    dup,
    dup_status,
    free,
    heap,
    heap_status,
    memory_params,
    subdevice,
)
from tests.guardian.charges import charged
from tests.guardian.fake_rm import HANDLE_PROVIDED, PAGE
from tests.guardian.pod import LIMIT, MINOR, MOST, allocate, held


def test_memory_over_limit_gets_no_memory_and_no_charge(on_card):
    assert allocate(on_card, 10, MOST) == abi.NV_OK
    assert allocate(on_card, 11, MOST) == abi.NV_ERR_NO_MEMORY
    assert held(on_card) == MOST
    assert on_card.shared.refusals.counts["web", "memory over the limit"] == 1
    assert (7, 11) not in on_card.rm.objects


def test_memory_is_charged_as_rm_rounds_it(on_card):
    allocate(on_card, 10, PAGE + 1)

    assert held(on_card) == 2 * PAGE


def test_memory_that_rm_rounds_over_the_limit_is_freed_again(on_card):
    on_card.limits[0] = PAGE + PAGE // 2

    assert allocate(on_card, 10, PAGE + 1) == abi.NV_ERR_NO_MEMORY
    assert held(on_card) == 0
    assert (7, 10) not in on_card.rm.objects


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("how", ["RM_ALLOC", "old heap"])
def test_memory_over_the_limit_is_charged_while_it_is_there(on_card, monkeypatch, how, mapped):
    """A mapping that the kernel makes meanwhile may name it: then it outlives its handle."""
    monkeypatch.setattr(fake_rm, "PAGE", 4 * PAGE)  # RM rounds it up to more than is left
    on_card.limits[0] = 3 * PAGE
    if mapped:
        on_card.rm.made = on_card.rm.mapped.add
    if how == "old heap":
        answered = heap_status(on_card.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, heap(10, PAGE))[2])
    else:
        answered = allocate(on_card, 10, PAGE)

    assert answered == abi.NV_ERR_NO_MEMORY
    assert (7, 10) in on_card.rm.sizes
    assert (7, 10) not in on_card.rm.objects
    assert held(on_card) == 4 * PAGE * mapped


def test_the_last_byte_of_a_limit_can_be_had(on_card):
    on_card.limits[0] = 3 * PAGE

    assert [allocate(on_card, handle, PAGE) for handle in range(10, 14)] == [0, 0, 0, abi.NV_ERR_NO_MEMORY]


def test_each_card_has_its_own_limit(on_card):
    limits, second = {0: 3 * PAGE, 1: 5 * PAGE}, 4
    on_card.limits |= limits
    on_card.minors[1] = MINOR  # the file that the child has open
    on_card.rm.instances[7, second] = 1
    for asked, params in ((device(second), struct.pack("<I52x", 1)), (subdevice(5, parent=second), bytes(4))):
        assert alloc_status(on_card.call(abi.NV_ESC_RM_ALLOC, asked, params)[2]) == abi.NV_OK
    answers = {
        card: [allocate(on_card, 100 * parent + n, PAGE, parent) for n in range(6)]
        for card, parent in ((0, 2), (1, second))
    }

    refused = abi.NV_ERR_NO_MEMORY
    assert answers == {0: [abi.NV_OK] * 3 + [refused] * 3, 1: [abi.NV_OK] * 5 + [refused]}
    assert {card: on_card.shared.quota.used("web", card) for card in limits} == limits


def test_memory_that_is_freed_can_be_had_again(on_card):
    allocate(on_card, 10, MOST)
    on_card.call(abi.NV_ESC_RM_FREE, free(10))

    assert held(on_card) == 0
    assert allocate(on_card, 11, MOST) == abi.NV_OK


def test_limit_below_usage_refuses_new_memory_and_keeps_old(on_card):
    allocate(on_card, 10, MOST)
    on_card.limits[0] = PAGE

    assert allocate(on_card, 11, PAGE) == abi.NV_ERR_NO_MEMORY
    assert held(on_card) == MOST


def test_duplicated_memory_charged_once_until_last_handle_freed(on_card):
    allocate(on_card, 10, MOST)
    on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(20, 10))
    both = held(on_card)
    on_card.call(abi.NV_ESC_RM_FREE, free(10))
    one = held(on_card)
    on_card.call(abi.NV_ESC_RM_FREE, free(20))

    assert (both, one, held(on_card)) == (MOST, MOST, 0)


def test_memory_of_the_old_heap_interface_counts_too(on_card):
    first, second = (on_card.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, heap(handle, MOST))[2] for handle in (30, 31))

    assert (heap_status(first), heap_status(second)) == (abi.NV_OK, abi.NV_ERR_NO_MEMORY)
    assert held(on_card) == MOST
    assert struct.unpack_from("<QQ", first, 24) == (LIMIT, LIMIT - MOST)


@pytest.mark.parametrize("flags", [0, HANDLE_PROVIDED])
def test_the_old_heap_makes_memory_under_the_handle_asked_for(on_card, flags):
    """Otherwise RM chooses another one, which is charged to nobody."""
    made = on_card.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, heap(30, MOST, flags=flags))[2]

    assert struct.unpack_from("<I", made, 44) == (30,)
    assert struct.unpack_from("<I", made, 52) == (flags,)
    assert (held(on_card), on_card.rm.sizes) == (MOST, {(7, 30): MOST})


def test_the_old_heap_makes_no_class_that_has_no_row(on_card):
    """RM chooses the class by attributes: memory that a Grace CPU extends the card's by is one of its own."""
    on_card.rm.heap_class = 0x42
    answer = on_card.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, heap(30, MOST))[2]

    assert (heap_status(answer), held(on_card)) == (abi.NV_ERR_NOT_SUPPORTED, 0)
    assert (7, 30) not in on_card.rm.objects


@pytest.mark.parametrize("function", [6, 14])
def test_the_old_heap_makes_memory_in_one_way_only(on_card, function):
    """RM computes the size of tiled memory (6) from other fields than that of a plain allocation."""
    asked = bytearray(heap(30, 1))
    struct.pack_into("<I", asked, 8, function)
    answer = on_card.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, bytes(asked))[2]

    assert heap_status(answer) == abi.NV_ERR_NOT_SUPPORTED
    assert on_card.shared.refusals.counts["web", f"heap function {function}"] == 1


def test_process_of_retired_pod_gets_no_memory(on_card):
    on_card.shared.allowance = lambda pod: NO_POD

    assert allocate(on_card, 10, PAGE) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
    assert on_card.shared.quota.over_limit("web", 0)
    assert not on_card.shared.quota.reserve_mapping("web", on_card.process.pid, PAGE)
    assert (7, 10) not in on_card.rm.objects


def someone_elses(pod, client=9):
    """A client of another pod's, with memory on the card, whose file has come to this pod."""
    pod.rm.objects[client, client] = (abi.NV01_ROOT_CLIENT, 0)
    for fact in (
        {"fact": "pod", "name": "other", "grants": {}},
        {"fact": "process", "pid": 1, "pod": "other"},
        {"fact": "client", "client": client, "pid": 1, "fd": 3},
        {"fact": "object", "client": client, "handle": 2, "parent": client, "class": abi.NV01_DEVICE_0, "detail": 0},
        {"fact": "confirm", "client": client, "handle": 2},
        {"fact": "object", "client": client, "handle": 10, "parent": 2, "class": 0x40, "detail": MOST}
        | {"memory": 10 * client},
        {"fact": "confirm", "client": client, "handle": 10},
    ):
        pod.shared.note(fact)
    pod.rm._make(client, 2, abi.NV01_DEVICE_0, client)
    pod.rm._make(client, 10, 0x40, 2, MOST)


def test_another_pods_memory_is_not_duplicated_by_handle(on_card):
    """Handles can be guessed, and CUDA IPC shares with all."""
    someone_elses(on_card)
    answer = on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(20, 10, source_client=9))

    assert dup_status(answer[2]) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
    assert (7, 20) not in on_card.rm.objects


def test_free_of_anothers_memory_does_not_take_its_lock(on_card, monkeypatch):
    """Handles can be guessed, and a pod that takes the lock all the time leaves its neighbour none."""
    someone_elses(on_card)
    on_card.rm.bare, locked, lock = True, [], shared_state.SharedState.pod_lock
    monkeypatch.setattr(shared_state.SharedState, "pod_lock", lambda self, pod: locked.append(pod) or lock(self, pod))
    on_card.call(abi.NV_ESC_RM_FREE, free(10, client=9))

    assert locked == []
    assert charged(on_card.shared.table, "other") == {0: MOST}


def test_memory_freed_by_another_pod_at_a_close_stays_charged(on_card):
    """RM's figure of its maker falls by what the closed file had, and the memory may be mapped yet."""
    someone_elses(on_card)
    someone_elses(on_card, client=8)
    on_card.rm.mapped.add((9, 10))
    on_card.rm.meanwhile = lambda: on_card.rm._free(8, 8)
    on_card.call(abi.NV_ESC_RM_FREE, free(10, client=9))

    assert (9, 10) not in on_card.rm.objects
    assert charged(on_card.shared.table, "other")[0] >= MOST
    assert [memory.pinned for memory in on_card.shared.table.allocations.memories.values()].count(True) == 1


def test_memory_made_beside_a_free_of_its_handle_stays_charged(on_card):
    """Two pods can have one client's file: one of them frees the handle, and the other makes it again at once."""
    allocate(on_card, 10, PAGE)

    def make_again():
        on_card.rm.meanwhile = lambda: None
        memory = RmObject(7, 10, 2, abi.NV01_MEMORY_LOCAL_USER, MOST)
        assert on_card.shared.claims.claim(memory) == abi.NV_OK
        on_card.rm._make(7, 10, abi.NV01_MEMORY_LOCAL_USER, 2, MOST)
        assert on_card.shared.claims.confirm(memory.key, MOST)

    on_card.rm.meanwhile = make_again
    on_card.call(abi.NV_ESC_RM_FREE, free(10))

    assert charged(on_card.shared.table, "web") == {0: MOST}


def test_memory_that_lost_its_claim_while_rm_made_it_is_freed(on_card, monkeypatch):
    """Its client may be another pod's by now, which names the same handle."""
    make = on_card.rm._alloc

    def made(data):
        with on_card.shared.lock:
            on_card.shared.note({"fact": "gone", "client": 7, "handle": 10})
        return make(data)

    monkeypatch.setattr(on_card.rm, "_alloc", made)

    assert allocate(on_card, 10, MOST) == abi.NV_ERR_NO_MEMORY
    assert (7, 10) not in on_card.rm.objects


def test_handle_that_rm_is_about_to_make_is_claimed_once(on_card):
    on_card.shared.claims.claim(RmObject(7, 10, 2, abi.NV01_MEMORY_LOCAL_USER, MOST))

    assert allocate(on_card, 10, PAGE) == abi.NV_ERR_INSERT_DUPLICATE_NAME
    assert charged(on_card.shared.table, "web") == {0: MOST}


def test_client_with_very_many_objects_stays_its_pods(on_card, monkeypatch):
    """Two pods that pass one to and fro would hold up all others; what RM no longer has of it is waited for."""
    someone_elses(on_card)
    on_card.rm.stale.add(9)
    monkeypatch.setattr(client_registry, "_MOST_MOVED", 1)
    monkeypatch.setattr(shared_table, "_FORGETTING_S", 0)
    refused = on_card.shared.clients.register(on_card.process.pid, 5, 5, 9)
    on_card.rm.objects.pop((9, 10))
    monkeypatch.setattr(shared_table, "_FORGETTING_S", 60)
    monkeypatch.setattr(shared_table.time, "sleep", lambda _: on_card.settle())
    moved = on_card.shared.clients.register(on_card.process.pid, 5, 5, 9)

    assert (refused, moved) == (False, True)
    assert on_card.shared.refusals.counts["web", "another pod's client with too many objects"] == 1


def test_a_client_its_pod_cannot_reach_goes_to_its_files_pod(on_card):
    """RM has given the name out again, or the other pod has passed its only file on: it is held, and paid for, here."""
    someone_elses(on_card)
    on_card.rm.stale.add(9)
    said = alloc_status(on_card.call(abi.NV_ESC_RM_ALLOC, alloc(11, 2, 0x40, client=9), memory_params(PAGE))[2])
    table = on_card.shared.table
    both = charged(table, "other"), charged(table, "web")
    for handle in (2, 10):
        del on_card.rm.objects[9, handle]  # what the client of that name had before
    on_card.settle()

    assert (said, both) == (abi.NV_OK, ({}, {0: MOST + PAGE}))
    assert table.clients[9].pod == "web"
    assert (9, 10) not in table.objects


def test_more_clients_than_are_kept_are_refused(on_card, monkeypatch):
    monkeypatch.setattr(client_registry, "_MOST_CLIENTS", 1)
    on_card.rm.objects[8, 8] = (abi.NV01_ROOT_CLIENT, 0)
    said = alloc_status(on_card.call(abi.NV_ESC_RM_ALLOC, alloc(11, 2, 0x40, client=8), memory_params(PAGE))[2])

    assert said == abi.NV_ERR_INVALID_CLIENT
    assert on_card.shared.refusals.counts["web", "too many clients of RM"] == 1


@pytest.mark.parametrize("way", ["alloc", "heap"])
def test_other_pods_client_allocates_nothing_through_this_pod(on_card, way):
    someone_elses(on_card)
    if way == "alloc":
        call = alloc(11, 2, 0x40, client=9)
        said = alloc_status(on_card.call(abi.NV_ESC_RM_ALLOC, call, memory_params(PAGE))[2])
    else:
        said = heap_status(on_card.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, heap(11, PAGE, client=9))[2])

    assert said == abi.NV_ERR_INVALID_CLIENT
    assert (9, 11) not in on_card.rm.objects


@pytest.mark.parametrize("rm_class", [abi.NV01_MEMORY_LOCAL_PRIVILEGED, abi.NV01_MEMORY_LOCAL_USER])
def test_the_whole_card_by_the_old_call_has_no_memory(on_card, rm_class):
    """OpenGL asks for it and uses it for nothing; no descriptor of the guardian's own is handed to RM."""
    asked = struct.pack("<IIII", 7, 2, 9, rm_class) + bytes(32) + struct.pack("<ii", 5, 0)
    answer = on_card.call(abi.NV_ESC_RM_ALLOC_MEMORY, asked)[2]
    ((_, call),) = on_card.rm.seen[-1:]

    assert struct.unpack_from("<I", call, 12)[0] == abi.NV01_MEMORY_VIRTUAL
    assert struct.unpack_from("<i", call, 48)[0] == -1
    assert answer[12:16] + answer[48:52] == asked[12:16] + asked[48:52]

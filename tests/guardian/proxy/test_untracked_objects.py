"""Objects that the object table does not keep: RM frees only so many of them at once, or for one pod."""

from __future__ import annotations

import struct

import pytest

from qgpu.guardian.proxy import untracked_objects
from qgpu.nvidia import abi
from tests.guardian.asked import TSG_PARAMS, alloc, alloc_status, dup, dup_status, free, heap, heap_status
from tests.guardian.failover.test_successors import successor_of

BINAPI, SYSTEM = 0x2081, abi.NV01_MEMORY_SYSTEM
FULL = abi.NV_ERR_INSUFFICIENT_RESOURCES


@pytest.fixture
def few(on_card, monkeypatch):
    """A pod whose client may have two pieces of system memory and, beside its subdevice, three others.

    All of its clients may have four of the former, and six of the latter.
    """
    monkeypatch.setattr(untracked_objects, "_MOST", {False: 4, True: 2})
    monkeypatch.setattr(untracked_objects, "_MOST_OF_POD", {False: 7, True: 4})
    monkeypatch.setattr(untracked_objects, "_MOST_UNNAMED", 2)
    return on_card


def make(pod, handle, rm_class=BINAPI, parent=3, client=7):
    call = alloc(handle, parent, rm_class, client=client)
    return alloc_status(pod.call(abi.NV_ESC_RM_ALLOC, call, bytes(128))[2])


def test_objects_that_are_not_kept_are_bounded(few):
    assert [make(few, 100 + i) for i in range(5)] == [0, 0, 0, FULL, FULL]
    assert few.shared.refusals.counts["web", "too many objects of RM"] == 2
    assert not any(key in few.rm.objects for key in [(7, 103), (7, 104)])
    assert [make(few, 200 + i, SYSTEM) for i in range(3)] == [0, 0, FULL]


@pytest.mark.parametrize("rm_class", [abi.FERMI_VASPACE_A, abi.NV20_SUBDEVICE_0, abi.NV_MEMORY_MULTICAST_FABRIC])
def test_kept_objects_without_another_bound_count_as_well(few, rm_class):
    """RM takes as long to free an address space or a subdevice; the pod has one subdevice already."""
    assert [make(few, 100 + i, rm_class, parent=2) for i in range(4)] == [0, 0, 0, FULL]
    assert make(few, 200) == FULL
    assert (7, 103) not in few.rm.objects
    few.call(abi.NV_ESC_RM_FREE, free(100))
    assert make(few, 200) == abi.NV_OK


def test_further_handles_of_an_address_space_count_as_well(few):
    """Without a limit a pod may have them: any number of further handles takes RM as long as other objects."""
    few.limits = {}
    make(few, 100, abi.FERMI_VASPACE_A, parent=2)
    further = [dup_status(few.call(abi.NV_ESC_RM_DUP_OBJECT, dup(200 + i, 100))[2]) for i in range(3)]

    assert further == [abi.NV_OK, abi.NV_OK, FULL]
    assert [(7, 200 + i) in few.rm.objects for i in range(3)] == [True, True, False]
    few.call(abi.NV_ESC_RM_FREE, free(200))
    assert dup_status(few.call(abi.NV_ESC_RM_DUP_OBJECT, dup(203, 100))[2]) == abi.NV_OK


@pytest.mark.parametrize("which", [100, 3], ids=["itself", "what it lies below"])
def test_a_freed_object_makes_room(few, which):
    made = [make(few, 100 + i) for i in range(4)]
    few.call(abi.NV_ESC_RM_FREE, free(which))
    more = make(few, 110, parent=2), make(few, 111, parent=2)

    assert (made, more) == ([0, 0, 0, FULL], (0, 0 if which == 3 else FULL))


def test_objects_that_fail_are_not_counted(few):
    few.rm.objects.pop((7, 7))
    failed = [make(few, 100 + i) for i in range(5)]

    assert abi.NV_OK not in failed
    assert not few.shared.table.untracked[False].of(7)


def test_programs_that_make_and_free_go_on_for_ever(few):
    assert [make(few, 100 + i) or few.call(abi.NV_ESC_RM_FREE, free(100 + i))[0] for i in range(20)] == [0] * 20


def test_further_handles_and_the_old_heap_count_as_well(few):
    make(few, 200, SYSTEM, parent=2)
    few.rm.heap_class = SYSTEM
    old = heap_status(few.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, heap(201, 1 << 16))[2])
    again = dup_status(few.call(abi.NV_ESC_RM_DUP_OBJECT, dup(202, 200))[2])

    assert (old, again) == (abi.NV_OK, FULL)
    assert few.shared.table.untracked[True].of(7) == {200, 201}
    assert (7, 202) not in few.rm.objects


def test_memory_that_the_kernel_makes_counts_by_its_name(few):
    def ask(handle):
        asked = struct.pack("<IIII", 7, 2, handle, abi.NV01_MEMORY_SYSTEM_OS_DESCRIPTOR) + bytes(40)
        result, _, answer = few.call(abi.NV_ESC_RM_ALLOC_MEMORY, asked)
        few.rm.objects[7, handle] = (abi.NV01_MEMORY_SYSTEM_OS_DESCRIPTOR, 2)
        return abi.NV_OK if result else struct.unpack_from("<I", answer, 40)[0]  # /dev/random refuses what goes on

    assert [ask(handle) for handle in (0, 200, 201, 202)] == [abi.NV_ERR_INVALID_ARGUMENT, 0, 0, FULL]


def test_memory_made_under_another_handle_counts_too(few):
    """Another thread changes the handle before the kernel reads it."""
    answers = []
    for i in range(4):
        asked = struct.pack("<IIII", 7, 2, 200, abi.NV01_MEMORY_SYSTEM_OS_DESCRIPTOR) + bytes(40)
        answers.append(few.call(abi.NV_ESC_RM_ALLOC_MEMORY, asked)[0])
        few.rm.objects[7, 300 + i] = (abi.NV01_MEMORY_SYSTEM_OS_DESCRIPTOR, 2)
    successor_of(few)

    assert answers == [-1, -1, 0, 0]  # /dev/random refuses what goes on to the kernel
    assert few.shared.table.unnamed == {"web": 2}
    assert make(few, 200, SYSTEM) == abi.NV_OK  # only the kernel makes no more
    few.shared.note({"fact": "gone", "client": 7, "handle": 7})
    assert few.shared.table.unnamed == {}


def test_the_kernel_makes_nothing_under_a_handle_in_use(few):
    """It would be refused, or made under another handle that nobody knows."""
    make(few, 200)
    asked = struct.pack("<IIII", 7, 2, 200, abi.NV01_MEMORY_SYSTEM_OS_DESCRIPTOR) + bytes(40)
    result, _, answer = few.call(abi.NV_ESC_RM_ALLOC_MEMORY, asked)

    assert (result, struct.unpack_from("<I", answer, 40)[0]) == (0, abi.NV_ERR_INSERT_DUPLICATE_NAME)
    assert few.shared.table.untracked[False].of(7) == {200}


def test_a_refused_claim_of_its_handle_leaves_it_counted(few):
    few.rm._alloc = refusing_handles_in_use(few.rm)
    made = [make(few, 100 + i) for i in range(3)]
    claimed = [make(few, 100 + i, abi.KEPLER_CHANNEL_GROUP_A, parent=2) for i in range(3)]

    assert (made, claimed) == ([0] * 3, [abi.NV_ERR_INSERT_DUPLICATE_NAME] * 3)
    assert make(few, 110) == FULL


def refusing_handles_in_use(rm):
    make_it = rm._alloc

    def alloc_or_refuse(data):
        client, _, handle = struct.unpack_from("<III", data)
        if (client, handle) in rm.objects:
            return rm._status(data, 40, abi.NV_ERR_INSERT_DUPLICATE_NAME) or 0
        return make_it(data)

    return alloc_or_refuse


@pytest.fixture
def channel(on_card):
    """A pod with a channel at handle 0x21; it can be freed unseen, as RM does with an address space of its own."""
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(0x20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(0x21, 0x20, 0xC86F), bytes(400))
    assert on_card.shared.table.objects[7, 0x21].confirmed
    return on_card


@pytest.mark.parametrize("rm_class", [BINAPI, SYSTEM, abi.NV01_EVENT_OS_EVENT])
def test_a_vanished_channels_handle_is_free_for_others(channel, rm_class):
    del channel.rm.objects[7, 0x21]
    made = make(channel, 0x21, rm_class)

    assert (made, (7, 0x21) in channel.shared.table.objects) == (abi.NV_OK, False)
    assert (0x21 in channel.shared.table.untracked[rm_class == SYSTEM].of(7)) == (rm_class != abi.NV01_EVENT_OS_EVENT)


@pytest.mark.parametrize("rm_class", [BINAPI, abi.NV01_EVENT_OS_EVENT])
def test_a_channels_handle_is_not_given_to_others(channel, rm_class):
    assert make(channel, 0x21, rm_class) == abi.NV_ERR_INSERT_DUPLICATE_NAME
    assert channel.rm.objects[7, 0x21][0] == channel.shared.table.objects[7, 0x21].rm_class == 0xC86F


def test_a_handle_that_rm_chooses_replaces_what_had_it(channel):
    make_it = channel.rm._alloc
    channel.rm._alloc = lambda data: struct.pack_into("<I", data, 8, 0x21) or make_it(data)
    del channel.rm.objects[7, 0x21]
    made = make(channel, 0)

    assert (made, (7, 0x21) in channel.shared.table.objects) == (abi.NV_OK, False)
    assert channel.shared.table.untracked[False].of(7) == {0x21}


def test_old_heaps_memory_replaces_what_had_its_handle(channel):
    channel.rm.heap_class, chosen = SYSTEM, 0xCAF00001  # the first that RM chooses
    channel.call(abi.NV_ESC_RM_ALLOC, alloc(chosen, 0x20, 0xC86F), bytes(400))
    del channel.rm.objects[7, chosen]
    asked = bytearray(heap(0, 1 << 16))
    struct.pack_into("<I", asked, 56, 1 << 25)  # attr: LOCATION_PCI
    status = heap_status(channel.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, bytes(asked))[2])

    assert (status, (7, chosen) in channel.shared.table.objects) == (abi.NV_OK, False)
    assert channel.shared.table.untracked[True].of(7) == {chosen}


def test_all_clients_of_a_pod_have_so_many_together(few):
    for client in (20, 21):
        few.rm.objects |= {(client, client): (abi.NV01_ROOT_CLIENT, 0)}
        few.shared.note({"fact": "client", "client": client, "pid": few.process.pid, "fd": 3})
    made = [make(few, 100 + i, client=client) for client in (7, 20, 21) for i in range(2)]
    full = make(few, 110, client=20)
    del few.rm.objects[21, 21]

    assert (made, full, make(few, 110, client=20)) == ([0] * 6, FULL, 0)


@pytest.mark.parametrize("compacted", [False, True])
def test_a_successor_knows_them(few, compacted):
    made = [make(few, 100 + i) for i in range(3)] + [make(few, 200, SYSTEM)]
    if compacted:
        few.shared.journal.compact(few.shared.table.facts())
    before = few.shared.table
    successor_of(few)
    after = few.shared.table

    assert (made, make(few, 110)) == ([0] * 4, FULL)
    assert [after.untracked[system].of(7) for system in (False, True)] == [{100, 101, 102}, {200}]
    assert all(after.untracked[system].counts == before.untracked[system].counts for system in (False, True))


def test_they_count_to_the_pod_that_has_the_client(few):
    make(few, 100)
    few.shared.note({"fact": "owner", "client": 7, "pod": "other", "pid": few.process.pid, "fd": 3})
    counts = few.shared.table.untracked[False].counts
    moved = counts["web"], counts["other"]
    few.shared.note({"fact": "gone", "client": 7, "handle": 7})

    assert (moved, counts["other"]) == ((0, 1), 0)
    assert not few.shared.table.untracked[False].of(7)

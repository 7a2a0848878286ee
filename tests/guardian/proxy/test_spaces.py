"""Address spaces of the card: what uses one, or a duplicate of it, lies on its card. RM takes one of any card."""

from __future__ import annotations

import struct

import pytest

from qgpu.guardian.proxy import rm_calls
from qgpu.guardian.proxy.alloc_checks import OTHER_SPACE
from qgpu.guardian.proxy.card_mappings import OTHER_CARD
from qgpu.nvidia import abi
from tests.guardian.asked import TSG, TSG_PARAMS, alloc, alloc_status, dup, dup_status, free, heap, heap_status, status
from tests.guardian.fake_rm import PAGE
from tests.guardian.pod import allocate, make_device_on_another_card
from tests.guardian.proxy.test_exports import export, take_in
from tests.traces import ARGUMENT, RECORDINGS, decode, rows

#: A device on each card with a subdevice, and an address space below each device.
FIRST, SECOND, SUBDEVICE = 2, 4, 5
SPACES = {FIRST: 40, SECOND: 41}
#: No object; and a handle that RM takes for no address space where memory is to be mapped (cl0070.h).
SPARE, DYNAMIC = 99, 0xFFFFFFFF
LAZY, VIRTUAL = 0x400, 0x80000
#: NVOS46_FLAGS_P2P_ENABLE_NOSLI.
PEER = 2 << 20
BAD, OK = abi.NV_ERR_INVALID_ARGUMENT, abi.NV_OK


@pytest.fixture
def both(on_card):
    """A pod without a limit that uses two cards, with a TSG on the first."""
    on_card.limits.clear()
    make_device_on_another_card(on_card, SECOND, SUBDEVICE)
    for card, space in SPACES.items():
        on_card.call(abi.NV_ESC_RM_ALLOC, alloc(space, card, abi.FERMI_VASPACE_A), bytes(64))
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, FIRST, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    return on_card


def make(pod, rm_class, params, parent=FIRST):
    return alloc_status(pod.call(abi.NV_ESC_RM_ALLOC, alloc(60, parent, rm_class), params)[2])


def use(pod, what, space):
    """Make something on the first card that uses an address space; return RM's status."""
    match what:
        case "TSG":
            return make(pod, abi.KEPLER_CHANNEL_GROUP_A, struct.pack("<5I", 0, 0, space, 1, 0))
        case "channel":
            return make(pod, 0xC86F, struct.pack("<28xI336x", space), TSG)
        case "context share":
            return make(pod, abi.FERMI_CONTEXT_SHARE_A, struct.pack("<I8x", space), TSG)
        case "virtual memory":
            return make(pod, abi.NV50_MEMORY_VIRTUAL, struct.pack("<8xI96xI16x", LAZY, space))
        case "mapped memory":
            return make(pod, abi.NV01_MEMORY_VIRTUAL, struct.pack("<16xI4x", space))
        case _:
            asked = bytearray(heap(60, PAGE, flags=LAZY | VIRTUAL))
            struct.pack_into("<I", asked, 12, space)
            return heap_status(pod.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, bytes(asked))[2])


USERS = ["TSG", "channel", "context share", "virtual memory", "mapped memory", "heap"]


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("what", USERS)
def test_an_address_space_is_used_on_its_own_card(both, what, limited):
    both.limits |= {0: 1 << 30, 1: 1 << 30} if limited else {}
    assert use(both, what, SPACES[SECOND]) == BAD
    assert (7, 60) not in both.rm.objects
    assert both.shared.refusals.counts["web", OTHER_SPACE] == 1
    assert use(both, what, SPACES[FIRST]) == OK


@pytest.mark.parametrize("what", USERS)
def test_an_address_space_that_nobody_made_is_not_used(both, what):
    assert use(both, what, SPARE) == BAD
    assert use(both, what, DYNAMIC) == (OK if what == "mapped memory" else BAD)


@pytest.mark.parametrize("what", USERS)
def test_no_address_space_need_be_named(both, what):
    assert use(both, what, 0) == OK


def test_the_heap_reads_an_address_space_if_it_is_to_be_virtual(both):
    """RM itself refuses one for memory (video_mem.c, system_mem.c)."""
    asked = bytearray(heap(60, PAGE))
    struct.pack_into("<I", asked, 12, SPACES[SECOND])

    assert heap_status(both.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, bytes(asked))[2]) == OK


def duplicate(pod, handle, source, parent):
    return dup_status(pod.call(abi.NV_ESC_RM_DUP_OBJECT, dup(handle, source, parent))[2])


@pytest.mark.parametrize("source", [SPACES[FIRST], TSG], ids=["address space", "TSG"])
def test_a_duplicate_lies_on_its_originals_card(both, source):
    """UVM and RM go by the device above it: the card would read page tables at another one's addresses."""
    for parent in (SECOND, SUBDEVICE, 7, 0, SPARE):
        assert duplicate(both, 50, source, parent) == BAD
    assert (7, 50) not in both.rm.objects
    assert both.shared.refusals.counts["web", OTHER_SPACE] == 5
    assert duplicate(both, 50, source, FIRST) == OK
    assert duplicate(both, 51, 50, SECOND) == BAD


def test_a_duplicate_of_an_unknown_address_space_goes(both):
    both.rm.objects[7, 48] = (abi.FERMI_VASPACE_A, FIRST)

    assert duplicate(both, 50, 48, FIRST) != OK
    assert (7, 50) not in both.rm.objects


def test_no_descriptor_carries_an_address_space(both):
    """An import could lie below a device of any card."""
    assert status(export(both, SPACES[FIRST])[2]) != OK
    assert both.rm.carried is None


def test_an_imported_address_space_goes(both):
    def carry(params):
        both.rm.objects[7, 50] = (abi.FERMI_VASPACE_A, FIRST)

    both.rm.answers[abi.NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD] = carry

    assert take_in(both, 50) != OK
    assert (7, 50) not in both.rm.objects


HOST = {FIRST: 70, SECOND: 71}
CARD = {FIRST: 72, SECOND: 73}
#: Virtual memory below a device of each card, and duplicates of card memory below the other one.
MAPPED_IN, CROSSED = {FIRST: 74, SECOND: 75}, {FIRST: 76, SECOND: 77}


@pytest.fixture
def mapping(both):
    """The pod with memory on each card, for each card, and duplicates of the former below the other's device."""
    for card in (FIRST, SECOND):
        both.call(abi.NV_ESC_RM_ALLOC, alloc(HOST[card], card, abi.NV01_MEMORY_SYSTEM), bytes(128))
        allocate(both, CARD[card], PAGE, parent=card)
        both.call(abi.NV_ESC_RM_ALLOC, alloc(MAPPED_IN[card], card, abi.NV01_MEMORY_VIRTUAL), bytes(24))
    for card, other in ((FIRST, SECOND), (SECOND, FIRST)):
        assert duplicate(both, CROSSED[card], CARD[card], other) == OK
    return both


def map_for_card(pod, device, space, memory, flags=0):
    call = struct.pack("<IIIIQQI", 7, device, space, memory, 0, PAGE, flags) + bytes(28)
    return struct.unpack_from("<I", pod.call(abi.NV_ESC_RM_MAP_MEMORY_DMA, call)[2], len(call) - 8)[0]


@pytest.mark.parametrize("device", [FIRST, 3])
def test_a_mapping_is_for_the_card_of_its_address_space(mapping, device):
    assert map_for_card(mapping, device, MAPPED_IN[FIRST], HOST[FIRST]) == OK
    for space in (MAPPED_IN[SECOND], SPARE):
        assert map_for_card(mapping, device, space, HOST[FIRST]) == BAD
    assert mapping.shared.refusals.counts["web", OTHER_CARD] == 2


def test_a_cards_own_memory_is_mapped_for_it(mapping):
    """RM takes an address of any memory of a card for one on the card that it maps for."""
    made = {memory: map_for_card(mapping, FIRST, MAPPED_IN[FIRST], memory) for memory in range(70, 78)}

    own = {*HOST.values(), CARD[FIRST], CROSSED[FIRST], MAPPED_IN[FIRST]}
    assert {memory for memory, status in made.items() if status == OK} == own


def test_a_peers_memory_is_mapped_by_its_own_cards_handle(mapping):
    """RM takes the card above the handle for the peer: its own one would be the mapping card itself."""
    memory = (CARD[SECOND], CROSSED[SECOND], CARD[FIRST], CROSSED[FIRST])
    made = [map_for_card(mapping, FIRST, MAPPED_IN[FIRST], each, PEER) for each in memory]

    assert made == [OK, BAD, OK, BAD]


def test_memory_of_an_unknown_card_is_not_mapped(mapping):
    """Of an import from another program nobody knows the card. RM maps host memory for any."""
    mapping.rm.objects |= {(9, 9): (abi.NV01_ROOT_CLIENT, 0), (9, 10): (abi.NV01_MEMORY_LOCAL_USER, 9)}
    mapping.rm.sizes[9, 10] = PAGE
    mapping.rm.carried = (9, 10)
    assert take_in(mapping, 50) == OK
    mapping.shared.table.clients[7].memory_of[HOST[FIRST]] = 0

    assert [map_for_card(mapping, FIRST, MAPPED_IN[FIRST], each) for each in (50, HOST[FIRST])] == [BAD, OK]


def test_objects_of_the_fabric_are_of_no_card(mapping):
    mapping.rm.objects[7, 50] = (abi.NV_MEMORY_FABRIC, SECOND)

    assert map_for_card(mapping, FIRST, MAPPED_IN[FIRST], 50) == OK


def test_a_free_of_the_space_leaves_none_to_name(both):
    both.call(abi.NV_ESC_RM_FREE, free(SPACES[FIRST]))

    assert use(both, "virtual memory", SPACES[FIRST]) == BAD


@pytest.mark.parametrize("trace", RECORDINGS, ids=lambda path: path.name.split(".")[-3].partition("-")[2])
def test_recorded_programs_use_address_spaces_they_made(trace):
    made = set()
    for row in rows(trace):
        match decode(row.request, ARGUMENT, row.reader()):
            case rm_calls.Alloc() as asked:
                uses = rm_calls.handles(rm_calls.USES, asked.rm_class, row.params)
                assert {(asked.client, each) for each in uses} <= made
                made.add((asked.client, *struct.unpack_from("<I", row.after, 8)))
            case rm_calls.Dup() as asked:
                made.add((asked.client, *struct.unpack_from("<I", row.after, 8)))
            case rm_calls.VidHeap() as asked if rm_calls.is_virtual(asked):
                assert (asked.client, asked.space) in made

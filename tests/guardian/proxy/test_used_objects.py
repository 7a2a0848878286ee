"""Freeing what a channel or TSG uses opens its gate, and the card writes only plain memory of the pod for it."""

from __future__ import annotations

import struct

import pytest

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.rm_object import Userd
from qgpu.guardian.proxy import alloc_calls, dup_calls, object_claims
from qgpu.guardian.rules import classes
from qgpu.nvidia import abi
from tests.guardian.asked import (
    DEVICE_PARAMS,
    TSG_PARAMS,
    alloc,
    alloc_status,
    device,
    dup,
    dup_status,
    free,
    heap,
    heap_status,
)
from tests.guardian.fake_rm import PAGE
from tests.guardian.pod import allocate

SPACE, SHARE, USERD, WRITTEN, CONTEXT_DMA = 40, 41, 42, 43, 44
#: How a channel comes to have the card write memory.
NAMED = ["USERD", "notifier", "TSG", "context DMA", "context DMA by the old call"]


def channel_using(share=0, space=0, userd=0):
    """Return a channel's parameters with handles of what it uses."""
    return bytes(24) + struct.pack("<III", share, space, userd) + bytes(332)


@pytest.fixture
def spaces(on_card):
    """A pod with address spaces, a context share in one of them, and memory for USERD."""
    for handle in (SPACE, SPACE + 10):
        on_card.call(abi.NV_ESC_RM_ALLOC, alloc(handle, 2, abi.FERMI_VASPACE_A), bytes(64))
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(19, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(SHARE, 19, abi.FERMI_CONTEXT_SHARE_A), struct.pack("<III", SPACE, 0, 0))
    on_card.rm.objects[7, USERD], on_card.rm.sizes[7, USERD] = (abi.NV01_MEMORY_SYSTEM, 2), PAGE
    on_card.shared.note({"fact": "untracked", "client": 7, "handle": USERD, "there": True, "system": True})
    return on_card


@pytest.mark.parametrize(
    ("tsg", "channel", "freed"),
    [
        (SPACE, {}, SPACE),
        (0, {"space": SPACE}, SPACE),
        (0, {"share": SHARE}, SHARE),
        (0, {"share": SHARE}, SPACE),
        (0, {"userd": USERD}, USERD),
    ],
    ids=["its TSG's address space", "its own", "its context share", "its share's address space", "its USERD memory"],
)
def test_a_free_opens_the_gate_of_a_channel_that_uses_it(spaces, tsg, channel, freed):
    """RM frees the channel first, under its lock, and waits there for the channel's work."""
    group = struct.pack("<IIIII", 0, 0, tsg, 1, 0)
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), group)
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), channel_using(**channel))
    assert spaces.shared.table.objects[7, 21].confirmed
    spaces.call(abi.NV_ESC_RM_FREE, free(SPACE + 10))
    assert not spaces.left
    spaces.call(abi.NV_ESC_RM_FREE, free(freed))

    assert (spaces.left, spaces.cancel_free) == ([(7, 21)], [])
    assert (7, 21) not in spaces.shared.table.objects


@pytest.mark.parametrize("below", [20, 25], ids=["first handle", "second handle"])
def test_a_free_opens_gates_below_each_handle_of_a_tsg(spaces, below):
    """RM ties a second handle to the TSG's address space (kernel_channel_group_api.c:kchangrpapiCopyConstruct)."""
    group = struct.pack("<IIIII", 0, 0, SPACE, 1, 0)
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), group)
    assert dup_status(spaces.call(abi.NV_ESC_RM_DUP_OBJECT, dup(25, 20))[2]) == abi.NV_OK
    spaces.rm.used[7, 25] = {(7, SPACE)}
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(21, below, 0xC86F), bytes(368))
    assert spaces.shared.table.objects[7, 21].confirmed
    spaces.call(abi.NV_ESC_RM_FREE, free(SPACE))

    assert (7, 21) not in spaces.rm.objects
    assert spaces.left == [(7, 21)]


def test_spaces_made_after_a_second_handle_open_no_gate(spaces):
    """RM ties the handle to an address space that its client has then: a pod would open its gate over and over."""
    group = struct.pack("<IIIII", 0, 0, SPACE, 1, 0)
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), group)
    assert dup_status(spaces.call(abi.NV_ESC_RM_DUP_OBJECT, dup(25, 20))[2]) == abi.NV_OK
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(21, 25, 0xC86F), bytes(368))
    for _ in range(3):
        spaces.call(abi.NV_ESC_RM_ALLOC, alloc(60, 2, abi.FERMI_VASPACE_A), bytes(64))
        spaces.call(abi.NV_ESC_RM_FREE, free(60))

    assert (spaces.shared.table.objects[7, 21].confirmed, spaces.left) == (True, [])


def test_a_client_with_many_spaces_gets_no_second_handle(spaces):
    """Each of them may be the one, so its free opens the gate."""
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    for handle in range(60, 60 + dup_calls._MOST_SPACES - 1):  # it has two
        spaces.call(abi.NV_ESC_RM_ALLOC, alloc(handle, 2, abi.FERMI_VASPACE_A), bytes(64))
    status = dup_status(spaces.call(abi.NV_ESC_RM_DUP_OBJECT, dup(25, 20))[2])

    assert (status, (7, 25) in spaces.rm.objects) == (abi.NV_ERR_INSUFFICIENT_RESOURCES, False)
    assert spaces.shared.refusals.counts["web", "second handle"] == 1


@pytest.fixture(params=[abi.NV01_MEMORY_SYSTEM, abi.NV01_MEMORY_LOCAL_USER], ids=["host memory", "card memory"])
def written(spaces, request):
    """A pod with memory below its subdevice, for the card to write, and a TSG."""
    if request.param == abi.NV01_MEMORY_LOCAL_USER:
        allocate(spaces, WRITTEN, PAGE, parent=3)
    else:
        spaces.rm.objects[7, WRITTEN], spaces.rm.sizes[7, WRITTEN] = (request.param, 3), PAGE
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    return spaces


def named_by(pod, how):
    """Make a channel of a TSG, one of which names the memory, or a context DMA over it."""
    context_dma = struct.pack("<IIIIQQ", 0, 0, WRITTEN, 0, 0, PAGE - 1)
    if how == "context DMA":
        pod.call(abi.NV_ESC_RM_ALLOC, alloc(CONTEXT_DMA, 3, abi.NV01_CONTEXT_DMA), context_dma)
    if how == "context DMA by the old call":
        old = struct.pack("<8I4Q", 7, 3, CONTEXT_DMA, abi.NV01_CONTEXT_DMA, 0, 0, WRITTEN, 0, 0, PAGE - 1, 0, 0)[:56]
        pod.call(abi.NV_ESC_RM_ALLOC_CONTEXT_DMA2, old)
        pod.rm.objects[7, CONTEXT_DMA] = (abi.NV01_CONTEXT_DMA, 3)
    if how == "TSG":
        group = struct.pack("<IIIII", WRITTEN, 0, 0, 1, 0)
        pod.call(abi.NV_ESC_RM_ALLOC, alloc(22, 2, abi.KEPLER_CHANNEL_GROUP_A), group)
        pod.call(abi.NV_ESC_RM_ALLOC, alloc(21, 22, 0xC86F), bytes(368))
    else:
        params = bytearray(channel_using(userd=WRITTEN if how == "USERD" else 0))
        notifier = WRITTEN if how == "notifier" else CONTEXT_DMA if how.startswith("context DMA") else 0
        struct.pack_into("<I", params, 0, notifier)
        pod.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), bytes(params))
    assert pod.shared.table.objects[7, 21].confirmed


@pytest.mark.parametrize("freed", [WRITTEN, 3], ids=["it", "what it lies below"])
@pytest.mark.parametrize("how", NAMED)
def test_channels_are_freed_before_memory_that_the_card_writes(written, how, freed):
    """RM keeps the channel, and gives the memory to the next who asks, in any pod."""
    named_by(written, how)
    order, perform = [], written.rm.free
    written.rm.free = lambda file, client, handle: (
        order.append((7, freed) in written.rm.objects),
        perform(7, 7, handle),
    )
    answer = written.call(abi.NV_ESC_RM_FREE, free(freed))[2]

    assert struct.unpack_from("<I", answer, 12)[0] == abi.NV_OK
    assert (7, 21) not in written.rm.objects | written.shared.table.objects
    assert (order, written.left) == ([True], [(7, 21)])


def test_memory_stays_if_the_channel_that_names_it_does(written):
    named_by(written, "USERD")
    written.rm.free = lambda file, client, handle: None
    answer = written.call(abi.NV_ESC_RM_FREE, free(WRITTEN))[2]

    assert struct.unpack_from("<I", answer, 12)[0] == abi.NV_ERR_STATE_IN_USE
    assert {(7, WRITTEN), (7, 21)} <= written.rm.objects.keys()


@pytest.mark.parametrize("how", ["notifier", "context DMA"])
def test_a_successor_knows_which_memory_the_card_writes(written, how):
    named_by(written, how)
    table = ObjectTable()
    for fact in written.shared.journal.read()[1]:
        table.note(fact)

    assert table.writers_of((7, WRITTEN)) == table.writers_of((7, 3)) == [(7, 21)]


@pytest.mark.parametrize("compacted", [False, True])
def test_a_successor_knows_what_memory_a_context_dma_has(written, compacted):
    context_dma = struct.pack("<IIIIQQ", 0, 0, WRITTEN, 0, 0, PAGE - 1)
    written.call(abi.NV_ESC_RM_ALLOC, alloc(CONTEXT_DMA, 3, abi.NV01_CONTEXT_DMA), context_dma)
    table = ObjectTable()
    for fact in list(written.shared.table.facts()) if compacted else written.shared.journal.read()[1]:
        table.note(fact)

    assert table.clients[7].memory_of == {CONTEXT_DMA: WRITTEN}


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize(
    ("asked", "known"), [(WRITTEN, Userd(WRITTEN, PAGE - 512, 1024)), (0, None)], ids=["its program's", "RM's own"]
)
def test_a_successor_knows_where_the_userd_of_a_channel_lies(written, compacted, asked, known):
    params = bytearray(channel_using(userd=asked))
    struct.pack_into("<I", params, 16, 1024)
    struct.pack_into("<Q", params, 64, PAGE - 512)
    written.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), bytes(params))
    table = ObjectTable()
    for fact in list(written.shared.table.facts()) if compacted else written.shared.journal.read()[1]:
        table.note(fact)

    assert table.objects[7, 21].confirmed
    assert table.objects[7, 21].userd == written.shared.table.objects[7, 21].userd == known


@pytest.mark.parametrize("rm_class", [0xDE, 0x70, 0x71, 0x50A0, abi.NV_MEMORY_FABRIC, abi.NV01_CONTEXT_DMA])
@pytest.mark.parametrize("at", [0, 32, 140], ids=["notifier", "USERD", "ECC notifier"])
def test_the_card_writes_only_memory_that_is_known(spaces, rm_class, at):
    """RM would write into the page that it shares with all, or behind addresses or a context DMA that nobody knows.

    Or into pages of the process that it may only read, such as those of a file that others have, too.
    """
    spaces.rm.objects[7, WRITTEN] = (rm_class, 3)
    params = bytearray(368)
    struct.pack_into("<I", params, at, WRITTEN)
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    answer = spaces.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), bytes(params))

    assert alloc_status(answer[2]) == abi.NV_ERR_INVALID_OBJECT_HANDLE
    assert (7, 21) not in spaces.rm.objects | spaces.shared.table.objects
    assert spaces.shared.refusals.counts["web", alloc_calls.OTHER_MEMORY] == 1


@pytest.mark.parametrize("at", [0, 4], ids=["error", "ECC error"])
@pytest.mark.parametrize("known", [False, True], ids=["that is not there", "that RM has freed along"])
def test_a_tsg_names_no_notifier(spaces, at, known):
    """RM keeps the handle, and looks for what has it by then as it makes a channel (kchannelConstruct_IMPL)."""
    if known:
        allocate(spaces, WRITTEN, PAGE, parent=3)
        spaces.rm.objects[7, WRITTEN] = (abi.RM_USER_SHARED_DATA, 3)
    params = bytearray(TSG_PARAMS)
    struct.pack_into("<I", params, at, WRITTEN)
    answer = spaces.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), bytes(params))

    assert alloc_status(answer[2]) == abi.NV_ERR_INVALID_OBJECT_HANDLE
    assert (7, 20) not in spaces.rm.objects | spaces.shared.table.objects


@pytest.mark.parametrize("at", [0, 4], ids=["semaphores", "greatest values"])
@pytest.mark.parametrize(("rm_class", "made"), [(0x3E, True), (0xDE, False), (0x71, False)])
def test_semaphore_surfaces_are_of_plain_memory(on_card, at, rm_class, made):
    """RM writes into each semaphore as it makes the surface: also into pages that the process may only read."""
    on_card.rm.objects[7, WRITTEN] = (rm_class, 3)
    params = bytes(at) + struct.pack("<I", WRITTEN) + bytes(20 - at)
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(30, 3, classes.SEMAPHORE_SURFACE), params)

    assert alloc_status(answer[2]) == (abi.NV_OK if made else abi.NV_ERR_INVALID_OBJECT_HANDLE)
    assert ((7, 30) in on_card.rm.objects) is made


@pytest.mark.parametrize("at", [PAGE - 511, PAGE, 1 << 40, (1 << 64) - PAGE])
def test_userd_lies_in_its_memory(written, at):
    """RM adds the offset to the memory's address on the card and looks at no size, so it could be any pod's memory."""

    def make(offset):
        params = bytearray(channel_using(userd=WRITTEN))
        struct.pack_into("<Q", params, 64, offset)
        return alloc_status(written.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), bytes(params))[2])

    assert make(at) == abi.NV_ERR_INVALID_ARGUMENT
    assert written.shared.refusals.counts["web", alloc_calls.BEYOND_MEMORY] == 1
    assert make(PAGE - 512) == abi.NV_OK


@pytest.mark.parametrize("how", NAMED[:4])
@pytest.mark.parametrize("elsewhere", ["another card", "a card that nobody knows"])
def test_the_card_writes_no_memory_that_lies_elsewhere(spaces, how, elsewhere):
    """RM takes an address there for one on the channel's card. Of imported memory it does not tell the card."""
    allocate(spaces, WRITTEN, PAGE, parent=3)
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    (memory,) = spaces.shared.table.allocations.behind([(7, WRITTEN)])
    if elsewhere == "another card":
        memory.instance += 1
    else:
        memory.foreign = True
    with pytest.raises((AssertionError, KeyError)):
        named_by(spaces, how)
    assert spaces.shared.refusals.counts["web", alloc_calls.BEYOND_MEMORY] == 1

    memory.instance, memory.foreign = spaces.shared.table.instance_of(spaces.shared.table.objects[7, 20]), False
    spaces.call(abi.NV_ESC_RM_FREE, free(CONTEXT_DMA))
    named_by(spaces, how)


@pytest.mark.parametrize(("offset", "limit"), [(0, 14), (PAGE - 15, PAGE - 1), (PAGE * 3 - 8, 63)])
@pytest.mark.parametrize("old", [False, True])
def test_a_context_dma_has_room_for_a_notifier(written, offset, limit, old):
    """RM tells the firmware only where it begins."""
    if old:
        call = struct.pack("<8IQQII", 7, 3, CONTEXT_DMA, abi.NV01_CONTEXT_DMA, 0, 0, WRITTEN, 0, offset, limit, 0, 0)
        status = struct.unpack_from("<I", written.call(abi.NV_ESC_RM_ALLOC_CONTEXT_DMA2, call)[2], 48)[0]
    else:
        params = struct.pack("<IIIIQQ", 0, 0, WRITTEN, 0, offset, limit)
        asked = alloc(CONTEXT_DMA, 3, abi.NV01_CONTEXT_DMA)
        status = alloc_status(written.call(abi.NV_ESC_RM_ALLOC, asked, params)[2])

    assert status == abi.NV_ERR_INVALID_ARGUMENT
    assert written.shared.refusals.counts["web", alloc_calls.BEYOND_MEMORY] == 1


def test_userd_in_memory_of_unknown_size_is_refused(spaces):
    del spaces.rm.sizes[7, USERD]
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    answer = spaces.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), channel_using(userd=USERD))

    assert alloc_status(answer[2]) == abi.NV_ERR_INVALID_ARGUMENT


def test_an_events_handle_opens_no_gate_after_memorys(spaces):
    """The kernel made memory under a handle that nobody knows. Then events get that handle, over and over."""
    spaces.rm.objects[7, 70], spaces.rm.sizes[7, 70] = (abi.NV01_MEMORY_SYSTEM, 2), PAGE
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), channel_using(userd=70))
    for _ in range(3):
        spaces.call(abi.NV_ESC_RM_FREE, free(70))
        assert alloc_status(spaces.call(abi.NV_ESC_RM_ALLOC, alloc(70, 3, 0x79), bytes(24))[2]) == abi.NV_OK

    assert spaces.left == [(7, 21)]  # once: the channel is freed


def test_of_a_channels_userd_handles_the_first_counts(spaces):
    """RM reads no other, so a pod could name there what it makes and frees over and over."""
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), bytes(36) + struct.pack("<I", USERD) + bytes(328))
    spaces.call(abi.NV_ESC_RM_FREE, free(USERD))

    assert spaces.left == []


@pytest.mark.parametrize("rm_class", [0x90, abi.FERMI_CONTEXT_SHARE_A, abi.KEPLER_CHANNEL_GROUP_A])
def test_what_rm_made_for_channels_is_not_freed(spaces, rm_class):
    """RM frees channels with the graphics context and the context shares that it makes for a TSG."""
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), bytes(368))
    spaces.rm.objects[7, 0xCAF00001] = (rm_class, 20)
    spaces.rm.used[7, 21] = {(7, 0xCAF00001)}
    answer = spaces.call(abi.NV_ESC_RM_FREE, free(0xCAF00001))[2]

    assert struct.unpack_from("<I", answer, 12)[0] == abi.NV_ERR_OBJECT_NOT_FOUND
    assert (7, 21) in spaces.rm.objects


def test_a_large_free_gates_again_the_channels_that_rm_kept(spaces, monkeypatch):
    monkeypatch.setattr(object_claims, "BATCH", 2)
    spaces.call(abi.NV_ESC_RM_ALLOC, device(4), DEVICE_PARAMS)
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(5, 4, abi.NV20_SUBDEVICE_0), bytes(4))
    for handle in (60, 61, 62):
        spaces.call(abi.NV_ESC_RM_ALLOC, alloc(handle, 4, abi.FERMI_VASPACE_A), bytes(64))
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), channel_using(space=60))
    spaces.rm.used[7, 21] = set()
    monkeypatch.setattr(object_claims.ObjectClaims, "_wait_until_forgotten", lambda self, key: spaces.settle())
    spaces.call(abi.NV_ESC_RM_FREE, free(4))

    assert (spaces.left, spaces.cancel_free) == ([(7, 21)], [(7, 21)])


@pytest.mark.parametrize("rm_class", [0x40, abi.NV01_MEMORY_SYSTEM], ids=["of the card", "system memory"])
def test_a_duplicate_gets_the_handle_of_what_rm_freed_along(spaces, rm_class):
    """The TSG has gone with its address space, which nobody has found out yet."""
    group = struct.pack("<IIIII", 0, 0, SPACE, 1, 0)
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), group)
    if rm_class == abi.NV01_MEMORY_SYSTEM:
        spaces.rm.objects[7, 30] = (rm_class, 2)
    else:
        allocate(spaces, 30, PAGE)
    spaces.call(abi.NV_ESC_RM_FREE, free(SPACE))

    assert dup_status(spaces.call(abi.NV_ESC_RM_DUP_OBJECT, dup(20, 30))[2]) == abi.NV_OK
    assert spaces.rm.objects[7, 20][0] == rm_class


def test_the_heap_frees_channels_before_memory(spaces):
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    spaces.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), channel_using(userd=USERD))
    asked = bytearray(heap(USERD))
    struct.pack_into("<I", asked, 8, 3)
    answer = spaces.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, bytes(asked))[2]

    assert (heap_status(answer), spaces.left) == (abi.NV_OK, [(7, 21)])
    assert (7, 21) not in spaces.rm.objects

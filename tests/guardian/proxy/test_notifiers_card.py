"""TSGs and channels use only what lies on their own card: addresses there mean other memory on another one."""

from __future__ import annotations

import struct

import pytest

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.proxy import alloc_calls
from qgpu.nvidia import abi
from tests.guardian.asked import TSG_PARAMS, alloc, alloc_status, control, dup, dup_status, free
from tests.guardian.fake_rm import PAGE
from tests.guardian.pod import make_device_on_another_card

#: A device on each card, each with a subdevice; a TSG on the first, and host memory below each of them.
FIRST, SECOND, TSG = 2, 4, 20
MEMORY = {FIRST: 42, 3: 43, SECOND: 44, 5: 45}
DUPLICATE, CONTEXT_DMA, CHANNEL = 50, 51, 21


@pytest.fixture
def both(on_card):
    on_card.limits |= {0: 1 << 30, 1: 1 << 30}
    make_device_on_another_card(on_card, SECOND, 5)
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, FIRST, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    for parent, handle in MEMORY.items():
        on_card.call(abi.NV_ESC_RM_ALLOC, alloc(handle, parent, abi.NV01_MEMORY_SYSTEM), bytes(128))
        on_card.rm.sizes[7, handle] = PAGE
    return on_card


def names(pod, handle, at=0):
    """Make a channel that names memory, as its error notifier or elsewhere in its parameters."""
    params = bytearray(368)
    struct.pack_into("<I", params, at, handle)
    return alloc_status(pod.call(abi.NV_ESC_RM_ALLOC, alloc(CHANNEL, TSG, 0xC86F), bytes(params))[2])


def duplicate(pod, handle, source, parent):
    return dup_status(pod.call(abi.NV_ESC_RM_DUP_OBJECT, dup(handle, source, parent))[2])


@pytest.mark.parametrize("at", [0, 32, 140], ids=["notifier", "USERD", "ECC notifier"])
@pytest.mark.parametrize(("parent", "made"), [(FIRST, True), (3, True), (SECOND, False), (5, False)])
def test_host_memory_is_named_on_its_own_card(both, parent, made, at):
    """RM tells the firmware the address that the IOMMU gave the memory for the card that it was made for."""
    assert names(both, MEMORY[parent], at) == (abi.NV_OK if made else abi.NV_ERR_INVALID_OBJECT_HANDLE)
    assert both.shared.refusals.counts.get(("web", alloc_calls.OTHER_MEMORY), 0) == (not made)


@pytest.mark.parametrize("successor", [False, True])
@pytest.mark.parametrize(("source", "made"), [(FIRST, True), (SECOND, False)])
def test_a_duplicate_is_of_its_originals_card(both, source, made, successor):
    """RM refers to the same pages by the same addresses, wherever the duplicate lies."""
    assert duplicate(both, DUPLICATE + 1, MEMORY[source], FIRST) == abi.NV_OK
    assert duplicate(both, DUPLICATE, DUPLICATE + 1, FIRST) == abi.NV_OK
    both.call(abi.NV_ESC_RM_FREE, free(MEMORY[source]))
    if successor:
        table = ObjectTable()
        for fact in list(both.shared.table.facts()):
            table.note(fact)
        both.shared.table.clients[7].memory_of = table.clients[7].memory_of

    assert (names(both, DUPLICATE) == abi.NV_OK) is made


def test_a_duplicate_of_an_unknown_original_is_not_named(both):
    both.rm.find_object = lambda rm: None
    assert duplicate(both, DUPLICATE, MEMORY[FIRST], FIRST) == abi.NV_OK

    assert names(both, DUPLICATE) == abi.NV_ERR_INVALID_OBJECT_HANDLE


def test_imported_host_memory_is_not_named(both):
    def carry(params):
        both.rm.objects[7, DUPLICATE], both.rm.sizes[7, DUPLICATE] = (abi.NV01_MEMORY_SYSTEM, FIRST), PAGE

    both.rm.answers[abi.NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD] = carry
    asked = control(abi.NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD, 7, 20)
    both.call(abi.NV_ESC_RM_CONTROL, asked, struct.pack("<iIIII", 0, 1, FIRST, FIRST, DUPLICATE))

    assert (7, DUPLICATE) in both.rm.objects
    assert names(both, DUPLICATE) == abi.NV_ERR_INVALID_OBJECT_HANDLE


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(("of", "made"), [(0, True), (3, True), (5, False), (99, False)])
def test_a_context_dma_is_for_its_memorys_card(both, of, made, old):
    """RM gets addresses for the subdevice that is named (memdescCreateSubMem)."""
    memory = MEMORY[FIRST]
    if old:
        call = struct.pack("<8IQQII", 7, of, CONTEXT_DMA, abi.NV01_CONTEXT_DMA, 0, 0, memory, 0, 0, PAGE - 1, 0, 0)
        status = struct.unpack_from("<I", both.call(abi.NV_ESC_RM_ALLOC_CONTEXT_DMA2, call)[2], 48)[0]
    else:
        params = struct.pack("<IIIIQQ", of, 0, memory, 0, 0, PAGE - 1)
        asked = alloc(CONTEXT_DMA, FIRST, abi.NV01_CONTEXT_DMA)
        status = alloc_status(both.call(abi.NV_ESC_RM_ALLOC, asked, params)[2])

    assert status == (abi.NV_OK if made else abi.NV_ERR_INVALID_ARGUMENT)


def test_a_context_dma_over_another_cards_memory_is_not_named(both):
    duplicate(both, DUPLICATE, MEMORY[SECOND], FIRST)
    params = struct.pack("<IIIIQQ", 0, 0, DUPLICATE, 0, 0, PAGE - 1)
    both.call(abi.NV_ESC_RM_ALLOC, alloc(CONTEXT_DMA, FIRST, abi.NV01_CONTEXT_DMA), params)

    assert names(both, CONTEXT_DMA) == abi.NV_ERR_INVALID_OBJECT_HANDLE

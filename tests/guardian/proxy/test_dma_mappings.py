"""Mappings of memory for the card: RM undoes only so many of them at once."""

from __future__ import annotations

import struct
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.guardian.accounting.client_entries import RmClientEntry
from qgpu.guardian.proxy import dma_mappings
from qgpu.guardian.proxy.dma_mappings import DmaMappings, Place
from qgpu.nvidia import abi
from tests.guardian.failover.test_successors import successor_of

CLIENT, DEVICE, SPACE, MEMORY = 7, 2, 9, 30
FULL = abi.NV_ERR_INSUFFICIENT_RESOURCES
MAP_SIZES, UNMAP_SIZES = tuple(abi.MAP_MEMORY_DMA), tuple(abi.UNMAP_MEMORY_DMA)


@pytest.fixture
def few(on_card, monkeypatch):
    """A pod without a memory limit, whose clients may have three mappings each."""
    monkeypatch.setattr(dma_mappings, "_MOST", 3)
    on_card.limits.clear()
    on_card.rm.objects |= {(CLIENT, MEMORY): (abi.NV01_MEMORY_SYSTEM, DEVICE), (CLIENT, SPACE): (0x90F1, DEVICE)}
    return on_card


def map_at(pod, offset, memory=MEMORY, size=MAP_SIZES[1], length=0x1000, space=SPACE):
    call = struct.pack("<IIIIQQ", CLIENT, DEVICE, space, memory, 0, length)
    call += bytes(size - 16 - len(call)) + struct.pack("<QQ", offset, 0)
    return struct.unpack_from("<I", pod.call(abi.NV_ESC_RM_MAP_MEMORY_DMA, call)[2], size - 8)[0]


def unmap_at(pod, offset, length=0, size=UNMAP_SIZES[1]):
    call = struct.pack("<IIIIQQQQ", CLIENT, DEVICE, SPACE, 0, 0, offset, length, 0)
    answer = pod.call(abi.NV_ESC_RM_UNMAP_MEMORY_DMA, call[:size])[2]
    return struct.unpack_from("<I", answer, size - 8)[0]


@pytest.mark.parametrize("size", MAP_SIZES)
def test_mappings_for_the_card_are_bounded(few, size):
    assert [map_at(few, at << 20, size=size) for at in range(5)] == [0, 0, 0, FULL, FULL]
    assert few.shared.refusals.counts["web", "too many objects of RM"] == 2


@pytest.mark.parametrize("size", UNMAP_SIZES)
def test_an_undone_mapping_makes_room(few, size):
    for at in range(3):
        map_at(few, at << 20)
    unmap_at(few, 1 << 20, size=size)

    assert [map_at(few, 5 << 20), map_at(few, 6 << 20)] == [0, FULL]


def test_a_mapping_cut_in_two_counts_twice(few):
    map_at(few, 0, length=0x3000)
    unmap_at(few, 0x1000, 0x1000)

    assert [map_at(few, 1 << 20), map_at(few, 2 << 20)] == [0, FULL]


def test_a_cut_that_could_make_too_many_is_refused(few):
    for at in range(3):
        map_at(few, at << 20, length=0x3000)

    assert unmap_at(few, 0x1000, 0x1000) == FULL
    assert [unmap_at(few, 0, 0x1000), unmap_at(few, 0x2000, 0x1000), unmap_at(few, 0x1000, 0x1000)] == [0] * 3
    assert unmap_at(few, 1 << 20) == 0  # leaves no parts


def test_a_mapping_over_stale_ones_is_cut(few, monkeypatch):
    """RM has dropped those with their memory; nobody has asked it yet."""
    monkeypatch.setattr(dma_mappings, "_MOST", 5)
    few.rm.objects[CLIENT, 31] = (abi.NV01_MEMORY_SYSTEM, DEVICE)
    for at in (0x1000, 0x5000):
        map_at(few, at, memory=31)
    few.rm.objects.pop((CLIENT, 31))
    assert map_at(few, 0, length=0x10000) == 0
    statuses = [unmap_at(few, at, 0x1000) for at in (0x3000, 0x7000, 0x9000, 0xB000, 0xD000)]

    assert statuses == [0, 0, 0, 0, FULL]
    assert few.shared.table.clients[CLIENT].dma_mappings == 5


def test_overlapping_mappings_in_a_context_dma_all_count(few):
    few.rm.objects[CLIENT, SPACE] = (abi.NV01_CONTEXT_DMA, DEVICE)

    assert [map_at(few, at, length=0x3000) for at in (0, 0x1000, 0x2000, 0x3000)] == [0, 0, 0, FULL]


def test_another_pods_mappings_are_not_cut(few):
    map_at(few, 0, length=0x3000)
    few.shared.table.clients[CLIENT].pod = "other"

    assert unmap_at(few, 0x1000, 0x1000) == FULL


def test_a_client_that_was_another_pods_keeps_its_count(few):
    """The other pod's mappings are not known here, but RM has them."""
    few.rm.objects[CLIENT, 31] = (abi.NV01_MEMORY_SYSTEM, DEVICE)
    map_at(few, 0, memory=31)
    few.shared.note({"fact": "dma_mappings", "client": CLIENT, "count": 3})
    few.rm.objects.pop((CLIENT, 31))

    assert (map_at(few, 1 << 20), few.shared.table.clients[CLIENT].dma_mappings) == (FULL, 3)


def test_freed_memory_takes_its_mappings_along(few):
    few.rm.objects[CLIENT, 31] = (abi.NV01_MEMORY_SYSTEM, DEVICE)
    made = [map_at(few, at << 20, memory=31) for at in range(4)]
    few.rm.objects.pop((CLIENT, 31))

    assert (made, map_at(few, 9 << 20)) == ([0, 0, 0, FULL], 0)


def test_a_freed_address_space_takes_its_mappings_along(few):
    few.rm.objects[CLIENT, 31] = (abi.FERMI_VASPACE_A, DEVICE)
    made = [map_at(few, at << 20, space=31) for at in range(4)]
    few.rm.objects.pop((CLIENT, 31))

    assert (made, map_at(few, 9 << 20)) == ([0, 0, 0, FULL], 0)


@pytest.mark.parametrize(
    ("rm_class", "statuses"),
    [(abi.NV01_MEMORY_VIRTUAL, [0] * 5), (abi.NV01_CONTEXT_DMA, [0, 0, 0, FULL, FULL])],
    ids=["virtual memory", "context DMA"],
)
def test_an_offset_used_again_counts_as_rm_keeps_it(few, rm_class, statuses):
    """RM makes a second mapping at the same place of a context DMA alone."""
    few.rm.objects[CLIENT, SPACE] = (rm_class, DEVICE)

    assert [map_at(few, 0) for _ in range(5)] == statuses


def test_all_clients_of_a_pod_are_bounded(few, monkeypatch):
    monkeypatch.setattr(dma_mappings, "_MOST_OF_POD", 2)

    assert [map_at(few, at << 20) for at in range(3)] == [0, 0, FULL]


def test_a_successor_counts_what_a_dead_guardian_mapped(few):
    for at in range(3):
        map_at(few, at << 20)
    successor_of(few)

    assert map_at(few, 3 << 20) == FULL
    unmap_at(few, 1 << 20)
    assert [map_at(few, 4 << 20), map_at(few, 5 << 20)] == [0, FULL]


def test_a_cut_of_what_a_dead_guardian_mapped_counts(few):
    map_at(few, 0, length=0x3000)
    successor_of(few)
    unmap_at(few, 0x1000, 0x1000)

    assert [map_at(few, 1 << 20), map_at(few, 2 << 20)] == [0, FULL]


STEPS = st.lists(
    st.tuples(st.booleans(), st.integers(1, 2), st.integers(0, 15), st.integers(0, 6)), min_size=1, max_size=40
)


@given(STEPS)
def test_ranges_are_cut_as_rm_cuts_them(steps):
    """RM's list holds mappings that do not overlap; each byte that is mapped lies in one of them."""
    entry = RmClientEntry("web")
    table = SimpleNamespace(clients={CLIENT: entry})
    shared = SimpleNamespace(
        table=table, lock=nullcontext(), note=lambda fact: setattr(entry, "dma_mappings", fact["count"])
    )
    known = DmaMappings(SimpleNamespace(shared=shared, pod="web"))
    runs: dict[tuple[int, int], int] = {}  # the mappings as RM has them: space and offset, and the bytes
    for maps, space, at, length in steps:
        overlaps = [
            (each, begin)
            for each, begin in ((each, each[1]) for each in list(runs))
            if length and each[0] == space and begin < at + length and begin + runs[each] > at
        ]
        if maps and length and not overlaps:
            runs[space, at] = length
            known.add(CLIENT, Place(DEVICE, space, at), length, MEMORY, lambda: False)
        elif not maps:
            if not length:
                runs.pop((space, at), None)
            for each, begin in overlaps:
                end = begin + runs.pop(each)
                if begin < at:
                    runs[space, begin] = at - begin
                if end > at + length:
                    runs[space, at + length] = end - at - length
            known.remove(CLIENT, Place(DEVICE, space, at), length)
        mine = known._of.get(CLIENT)
        found = {} if mine is None else {place[1:]: length for place, (length, _) in mine.mapped.items()}
        assert found == runs
        assert mine is None or mine.places == sorted(mine.mapped)
        assert entry.dma_mappings == len(runs)

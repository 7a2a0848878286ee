"""Who is charged for memory, and for how long."""

from __future__ import annotations

from qgpu.guardian.accounting import allocations as accounting
from qgpu.guardian.accounting.address_space import table_bytes
from qgpu.guardian.accounting.allocations import Allocations

A, B = (7, 10), (7, 11)
CARD, OTHER = bytes(16), b"\x01" * 16
TABLE = 4 << 10


SIZE = 1 << 20


def allocations(size=SIZE):
    made = Allocations()
    made.allocate(A, "web", 0, size, 1)
    return made


def held(found):
    return {key: size for key, size in found.held.items() if size}


def test_memory_with_two_handles_charged_once_until_both_freed():
    found = allocations()
    found.duplicate(B, 1)
    found.drop(A)
    one = held(found)
    found.drop(B)

    assert (one, held(found), found.memories) == ({("web", 0): SIZE}, {}, {})


def test_mapped_memory_is_charged_until_last_part_is_unmapped():
    found = allocations()
    found.map(5, 0, 64, CARD, 1)
    found.drop(A)
    found.unmap(5, 0, 32, CARD)
    half = held(found)
    found.unmap(5, 32, 32, OTHER)
    still = held(found)
    found.unmap(5, 32, 32, CARD)

    assert (half, still, held(found)) == ({("web", 0): SIZE}, {("web", 0): SIZE}, {})


def test_unmapping_the_middle_leaves_both_ends():
    found = allocations()
    found.map(5, 0, 96, CARD, 1)
    found.unmap(5, 32, 32)

    assert [(mapping.base, mapping.end) for mapping in sorted(found.mappings[5].mappings)] == [(0, 32), (64, 96)]


def test_mapping_split_during_a_walk_is_told_of_in_pieces():
    """A compaction is such a walk. The pieces lie before and after the place where it is."""
    found = allocations()
    for end in (100, 200, 300):
        found.map(5, 0, end, CARD, 1)
    space = found.mappings[5]
    walk = space.walk()
    first = next(walk)
    found.unmap(5, 40, 10)
    rest = {*walk}

    assert first not in space.mappings
    assert rest == {*space.mappings}


def test_unmapping_finds_short_mappings_beside_a_very_long_one():
    found = allocations()
    found.map(5, 0, 1 << 46, CARD, 1)
    for at in range(1, 100):
        found.map(5, at << 30, 4096, OTHER, 1)
    looked = found.space_of(5).reaching_into(50 << 30, (50 << 30) + 4096)
    found.unmap(5, 50 << 30, 4096, OTHER)

    assert len(looked) <= 3
    assert len(found.mappings[5].mappings) == 99


def test_overlaps_are_counted_no_further_than_asked():
    """UVM refuses such a mapping: a pod can ask for it for ever, and others wait for the lock."""
    found = allocations()
    for at in range(1000):
        found.map(5, at << 20, 4096, CARD, 1)
    looked = []

    class Counted(list):
        def __getitem__(self, at):
            looked.append(at)
            return super().__getitem__(at)

    space = found.mappings[5]
    space.by_kind = {kind: Counted(like) for kind, like in space.by_kind.items()}
    few = found.space_of(5).count_overlaps(0, 1 << 63, 10), len(looked) < 100

    assert few == (10, True)
    assert found.space_of(5).count_overlaps(0, 1 << 63, 5000) == 1000


def test_unmapping_for_another_card_looks_at_no_mapping():
    found = allocations()
    found.map(5, 0, 64, CARD, 1)
    space = found.mappings[5]
    space.by_kind = dict.fromkeys(space.by_kind)
    found.unmap(5, 0, 1 << 63, OTHER)

    assert list(space.by_kind.values()) == [None]


def test_mapping_is_left_whole_where_parts_are_not_tracked():
    found = allocations()
    found.map(5, 0, 64, CARD, 1)
    found.map(5, 64, 64, CARD, 1)
    found.unmap(5, 32, 96, whole=True)

    assert [(each.base, each.end) for each in found.mappings[5].mappings] == [(0, 64)]
    assert found.records[""] == 1


def test_overlapping_mapping_keeps_both_charged():
    found = allocations()
    found.allocate(B, "web", 0, SIZE, 2)
    found.map(5, 0, 64, CARD, 1)
    found.drop(A)
    found.map(5, 0, 64, CARD, 2)
    both = held(found)
    found.drop(B)
    found.unmap(5, 0, 64, CARD)

    assert (both, held(found)) == ({("web", 0): 2 * SIZE}, {})


def test_a_process_takes_what_hung_on_its_address_space_with_it():
    found = allocations()
    found.map(5, 0, 64, CARD, 1)
    found.set_managed(5, 30)
    found.drop(A)
    found.exited(5)
    found.forget_some(1)

    assert (held(found), found.managed) == ({}, {})


def test_mappings_of_a_process_that_has_ended_go_bit_by_bit():
    found = allocations()
    for at in range(10):
        found.map(5, at << 20, 64, CARD, 1)
    found.drop(A)
    found.exited(5)
    left = [found.forget_some(4) for _ in range(3)]

    assert left == [True, True, False]
    assert held(found) == {}


def test_many_mappings_of_memory_that_is_gone_go_bit_by_bit(monkeypatch):
    monkeypatch.setattr(accounting, "_MANY", 4)
    found = allocations()
    found.allocate(B, "web", 0, SIZE, 2)
    for at in range(20):
        found.map(5 + at % 2, at << 20, 64, CARD, 1 + at % 4 // 2)
    found.drop(A)
    found.unmap_all(1)
    at_once = held(found), [fact["memory"] for fact in found.facts() if fact["fact"] == "map"]
    steps = 1
    while found.forget_some(3):
        steps += 1

    assert at_once == ({("web", 0): SIZE}, [2] * 10)
    assert steps > 5
    assert {each.memory for space in found.mappings.values() for each in space.mappings} == {2}
    assert found.records.total() == found.records["web"] + found.records[""] == 11


def test_what_was_exported_counts_until_the_pod_ends():
    found = allocations()
    found.pin(1)
    found.drop(A)
    found.exited(5)
    still = held(found)
    found.pod_ended("web")
    found.forget_some(1)

    assert (still, held(found)) == ({("web", 0): SIZE}, {})


def test_what_a_client_may_keep_counts_until_it_is_gone():
    found = allocations()
    found.clients.add("web", 7)
    found.pin(1)
    found.drop(A)
    found.pod_ended("web")
    found.forget_some(1)
    still = held(found)
    found.client_gone("web", 7)
    found.forget_some(1)

    assert (still, held(found)) == ({("web", 0): SIZE}, {})


def test_a_handle_given_anew_names_the_new_memory():
    found = allocations()
    found.allocate(A, "web", 0, 2 * SIZE, 2)

    assert (held(found), list(found.memories)) == ({("web", 0): 2 * SIZE}, [2])


def test_charge_is_rounded_up_to_rm_allocation_granularity():
    """RM takes the card's memory in pieces of 64 KiB, and tells of the 4 KiB that were asked for."""
    found = allocations(4096)
    few = held(found)
    found.allocate(B, "web", 0, (64 << 10) + 1, 2)
    more = held(found)
    found.drop(A)
    found.drop(B)

    assert (few, more, held(found)) == ({("web", 0): 64 << 10}, {("web", 0): 192 << 10}, {})


def test_page_tables_are_charged_per_level_for_lone_mapping():
    assert table_bytes(1 << 40, 4096) == 4 * TABLE
    assert table_bytes((1 << 40) - 4096, 8192) == 7 * TABLE  # two of each level but the uppermost
    assert table_bytes(1 << 40, 64 << 20) == (32 + 3) * TABLE
    assert table_bytes(0, 1 << 64) > 1 << 50


def test_page_table_charge_keeps_its_peak_until_all_are_gone():
    """UVM gives a piece of 2 MiB back when no table lies in it any more, and one can be left in each."""
    found = allocations()
    for at in range(1, 4):
        found.map(5, at << 30, 4096, CARD, 1)
    found.unmap(5, 1 << 30, 2 << 30)
    fewer = found.tables_of["", CARD]
    again = [found.space_of(5).more_tables(CARD, 1 << 30, length) for length in (4096, 1 << 30)]
    found.unmap(5, 0, 1 << 40)

    assert (fewer, again[0], again[1] > 0, found.tables_of["", CARD]) == (12 * TABLE, 0, True, 0)


def test_memory_given_away_lets_its_ended_pod_go():
    found = Allocations()
    found.allocate((1, 1), "a", 0, SIZE, 1)
    found.add_carrier(1, 1)
    found.allocate((3, 1), "a", 0, SIZE, 2)
    found.pin(2)
    found.drop((3, 1))
    found.pod_ended("a")
    found.transfer([(1, 1)], "b")
    found.carrier_closed(1)
    found.drop((1, 1))
    found.forget_some(10)

    assert held(found) == {}


def test_memory_with_a_handle_elsewhere_is_not_given_away():
    found = Allocations()
    found.allocate((1, 1), "a", 0, SIZE, 1)
    found.duplicate((2, 1), 1)
    found.transfer([(1, 1)], "b")

    assert held(found) == {("a", 0): SIZE}


def test_few_of_many_allocations_that_are_kept_are_listed():
    """Their pod waits for an import meanwhile, and so does who waits for the lock."""
    found = Allocations()
    for number in range(1, 101):
        found.keep(number, "web", 0, 1 << 16)
        found.pin(number)

    assert [memory.number for memory in found.kept_of_size("web", 0, 1 << 16, 3)] == [100, 99, 98]

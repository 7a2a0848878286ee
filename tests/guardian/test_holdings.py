"""Who is charged for memory, and for how long."""

from __future__ import annotations

from qgpu.guardian.holdings import Holdings

A, B = (7, 10), (7, 11)
CARD, OTHER = bytes(16), b"\x01" * 16


def holdings(size=100):
    made = Holdings()
    made.allocate(A, "web", 0, size, 1)
    return made


def held(found):
    return {key: size for key, size in found.held.items() if size}


def test_memory_with_two_names_is_charged_once_until_both_are_gone():
    found = holdings()
    found.duplicate(B, 1)
    found.drop(A)
    one = held(found)
    found.drop(B)

    assert (one, held(found), found.memories) == ({("web", 0): 100}, {}, {})


def test_what_is_mapped_counts_until_the_last_part_of_it_is_unmapped():
    found = holdings()
    found.map(5, 0, 64, CARD, 1)
    found.drop(A)
    found.unmap(5, 0, 32, CARD)
    half = held(found)
    found.unmap(5, 32, 32, OTHER)
    still = held(found)
    found.unmap(5, 32, 32, CARD)

    assert (half, still, held(found)) == ({("web", 0): 100}, {("web", 0): 100}, {})


def test_unmapping_the_middle_leaves_both_ends():
    found = holdings()
    found.map(5, 0, 96, CARD, 1)
    found.unmap(5, 32, 32)

    assert [(mapping.base, mapping.end) for mapping in found.mappings[5].all] == [(0, 32), (64, 96)]


def test_a_mapping_over_another_leaves_both_for_it_may_have_failed():
    found = holdings()
    found.allocate(B, "web", 0, 50, 2)
    found.map(5, 0, 64, CARD, 1)
    found.drop(A)
    found.map(5, 0, 64, CARD, 2)
    both = held(found)
    found.drop(B)
    found.unmap(5, 0, 64, CARD)

    assert (both, held(found)) == ({("web", 0): 150}, {})


def test_a_process_takes_what_hung_on_its_address_space_with_it():
    found = holdings()
    found.map(5, 0, 64, CARD, 1)
    found.managed[5] = 30
    found.drop(A)
    found.exited(5)

    assert (held(found), found.managed) == ({}, {})


def test_what_was_exported_counts_until_the_pod_ends():
    found = holdings()
    found.pin(1)
    found.drop(A)
    found.exited(5)
    still = held(found)
    found.pod_ended("web")

    assert (still, held(found)) == ({("web", 0): 100}, {})


def test_a_handle_given_anew_names_the_new_memory():
    found = holdings()
    found.allocate(A, "web", 0, 50, 2)

    assert (held(found), list(found.memories)) == ({("web", 0): 50}, [2])

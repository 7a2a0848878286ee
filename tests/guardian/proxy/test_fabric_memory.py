"""An object of the NVLink fabric keeps memory as another handle of it does: for as long as it lives, and no longer."""

from __future__ import annotations

import os
import struct
from itertools import permutations

import pytest

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover.journal import Journal
from qgpu.nvidia import abi, uvm
from tests.guardian.asked import alloc, alloc_status, dup, free, uvm_mapping, uvm_range
from tests.guardian.charges import charged
from tests.guardian.fake_rm import PAGE
from tests.guardian.pod import LIMIT, MOST, allocate

MEMORY, FABRIC, COPY = 10, 11, 12
BASE = 1 << 40


def make_fabric(pod):
    """Put the memory on the fabric, as libcuda does with all that it allocates where cards are linked."""
    params = bytearray(64)
    struct.pack_into("<I", params, 40, MEMORY)
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(FABRIC, 3, abi.NV_MEMORY_FABRIC), bytes(params))


@pytest.fixture(params=[True, False], ids=["limited", "unlimited"])
def linked(on_card, request):
    """A pod whose memory 10 is on the fabric as 11."""
    on_card.limits = {0: LIMIT} if request.param else {}
    allocate(on_card, MEMORY, MOST)
    make_fabric(on_card)
    return on_card


@pytest.fixture
def limited(on_card):
    allocate(on_card, MEMORY, MOST)
    make_fabric(on_card)
    return on_card


def release(pod, *handles):
    for handle in handles:
        pod.call(abi.NV_ESC_RM_FREE, free(handle))


def memory(pod):
    """Return what a pod is charged for memory alone, without page tables."""
    pod.shared.table.allocations.forget_some(1000)
    return charged(pod.shared.table, "web").get(0, 0)


def test_an_object_without_memory_is_refused(linked):
    """RM attaches any number of pieces to it later, and detaches all with its lock held."""
    answer = linked.call(abi.NV_ESC_RM_ALLOC, alloc(COPY, 3, abi.NV_MEMORY_FABRIC), bytes(64))

    assert alloc_status(answer[2]) == abi.NV_ERR_NOT_SUPPORTED
    assert (7, COPY) not in linked.rm.objects


@pytest.mark.parametrize("order", [*permutations((MEMORY, FABRIC))], ids=["memory first", "fabric first"])
def test_memory_is_discharged_once_both_are_freed(linked, order):
    release(linked, order[0])
    between = memory(linked)
    release(linked, order[1])

    assert (between, memory(linked)) == (MOST, 0)


@pytest.mark.parametrize("above", [2, 7], ids=["device", "client"])
def test_what_is_above_takes_both_along(linked, above):
    release(linked, above)

    assert memory(linked) == 0


def test_memory_can_be_taken_again_and_again(linked):
    """A checkpoint frees all and takes it again; so does a framework that returns its cache."""
    answers = []
    for _ in range(3):
        release(linked, FABRIC, MEMORY)
        answers.append(allocate(linked, MEMORY, MOST))
        make_fabric(linked)

    assert answers == [abi.NV_OK] * 3
    assert memory(linked) == MOST


def test_a_copy_on_the_fabric_keeps_memory_too(linked):
    linked.call(abi.NV_ESC_RM_DUP_OBJECT, dup(COPY, FABRIC, parent=3))
    release(linked, MEMORY, FABRIC)
    between = memory(linked)
    release(linked, COPY)

    assert (between, memory(linked)) == (MOST, 0)


def test_memory_freed_first_and_unmapped_last_is_discharged(limited):
    limited.uvm(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(BASE, PAGE, FABRIC))
    limited.rm.mapped.add((7, MEMORY))
    release(limited, MEMORY, FABRIC)
    between = memory(limited)
    limited.rm.unmaps = True
    limited.rm.mapped.clear()
    limited.uvm(uvm.FREE, uvm_range(BASE, PAGE))

    assert (between, memory(limited)) == (MOST, 0)


@pytest.mark.parametrize("order", [(MEMORY, FABRIC), (FABRIC, MEMORY), (7,)])
def test_memory_mapped_in_secret_stays_charged(limited, order):
    limited.rm.mapped.add((7, MEMORY))
    release(limited, *order)

    assert memory(limited) == MOST


def test_memory_exported_from_the_fabric_stays_charged(limited):
    """An importer keeps it as long as it likes, and RM does not say which memory it is."""
    ends = os.pipe()
    limited.shared.quota.export(7, [FABRIC], ends[0])
    for end in ends:
        os.close(end)
    limited.shared.quota.carriers_closed(limited.shared.quota.closed_carriers())
    release(limited, MEMORY, FABRIC)

    assert memory(limited) == MOST


def test_a_successor_charges_it_alike(limited):
    release(limited, MEMORY)
    again = ObjectTable()
    for fact in Journal(os.dup(limited.shared.journal.fd)).read()[1]:
        again.note(fact)
    compacted = ObjectTable()
    for fact in limited.shared.table.facts():
        compacted.note(fact)

    assert charged(again, "web") == charged(compacted, "web") == charged(limited.shared.table, "web")
    assert memory(limited) == MOST

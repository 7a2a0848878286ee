"""A copy of another pod's object of the NVLink fabric keeps that pod's memory, so its own pod pays for it."""

from __future__ import annotations

import os
import struct

import pytest

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.proxy.dup_calls import PART_ON_FABRIC, UNKNOWN_ON_FABRIC
from qgpu.nvidia import abi
from tests.guardian.asked import control, dup, dup_status, free, status
from tests.guardian.charges import charged
from tests.guardian.fake_rm import PAGE
from tests.guardian.pod import LIMIT, MINOR, MOST, allocate, device_of
from tests.guardian.proxy.test_fabric_memory import make_fabric
from tests.guardian.proxy.test_memory import someone_elses

#: The other pod's memory and the object of the fabric over it, and the copy here.
THEIRS, ON_FABRIC, COPY = (9, 10), (9, 20), 30
#: The pod's own.
MEMORY, FABRIC = 10, 11


@pytest.fixture
def offered(on_card):
    """A pod with a limit, beside one that shares an object of the fabric over its memory."""
    someone_elses(on_card)
    on_card.rm.objects[ON_FABRIC] = (abi.NV_MEMORY_FABRIC, 2)
    on_card.rm.fabric[ON_FABRIC] = THEIRS
    fact = {"fact": "object", "client": 9, "handle": 20, "parent": 2, "class": abi.NV_MEMORY_FABRIC, "detail": 0}
    on_card.shared.note(fact | {"memory": 90})
    on_card.shared.note({"fact": "confirm", "client": 9, "handle": 20})
    return on_card


def bring_in(pod, handle=COPY):
    """Import what a descriptor carries."""
    params = struct.pack("<iIIII", 0, 1, 2, 3, handle)
    asked = control(abi.NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD, 7, len(params))
    return status(pod.call(abi.NV_ESC_RM_CONTROL, asked, params)[2])


def send_out(pod, handle):
    params = struct.pack("<IIIIiI", 1, 2, 2, handle, device_of(pod), 0)
    asked = control(abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD, 7, len(params))
    return status(pod.call(abi.NV_ESC_RM_CONTROL, asked, params)[2])


def by_descriptor(pod):
    pod.rm.carried = ON_FABRIC
    return bring_in(pod)


def other_ends(pod):
    for key in [key for key in pod.rm.objects if key[0] == 9]:
        del pod.rm.objects[key]
    for fact in ({"fact": "gone", "client": 9, "handle": 9}, {"fact": "exit", "pid": 1}):
        pod.shared.note(fact)
    pod.shared.note({"fact": "ended", "name": "other"})


def memory(pod, name="web"):
    """Return what a pod is charged for memory alone, without page tables."""
    pod.shared.table.allocations.forget_some(1000)
    return charged(pod.shared.table, name).get(0, 0)


def test_another_pods_object_is_not_copied_by_handle(offered):
    """Handles can be guessed; a descriptor is given away on purpose."""
    answer = offered.call(abi.NV_ESC_RM_DUP_OBJECT, dup(COPY, 20, 3, source_client=9))[2]

    assert dup_status(answer) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
    assert (7, COPY) not in offered.rm.objects


def test_memory_that_only_a_copy_keeps_is_charged_to_its_pod(offered):
    assert by_descriptor(offered) == abi.NV_OK
    both = memory(offered, "other"), memory(offered)
    other_ends(offered)

    assert both == (MOST, MOST)
    assert (memory(offered, "other"), memory(offered)) == (0, MOST)


def test_a_copy_that_does_not_fit_is_refused_and_freed(offered):
    allocate(offered, MEMORY, LIMIT - MOST + PAGE)

    assert by_descriptor(offered) == abi.NV_ERR_NO_MEMORY
    assert (7, COPY) not in offered.rm.objects
    assert memory(offered) == LIMIT - MOST + PAGE


def test_a_freed_copy_of_others_memory_stays_charged(offered):
    """UVM may have mapped it, and RM's figures show nothing of memory that another process made."""
    by_descriptor(offered)
    offered.call(abi.NV_ESC_RM_FREE, free(COPY))
    between = memory(offered)
    offered.shared.note({"fact": "ended", "name": "web"})
    ended = memory(offered)
    offered.shared.note({"fact": "gone", "client": 7, "handle": 7})

    assert (between, ended, memory(offered)) == (MOST, MOST, 0)


def test_a_copy_of_unknown_size_is_refused_and_freed(offered):
    offered.rm.fabric_says[ON_FABRIC] = None

    assert (by_descriptor(offered), memory(offered)) == (abi.NV_ERR_NOT_SUPPORTED, 0)
    assert (7, COPY) not in offered.rm.objects


def test_flexible_object_is_not_copied_under_a_limit(offered):
    """It gets memory later, of which nothing is known here."""
    offered.rm.fabric_says[ON_FABRIC] = (MOST, abi.NV00F8_ALLOC_FLAGS_FLEXIBLE_FLA)

    assert by_descriptor(offered) == abi.NV_ERR_NOT_SUPPORTED
    assert (7, COPY) not in offered.rm.objects
    assert offered.shared.refusals.counts["web", UNKNOWN_ON_FABRIC] == 1


def test_a_pod_without_a_limit_copies_any_object(offered):
    offered.limits.clear()
    offered.rm.fabric_says[ON_FABRIC] = (PAGE, abi.NV00F8_ALLOC_FLAGS_FLEXIBLE_FLA)

    assert by_descriptor(offered) == abi.NV_OK
    offered.call(abi.NV_ESC_RM_FREE, free(COPY))
    assert memory(offered) == 0


def test_own_object_that_comes_back_is_charged_once(on_card):
    allocate(on_card, MEMORY, MOST)
    make_fabric(on_card)
    assert send_out(on_card, FABRIC) == abi.NV_OK

    assert (bring_in(on_card), memory(on_card)) == (abi.NV_OK, MOST)


def test_own_object_comes_back_below_another_card_uncharged(on_card):
    """A program maps memory of one card on another, by a handle below that one."""
    allocate(on_card, MEMORY, MOST)
    make_fabric(on_card)
    send_out(on_card, FABRIC)
    on_card.minors |= {1: MINOR}
    on_card.limits |= {1: PAGE}
    on_card.shared.table.objects[7, 2].detail = 1

    assert (bring_in(on_card), memory(on_card)) == (abi.NV_OK, MOST)
    assert charged(on_card.shared.table, "web").get(1) is None


@pytest.mark.parametrize("says", [None, (PAGE, 0)], ids=["nothing", "a part"])
def test_object_over_a_part_of_memory_is_not_exported(on_card, says):
    """An import of it says of itself only that part, and keeps all."""
    allocate(on_card, MEMORY, MOST)
    make_fabric(on_card)
    on_card.rm.fabric_says[7, FABRIC] = says

    assert send_out(on_card, FABRIC) == abi.NV_ERR_INSUFFICIENT_RESOURCES
    assert on_card.shared.refusals.counts["web", PART_ON_FABRIC] == 1
    assert not on_card.shared.table.allocations.carriers()


def test_a_successor_charges_a_copy_alike(offered):
    by_descriptor(offered)
    again, compacted = ObjectTable(), ObjectTable()
    for fact in Journal(os.dup(offered.shared.journal.fd)).read()[1]:
        again.note(fact)
    for fact in offered.shared.table.facts():
        compacted.note(fact)

    assert charged(again, "web") == charged(compacted, "web") == {0: MOST}

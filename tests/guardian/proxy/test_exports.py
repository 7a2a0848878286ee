"""Memory that one client exports and another of the same pod imports counts once, by RM's word on what it is."""

from __future__ import annotations

import os
import struct
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.proxy import control_calls
from qgpu.nvidia import abi
from tests.guardian.asked import control, dup, dup_status, free, status
from tests.guardian.charges import charged
from tests.guardian.pod import allocate, device_of, held

SIZE = 1 << 20
#: RM makes it for a TSG (KERNEL_GRAPHICS_CONTEXT).
GRAPHICS_CONTEXT = 0x90
POD = {"fact": "pod", "name": "web", "grants": {}}


@pytest.fixture
def sharing(on_card):
    """A pod with a client and a card, and memory of its own under handle 10."""
    assert allocate(on_card, 10, SIZE) == abi.NV_OK
    return on_card


def export(pod, handle):
    params = struct.pack("<IIIIiI", 1, 2, 2, handle, device_of(pod), 0)
    return pod.call(abi.NV_ESC_RM_CONTROL, control(abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD, 7, len(params)), params)


def take_in(pod, handle):
    params = struct.pack("<iIIII", 0, 1, 2, 2, handle)
    answer = pod.call(abi.NV_ESC_RM_CONTROL, control(abi.NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD, 7, len(params)), params)
    return status(answer[2])


def take_in_all(pod, *handles, count=None):
    """Import several objects from one file."""
    places = struct.pack(f"<{len(handles)}I", *handles).ljust(512, b"\0")
    count = len(handles) if count is None else count
    params = struct.pack("<iI", device_of(pod), 2) + places + bytes(128) + struct.pack("<HH", count, 0)
    answer = pod.call(abi.NV_ESC_RM_CONTROL, control(abi.NV0000_OS_UNIX_IMPORT_OBJECTS_FROM_FD, 7, len(params)), params)
    return status(answer[2])


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("rm_class", [abi.KEPLER_CHANNEL_GROUP_A, abi.FERMI_CONTEXT_SHARE_A, GRAPHICS_CONTEXT])
def test_what_holds_a_contexts_buffers_is_not_exported(sharing, rm_class, limited):
    """RM would keep a duplicate, and its buffers uncharged, when the TSG is gone."""
    sharing.limits = {0: 1 << 30} if limited else {}
    sharing.rm.objects[7, 40] = (rm_class, 2)

    assert status(export(sharing, 40)[2]) == abi.NV_ERR_INSUFFICIENT_RESOURCES
    assert sharing.shared.refusals.counts["web", "second handle"] == 1


def test_a_graphics_context_gets_no_second_handle(sharing):
    sharing.rm.objects[7, 40] = (GRAPHICS_CONTEXT, 2)

    assert dup_status(sharing.call(abi.NV_ESC_RM_DUP_OBJECT, dup(41, 40))[2]) == abi.NV_ERR_NOT_SUPPORTED
    assert (7, 41) not in sharing.rm.objects


def test_an_import_of_nothing_frees_nothing(sharing):
    assert take_in_all(sharing, 10, count=0) == abi.NV_OK
    assert (7, 10) in sharing.rm.objects
    assert held(sharing) == SIZE


@pytest.mark.parametrize("source", [None, (7, 10)])
def test_an_import_over_an_object_is_refused(sharing, source):
    """RM skips a place without an export, and frees what stands there when a later one fails."""
    sharing.rm.carriers = [source]

    assert take_in_all(sharing, 10) == abi.NV_ERR_INSERT_DUPLICATE_NAME
    assert (7, 10) in sharing.rm.objects
    assert held(sharing) == SIZE


def test_places_without_an_export_are_not_charged(sharing):
    export(sharing, 10)
    sharing.rm.carriers = [None, (7, 10)]

    assert take_in_all(sharing, 30, 31) == abi.NV_OK
    assert {key for key in sharing.shared.table.objects if key[1] in (30, 31)} == {(7, 31)}
    assert held(sharing) == SIZE


def test_imports_that_do_not_fit_are_all_freed(sharing):
    sharing.rm.objects |= {(9, 9): (abi.NV01_ROOT_CLIENT, 0), (9, 10): (abi.NV01_MEMORY_LOCAL_USER, 9)}
    sharing.rm.sizes[9, 10] = SIZE
    sharing.rm.carriers = [(7, 10), (9, 10)]
    sharing.limits[0] = held(sharing) + SIZE // 2

    assert take_in_all(sharing, 30, 31) == abi.NV_ERR_NO_MEMORY
    assert not {(7, 30), (7, 31)} & sharing.rm.objects.keys()
    assert not {(7, 30), (7, 31)} & sharing.shared.table.objects.keys()
    assert held(sharing) == SIZE


def test_a_file_that_is_no_nvidia_file_is_not_given_to_rm(sharing):
    """Nor is it closed under a lock: a socket that lingers takes as long as its owner likes."""
    held_locks = []
    close = os.close

    def watched(fd):
        held_locks.append(sharing.shared.pod_lock("web")._is_owned() or sharing.shared.lock._is_owned())
        close(fd)

    params = struct.pack("<IIIIiI", 1, 2, 2, 10, 2, 0)  # its stderr
    answer = control(abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD, 7, len(params))
    seen = []
    sharing.rm.answers[abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD] = lambda said: seen.append(bytes(said))
    with mock.patch.object(control_calls.os, "close", watched):
        sharing.call(abi.NV_ESC_RM_CONTROL, answer, params)

    assert [struct.unpack_from("<i", said, 16)[0] for said in seen] == [-1]
    assert held_locks
    assert not any(held_locks)
    assert not sharing.shared.table.allocations.carriers()


def test_what_is_imported_again_within_a_pod_is_charged_once(sharing):
    export(sharing, 10)

    assert (take_in(sharing, 11), take_in(sharing, 12), held(sharing)) == (abi.NV_OK, abi.NV_OK, SIZE)


def test_a_pod_at_its_limit_may_import_what_is_its_own(sharing):
    sharing.limits = {0: SIZE}
    export(sharing, 10)

    assert (take_in(sharing, 11), held(sharing)) == (abi.NV_OK, SIZE)


def test_what_a_pod_imports_of_somebody_elses_is_charged_to_it(sharing):
    export(sharing, 10)
    sharing.rm.objects[99, 5] = (abi.NV01_MEMORY_LOCAL_USER, 0)
    sharing.rm.sizes[99, 5] = SIZE
    sharing.rm.carried = (99, 5)

    assert (take_in(sharing, 11), held(sharing)) == (abi.NV_OK, 2 * SIZE)


@pytest.mark.parametrize("compacted", [False, True])
def test_a_successor_knows_memory_on_an_unknown_card(sharing, compacted):
    export(sharing, 10)
    sharing.rm.objects[99, 5] = (abi.NV01_MEMORY_LOCAL_USER, 0)
    sharing.rm.sizes[99, 5] = SIZE
    take_in(sharing, 11)
    sharing.rm.carried = (99, 5)
    take_in(sharing, 12)
    sharing.call(abi.NV_ESC_RM_DUP_OBJECT, dup(13, 12))
    sharing.call(abi.NV_ESC_RM_FREE, free(12))
    table = ObjectTable()
    for fact in list(sharing.shared.table.facts()) if compacted else sharing.shared.journal.read()[1]:
        table.note(fact)

    for known in (sharing.shared.table, table):
        found = [memory.foreign for handle in (10, 11, 13) for memory in known.allocations.behind([(7, handle)])]
        assert found == [False, False, True]


def test_import_whose_size_rm_does_not_tell_is_freed(sharing):
    export(sharing, 10)
    sharing.rm.sizes[7, 10] = 0

    assert take_in(sharing, 11) == abi.NV_ERR_INVALID_STATE
    assert (7, 11) not in sharing.rm.objects


def test_export_without_handle_stays_charged_and_imports_add(sharing):
    """Nobody can say any more what the descriptor carries: rather twice than not at all."""
    export(sharing, 10)
    sharing.call(abi.NV_ESC_RM_FREE, free(10))

    assert (take_in(sharing, 11), held(sharing)) == (abi.NV_OK, 2 * SIZE)


def test_export_stays_charged_after_import_or_source_is_freed(sharing):
    export(sharing, 10)
    take_in(sharing, 11)
    sharing.call(abi.NV_ESC_RM_FREE, free(11))
    one = held(sharing)
    sharing.call(abi.NV_ESC_RM_FREE, free(10))

    assert (one, held(sharing)) == (SIZE, SIZE)


def test_a_successor_of_the_guardian_counts_it_once_too(sharing):
    export(sharing, 10)
    take_in(sharing, 11)
    again = ObjectTable()
    for fact in Journal(os.dup(sharing.shared.journal.fd)).read()[1]:
        again.note(fact)

    assert charged(again, "web") == {0: SIZE}


def fact(kind, **more):
    return {"fact": kind, **more}


def size_of(number):
    return (1000 + number) << 16


def thing(handle, number):
    size = size_of(number)
    return fact("object", client=7, handle=handle, parent=2, detail=size, memory=number) | {"class": 0x40}


steps = st.lists(
    st.tuples(st.sampled_from(["make", "export", "import", "free"]), st.integers(10, 16), st.integers(10, 16)),
    max_size=30,
)


@given(steps)
def test_allocation_charged_once_while_handle_or_export_holds_it(story):
    """The naive twin: a set of allocations by handle, and a set of those exported."""
    table = ObjectTable()
    device = fact("object", client=7, handle=2, parent=7, detail=0) | {"class": abi.NV01_DEVICE_0}
    for first in (POD, fact("process", pid=1, pod="web"), fact("client", client=7, pid=1, fd=3), device):
        table.note(first)
    handles, exported = {}, set()
    for kind, one, other in story:
        if kind == "make" and one not in handles:
            number = table.allocations.next_number()
            table.note(thing(one, number))
            handles[one] = number
        elif kind == "export" and one in handles:
            table.note(fact("pin", memory=handles[one], keeper=0))
            exported.add(handles[one])
        elif kind == "import" and one in handles and handles[one] in exported and other not in handles:
            found = table.exported("web", 0, size_of(handles[one]), 10)
            assert [memory.number for memory in found] == [handles[one]]
            table.note(thing(other, handles[one]))
            handles[other] = handles[one]
        elif kind == "free" and one in handles:
            table.note(fact("gone", client=7, handle=one))
            del handles[one]

    assert charged(table, "web").get(0, 0) == sum(size_of(number) for number in {*handles.values(), *exported})


def test_exports_of_a_neighbours_memory_leave_it_as_it_is(sharing):
    for fact in (
        POD | {"name": "other"},
        {"fact": "process", "pid": 4_194_000, "pod": "other"},
        {"fact": "client", "client": 99, "pid": 4_194_000, "fd": 3},
        {"fact": "object", "client": 99, "handle": 2, "parent": 99, "class": abi.NV01_DEVICE_0, "detail": 0},
        {"fact": "object", "client": 99, "handle": 10, "parent": 2, "class": 0x40, "detail": SIZE, "memory": 90},
    ):
        sharing.shared.note(fact)
    params = struct.pack("<IIIIiI", 1, 2, 2, 10, device_of(sharing), 0)
    asked = control(abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD, 99, len(params), 99)
    sharing.call(abi.NV_ESC_RM_CONTROL, asked, params)
    sharing.shared.quota.map(sharing.process.pid, 1 << 30, SIZE, [bytes(16)], (99, 10))
    memory = sharing.shared.table.allocations.memories[90]

    assert (memory.pinned, memory.carriers) == (False, set())
    assert not sharing.shared.table.allocations.is_mapped(90)


def test_an_export_that_rm_refuses_counts_while_its_file_is_open(sharing):
    """The file keeps its mark in an epoll, whose watches are few."""
    sharing.shared.files, perform = sharing.files, sharing.rm._control
    sharing.rm._control = lambda data: perform(data) or sharing.rm._status(data, 28, abi.NV_ERR_INVALID_ARGUMENT) or 0

    assert status(export(sharing, 10)[2]) == abi.NV_ERR_INVALID_ARGUMENT
    assert sharing.shared.table.allocations.carries("web") == (1, 1)
    assert not sharing.shared.quota.closed_carriers()

"""The guardian notes what a checkpoint cannot restore before a process gets it, and forgets it with the RM client."""

from __future__ import annotations

import os
import struct

import pytest

from qgpu.guardian.accounting.client_entries import IMPORTED, PEER_ACCESS
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover.journal import Journal
from qgpu.nvidia import abi
from tests.guardian.asked import alloc, control, dup, free
from tests.guardian.pod import allocate

SIZE = 1 << 20


def unrestorable(pod, name="web"):
    return pod.shared.table.unrestorable_of(name)


@pytest.fixture
def beside(on_card):
    """The pod, with another process in it whose client 9 has memory 10."""
    on_card.shared.note({"fact": "process", "pid": 1, "pod": "web"})
    on_card.shared.note({"fact": "client", "client": 9, "pid": 1, "fd": 3})
    for handle, rm_class, parent in ((9, 0, 9), (2, abi.NV01_DEVICE_0, 9), (10, abi.NV01_MEMORY_LOCAL_USER, 2)):
        on_card.rm._make(9, handle, rm_class, parent, SIZE)
    return on_card


def open_memory(pod):
    """Duplicate another process's memory, as cuIpcOpenMemHandle does."""
    pod.call(abi.NV_ESC_RM_DUP_OBJECT, dup(20, 10, source_client=9))


def allow_peers(pod):
    """Make what cuCtxEnablePeerAccess makes."""
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(21, 7, abi.NV50_P2P), struct.pack("<8I", 3, 3, 0, 0, 0, 0, 0, 0))


def take_in(pod):
    params = struct.pack("<iIIII", 0, 1, 2, 2, 22)
    pod.call(abi.NV_ESC_RM_CONTROL, control(abi.NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD, 7, len(params)), params)


def export(pod, handle):
    params = struct.pack("<IIIIiI", 1, 2, 2, handle, 2, 0)
    pod.call(abi.NV_ESC_RM_CONTROL, control(abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD, 7, len(params)), params)


def test_memory_of_its_own_can_be_restored(on_card):
    allocate(on_card, 10, SIZE)
    on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(20, 10))
    export(on_card, 10)

    assert unrestorable(on_card) == []


@pytest.mark.parametrize(("get", "what"), [(open_memory, IMPORTED), (take_in, IMPORTED), (allow_peers, PEER_ACCESS)])
def test_what_cannot_be_restored_is_noted(beside, get, what):
    beside.rm.carried = (9, 10)
    get(beside)

    assert unrestorable(beside) == [what]


def test_it_is_noted_before_rm_makes_it(beside):
    seen = []
    perform = beside.rm._dup
    beside.rm._dup = lambda data: (seen.append(unrestorable(beside)), perform(data))[1]
    open_memory(beside)

    assert seen == [[IMPORTED]]


def test_it_is_forgotten_with_the_client(beside):
    open_memory(beside)
    beside.call(abi.NV_ESC_RM_FREE, free(20))
    kept = unrestorable(beside)
    beside.call(abi.NV_ESC_RM_FREE, free(7))

    assert (kept, unrestorable(beside)) == ([IMPORTED], [])


@pytest.mark.parametrize("compacted", [False, True])
def test_a_successor_knows_it_too(beside, compacted):
    open_memory(beside)
    allow_peers(beside)
    again = ObjectTable()
    facts = list(beside.shared.table.facts()) if compacted else Journal(os.dup(beside.shared.journal.fd)).read()[1]
    for fact in facts:
        again.note(fact)

    assert again.unrestorable_of("web") == [IMPORTED, PEER_ACCESS]


def test_it_goes_to_the_pod_that_takes_the_client(beside):
    open_memory(beside)
    beside.shared.note({"fact": "pod", "name": "other", "grants": {}})
    beside.shared.note({"fact": "process", "pid": 2, "pod": "other"})
    beside.shared.note({"fact": "owner", "client": 7, "pod": "other", "pid": 2, "fd": 5})

    assert (unrestorable(beside), unrestorable(beside, "other")) == ([], [IMPORTED])

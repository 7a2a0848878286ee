"""Mappings for the CPU: the guardian makes them for the clients that it made, the kernel for its own."""

from __future__ import annotations

import errno
import struct

import pytest

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.rm_object import gone_fact
from qgpu.guardian.proxy import cpu_mappings
from qgpu.guardian.rules import escapes
from qgpu.nvidia import abi
from tests.guardian.asked import alloc
from tests.guardian.failover.test_successors import successor_of

#: Bytes of each call.
SIZES = {number: size for number, size in escapes.WATCHED if number in escapes.MAPPINGS}
KERNELS = 7


@pytest.fixture
def made(on_card):
    """A client that the guardian made for the pod, beside the one that the kernel made."""
    return struct.unpack_from("<I", on_card.call(abi.NV_ESC_RM_ALLOC, alloc(0, 0, 0, client=0))[2], 8)[0]


def mapping(pod, client, number):
    """Make a call that maps object 30 of a client; return the calls that RM was asked."""
    argument = struct.pack("<III", client, 3, 30) + bytes(SIZES[number] - 12)
    pod.rm.seen.clear()
    pod.call(number, argument)
    return [asked for asked, _ in pod.rm.seen]


def memory_with_mapping(pod, client):
    asked = struct.pack("<IIII", client, 2, 9, abi.NV01_MEMORY_SYSTEM) + bytes(32) + struct.pack("<ii", 0, 0)
    pod.rm.seen.clear()
    pod.call(abi.NV_ESC_RM_ALLOC_MEMORY, asked)
    return [number for number, _ in pod.rm.seen]


@pytest.mark.parametrize("number", sorted(SIZES))
def test_guardian_maps_memory_of_clients_that_it_made(on_card, made, number):
    assert mapping(on_card, made, number) == [number]
    for client in (KERNELS, 99):  # the kernel performs these, on the pod's own file
        assert mapping(on_card, client, number) == []


def test_only_the_maker_of_a_client_maps_its_memory(on_card, made):
    """As RM has it for clients that the kernel makes: a child's count would end with the child."""
    on_card.shared.table.clients[made].maker += 1

    assert [mapping(on_card, made, number) for number in sorted(SIZES)] == [
        [] if number == abi.NV_ESC_RM_MAP_MEMORY else [number] for number in sorted(SIZES)
    ]


@pytest.mark.parametrize("number", sorted(SIZES))
def test_another_pods_client_is_left_to_the_kernel(on_card, made, number):
    on_card.shared.table.clients[made].pod = "other"

    assert mapping(on_card, made, number) == []


def test_guardian_makes_system_memory_with_its_mapping(on_card, made):
    assert memory_with_mapping(on_card, made) == [abi.NV_ESC_RM_ALLOC_MEMORY]
    assert memory_with_mapping(on_card, KERNELS) == []


@pytest.mark.parametrize(("limited", "calls"), [(True, 2), (False, 4)])
def test_a_limited_process_maps_only_so_often(on_card, made, monkeypatch, limited, calls):
    """RM undoes all mappings of a client at once, and nothing tells of those that the kernel removed."""
    monkeypatch.setattr(cpu_mappings, "_MOST", 2)
    if not limited:
        on_card.limits.clear()

    assert sum(bool(mapping(on_card, made, abi.NV_ESC_RM_MAP_MEMORY)) for _ in range(4)) == calls
    if limited:
        argument = struct.pack("<III", KERNELS, 3, 30) + bytes(SIZES[abi.NV_ESC_RM_MAP_MEMORY] - 12)
        assert on_card.call(abi.NV_ESC_RM_MAP_MEMORY, argument)[:2] == (-1, errno.ENOMEM)


def test_a_successor_counts_mappings_of_a_dead_guardian(on_card, made, monkeypatch):
    monkeypatch.setattr(cpu_mappings, "_MOST", 4)
    monkeypatch.setattr(cpu_mappings, "_STEP", 2)
    before = [mapping(on_card, made, abi.NV_ESC_RM_MAP_MEMORY) for _ in range(2)]
    successor_of(on_card)
    after = [mapping(on_card, made, abi.NV_ESC_RM_MAP_MEMORY) for _ in range(3)]

    assert [len(each) for each in before + after] == [1, 1, 1, 1, 0]


def test_mappings_count_as_long_as_a_client_of_their_maker(on_card, made, monkeypatch):
    """RM undoes them with the client: when a process resumes, it makes others in a new one."""
    monkeypatch.setattr(cpu_mappings, "_STEP", 1)
    table, pid = on_card.shared.table, on_card.process.pid
    mapping(on_card, made, abi.NV_ESC_RM_MAP_MEMORY)
    on_card.shared.note({"fact": "exit", "pid": pid})  # another process has its files
    on_card.shared.note(gone_fact((KERNELS, KERNELS)))
    successor_of(on_card)
    kept = dict(on_card.shared.table.cpu_mappings)
    rebuilt = ObjectTable()
    for fact in list(table.facts()):
        rebuilt.note(fact)
    table.note(gone_fact((made, made)))

    assert (kept, rebuilt.cpu_mappings, table.cpu_mappings) == ({pid: 1}, {pid: 1}, {})

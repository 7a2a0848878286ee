"""Page tables lie on the card and have no handle: under a limit, address space that brings its own is not for pods."""

from __future__ import annotations

import errno
import os
import struct

import pytest

from qgpu.guardian.accounting import memory_quota, object_table
from qgpu.guardian.accounting.address_space import AddressSpace
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.rm_object import NO_INSTANCE, RmObject
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.proxy import alloc_checks, held_uvm_files, object_claims
from qgpu.guardian.proxy.handler_context import HandlerContext
from qgpu.linux import fd_budget
from qgpu.nvidia import abi, uvm
from tests.guardian.asked import (
    DEVICE_PARAMS,
    alloc,
    alloc_status,
    device,
    free,
    heap,
    heap_status,
    uvm_mapping,
    uvm_mapping_status,
    uvm_range,
)
from tests.guardian.failover.test_successors import successor_of
from tests.guardian.pod import held

VIRTUAL, LAZY, MANAGED_ELSEWHERE, SPARSE = 0x80000, 0x400, 0x400000, 0x4000000


def space(pod, flags):
    """Ask for address space, as an object and of the old heap; return RM's two answers."""
    params = struct.pack("<III", 7, 0, flags) + bytes(116)
    new = pod.call(abi.NV_ESC_RM_ALLOC, alloc(10, 2, abi.NV50_MEMORY_VIRTUAL), params)
    old = pod.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, heap(11, flags=flags))
    return alloc_status(new[2]), heap_status(old[2])


def test_address_space_with_its_tables_is_refused_under_a_limit(on_card):
    refused = (abi.NV_ERR_NOT_SUPPORTED,) * 2

    assert space(on_card, VIRTUAL) == refused
    assert space(on_card, VIRTUAL | LAZY | SPARSE) == refused


@pytest.mark.parametrize(
    "flags", [VIRTUAL | LAZY, VIRTUAL | MANAGED_ELSEWHERE, 0x8C415], ids=["lazy", "managed", "cuda"]
)
def test_address_space_whose_tables_come_later_is_made(on_card, flags):
    assert space(on_card, flags) == (abi.NV_OK,) * 2


def test_without_a_limit_all_of_it_is_made(on_card):
    on_card.limits = {}

    assert space(on_card, VIRTUAL) == (abi.NV_OK,) * 2


def test_devices_beyond_free_ones_must_fit_with_address_space(on_card, monkeypatch):
    monkeypatch.setattr(object_table, "SPACE_BYTES", 1 << 16)
    monkeypatch.setattr(object_claims, "_FREE_DEVICES", 2)
    on_card.limits[0] = 1
    answers = [on_card.call(abi.NV_ESC_RM_ALLOC, device(50 + i), DEVICE_PARAMS)[2] for i in range(2)]

    assert [alloc_status(answer) for answer in answers] == [abi.NV_OK, abi.NV_ERR_NO_MEMORY]
    assert (7, 51) not in on_card.shared.table.objects


@pytest.mark.parametrize(("limited", "most"), [(True, 4), (False, 16)])
def test_a_client_has_a_bounded_number_of_devices_on_a_card(on_card, limited, most):
    """Under a limit the guardian asks RM about a process as it frees: RM goes through its objects once a device."""
    on_card.limits = on_card.limits if limited else {}
    answers = [
        alloc_status(on_card.call(abi.NV_ESC_RM_ALLOC, device(50 + i), DEVICE_PARAMS)[2]) for i in range(most + 2)
    ]
    with on_card.shared.lock:
        on_card.shared.table.note({"fact": "gone", "client": 7, "handle": 50})
    again = alloc_status(on_card.call(abi.NV_ESC_RM_ALLOC, device(80), DEVICE_PARAMS)[2])

    assert answers == [abi.NV_OK] * (most - 1) + [abi.NV_ERR_INSUFFICIENT_RESOURCES] * 3  # it has one already
    assert again == abi.NV_OK
    assert on_card.shared.refusals.counts["web", alloc_checks.TOO_MANY_DEVICES] == 3


def first_device(pod, client):
    """Return what a pod's call asks for that makes the first device of one more client."""
    pod.rm.objects[client, client] = (abi.NV01_ROOT_CLIENT, 0)
    pod.shared.note({"fact": "client", "client": client, "pid": pod.process.pid, "fd": 3})
    return RmObject(client, 2, client, abi.NV01_DEVICE_0, NO_INSTANCE)


@pytest.fixture
def two_limits(on_card, monkeypatch):
    """A pod with two cards, and room on the second for three address spaces."""
    monkeypatch.setattr(object_table, "SPACE_BYTES", 1 << 16)
    monkeypatch.setattr(object_claims, "_FREE_DEVICES", 2)
    on_card.limits[1] = 3 << 16
    return on_card


def test_devices_on_an_unknown_card_must_fit_on_every_card(two_limits):
    answers = [two_limits.shared.claims.claim(first_device(two_limits, client)) for client in range(20, 24)]

    assert answers == [abi.NV_OK] * 3 + [abi.NV_ERR_NO_MEMORY]
    assert [two_limits.shared.quota.used("web", card) for card in (0, 1)] == [3 << 16] * 2


def test_a_device_counts_on_one_card_once_that_is_known(two_limits):
    device = first_device(two_limits, 20)
    two_limits.shared.claims.claim(device)
    two_limits.shared.claims.set_instance(device, 0)

    assert [two_limits.shared.quota.used("web", card) for card in (0, 1)] == [1 << 16, 0]


def test_device_on_an_unknown_card_moves_with_its_client(two_limits):
    two_limits.shared.claims.claim(first_device(two_limits, 20))
    two_limits.shared.note({"fact": "owner", "client": 20, "pod": "other", "pid": two_limits.process.pid, "fd": 3})
    moved = [two_limits.shared.quota.used(name, 1) for name in ("web", "other")]
    two_limits.shared.note({"fact": "gone", "client": 20, "handle": 20})

    assert (moved, two_limits.shared.quota.used("other", 1)) == ([0, 1 << 16], 0)


@pytest.mark.parametrize("limited", [True, False])
def test_memory_at_fixed_card_address_is_refused_under_a_limit(on_card, limited):
    """RM takes all that a large alignment spans, and tells of what was asked for."""
    on_card.limits = {0: 1 << 40} if limited else {}
    params = bytes(8) + struct.pack("<I", 0x1C011) + bytes(52) + struct.pack("<Q", 1 << 16) + bytes(56)
    new = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(10, 2, abi.NV01_MEMORY_LOCAL_USER), params)
    old = on_card.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, heap(11, 1 << 16, flags=0x1C011))

    answers = alloc_status(new[2]), heap_status(old[2])
    assert answers == ((abi.NV_ERR_NOT_SUPPORTED,) * 2 if limited else (abi.NV_OK,) * 2)


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("half", [1 << 29, 2 << 29])
def test_memory_in_one_half_of_a_card_is_refused_under_a_limit(on_card, limited, half):
    """RM sets 64 MiB aside for it, and tells of what was asked for."""
    on_card.limits = {0: 1 << 40} if limited else {}
    params = bytes(28) + struct.pack("<I", half) + bytes(32) + struct.pack("<Q", 1 << 16) + bytes(56)
    new = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(10, 2, abi.NV01_MEMORY_LOCAL_USER), params)
    old = bytearray(heap(11, 1 << 16, flags=0x1C001))
    struct.pack_into("<I", old, 144, half)
    old = on_card.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, bytes(old))

    answers = alloc_status(new[2]), heap_status(old[2])
    assert answers == ((abi.NV_ERR_NOT_SUPPORTED,) * 2 if limited else (abi.NV_OK,) * 2)


def test_address_spaces_take_of_the_card_and_must_fit(on_card, monkeypatch):
    monkeypatch.setattr(object_table, "SPACE_BYTES", 1 << 16)
    on_card.limits[0] = 3 << 16
    answers = [on_card.call(abi.NV_ESC_RM_ALLOC, alloc(40 + i, 2, abi.FERMI_VASPACE_A), bytes(64))[2] for i in range(4)]
    full = held(on_card)
    on_card.call(abi.NV_ESC_RM_FREE, free(40))

    assert [alloc_status(answer) for answer in answers] == [abi.NV_OK] * 3 + [abi.NV_ERR_NO_MEMORY]
    assert (full, held(on_card)) == (3 << 16, 2 << 16)


REGION, POOL, SPARSE_RANGE = uvm.MAP_DYNAMIC_PARALLELISM_REGION, uvm.ALLOC_SEMAPHORE_POOL, uvm.MAP_EXTERNAL_SPARSE
TABLES = 16 << 10


@pytest.mark.parametrize(("request_", "size", "at"), [(REGION, 40, 32), (SPARSE_RANGE, 40, 32), (POOL, 9248, 9240)])
def test_page_tables_of_non_memory_ranges_charged_until_freed(on_card, request_, size, at):
    """UVM makes them for a page here and a page there, as many as are asked for."""
    on_card.limits[0] = 3 * TABLES
    place = (struct.pack("<QQ", page << 40, 4096) for page in range(1, 6))
    answers = [on_card.uvm(request_, where + bytes(size - 16))[2] for where in place]
    full = held(on_card)
    for page in range(1, 6):
        on_card.uvm(uvm.FREE, struct.pack("<QQQ", page << 40, 4096, 0))

    said = [struct.unpack_from("<I", answer, at)[0] for answer in answers]
    assert said == [abi.NV_OK] * 3 + [abi.NV_ERR_NO_MEMORY] * 2
    assert (full, held(on_card)) == (3 * TABLES, 0)


@pytest.mark.parametrize(
    ("pages", "left"), [(1, 2), (2, 1), (3, 0), (4, 3)], ids=["one mapping", "two", "all", "more than is mapped"]
)
def test_a_free_without_length_ends_what_uvm_frees(on_card, pages, left):
    """Since branch 590 a program does not say how long the range is, and what lies behind the call is its own."""
    on_card.rm.uvm_version, on_card.rm.ranges = "595.45", {1 << 40: pages << 12}
    on_card.shared.uvm_layouts = uvm.layouts("595.45")
    for page in range(3):
        on_card.uvm(SPARSE_RANGE, struct.pack("<QQ", (1 << 40) + (page << 12), 4096) + bytes(24))
    on_card.uvm(uvm.FREE, struct.pack("<QQQ", 1 << 40, 1 << 46, 0))

    (space,) = on_card.shared.table.allocations.mappings.values() or (None,)
    assert (len(space.mappings) if space else 0) == left


@pytest.mark.parametrize("size", abi.MAP_MEMORY_DMA)
def test_rm_dma_mappings_refused_under_limit_else_made(on_card, size):
    own, others = (struct.pack("<IIII", client, 2, 9, 30).ljust(size, b"\0") for client in (7, 9))
    on_card.rm.objects |= {(7, 9): (abi.NV01_MEMORY_VIRTUAL, 2), (7, 30): (abi.NV01_MEMORY_SYSTEM, 2)}
    under = on_card.call(abi.NV_ESC_RM_MAP_MEMORY_DMA, own)[:2]
    on_card.limits = {}

    assert under == (-1, errno.EOPNOTSUPP)
    on_card.rm.seen.clear()
    assert on_card.call(abi.NV_ESC_RM_MAP_MEMORY_DMA, others)[:2] == (-1, errno.EPERM)
    assert on_card.call(abi.NV_ESC_RM_MAP_MEMORY_DMA, own)[0] == 0
    assert [number for number, _ in on_card.rm.seen] == [abi.NV_ESC_RM_MAP_MEMORY_DMA]


def test_without_a_limit_nothing_is_kept_of_what_is_mapped(on_card):
    on_card.limits = {}
    on_card.uvm(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(1 << 40, 1 << 21, 10))
    on_card.uvm(REGION, struct.pack("<QQ", 1 << 41, 4096) + bytes(24))

    assert on_card.shared.table.allocations.mappings == {}


def test_mappings_over_many_others_are_refused(on_card, monkeypatch):
    """UVM refuses them too, but each was tracked, and an unmapping looked at all of them."""
    monkeypatch.setattr(memory_quota, "_MOST_OVERLAPS", 2)
    asked = [uvm_mapping(1 << 40, pages << 16, 10) for pages in range(1, 4)]
    answers = [on_card.uvm(uvm.MAP_EXTERNAL_ALLOCATION, mapping)[2] for mapping in asked]

    assert [uvm_mapping_status(answer) for answer in answers] == [0xFFFF, 0xFFFF, abi.NV_ERR_NO_MEMORY]


def test_mapping_longer_than_an_address_space_is_refused(on_card, monkeypatch):
    """Before all mappings in it are looked at: UVM refuses it, so a pod can ask for ever."""
    monkeypatch.setattr(AddressSpace, "count_overlaps", lambda *_: pytest.fail("looked"))
    answer = on_card.uvm(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(1 << 21, 1 << 63, 10))[2]

    assert uvm_mapping_status(answer) == abi.NV_ERR_NO_MEMORY


@pytest.fixture
def two_files(on_card):
    """A pod whose process has a card on UVM files A and B, and a mapping on A; ``on_b`` makes a call on B."""
    on_card.uvm(uvm.REGISTER_GPU, bytes(40))
    on_card.uvm(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(1 << 40, 1 << 21, 10))
    b = os.open("/dev/random", os.O_RDWR)

    def on_b(request, argument):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HandlerContext, "take_fd", lambda ctx, pod_call, fd: os.dup(b))
            return on_card.uvm(request, argument)

    on_card.on_b = on_b
    yield on_card
    os.close(b)


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("succeeds", [True, False])
def test_unmapping_on_another_file_leaves_mappings_charged(two_files, registered, succeeds):
    """It may have ranges at the same addresses, which are free to make."""
    before = held(two_files)
    if registered:
        two_files.on_b(uvm.REGISTER_GPU, bytes(40))
    if succeeds:
        successor_of(two_files)
    for request, argument in ((uvm.UNMAP_EXTERNAL, uvm_range(0, 1 << 46)), (uvm.FREE, uvm_range(0, 1 << 46)[:24])):
        assert two_files.on_b(request, argument)[0] == 0

    assert held(two_files) == before > 0


def test_unmapping_beside_another_file_leaves_mappings_charged(two_files):
    """Those of the other may be at the same addresses."""
    two_files.on_b(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(1 << 41, 1 << 21, 10))
    before = held(two_files)
    two_files.uvm(uvm.UNMAP_EXTERNAL, uvm_range(0, 1 << 46))

    assert held(two_files) == before > 0


def test_unmapping_counts_once_the_other_file_is_emptied(two_files, monkeypatch):
    shared, pid = two_files.shared, two_files.process.pid
    two_files.on_b(uvm.REGISTER_GPU, bytes(40))
    a = shared.uvm_files._files[pid][0]
    monkeypatch.setattr(held_uvm_files, "_has", lambda pid, held: held is a)
    (files,) = shared.uvm_files.take_closed([pid]).values()
    two_files.uvm(uvm.UNMAP_EXTERNAL, uvm_range(0, 1 << 46))
    not_yet = held(two_files)
    shared.uvm_files.release(files)
    shared.pod_uvm_files.released(pid, files)
    two_files.uvm(uvm.UNMAP_EXTERNAL, uvm_range(0, 1 << 46))

    assert (not_yet > 0, held(two_files)) == (True, 0)


def test_unmapping_beyond_the_share_makes_no_more_records(on_card, monkeypatch):
    on_card.uvm(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(1 << 40, 8 << 21, 10))
    before = on_card.shared.table.records("web")
    monkeypatch.setattr(memory_quota, "_MOST_RECORDS", 0)
    on_card.shared.quota.unmap(on_card.process.pid, (1 << 40) + (1 << 21), 1 << 21, None)
    journal = Journal(os.dup(on_card.shared.journal.fd))
    again = ObjectTable()
    for fact in journal.read()[1]:
        again.note(fact)
    os.close(journal.fd)

    assert on_card.shared.table.records("web") == before == again.records("web")


def test_mappings_beyond_a_pods_share_are_refused_and_counted(on_card, monkeypatch):
    own, _ = on_card.shared.table.records("web")
    monkeypatch.setattr(memory_quota, "_GUARANTEED_RECORDS", 1)
    monkeypatch.setattr(memory_quota, "_MOST_RECORDS", 3 * (own + 2) + fd_budget.FOR_NEW_PODS)
    asked = [uvm_mapping(at << 40, 1 << 21, 10) for at in range(1, 4)]
    answers = [on_card.uvm(uvm.MAP_EXTERNAL_ALLOCATION, mapping)[2] for mapping in asked]
    table = on_card.uvm(REGION, struct.pack("<QQ", 1 << 50, 4096) + bytes(24))[2]

    assert [uvm_mapping_status(answer) for answer in answers] == [0xFFFF, 0xFFFF, abi.NV_ERR_NO_MEMORY]
    assert on_card.shared.refusals.counts["web", "too many mappings of UVM"] == 2
    assert table != struct.pack("<QQ", 1 << 50, 4096) + bytes(24)

"""A pod names memory, or a client, that is not its own: what RM would take is refused before RM is asked."""

from __future__ import annotations

import struct

import pytest

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.rules import classes, controls
from qgpu.nvidia import abi
from tests.guardian.asked import alloc, alloc_status, control, dup, dup_status, status
from tests.guardian.pod import allocate, held

NEIGHBOURS, OWN = 8, 9
_BYTES = 256


def put(at, client, size=_BYTES):
    return bytes(at) + struct.pack("<I", client) + bytes(size - at - 4)


@pytest.fixture
def with_client(on_card):
    """A pod on a card that has another client besides, in another process of its own."""
    pid = next(iter(on_card.shared.table.processes))
    on_card.shared.note({"fact": "client", "client": OWN, "pid": pid, "fd": 100})
    on_card.rm.seen.clear()
    on_card.profiling = True
    return on_card


def ask(pod, command, params):
    before = len(pod.rm.seen)
    answer = status(pod.call(abi.NV_ESC_RM_CONTROL, control(command, 3, len(params)), params)[2])
    return answer, len(pod.rm.seen) - before


def make(pod, rm_class, params):
    return alloc_status(pod.call(abi.NV_ESC_RM_ALLOC, alloc(30, 3, rm_class), params)[2])


#: Controls with a client in their parameters that were allowed, and are not: none of them is a program's.
GONE = {
    0x20801103: "NV2080_CTRL_CMD_FIFO_BIND_ENGINES",
    0x20801123: "NV2080_CTRL_CMD_FIFO_GET_CHANNEL_GROUP_UNIQUE_ID_INFO",
    0x20801124: "NV2080_CTRL_CMD_FIFO_QUERY_CHANNEL_UNIQUE_ID",
    0x20801205: "NV2080_CTRL_CMD_GR_CTXSW_ZCULL_MODE",
    0x20801209: "NV2080_CTRL_CMD_GR_CTXSW_PM_BIND",
    0x2080123A: "NV2080_CTRL_CMD_GR_CTXSW_SETUP_BIND",
    0x208001A6: "NV2080_CTRL_CMD_GPU_MIGRATABLE_OPS",
    0x20802502: "NV2080_CTRL_CMD_DMA_INVALIDATE_TLB",
    0x503C0106: "NV503C_CTRL_CMD_REGISTER_PID",
    # what tells of others' sessions, and what writes page tables
    0x208001AF: "NV2080_CTRL_GPU_GET_NVENC_SW_SESSION_INFO_V2",
    0x2080017C: "NV2080_CTRL_GPU_GET_NVFBC_SW_SESSION_INFO",
    0x0080180A: "NV0080_CTRL_CMD_DMA_SET_PTE_INFO",
}


@pytest.mark.parametrize("command", GONE, ids=GONE.get)
def test_a_control_that_reaches_others_is_refused_by_name(with_client, command):
    assert ask(with_client, command, put(0, OWN)) == (abi.NV_ERR_NOT_SUPPORTED, 0)
    assert with_client.shared.refusals.counts["web", GONE[command]] == 1


def test_fabric_memory_by_base_and_limit_is_refused_by_name(with_client):
    assert make(with_client, 0xF3, bytes(_BYTES)) == abi.NV_ERR_INVALID_CLASS
    assert with_client.shared.refusals.counts["web", "NV01_MEMORY_FLA"] == 1
    assert with_client.rm.seen == []


#: Controls with a client in their parameters: the number and the size (535's; 570's BIND_CHANNEL names none).
NAMING = [
    pytest.param(0x20801208, 24, id="GR_CTXSW_ZCULL_BIND"),
    pytest.param(0x00DA0002, 24, id="SEMAPHORE_SURFACE_BIND_CHANNEL"),
]


@pytest.mark.parametrize(("command", "size"), NAMING)
@pytest.mark.parametrize("own", [0, 7, OWN])
def test_a_control_may_name_the_pods_own_client(with_client, command, size, own):
    assert ask(with_client, command, put(0, own, size)) == (abi.NV_OK, 1)


@pytest.mark.parametrize(("command", "size"), NAMING)
def test_a_control_that_names_anothers_client_is_refused(with_client, command, size):
    assert ask(with_client, command, put(0, NEIGHBOURS, size)) == (abi.NV_ERR_INVALID_OBJECT_HANDLE, 0)
    assert with_client.shared.refusals.counts["web", f"{controls.name(command)} on another pod's client"] == 1


def test_a_channel_is_no_client_where_a_branch_has_none(with_client):
    assert ask(with_client, 0x00DA0002, put(0, NEIGHBOURS, 40)) == (abi.NV_OK, 1)


def test_every_row_that_names_clients_is_tried():
    rows = controls.ALLOWED_TO_SOME.values()
    assert {each.number for each in rows if each.clients} == {each.values[0] for each in NAMING}
    tried = {abi.NV01_DEVICE_0} | {each.values[0] for each in PLACES}
    assert {each.number for each in classes.ALLOWED_TO_SOME.values() if each.clients} == tried


def test_a_client_that_became_anothers_is_not_the_pods(with_client):
    with_client.shared.note({"fact": "pod", "name": "neighbour", "grants": {}})
    with with_client.shared.lock:
        with_client.shared.table.clients[OWN].pod = "neighbour"

    assert ask(with_client, 0x20801208, put(0, OWN)) == (abi.NV_ERR_INVALID_OBJECT_HANDLE, 0)


#: Classes with a client in their parameters, by what RM would do with somebody else's.
PLACES = [
    pytest.param(0x05, 0, id="events without a descriptor"),
    pytest.param(0x79, 0, id="events of its objects"),
    pytest.param(0x83DE, 4, id="its compute debugged"),
    pytest.param(0xB2CC, 0, id="it is profiled"),
    pytest.param(0xCB33, 0, id="its confidential compute"),
]


@pytest.mark.parametrize(("rm_class", "at"), PLACES)
@pytest.mark.parametrize("own", [0, 7, OWN])
def test_an_object_may_name_the_pods_own_client(with_client, rm_class, at, own):
    assert make(with_client, rm_class, put(at, own)) == abi.NV_OK


@pytest.mark.parametrize(("rm_class", "at"), PLACES)
def test_an_object_that_names_anothers_client_is_refused(with_client, rm_class, at):
    assert make(with_client, rm_class, put(at, NEIGHBOURS)) == abi.NV_ERR_INVALID_OBJECT_HANDLE
    assert with_client.rm.seen == []
    assert sum(with_client.shared.refusals.counts.values()) == 1


@pytest.mark.parametrize("at", [4, 8], ids=["address space shared", "target"])
@pytest.mark.parametrize("other", [NEIGHBOURS, OWN])
def test_a_device_shares_no_other_clients_address_space(with_client, at, other):
    """RM looks for the client at the first use: the handle may be a neighbour's, and two may name each other."""
    before = dict(with_client.shared.table.objects)
    argument = alloc(40, 7, abi.NV01_DEVICE_0)

    assert alloc_status(with_client.call(abi.NV_ESC_RM_ALLOC, argument, put(at, other))[2]) == (
        abi.NV_ERR_INVALID_OBJECT_HANDLE
    )
    assert with_client.shared.refusals.counts["web", "NV01_DEVICE_0 on another pod's client"] == 1
    assert with_client.shared.table.objects == before


@pytest.mark.parametrize("own", [0, 7])
def test_a_device_may_have_its_own_clients_address_space(with_client, own):
    answer = with_client.call(abi.NV_ESC_RM_ALLOC, alloc(40, 7, abi.NV01_DEVICE_0), put(4, own))

    assert alloc_status(answer[2]) == abi.NV_OK
    assert (7, 40) in with_client.shared.table.objects


def test_a_key_of_confidential_compute_keeps_its_memory(with_client):
    """RM duplicates what it names under a handle that nobody is told (kernel_channel.c)."""
    assert allocate(with_client, 10, 1 << 30) == abi.NV_OK
    assert ask(with_client, abi.NVC56F_GET_KMB, put(124, 10)) == (abi.NV_OK, 1)
    memory = with_client.shared.table.allocations.by_handle[7, 10]

    assert held(with_client) == 1 << 30
    assert memory.pinned


NEIGHBOURS_PROCESS = {"fact": "process", "pid": 1, "pod": "other"}
NEIGHBOURS_CLIENT = {"fact": "client", "client": NEIGHBOURS, "pid": 1, "fd": 3}


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param([NEIGHBOURS_PROCESS, NEIGHBOURS_CLIENT | {"made_here": True}], id="guardian made it"),
        pytest.param([NEIGHBOURS_PROCESS, NEIGHBOURS_CLIENT, {"fact": "exit", "pid": 1}], id="its maker has ended"),
        pytest.param([], id="the guardian's own"),
    ],
)
def test_no_dup_from_clients_whose_makers_rm_cannot_tell_apart(with_client, facts):
    """RM lets the clients of one process share, by its number: these may have another's number, or the guardian's."""
    for fact in facts:
        with_client.shared.note(fact)
    with_client.rm.elsewhere.add(NEIGHBOURS)
    with_client.rm.objects |= {
        (NEIGHBOURS, NEIGHBOURS): (abi.NV01_ROOT_CLIENT, 0),
        (NEIGHBOURS, 10): (0x3E, NEIGHBOURS),
    }
    answer = with_client.call(abi.NV_ESC_RM_DUP_OBJECT, dup(20, 10, source_client=NEIGHBOURS))

    assert dup_status(answer[2]) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
    assert (7, 20) not in with_client.rm.objects
    assert with_client.shared.refusals.counts["web", "NV_ESC_RM_DUP_OBJECT on another pod's client"] == 1


def test_successor_knows_the_clients_that_a_guardian_made(with_client):
    with_client.call(abi.NV_ESC_RM_ALLOC, alloc(0, 0, abi.NV01_ROOT, client=0))  # on a file that has a device
    successor = ObjectTable()
    for fact in with_client.shared.table.facts():
        successor.note(fact)

    assert [entry.made_here for entry in successor.clients.values()] == [False, False, True]

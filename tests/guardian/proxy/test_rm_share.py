"""Objects are shared among the pod's own clients or with all, and RM keeps a bounded number of notes for that."""

from __future__ import annotations

import struct

import pytest

from qgpu.guardian.proxy import rm_share
from qgpu.nvidia import abi
from tests.guardian.asked import alloc, control, dup, status

NEIGHBOURS = 8


def shared(pod, client, handle, share_type=1, target=0):
    """Share an object, by default as CUDA IPC does; return RM's status, and how often RM was asked."""
    asked = struct.pack("<4IHBxI", client, handle, target, 1, share_type, 0, 0)
    answer = pod.call(abi.NV_ESC_RM_SHARE, asked)
    at = abi.offsetof("NVOS57_PARAMETERS", "status")
    return struct.unpack_from("<I", answer[2], at)[0], [number for number, _ in pod.rm.seen].count(abi.NV_ESC_RM_SHARE)


@pytest.mark.parametrize("maker", [None, 1])
def test_clients_of_one_process_share_whoever_made_them(on_card, maker):
    """RM takes the guardian for the owner of some of them; those of another process keep to themselves."""
    made = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(0, 0, abi.NV01_ROOT, client=0))[2]
    (client,) = struct.unpack_from("<I", made, 8)
    if maker is not None:
        on_card.shared.table.clients[client].maker = maker
    on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(20, 10, client=client))
    on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(21, 10))  # within a client

    assert on_card.rm.shared == ([((7, 10), client)] if maker is None else [])


def note_neighbour(pod):
    """Record a client of another pod."""
    pod.shared.note({"fact": "pod", "name": "other", "grants": {}})
    pod.shared.note({"fact": "process", "pid": 1, "pod": "other"})
    pod.shared.note({"fact": "client", "client": NEIGHBOURS, "pid": 1, "fd": 3})


def test_a_pod_shares_objects_of_its_own_clients_only(on_card):
    """RM would share anybody's: then this pod could duplicate it."""
    note_neighbour(on_card)
    on_card.rm.objects[NEIGHBOURS, 2] = on_card.rm.objects[7, 2]

    for client, handle in ((NEIGHBOURS, 2), (7, 999), (99, 2)):
        assert shared(on_card, client, handle) == (abi.NV_ERR_INSUFFICIENT_PERMISSIONS, 0)
    assert on_card.shared.refusals.counts["web", "NV_ESC_RM_SHARE on another pod's client"] == 3
    assert shared(on_card, 7, 2) == (abi.NV_OK, 1)


def test_a_pod_shares_with_its_own_clients_or_with_all(on_card):
    """RM keeps a note of each sharing in the client that it is with, until that client ends."""
    note_neighbour(on_card)
    for target in (NEIGHBOURS, 99):
        found = shared(on_card, 7, 2, abi.RS_SHARE_TYPE_CLIENT, target)
        assert found == (abi.NV_ERR_INSUFFICIENT_PERMISSIONS, 0)

    assert shared(on_card, 7, 2, abi.RS_SHARE_TYPE_CLIENT, 7) == (abi.NV_OK, 1)


@pytest.mark.parametrize(("share_type", "passes"), [(1, True), (4, True), (abi.RS_SHARE_TYPE_CLIENT, False)])
def test_a_policy_for_all_objects_names_no_client(on_card, share_type, passes):
    """RM notes it in that client, whosever it is. CUDA sets one for all that one process makes (4)."""
    note_neighbour(on_card)
    policy = struct.pack("<IIHBx", NEIGHBOURS, 1, share_type, 0)
    asked = control(abi.NV0000_CLIENT_SET_INHERITED_SHARE_POLICY, 7, len(policy))
    answer = status(on_card.call(abi.NV_ESC_RM_CONTROL, asked, policy)[2])

    assert (answer == abi.NV_OK) == passes
    assert on_card.shared.refusals.counts.total() == (not passes)


def test_notes_of_sharing_are_bounded_and_end_with_their_client(on_card, monkeypatch):
    monkeypatch.setattr(rm_share, "_MOST_NOTES", 4)
    made = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(0, 0, abi.NV01_ROOT, client=0))[2]
    (client,) = struct.unpack_from("<I", made, 8)
    on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(20, 10, client=client))  # shared, and taken back
    for count in (1, 2):
        assert shared(on_card, 7, 2, abi.RS_SHARE_TYPE_CLIENT, client) == (abi.NV_OK, count)

    assert shared(on_card, 7, 2, abi.RS_SHARE_TYPE_CLIENT, 7) == (abi.NV_ERR_INSUFFICIENT_RESOURCES, 2)
    on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(21, 10, client=client))
    assert len(on_card.rm.shared) == 1
    on_card.shared.table.clients.pop(client)
    assert shared(on_card, 7, 2, abi.RS_SHARE_TYPE_CLIENT, 7) == (abi.NV_OK, 3)

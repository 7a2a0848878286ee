"""Objects are shared among the pod's own clients or with all, and RM keeps a bounded number of notes for that."""

from __future__ import annotations

import os
import struct

import pytest

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.proxy import client_registry, rm_share
from qgpu.linux.inflight_syscalls import InflightSyscalls
from qgpu.nvidia import abi
from tests.guardian.asked import alloc, alloc_status, control, dup, free, status
from tests.guardian.failover.test_successors import successor_of
from tests.guardian.fake_rm import PAGE
from tests.guardian.pod import allocate, device_of

NEIGHBOURS = 8


def shared(pod, client, handle, share_type=abi.RS_SHARE_TYPE_ALL, target=0, action=0):
    """Share an object, by default as CUDA IPC does; return RM's status, and how often RM was asked."""
    asked = struct.pack("<4IHBxI", client, handle, target, 1, share_type, action, 0)
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
    assert shared(on_card, 7, 2) == (abi.NV_OK, 0)


@pytest.mark.parametrize(("share_type", "heard"), [(0, 1), (1, 0), (2, 0), (4, 1), (5, 0), (6, 0), (7, 0)])
def test_rm_hears_of_no_sharing_beyond_the_process(on_card, share_type, heard):
    """RM would let UVM map the object for every process that the pod shares it with."""
    assert shared(on_card, 7, 2, share_type) == (abi.NV_OK, heard)
    assert on_card.shared.table.is_shared((7, 2)) == (not heard)


def test_rm_shares_with_one_client_what_is_shared_with_all(on_card):
    """RM would let UVM map it for any process. The guardian shares it while it duplicates it."""
    allocate(on_card, 10, PAGE)
    on_card.shared.note({"fact": "client", "client": NEIGHBOURS, "pid": on_card.process.pid, "fd": 4})
    on_card.rm.objects[NEIGHBOURS, NEIGHBOURS] = (abi.NV01_ROOT, 0)
    on_card.rm.objects[NEIGHBOURS, 2] = (abi.NV01_DEVICE_0, NEIGHBOURS)
    found = shared(on_card, 7, 10)
    on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(20, 10, client=NEIGHBOURS))
    during = list(on_card.rm.shared)
    again = ObjectTable()
    for fact in Journal(os.dup(on_card.shared.journal.fd)).read()[1]:
        again.note(fact)
    after = shared(on_card, 7, 10, action=abi.RS_SHARE_ACTION_FLAG_REVOKE)
    on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(21, 10, client=NEIGHBOURS))

    assert (found, after) == ((abi.NV_OK, 0), (abi.NV_OK, 0))
    assert during == on_card.rm.shared == [((7, 10), NEIGHBOURS)]
    assert again.is_shared((7, 10))
    assert not on_card.shared.table.is_shared((7, 10))


def test_what_is_freed_is_not_shared_any_more(on_card):
    allocate(on_card, 10, PAGE)
    shared(on_card, 7, 10)
    on_card.call(abi.NV_ESC_RM_FREE, free(10))
    allocate(on_card, 10, PAGE)

    assert not on_card.shared.table.is_shared((7, 10))
    assert on_card.shared.table.shared_with_all.counts.total() == 0


def test_a_reused_client_shares_nothing_of_its_predecessor(on_card):
    shared(on_card, 7, 2)
    note_neighbour(on_card)
    on_card.shared.note({"fact": "owner", "client": 7, "pod": "other", "pid": 1, "fd": 3, "maker": 1})

    assert not on_card.shared.table.is_shared((7, 2))
    assert on_card.shared.table.shared_with_all.counts.total() == 0


def test_a_pod_shares_so_many_objects_with_all(on_card, monkeypatch):
    monkeypatch.setattr(client_registry, "_MOST_SHARED", 2)
    found = [shared(on_card, 7, allocated) for allocated in (2, 3, 7)]

    assert [status for status, _ in found] == [abi.NV_OK, abi.NV_OK, abi.NV_ERR_INSUFFICIENT_RESOURCES]


def test_a_pod_shares_with_its_own_clients_or_with_all(on_card):
    """RM keeps a note of each sharing in the client that it is with, until that client ends."""
    note_neighbour(on_card)
    for target in (NEIGHBOURS, 99):
        found = shared(on_card, 7, 2, abi.RS_SHARE_TYPE_CLIENT, target)
        assert found == (abi.NV_ERR_INSUFFICIENT_PERMISSIONS, 0)

    assert shared(on_card, 7, 2, abi.RS_SHARE_TYPE_CLIENT, 7) == (abi.NV_OK, 1)


@pytest.mark.parametrize("share_type", range(8))
def test_a_policy_shares_all_objects_without_rm(on_card, share_type):
    """RM hears of a policy for the client's process alone, as CUDA sets it; one client cannot be named."""
    named = share_type == abi.RS_SHARE_TYPE_CLIENT
    policy = struct.pack("<IIHBx", NEIGHBOURS, 1, share_type, 0)
    asked = control(abi.NV0000_CLIENT_SET_INHERITED_SHARE_POLICY, 7, len(policy))
    on_card.rm.seen.clear()
    answer = status(on_card.call(abi.NV_ESC_RM_CONTROL, asked, policy)[2])
    heard = share_type in (abi.RS_SHARE_TYPE_NONE, abi.RS_SHARE_TYPE_PID)

    assert (answer == abi.NV_OK) == (not named)
    assert (abi.NV_ESC_RM_CONTROL in [number for number, _ in on_card.rm.seen]) == heard
    assert on_card.shared.table.is_shared((7, 10)) == (not heard and not named)


def test_a_successor_knows_the_notes_of_sharing(on_card, monkeypatch):
    """RM keeps them, whichever guardian called it."""
    monkeypatch.setattr(rm_share, "_MOST_NOTES", 2)
    asked = [shared(on_card, 7, 2, abi.RS_SHARE_TYPE_CLIENT, 7)]
    for compacted in (False, True):
        if compacted:
            on_card.shared.journal.compact(on_card.shared.table.facts())
        successor_of(on_card)
        asked.append(shared(on_card, 7, 2, abi.RS_SHARE_TYPE_CLIENT, 7))

    assert asked == [(abi.NV_OK, 1), (abi.NV_OK, 2), (abi.NV_ERR_INSUFFICIENT_RESOURCES, 2)]


def test_a_reused_client_has_no_notes_of_its_predecessor(on_card):
    shared(on_card, 7, 2, abi.RS_SHARE_TYPE_CLIENT, 7)
    before = on_card.shared.table.notes_of("web")
    note_neighbour(on_card)
    on_card.shared.note({"fact": "owner", "client": 7, "pod": "other", "pid": 1, "fd": 3, "maker": 1})

    assert (before, on_card.shared.table.notes_of("web"), on_card.shared.table.notes_of("other")) == (1, 0, 0)


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


def shared_page(pod):
    """Make an object of the page that RM shares with all; return the status."""
    return alloc_status(pod.call(abi.NV_ESC_RM_ALLOC, alloc(20, 3, abi.RM_USER_SHARED_DATA), bytes(8))[2])


def sharings(pod):
    """List what RM was asked to share, and what it was asked to take back, with all of a process."""
    return [struct.unpack("<4IHBxI", each)[:6] for number, each in pod.rm.seen if number == abi.NV_ESC_RM_SHARE]


@pytest.mark.parametrize("kept", [True, False])
def test_uvm_gets_no_page_that_rm_shares_with_all(on_card, monkeypatch, kept):
    """UVM would map it for the card, which RM lets write there."""
    if not kept:
        monkeypatch.setattr(on_card.rm, "share_status", abi.NV_ERR_INVALID_STATE)

    assert shared_page(on_card) == abi.NV_OK
    taken_back = (7, 20, 0, abi.RS_ACCESS_DUP_OBJECT, abi.RS_SHARE_TYPE_PID, abi.RS_SHARE_ACTION_FLAG_REVOKE)
    assert sharings(on_card) == [taken_back]
    assert on_card.shared.refusals.counts["web", rm_share.STILL_SHARED] == (not kept)


def test_the_shared_page_is_made_when_uvm_maps_nothing(on_card):
    """A mapping in progress could name it before it is kept from UVM."""

    class Busy(InflightSyscalls):
        def wait(self, patience_s):
            return False

    on_card.dispatcher._ctx.uvm_mappings = Busy()

    assert shared_page(on_card) == abi.NV_ERR_BUSY_RETRY
    assert (7, 20) not in on_card.rm.objects
    on_card.dispatcher._ctx.uvm_mappings = InflightSyscalls()
    assert shared_page(on_card) == abi.NV_OK


def test_the_shared_page_gets_no_second_handle(on_card, monkeypatch):
    """RM would share that again with all of its process."""
    shared_page(on_card)
    copied = struct.unpack_from("<I", on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(21, 20))[2], 24)[0]
    assert (copied, (7, 21) in on_card.rm.objects) == (abi.NV_ERR_NOT_SUPPORTED, False)

    params = struct.pack("<IIIIiI", 1, 2, 3, 20, device_of(on_card), 0)
    asked = control(abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD, 7, len(params))
    for hidden in (False, True):  # the file, at the descriptors where it was used
        with monkeypatch.context() as patch:
            patch.setattr(on_card.rm, "find_object", (lambda rm: None) if hidden else on_card.rm.find_object)
            answer = status(on_card.call(abi.NV_ESC_RM_CONTROL, asked, params)[2])
        assert answer == abi.NV_ERR_INSUFFICIENT_RESOURCES

    assert shared(on_card, 7, 20, abi.RS_SHARE_TYPE_PID)[0] == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
    assert len(sharings(on_card)) == 1


def test_an_import_of_the_shared_page_is_refused(on_card):
    def arrives(params):
        on_card.rm.objects[7, 30] = (abi.RM_USER_SHARED_DATA, 3)

    on_card.rm.answers[abi.NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD] = arrives
    params = struct.pack("<iIIII", device_of(on_card), 1, 2, 3, 30)
    asked = control(abi.NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD, 7, len(params))

    assert status(on_card.call(abi.NV_ESC_RM_CONTROL, asked, params)[2]) == abi.NV_ERR_NOT_SUPPORTED
    assert (7, 30) not in on_card.rm.objects

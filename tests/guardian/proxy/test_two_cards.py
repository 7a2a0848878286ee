"""Memory of several cards that one call frees: RM's figure is of one card, so each card is judged by its own."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.proxy import control_calls
from qgpu.guardian.proxy.handler_context import PodCall
from qgpu.guardian.rules import allowed_controls
from qgpu.linux.seccomp_notify import UnansweredCall
from qgpu.nvidia import abi, uvm
from tests.guardian.asked import control, dup, free, status, uvm_mapping
from tests.guardian.fake_rm import PAGE
from tests.guardian.pod import allocate, device_of, make_device_on_another_card
from tests.guardian.proxy.test_exports import take_in

SIZE, LIMIT = 64 << 20, 1 << 30
#: A device on each card.
FIRST, SECOND = 2, 4


@pytest.fixture
def both(on_card):
    """A pod with a limit and a device on each of two cards, of which RM has figures."""
    on_card.limits |= {0: LIMIT, 1: LIMIT}
    make_device_on_another_card(on_card, SECOND, 5)
    rm = on_card.rm

    def figure(instance, _):
        here = {key for key in rm.sizes if rm.objects.get(key, (0, 0))[1] == (FIRST, SECOND)[instance]}
        return sum(rm.sizes[key] for key in here - rm.mapped)

    rm.private_bytes = figure
    return on_card


def used(pod):
    """Return what a pod is charged for memory alone, by card."""
    pod.shared.table.allocations.forget_some(1000)
    return [pod.shared.table.allocations.held.get(("web", card), 0) for card in (0, 1)]


def free_client(pod):
    pod.call(abi.NV_ESC_RM_FREE, free(7))


def test_memory_on_two_cards_that_goes_at_once_is_discharged(both):
    assert [allocate(both, 10, SIZE), allocate(both, 11, SIZE, SECOND)] == [abi.NV_OK] * 2
    free_client(both)

    assert used(both) == [0, 0]


@pytest.mark.parametrize("card", [0, 1])
def test_what_one_cards_figure_does_not_show_stays_charged(both, card):
    allocate(both, 10, SIZE)
    allocate(both, 11, SIZE, SECOND)
    both.rm.mapped = {(7, 10 + card)}
    free_client(both)

    assert used(both) == [SIZE * (card == 0), SIZE * (card == 1)]


def test_pinned_memory_does_not_pay_for_another_cards(both):
    for handle, parent in ((10, FIRST), (11, FIRST), (12, SECOND)):
        allocate(both, handle, SIZE, parent)
    both.shared.quota.pin_handles(7, [10])
    both.uvm(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(1 << 40, PAGE, 12))
    both.rm.mapped = {(7, 12)}
    free_client(both)

    assert used(both) == [SIZE, SIZE]


def test_pinned_memory_does_not_pay_for_what_is_mapped_beside(both):
    for handle in (10, 11):
        allocate(both, handle, SIZE)
    both.shared.quota.pin_handles(7, [10])
    both.rm.mapped = {(7, 11)}
    free_client(both)

    assert used(both) == [2 * SIZE, 0]


def test_memory_of_a_pod_without_a_limit_pays_for_nothing(both):
    """Two pods can have handles of each other's memory in one client."""
    for handle in (10, 11):
        allocate(both, handle, SIZE)
    for memory in both.shared.table.allocations.memories.values():
        if (7, 10) in memory.handles:
            memory.pod = "other"
    everyones = both.shared.allowance
    unlimited = SimpleNamespace(limits={})
    both.shared.allowance = lambda pod: unlimited if pod == "other" else everyones(pod)
    both.rm.mapped = {(7, 11)}
    free_client(both)

    assert [memory.pinned for memory in both.shared.table.allocations.memories.values()] == [True]


def free_again(pod, before):
    """Let a successor finish a free that RM has done; return the figure that it records itself."""
    recorded = []
    listener = SimpleNamespace(begin=recorded.append)
    for key in [key for key in pod.rm.objects if key[0] == 7]:
        del pod.rm.objects[key]
    left = UnansweredCall(SimpleNamespace(), begun=True, before=before)
    pod_call = PodCall(listener, SimpleNamespace(), pod.process.pid, -1, left)
    assert pod.dispatcher._freed_memory.free(pod_call, (7, 7), lambda: True)
    pod.shared.note({"fact": "gone", "client": 7, "handle": 7})
    return recorded


@pytest.mark.parametrize("handles", [[(10, FIRST)], [(10, FIRST), (11, SECOND)]], ids=["one card", "two cards"])
def test_successor_trusts_the_recorded_figure_of_one_card_only(both, handles):
    for handle, parent in handles:
        allocate(both, handle, SIZE, parent)
    recorded = free_again(both, SIZE)

    assert used(both) == ([0, 0] if len(handles) == 1 else [SIZE, SIZE])
    assert recorded == ([SIZE] if len(handles) == 1 else [None])


def test_no_figure_is_recorded_for_memory_on_two_cards(both, monkeypatch):
    for handle, parent in ((10, FIRST), (11, SECOND)):
        allocate(both, handle, SIZE, parent)
    recorded, begin = [], PodCall.begin
    monkeypatch.setattr(PodCall, "begin", lambda self, before=None: recorded.append(before) or begin(self, before))
    free_client(both)

    assert recorded == [None]


#: What RM says of a descriptor, and what it carries: memory that a neighbour made.
INFO, THEIRS = allowed_controls.EXPORT_INFO, (99, 5)


def export(pod, handle, device):
    params = struct.pack("<IIIIiI", 1, device, device, handle, device_of(pod), 0)
    asked = control(abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD, 7, len(params))
    return status(pod.call(abi.NV_ESC_RM_CONTROL, asked, params)[2])


def import_below(pod, device, card):
    """Import a neighbour's memory below a device, of which RM says that it lies on a card."""
    pod.rm.objects[THEIRS] = (abi.NV01_MEMORY_LOCAL_USER, 0)
    pod.rm.sizes[THEIRS] = SIZE
    pod.rm.carried = THEIRS
    pod.rm.answers[INFO] = lambda params: struct.pack_into("<I", params, 4, card)
    params = struct.pack("<iIIII", 0, 1, device, device, 30)
    asked = control(abi.NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD, 7, len(params))
    return status(pod.call(abi.NV_ESC_RM_CONTROL, asked, params)[2])


@pytest.mark.parametrize("card", [0, 1])
@pytest.mark.parametrize("device", [FIRST, SECOND])
def test_an_import_counts_to_the_card_that_it_lies_on(both, device, card):
    """A program may have a handle of memory below whichever of its devices."""
    assert import_below(both, device, card) == abi.NV_OK
    assert used(both) == [SIZE * (card == 0), SIZE * (card == 1)]


@pytest.mark.parametrize("compacted", [False, True])
def test_a_successor_knows_the_card_of_an_import(both, compacted):
    import_below(both, FIRST, 1)
    both.call(abi.NV_ESC_RM_DUP_OBJECT, dup(31, 30, FIRST))
    both.call(abi.NV_ESC_RM_FREE, free(30))
    table = ObjectTable()
    for fact in list(both.shared.table.facts()) if compacted else both.shared.journal.read()[1]:
        table.note(fact)

    assert [table.allocations.held.get(("web", card), 0) for card in (0, 1)] == [0, SIZE]


def test_an_import_over_the_limit_of_its_own_card_is_freed(both):
    both.limits[1] = SIZE // 2

    assert import_below(both, FIRST, 1) == abi.NV_ERR_NO_MEMORY
    assert (7, 30) not in both.rm.objects
    assert used(both) == [0, 0]


def test_an_import_from_a_card_without_a_grant_is_freed(both):
    assert import_below(both, FIRST, 2) == abi.NV_ERR_NOT_SUPPORTED
    assert (7, 30) not in both.rm.objects


def test_an_import_whose_card_rm_does_not_tell_stays_below(both):
    assert import_below(both, SECOND, 32) == abi.NV_OK
    assert used(both) == [0, SIZE]


def test_what_a_pod_exports_counts_once_on_whichever_card(both):
    allocate(both, 10, SIZE, SECOND)
    export(both, 10, SECOND)
    both.rm.answers[INFO] = lambda params: struct.pack_into("<I", params, 4, 1)

    assert take_in(both, 11) == abi.NV_OK  # below the first
    assert used(both) == [0, SIZE]


@pytest.mark.parametrize(("handle", "device", "answer"), [(10, SECOND, 0), (10, FIRST, 0x1A), (12, SECOND, 0x1A)])
def test_no_export_tells_of_another_card(both, handle, device, answer):
    """RM tells importers of the card of the device that the call names, or of what the handle lies below."""
    allocate(both, 10, SIZE, SECOND)
    both.call(abi.NV_ESC_RM_DUP_OBJECT, dup(12, 10, FIRST))

    assert export(both, handle, device) == answer


@pytest.mark.parametrize(("handle", "answer"), [(10, abi.NV_OK), (12, abi.NV_ERR_INVALID_ARGUMENT), (99, abi.NV_OK)])
@pytest.mark.parametrize("limited", [True, False])
def test_network_cards_get_memory_of_its_handles_card(both, handle, answer, limited):
    """RM takes the memory for that of the card that its handle lies below; it looks for unknown memory itself."""
    if not limited:
        both.limits.clear()
    allocate(both, 10, SIZE, SECOND)
    both.call(abi.NV_ESC_RM_DUP_OBJECT, dup(12, 10, FIRST))
    params = struct.pack("<IIQQQ", handle, 0, 1 << 16, SIZE, 0)

    assert status(both.call(abi.NV_ESC_RM_CONTROL, control(0x503C0104, 30, len(params)), params)[2]) == answer
    refused = both.shared.refusals.counts["web", control_calls.OTHER_CARD]
    assert refused == (answer != abi.NV_OK)

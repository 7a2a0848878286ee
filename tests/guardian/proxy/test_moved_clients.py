"""A client whose file has gone to another pod moves there with its memory, if that fits there, or not at all."""

from __future__ import annotations

import os

import pytest

from qgpu.guardian.accounting.rm_object import RmObject, object_fact
from qgpu.guardian.proxy import client_registry, shared_table
from qgpu.guardian.rules import classes
from qgpu.linux.open_file_set import FileSets
from qgpu.nvidia import abi
from tests.guardian.asked import alloc, alloc_status, control, dup, dup_status, free, memory_params
from tests.guardian.charges import charged
from tests.guardian.fake_rm import PAGE
from tests.guardian.pod import LIMIT, MOST, allocate, device_of, held, make_device
from tests.guardian.proxy.test_memory import someone_elses

REFUSED = "another pod's memory over the limit"


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    monkeypatch.setattr(shared_table, "_FORGETTING_S", 0)


def pass_on(pod, client, *objects, maker_ends=True):
    """Let another pod make a client with memory, and leave its file to this pod alone; tell whether it is its now."""
    someone_elses(pod, client)
    for rm in objects:
        pod.shared.note(object_fact(rm))
        pod.rm.objects[rm.key] = (rm.rm_class, rm.parent)
    pod.rm.stale.add(client)
    pod.files.makers.is_by = lambda file, pid: False
    if maker_ends:
        pod.shared.exited(1)
    return pod.shared.clients.register(pod.process.pid, 5, 5, client)


def both(pod):
    return [charged(pod.shared.table, name).get(0, 0) for name in ("other", "web")]


def test_clients_passed_on_one_by_one_stay_within_the_limit(on_card):
    moved = [pass_on(on_card, client) for client in (9, 8, 6, 5)]

    assert moved == [True, False, False, False]
    assert both(on_card) == [3 * MOST, MOST]
    assert on_card.shared.refusals.counts["web", REFUSED] == 3


@pytest.mark.parametrize(("most", "rm_class"), [("_MOST_CHANNELS", 0xC86F), ("_MOST_DEBUGGERS", classes.DEBUGGER)])
def test_objects_passed_on_stay_within_their_bound(on_card, monkeypatch, most, rm_class):
    """Each of many pods could make as many as a pod may have, and leave them to one."""
    monkeypatch.setattr(client_registry, most, 1)
    on_card.limits.clear()

    def with_object(client):
        tsg, bounded = RmObject(client, 0x20, 2, abi.KEPLER_CHANNEL_GROUP_A, 1), RmObject(client, 0x21, 0x20, rm_class)
        return pass_on(on_card, client, tsg, bounded)

    assert [with_object(client) for client in (9, 8)] == [True, False]
    assert on_card.shared.table.clients[8].pod != "web"


def test_a_client_stays_while_its_maker_could_map_its_memory(on_card):
    """RM lets UVM map it for that process, whosever the client is by now."""
    assert not pass_on(on_card, 9, maker_ends=False)
    assert both(on_card) == [MOST, 0]
    assert on_card.shared.refusals.counts["web", client_registry.OTHER_PROCESS] == 1


def test_client_stays_while_a_uvm_file_of_its_maker_is_not_empty(on_card):
    someone_elses(on_card, 9)
    file = os.open("/dev/random", os.O_RDONLY)
    on_card.shared.pod_uvm_files.hold(1, file, file)
    (held_file,) = on_card.shared.uvm_files.take(1)
    moved = [pass_on(on_card, 9)]
    on_card.shared.uvm_files.release([held_file])
    moved.append(on_card.shared.clients.register(on_card.process.pid, 5, 5, 9))
    os.close(file)

    assert moved == [False, True]


def test_no_process_has_the_number_of_who_made_anothers_client(on_card):
    """RM lets UVM map the client's memory for whoever has that number."""
    someone_elses(on_card, 9)
    on_card.shared.exited(1)
    with pytest.raises(BlockingIOError):
        on_card.shared.clients.register_process("web", 1)

    on_card.shared.clients.register_process("other", 1)


def test_nothing_is_made_through_a_client_that_does_not_fit(on_card):
    allocate(on_card, 10, MOST)
    pass_on(on_card, 9)
    call = alloc(11, 2, 0x40, client=9)

    assert alloc_status(on_card.call(abi.NV_ESC_RM_ALLOC, call, memory_params(PAGE))[2]) == abi.NV_ERR_INVALID_CLIENT
    assert (9, 11) not in on_card.rm.objects
    assert on_card.shared.table.clients[9].pod == "other"


def test_client_moves_up_to_the_last_byte_of_the_limit(on_card):
    on_card.limits[0] = MOST

    assert pass_on(on_card, 9)
    assert both(on_card) == [0, MOST]


def test_client_with_memory_on_a_card_without_a_grant_stays(on_card):
    on_card.limits.clear()
    on_card.minors.clear()

    assert not pass_on(on_card, 9)
    assert both(on_card) == [MOST, 0]


def test_a_pod_without_a_limit_takes_any_client(on_card):
    on_card.limits.clear()

    assert [pass_on(on_card, client) for client in (9, 8)] == [True, True]
    assert both(on_card) == [0, 2 * MOST]


def test_reused_name_moves_once_rm_has_denied_its_old_memory(on_card, monkeypatch):
    allocate(on_card, 10, MOST)
    someone_elses(on_card)
    on_card.rm.stale.add(9)
    for handle in (2, 10):
        del on_card.rm.objects[9, handle]
    monkeypatch.setattr(shared_table, "_FORGETTING_S", 60)
    monkeypatch.setattr(shared_table.time, "sleep", lambda _: on_card.settle())

    assert on_card.shared.clients.register(on_card.process.pid, 5, 5, 9)
    assert both(on_card) == [0, MOST]
    assert on_card.shared.refusals.counts["web", REFUSED] == 0


def test_clients_that_the_pod_no_longer_has_make_room(on_card):
    allocate(on_card, 10, MOST)
    for key in [key for key in on_card.rm.objects if key[0] == 7]:
        del on_card.rm.objects[key]

    assert pass_on(on_card, 9)
    assert both(on_card) == [0, MOST]


def test_memory_that_comes_while_rm_is_asked_counts_too(on_card, monkeypatch):
    """The other pod still makes calls: what it makes last must not move for nothing."""
    someone_elses(on_card)
    on_card.rm.stale.add(9)
    room, looks = client_registry.ClientRegistry._has_room, []

    def more_after_the_first(shared, pod, client):
        fits = room(shared, pod, client)
        if not looks:
            fact = {"fact": "object", "client": 9, "handle": 11, "parent": 2, "class": 0x40, "detail": MOST}
            shared._note(fact | {"memory": 91})
        looks.append(fits)
        return fits

    monkeypatch.setattr(client_registry.ClientRegistry, "_has_room", more_after_the_first)

    assert not on_card.shared.clients.register(on_card.process.pid, 5, 5, 9)
    assert (looks, both(on_card)) == ([True, False], [2 * MOST, 0])


def test_memory_that_stayed_behind_follows_no_second_handle(on_card):
    """It has a handle elsewhere when its client moves, and is not asked for then; nor is it later."""
    someone_elses(on_card)
    for fact in (
        {"fact": "client", "client": 8, "pid": 1, "fd": 4},
        {"fact": "object", "client": 8, "handle": 2, "parent": 8, "class": abi.NV01_DEVICE_0, "detail": 0},
        {"fact": "object", "client": 8, "handle": 20, "parent": 2, "class": 0x40, "detail": MOST, "memory": 90},
    ):
        on_card.shared.note(fact)
    on_card.rm.stale.add(9)
    allocate(on_card, 10, LIMIT - MOST)
    assert on_card.shared.clients.register(on_card.process.pid, 5, 5, 9)
    on_card.shared.note({"fact": "gone", "client": 8, "handle": 8})

    answer = on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(30, 10, client=9, source_client=9))

    assert dup_status(answer[2]) == abi.NV_OK
    assert both(on_card) == [MOST, LIMIT - MOST]
    on_card.call(abi.NV_ESC_RM_FREE, free(9, client=9))
    assert held(on_card) == LIMIT - MOST


def test_client_stays_with_the_pod_that_has_its_file(on_card):
    """Its maker has kept no object in it, and passed the file on."""
    on_card.rm.objects[9, 9] = (abi.NV01_ROOT_CLIENT, 0)
    for fact in (
        {"fact": "pod", "name": "other", "grants": {}},
        {"fact": "process", "pid": 1, "pod": "other"},
        {"fact": "client", "client": 9, "pid": 1, "fd": 3, "made_here": True},
        {"fact": "notes", "client": 9, "count": 5},
    ):
        on_card.shared.note(fact)
    on_card.files.makers.is_by = lambda file, pid: pid == 1

    assert not on_card.shared.clients.register(on_card.process.pid, 5, 5, 9)
    entry = on_card.shared.table.clients[9]
    assert (entry.pod, entry.maker, entry.made_here, entry.notes, entry.users) == ("other", 1, True, 5, [(1, 3)])


def test_nothing_is_made_in_a_client_another_pod_named_first(on_card):
    test_client_stays_with_the_pod_that_has_its_file(on_card)
    call = alloc(10, 2, 0x40, client=9)

    assert alloc_status(on_card.call(abi.NV_ESC_RM_ALLOC, call, memory_params(PAGE))[2]) == abi.NV_ERR_INVALID_CLIENT


@pytest.mark.parametrize("made_here", [False, True], ids=["by the kernel", "by the guardian"])
def test_a_client_made_again_in_its_pod_has_its_new_maker(pod, made_here):
    """Its first maker closed the file; no call told of that. RM takes the handle that a process asks for."""
    pod.shared.files = FileSets(pod.files.fd)
    pod.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))  # its process is known
    pod.shared.note({"fact": "process", "pid": 1, "pod": "web"})
    first = pod.process.pid if made_here else 1
    pod.shared.note({"fact": "client", "client": 7, "pid": first, "fd": device_of(pod), "made_here": made_here})
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(0, 0, abi.NV01_ROOT, client=0))
    make_device(pod)
    entry = pod.shared.table.clients[7]

    assert (entry.maker, entry.made_here) == (pod.process.pid, False)


def test_few_clients_of_a_pod_may_outlive_their_makers(pod, monkeypatch):
    monkeypatch.setattr(client_registry, "_MOST_OUTLIVING", 2)
    answers = []
    for client in range(20, 23):
        answers.append(pod.shared.clients.may_have_another("web"))
        pod.shared.note({"fact": "process", "pid": client, "pod": "web"})
        pod.shared.note({"fact": "client", "client": client, "pid": client, "fd": 4})
        pod.shared.exited(client)

    assert answers == [True, True, False]


def test_clients_that_move_count_to_their_new_pod(on_card, monkeypatch):
    monkeypatch.setattr(client_registry, "_MOST_OUTLIVING", 3)
    monkeypatch.setattr("tests.guardian.proxy.test_memory.MOST", 0)
    on_card.limits.clear()

    moved = [pass_on(on_card, client) for client in range(20, 26)]
    assert moved == [True] * 3 + [False] * 3
    assert on_card.shared.refusals.counts["web", "too many clients of RM"] == 3

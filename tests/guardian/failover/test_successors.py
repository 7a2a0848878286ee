"""What the next guardian makes of what the last one left, and of a recorded program as a whole."""

from __future__ import annotations

import errno
import os
import select
import struct
import threading

import pytest

from qgpu.guardian.accounting.rm_object import RmObject
from qgpu.guardian.failover.journal import Journal
from qgpu.linux import proc
from qgpu.linux.open_file_set import FileSets
from qgpu.nvidia import abi, uvm
from tests.guardian.asked import TSG_PARAMS, alloc, alloc_status, control, free, status
from tests.guardian.fake_rm import PAGE
from tests.guardian.pod import MAJOR, MOST, PATIENCE_S, Pod, allocate, device_of
from tests.traces import TRACES, allocated, rows


def test_call_received_by_dead_guardian_is_judged_by_successor(pod):
    pod.begin(abi.NV_ESC_RM_CONTROL, control(abi.NV2080_FIFO_DISABLE_CHANNELS))
    select.select([pod.listener], [], [], PATIENCE_S)
    assert pod.shared.listeners[pod.number][1].receive() is not None  # and here it dies

    successor = pod.fresh(Journal(os.dup(pod.shared.journal.fd)))
    successor.listeners.add("web", os.dup(pod.listener), pod.number)
    left = successor.listeners.unanswered_call(pod.number)
    pod.dispatcher_of(successor, pod.number).resume(successor.listeners[pod.number][1], left)

    assert status(pod.answer()[2]) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
    assert successor.listeners.unanswered_call(pod.number) is None


def test_what_a_dead_guardian_was_making_is_found_by_the_next(on_card):
    rm = RmObject(7, 10, 2, abi.NV01_MEMORY_LOCAL_USER, MOST)
    on_card.shared.claims.claim(rm)
    on_card.shared.claims.claim(RmObject(7, 11, 2, abi.NV01_MEMORY_LOCAL_USER, 2 * PAGE))
    on_card.rm._make(7, 10, abi.NV01_MEMORY_LOCAL_USER, 2, MOST + 1)  # and here it dies

    successor = on_card.fresh(Journal(os.dup(on_card.shared.journal.fd)))
    for fact in successor.journal.read()[1]:
        successor.table.note(fact)
    successor.resume()
    before = successor.quota.used("web", 0)
    successor.claims.settle("web")

    assert before == MOST + 2 * PAGE  # it asks RM only when it serves the pod: a pod can leave many claims
    assert successor.quota.used("web", 0) == MOST + PAGE


def test_memory_of_unknown_size_is_settled_before_more(on_card, monkeypatch):
    """The pod hides its client's file while a guardian dies in a call. RM rounds memory up, by megabytes if asked."""
    on_card.shared.claims.claim(RmObject(7, 10, 2, abi.NV01_MEMORY_LOCAL_USER, PAGE))
    on_card.rm._make(7, 10, abi.NV01_MEMORY_LOCAL_USER, 2, MOST)  # and here it dies
    with monkeypatch.context() as hidden:
        hidden.setattr(on_card.rm, "find_object", lambda rm: None)
        hidden.setattr(on_card.rm, "size", lambda rm: None)
        successor_of(on_card)
        meanwhile = allocate(on_card, 11, PAGE)
    found = allocate(on_card, 11, MOST)

    assert (meanwhile, found) == (abi.NV_ERR_BUSY_RETRY, abi.NV_ERR_NO_MEMORY)
    assert on_card.shared.quota.used("web", 0) == MOST
    assert allocate(on_card, 11, PAGE) == abi.NV_OK


def successor_of(pod):
    """Let the next guardian take up what the last one left, and serve the pod from now on."""
    pod.shared = pod.fresh(Journal(os.dup(pod.shared.journal.fd)))
    for fact in pod.shared.journal.read()[1]:
        pod.shared.table.note(fact)
    pod.shared.listeners.add("web", os.dup(pod.listener), pod.number)
    pod.shared.resume()
    pod.dispatcher = pod.dispatcher_of(pod.shared, pod.number)
    pod.dispatcher.resume(pod.shared.listeners[pod.number][1], pod.shared.listeners.unanswered_call(pod.number))


class _DiesError(BaseException):
    """The guardian's end in the middle of a call."""


@pytest.mark.parametrize(("handle", "client"), [(0x20, 8), (8, 8), (0x20, 7)], ids=["another's", "its client", "own"])
def test_a_free_that_rm_refuses_forgets_nothing(on_card, handle, client):
    """The call came on a file of other clients. A dead guardian began it, so its successor makes it again."""
    neighbour(on_card)
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(0x20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    before = set(on_card.shared.table.objects)
    die_in_free(on_card, free(handle, client=client))
    on_card.rm.elsewhere.add(client)
    on_card.rm._free = lambda client, handle: False
    successor_of(on_card)

    assert struct.unpack_from("<I", on_card.answer()[2], 12)[0] in abi.UNKNOWN_TO_RM
    assert set(on_card.shared.table.objects) == before


def test_an_alloc_on_another_file_forgets_nothing(on_card):
    """RM had made its object. A successor finds another file at the descriptor, which does not reach that."""
    die_in(on_card, abi.NV_ESC_RM_ALLOC, alloc(0x20, 2, abi.KEPLER_CHANNEL_GROUP_A))
    on_card.rm._make(7, 0x20, abi.KEPLER_CHANNEL_GROUP_A, 2)
    on_card.shared.note({"fact": "confirm", "client": 7, "handle": 0x20})
    on_card.rm.elsewhere.add(7)
    on_card.rm._free = lambda client, handle: False
    successor_of(on_card)
    on_card.answer()

    assert (7, 0x20) in on_card.shared.table.objects


@pytest.mark.parametrize("handle", [7, 0x20], ids=["client", "TSG"])
def test_a_free_that_was_done_and_noted_is_answered_so(on_card, handle):
    """The guardian died after it had noted the free, and before it had written down the answer."""
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(0x20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    die_in_free(on_card, free(handle))
    for key in [key for key in on_card.rm.objects if handle in (key[1], 7)]:
        del on_card.rm.objects[key]
    on_card.shared.note({"fact": "gone", "client": 7, "handle": handle})
    successor_of(on_card)

    assert struct.unpack_from("<I", on_card.answer()[2], 12)[0] == abi.NV_OK


def neighbour(pod):
    for fact in (
        {"fact": "pod", "name": "neighbour", "grants": {}},
        {"fact": "process", "pid": 1, "pod": "neighbour"},
        {"fact": "client", "client": 8, "pid": 1, "fd": 3},
    ):
        pod.shared.note(fact)
    pod.rm.objects[8, 8] = (abi.NV01_ROOT_CLIENT, 0)
    for handle, parent, rm_class in ((2, 8, abi.NV01_DEVICE_0), (0x20, 2, abi.KEPLER_CHANNEL_GROUP_A)):
        made = {"client": 8, "handle": handle, "parent": parent, "class": rm_class, "detail": 0, "confirmed": 0}
        pod.shared.note({"fact": "object"} | made)
        pod.rm.objects[8, handle] = (rm_class, parent)


def die_in_free(pod, call):
    """Let the guardian die in a pod's free, after it has begun, and before RM is asked."""
    die_in(pod, abi.NV_ESC_RM_FREE, call)


def die_in(pod, number, call, *, after=False):
    """Let the guardian die in a call, after it has begun, and before RM is asked or after it has answered."""
    perform = pod.rm.perform

    def dies(fd, request, argument):
        if request & 0xFF != number or after:
            result = perform(fd, request, argument)
        if request & 0xFF == number:
            raise _DiesError
        return result

    pod.shared.perform = pod.dispatcher._proxy._perform = dies
    pod.begin(number, call)
    select.select([pod.listener], [], [], PATIENCE_S)
    listener = pod.shared.listeners[pod.number][1]
    with pytest.raises(_DiesError):
        pod.dispatcher.serve(listener, listener.receive())


def test_a_watch_that_failed_is_tried_again(pod, monkeypatch):
    """The user has no epoll watches left; without a watch nobody would learn of the process's end."""
    pod.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))  # its process is known
    watched, full = [], [True]

    def watch(pid, pidfd):
        if full[0]:
            raise OSError(errno.ENOSPC, "no watches")
        watched.append(pid)

    fresh = pod.fresh
    monkeypatch.setattr(pod, "fresh", lambda journal: setattr(found := fresh(journal), "watch", watch) or found)
    successor_of(pod)
    pod.shared.retry_watches()
    assert (watched, list(pod.shared.table.processes)) == ([], [pod.process.pid])

    full[0] = False
    for _ in range(3):
        pod.shared.retry_watches()
    assert watched == [pod.process.pid]


@pytest.mark.parametrize("started", ["1", None])
def test_a_pid_that_another_process_has_by_now_is_nobodys(pod, started):
    """The process of before ended while there was no guardian, and its pid went to a process of another container."""
    pod.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))  # its process is known
    pid = pod.process.pid
    if started is not None:
        pod.shared.note({"fact": "process", "pid": pid, "pod": "web", "started": started})
    successor_of(pod)

    assert pod.shared.table.processes.get(pid) == ("web" if started is None else None)
    assert pod.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))[:2] == (0, 0)


def test_a_pid_of_another_pods_ended_process_is_refused(pod):
    """That process is forgotten once its files of UVM's are emptied; this one's calls fail until then."""
    pod.shared.note({"fact": "process", "pid": pod.process.pid, "pod": "other"})

    assert pod.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))[:2] == (-1, errno.EAGAIN)
    pod.shared.note({"fact": "exit", "pid": pod.process.pid})
    assert pod.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))[0] == 0
    assert pod.shared.table.processes[pod.process.pid] == "web"


@pytest.mark.parametrize("moved", [False, True])
def test_a_successor_holds_uvms_files_where_they_were(pod, monkeypatch, moved):
    """It looks at no other descriptor before it serves; a file that was moved it searches for then."""
    pod.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))  # its process is known
    monkeypatch.setattr(uvm, "major", lambda: MAJOR)
    monkeypatch.setattr(proc, "devices", lambda pid, most=None: looked.append(pid) or iter([(device, MAJOR << 8)]))
    looked = []
    device, pid = device_of(pod), pod.process.pid
    pod.shared.note({"fact": "uvm_file", "pid": pid, "fd": 999 if moved else device, "there": True})
    successor_of(pod)
    held = pod.shared.uvm_files.count("web"), list(looked)
    pod.shared.pod_uvm_files.find_moved("web")

    assert held == (0 if moved else 1, [])
    assert pod.shared.uvm_files.count("web") == 1


def test_a_pod_that_hides_uvms_file_holds_up_no_other(pod, monkeypatch):
    shared, stuck = pod.shared, threading.Event()
    monkeypatch.setattr(proc, "devices", lambda pid: stuck.wait(PATIENCE_S) and () if pid == 5 else iter(()))
    shared.pod_uvm_files.moved |= {"a": {5}, "b": {6}}
    slow = threading.Thread(target=shared.pod_uvm_files.find_moved, args=["a"])
    slow.start()
    shared.pod_uvm_files.find_moved("b")
    waits = slow.is_alive()
    stuck.set()
    slow.join()

    assert waits
    assert shared.pod_uvm_files.moved == {}


def test_a_successor_touches_no_uvm_file_before_it_serves(pod, monkeypatch):
    """A pod can have thousands of them in thousands of processes; they are held again before its own first call."""
    pod.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))
    pod.shared.note({"fact": "uvm_file", "pid": pod.process.pid, "fd": device_of(pod), "there": True})
    successor = pod.fresh(Journal(os.dup(pod.shared.journal.fd)))
    for fact in successor.journal.read()[1]:
        successor.table.note(fact)
    monkeypatch.setattr(uvm, "major", lambda: MAJOR)
    successor.resume()
    before = successor.uvm_files.count("web")
    successor.pod_uvm_files.hold_all("web")
    pod.shared = successor

    assert (before, successor.uvm_files.count("web")) == (0, 1)


def ask_for_root(pod):
    pod.begin(abi.NV_ESC_RM_ALLOC, alloc(0, 0, abi.NV01_ROOT, client=0))


@pytest.mark.parametrize("received", [False, True])
def test_program_started_without_guardian_gets_client_from_next(pod, received):
    pod.call(abi.NV_ESC_RM_CONTROL, control(0x20800110))  # its process is known
    ask_for_root(pod)
    select.select([pod.listener], [], [], PATIENCE_S)
    assert not received or pod.shared.listeners[pod.number][1].receive() is not None
    successor_of(pod)

    assert pod.answer()[:2] == (-1, errno.EINVAL)  # /dev/random's answer


def test_successor_makes_the_second_client_of_a_file_itself(pod):
    ask_for_root(pod)
    pod.answer()
    successor_of(pod)
    ask_for_root(pod)

    assert alloc_status(pod.answer()[2]) == abi.NV_OK


@pytest.mark.parametrize(
    "trace", [*(t for t in TRACES if "min." in t.name or "04-torch." in t.name)], ids=lambda path: path.name
)
def test_replayed_recording_is_registered_completely(trace):
    made = allocated(trace)
    pod = Pod({key: what for key, what in made.items() if what[0] in abi.ROOT_CLASSES})
    try:
        for row in rows(trace):
            if row.number == abi.NV_ESC_REGISTER_FD:  # names a descriptor of the recorded process
                continue
            pod.call(row.number, row.before, row.params)
            client, parent, handle, rm_class = struct.unpack_from("<IIII", row.before.ljust(16))
            is_memory = row.number == abi.NV_ESC_RM_ALLOC_MEMORY
            if is_memory or (row.number, rm_class) == (abi.NV_ESC_RM_ALLOC, abi.NV01_DEVICE_0):  # the kernel made it
                pod.rm.objects[client, handle] = (rm_class, parent)
        table = pod.shared.table
        kept = {abi.NV01_DEVICE_0, abi.NV20_SUBDEVICE_0, abi.KEPLER_CHANNEL_GROUP_A, 0x40} | abi.GPFIFO_CLASSES

        assert {rm.key for rm in table.objects.values() if rm.confirmed and rm.rm_class in kept} == {
            key for key, (rm_class, _) in made.items() if rm_class in kept
        }
        assert len(table.compute_tsgs(0)) == 1
        assert len(table.channels(table.compute_tsgs(0)[0])) == 8

        assert not pod.shared.refusals.counts
    finally:
        pod.end()


def test_a_waiting_call_gives_a_file_no_second_root_client(pod):
    """The dead guardian had received it only. So the client that the file has is of an earlier call."""
    pod.shared.files = pod.files = FileSets(pod.files.fd)
    by_kernel = (-1, errno.EINVAL)
    ask_for_root(pod)
    assert pod.answer()[:2] == by_kernel
    ask_for_root(pod)
    select.select([pod.listener], [], [], PATIENCE_S)
    assert pod.shared.listeners[pod.number][1].receive() is not None
    successor_of(pod)

    assert pod.answer()[:2] != by_kernel

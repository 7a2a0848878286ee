"""Reaching into pods: few descriptors are tried, and a file that was moved is searched for beside the main loop."""

from __future__ import annotations

import errno
import os
import platform
import select
import threading
from types import SimpleNamespace

import pytest

from qgpu.errors import RmError
from qgpu.guardian.accounting.client_entries import MOST_USERS
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.rm_object import RmObject
from qgpu.guardian.gpu import gpu_ops
from qgpu.guardian.gpu.gpu_ops import GpuOps
from qgpu.guardian.proxy import control_file_search
from qgpu.guardian.proxy.control_file_search import ControlFileSearch
from qgpu.linux import kcmp, pod_fd_closer, pod_fd_taker, proc
from qgpu.nvidia import abi, rm_client
from tests.guardian.pod import PATIENCE_S, until

CLIENT = 7
_SELECT = {"x86_64": 270, "aarch64": 72}


@pytest.fixture
def reach(monkeypatch):
    """Ours as a pod's process with an RM client, where /dev/random is a control file."""
    monkeypatch.setattr(gpu_ops, "_CONTROL_DEVICE", os.makedev(1, 8))
    table, there = ObjectTable(), SimpleNamespace(there=True, taken=0)
    for fact in (
        {"fact": "pod", "name": "web", "cgroup": "/no-such-pod", "grants": {}},
        {"fact": "process", "pid": os.getpid(), "pod": "web"},
    ):
        table.note(fact)
    made = GpuOps(table, SimpleNamespace(), SimpleNamespace(knows=lambda *_: there.there), [])
    made.watch(os.getpid())
    take = rm_client.take

    def counted(*arguments):
        there.taken += 1
        return take(*arguments)

    monkeypatch.setattr(rm_client, "take", counted)
    yield SimpleNamespace(table=table, gpu_ops=made, rm=there)
    made.unwatch(os.getpid())


def used(reach, *fds):
    for fd in fds:
        reach.table.note({"fact": "client", "client": CLIENT, "pid": os.getpid(), "fd": fd})


def test_few_of_a_clients_many_descriptors_are_tried(reach):
    files = [os.open("/dev/random", os.O_RDONLY) for _ in range(4 * MOST_USERS)]
    used(reach, *files)
    reach.gpu_ops._via_client_file(CLIENT, lambda file: None)
    for fd in files:
        os.close(fd)

    assert reach.rm.taken == MOST_USERS


@pytest.mark.parametrize("there", [True, False])
def test_only_a_client_that_rm_has_is_said_to_be_unreached(reach, there):
    told = []
    reach.gpu_ops.on_unreachable, reach.rm.there = told.append, there
    used(reach, 999)
    reach.gpu_ops._via_client_file(CLIENT, lambda file: True)

    assert (told, reach.rm.taken) == ([CLIENT] if there else [], 0)


def test_another_file_in_the_descriptors_place_is_not_used(reach, pipe):
    used(reach, pipe[0])

    assert reach.gpu_ops._via_client_file(CLIENT, lambda file: True) is None


def test_a_pods_files_are_looked_at_by_a_thread_of_its_own(reach, monkeypatch):
    """Some file systems ask their server what a file is, and a pod may be that server."""
    statx, threads = proc._syscall, set()

    def noted(*arguments):
        threads.add(threading.current_thread().name)
        return statx(*arguments)

    monkeypatch.setattr(proc, "_syscall", noted)
    fd = os.open("/dev/random", os.O_RDONLY)
    used(reach, fd)
    found = reach.gpu_ops._via_client_file(CLIENT, lambda file: True)
    os.close(fd)

    assert (found, threads) == (True, {"qgpu-take"})


def test_a_pods_files_are_closed_by_a_thread_of_its_own(reach, monkeypatch):
    """The last descriptor of a control file frees its client: that takes as long as the pod has made it."""
    stuck, closed = threading.Event(), threading.Event()
    close = os.close

    def slow(fd):
        if threading.current_thread().name == "qgpu-close":
            stuck.wait(PATIENCE_S)
        close(fd)
        closed.set()

    monkeypatch.setattr("qgpu.linux.pod_fd_closer.os", SimpleNamespace(close=slow))
    fd = os.open("/dev/random", os.O_RDONLY)
    used(reach, fd)
    answers = [reach.gpu_ops._via_client_file(CLIENT, lambda file: True) for _ in range(100)]
    stuck.set()

    assert closed.wait(PATIENCE_S)
    assert (answers[0], answers[-1]) == (True, None)  # and no more is taken than may wait
    os.close(fd)


@pytest.fixture
def stuck(reach, monkeypatch, pipe):
    """Keep every file in the kernel until told, as a process's are that executes a program; its client and that."""

    def wait(*_):
        select.select([pipe[0]], [], [])

    take = rm_client.take
    monkeypatch.setattr(rm_client, "take", lambda *arguments: wait() or take(*arguments))
    monkeypatch.setattr(kcmp, "same_file", lambda *_: wait() is None)
    monkeypatch.setattr(pod_fd_taker, "_CALLS", {str(_SELECT[platform.machine()])})
    fd = os.open("/dev/random", os.O_RDONLY)
    used(reach, fd)
    yield SimpleNamespace(fd=fd, end=lambda: os.write(pipe[1], b"x"))
    os.write(pipe[1], b"x")
    taker = reach.gpu_ops.taker._of("web")
    until(lambda: taker.request is None)
    os.close(fd)


def test_process_that_executes_a_program_delays_nobody(reach, stuck):
    """Who waited for the file would wait for ever."""
    answers = [reach.gpu_ops._via_client_file(CLIENT, lambda file: True) for _ in range(3)]
    stuck.end()

    assert answers == [None] * 3
    until(lambda: reach.gpu_ops._via_client_file(CLIENT, lambda file: True))


def test_former_owner_of_a_client_does_not_delay_its_new_one(reach, stuck):
    assert not reach.gpu_ops.pod_has_file(CLIENT, "web", stuck.fd)


def test_slow_files_of_one_pod_delay_no_other_pods(reach, stuck, monkeypatch):
    reach.gpu_ops._via_client_file(CLIENT, lambda file: True)
    reach.table.pods["db"] = reach.table.pods["web"]
    reach.table.clients[CLIENT].pod = "db"
    monkeypatch.setattr(rm_client, "take", abi.pidfd_getfd)

    assert reach.gpu_ops._via_client_file(CLIENT, lambda file: True)


def searching(reach, monkeypatch, clients_behind_fd):
    monkeypatch.setattr(control_file_search, "_PATIENCE_S", 0.3)
    monkeypatch.setattr(control_file_search, "_AGAIN_S", 0.05)
    found, missed = [], threading.Event()
    search = ControlFileSearch(
        reach.table,
        lambda pid, at, clients: clients if clients_behind_fd(pid, at, CLIENT) else set(),
        lambda client: reach.rm.there,
        lambda *where: found.append(where) or True,
        missed.set,
    )
    return search, found, missed


def test_a_search_after_a_search_is_begun(reach, monkeypatch):
    fd = os.open("/dev/random", os.O_RDONLY)
    used(reach, 999)
    search, found, _ = searching(reach, monkeypatch, lambda pid, at, client: at == fd)
    for count in range(1, 20):
        search.search_for(CLIENT)
        until(lambda count=count: len(found) >= count)
    os.close(fd)


def test_a_file_under_another_number_is_found(reach, monkeypatch):
    fd = os.open("/dev/random", os.O_RDONLY)
    used(reach, 999)
    search, found, _ = searching(reach, monkeypatch, lambda pid, at, client: at == fd)
    search.search_for(CLIENT)
    until(lambda: found)
    os.close(fd)

    assert (found, search.lost) == ([(CLIENT, os.getpid(), fd)], set())


def test_a_search_that_could_not_look_loses_no_client(reach, monkeypatch):
    looked = []

    def clients_behind_fd(pid, at, client):
        looked.append(at)
        if len(looked) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return True

    used(reach, 999)
    search, found, _ = searching(reach, monkeypatch, clients_behind_fd)
    search.search_for(CLIENT)
    until(lambda: found)

    assert not search.lost


def test_client_of_a_pod_with_too_many_cgroups_is_lost(reach, monkeypatch):
    """Otherwise it would keep its timeslice as long as its file stays hidden."""

    def refuse(*_):
        raise OSError(errno.E2BIG, "more than 512 cgroups are below it")

    monkeypatch.setattr(control_file_search.cgroup, "pids", refuse)
    looked = []
    used(reach, 999)
    search, _, missed = searching(reach, monkeypatch, lambda pid, at, client: looked.append(pid))
    search.search_for(CLIENT)
    assert missed.wait(PATIENCE_S)
    lost = set(search.lost)
    reach.rm.there = False
    until(lambda: not search.lost)

    assert lost == {CLIENT}
    assert set(looked) == {os.getpid()}  # processes that made calls are searched all the same


def test_client_is_lost_if_each_search_fails(reach, monkeypatch):
    def fail(pid, at, client):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    used(reach, 999)
    search, _, missed = searching(reach, monkeypatch, fail)
    search.search_for(CLIENT)
    assert missed.wait(PATIENCE_S)
    assert search.lost == {CLIENT}
    reach.rm.there = False
    until(lambda: not search.lost)


def test_a_client_whose_file_is_nowhere_is_lost_until_it_ends(reach, monkeypatch):
    used(reach, 999)
    search, found, missed = searching(reach, monkeypatch, lambda *_: False)
    search.search_for(CLIENT)
    assert missed.wait(PATIENCE_S)
    lost = set(search.lost)
    reach.rm.there = False
    until(lambda: not search.lost)

    assert (lost, found) == ({CLIENT}, [])


def test_one_client_that_is_nowhere_hides_no_other(reach, monkeypatch):
    used(reach, 999)
    reach.table.note({"fact": "client", "client": CLIENT + 1, "pid": os.getpid(), "fd": 998})
    search, _, _ = searching(reach, monkeypatch, lambda *_: False)
    for client in (CLIENT, CLIENT + 1):
        search.search_for(client)
    until(lambda: search.lost == {CLIENT, CLIENT + 1})
    reach.rm.there = False
    until(lambda: not search.lost)


def test_a_client_of_a_new_owner_is_not_lost_for_the_old_one(reach, monkeypatch):
    used(reach, 999)
    search, _, missed = searching(reach, monkeypatch, lambda *_: False)
    search.search_for(CLIENT)
    assert missed.wait(PATIENCE_S)
    reach.table.note({"fact": "process", "pid": 4242, "pod": "other"})
    reach.table.note({"fact": "owner", "client": CLIENT, "pod": "other", "pid": 4242, "fd": 5})
    until(lambda: not search.lost)


def test_a_burst_is_not_taken_for_a_hidden_file(reach):
    told = []
    reach.gpu_ops.on_unreachable = told.append
    fd = os.open("/dev/random", os.O_RDONLY)
    used(reach, fd)
    for _ in range(20 * pod_fd_closer.MOST_WAITING):
        reach.gpu_ops._via_client_file(CLIENT, lambda file: True)
    reached = [reach.gpu_ops.pod_has_file(CLIENT, "web", fd) for _ in range(1000)]
    os.close(fd)

    assert (told, all(reached)) == ([], True)


@pytest.mark.parametrize(
    ("objects", "freed", "found"),
    [([30, 31], True, 2), ([], True, 0), ([30], False, None)],
    ids=["some", "none", "kept"],
)
def test_what_a_pod_may_not_have_is_freed_or_said_to_be_there(reach, monkeypatch, objects, freed, found):
    monkeypatch.setattr(rm_client, "handle_info", lambda *_: (0x41, 0))
    monkeypatch.setattr(rm_client, "child", lambda *_: objects[0] if objects else None)
    monkeypatch.setattr(rm_client, "free", lambda *_: freed and bool(objects.pop(0)))
    with open("/dev/random") as file:
        used(reach, file.fileno())

        assert reach.gpu_ops.free_children(CLIENT, [2], [0xE61EE1]) == found


@pytest.mark.parametrize("own", [True, False])
def test_no_objects_are_missed_where_the_driver_does_not_say(reach, monkeypatch, own):
    def refuse(*_):
        raise RmError("GET_CHILD_HANDLE", abi.NV_ERR_NO_MEMORY)

    monkeypatch.setattr(rm_client, "handle_info", lambda *_: (0x41, 0))
    monkeypatch.setattr(rm_client, "control", refuse)
    with open("/dev/random") as file:
        used(reach, file.fileno())

        assert reach.gpu_ops.free_children(CLIENT, [2], [0xE61EE1], None if own else file.fileno()) is None


def test_a_cards_file_tells_of_no_clients_children(reach):
    """On a card's file the driver refuses controls by EINVAL."""
    with open("/dev/random") as file:
        assert reach.gpu_ops.free_children(CLIENT, [2], [0xE61EE1], file.fileno()) is None


@pytest.mark.parametrize("theirs", [True, False])
def test_only_objects_of_the_pods_own_files_are_shared(reach, monkeypatch, theirs):
    """RM shares any client's object: a client may have ended, and its number may be another pod's by now."""
    asked = []
    monkeypatch.setattr(rm_client, "handle_info", lambda *_: (0x40, 2) if theirs else None)
    monkeypatch.setattr(rm_client, "share", lambda _file, *what, revoke=False: asked.append((*what, revoke)) or True)
    monkeypatch.setattr(reach.gpu_ops, "_client", SimpleNamespace(fd=-1, knows=lambda *_: True))
    with open("/dev/random") as file:
        used(reach, file.fileno())
        with reach.gpu_ops.shared_with((CLIENT, 10), 9):
            assert asked == ([(CLIENT, 10, 9, False)] if theirs else [])

    assert asked[1:] == ([(CLIENT, 10, 9, True)] if theirs else [])


@pytest.mark.parametrize("failing", [RmError("RM control", abi.NV_ERR_INVALID_ARGUMENT), OSError(errno.EBADF, "gone")])
def test_size_on_the_fabric_is_unknown_where_rm_does_not_say(reach, monkeypatch, failing):
    def control(fd, client, target, command, params):
        assert (fd, client, target, command) == (3, CLIENT, 11, abi.NV00F8_GET_INFO)
        if params.size == 0 and answers:
            params.size, params.allocFlags = answers.pop()
            return
        raise failing

    answers = [(1 << 30, 1)]
    monkeypatch.setattr(rm_client, "control", control)

    assert [reach.gpu_ops.fabric_info(3, CLIENT, 11) for _ in range(2)] == [(1 << 30, 1), None]


@pytest.mark.parametrize(
    ("failing", "known"),
    [
        (RmError("RM control", abi.NV_ERR_OBJECT_NOT_FOUND), False),
        (OSError(errno.EBADF, "gone"), False),
        (RmError("RM control", abi.NV_ERR_NO_MEMORY), False),
        (RmError("RM control", abi.NV_ERR_INVALID_STATE), False),
        (RmError("RM control", abi.NV_ERR_NOT_SUPPORTED), True),
    ],
)
def test_card_that_cannot_preempt_differs_from_a_failure(reach, monkeypatch, failing, known):
    def control(*asked):
        raise failing

    monkeypatch.setattr(rm_client, "control", control)
    monkeypatch.setattr(rm_client, "handle_info", lambda *asked: (abi.NV20_SUBDEVICE_0, 2))

    assert reach.gpu_ops.make_preemptible(3, CLIENT, 5, 20) == known


@pytest.mark.parametrize("found", [None, (0x79, 2)])
def test_only_a_subdevice_can_tell_that_its_card_cannot(reach, monkeypatch, found):
    """RM says of any other object, too, that it does not support the control."""

    def control(*asked):
        raise RmError("RM control", abi.NV_ERR_NOT_SUPPORTED)

    monkeypatch.setattr(rm_client, "control", control)
    monkeypatch.setattr(rm_client, "handle_info", lambda *asked: found)

    assert not reach.gpu_ops.make_preemptible(3, CLIENT, 5, 20)


@pytest.mark.parametrize(("rm_class", "replaced"), [(0x2081, True), (abi.KEPLER_CHANNEL_GROUP_A, False), (None, False)])
def test_a_tsgs_handle_that_names_another_object_is_told(reach, monkeypatch, rm_class, replaced):
    """RM frees TSGs with their address space; their timeslices can no longer be set."""
    file, told = os.open("/dev/random", os.O_RDONLY), []
    used(reach, file)
    monkeypatch.setattr(rm_client, "handle_info", lambda *_: None if rm_class is None else (rm_class, 2))
    tsg = RmObject(CLIENT, 0x20, 2, abi.KEPLER_CHANNEL_GROUP_A, 1)
    reach.gpu_ops.on_replaced = told.append
    done = reach.gpu_ops.timeslice(tsg, 200)  # /dev/random refuses it
    os.close(file)

    assert (done, told) == (False, [tsg] if replaced else [])

"""The guardian's threads: real pods behind real filters, a card in a table, and a daemon on the socket."""

from __future__ import annotations

import gc
import os
import select
import subprocess
import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest

from qgpu.guardian import server
from qgpu.guardian.accounting.managed_search import ManagedSearch
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.gpu.enforcer import Enforcer
from qgpu.guardian.gpu.gpu_ops import Moved
from qgpu.guardian.proxy import listeners
from qgpu.guardian.proxy.shared_state import SharedState
from qgpu.guardian.server import Guardian
from qgpu.ipc import wire
from qgpu.linux import capabilities, cgroup
from qgpu.linux.open_file_set import reserve_fds
from qgpu.model.plane_api import MigInstance
from qgpu.nvidia import abi, mig, uvm
from qgpu.planes.seccomp.hang_detector import waits_for_pages
from tests.guardian.asked import (
    DEVICE_PARAMS,
    TSG,
    TSG_PARAMS,
    alloc,
    alloc_status,
    device,
    free,
    memory_params,
    subdevice,
)
from tests.guardian.fake_device import FakeDevice
from tests.guardian.fake_rm import PAGE, FakeRm
from tests.guardian.pod import PATIENCE_S, Child, Files, until

#: How many processes end at once.
MANY = 100


class _Log:
    dropped = 0

    def __init__(self, device):
        pass

    def read(self):
        return []


@pytest.fixture
def devices():
    """What there is on this host: one card."""
    return [FakeDevice(minor=3)]


@pytest.fixture
def guardian(monkeypatch, tmp_path, devices):
    """A guardian in a thread of this process, over a card in a table and /dev/null in the place of the driver."""
    reserve_fds()
    before, rm = _descriptors(), FakeRm()
    monkeypatch.setattr(server, "installed", lambda: "580.1")
    monkeypatch.setattr(server, "RmClient", lambda: None)
    monkeypatch.setattr(server, "open_devices", lambda client: devices)
    monkeypatch.setattr(server, "gpu_instance_uuid", lambda device: bytes([device.index]) * 16)
    mig.keep_shared(tmp_path, [0])
    monkeypatch.setattr(server, "CtxswLog", _Log)
    monkeypatch.setattr(server, "GpuOps", lambda table, branch, client, devices: rm)
    monkeypatch.setattr(cgroup, "create", lambda name: None)
    monkeypatch.setattr(cgroup, "ensure_in", lambda name, pid, path, joined: None)
    rm.gate = lambda device, channels, closed, preempt=True: Moved()
    rm.open_gates = lambda device: None
    rm.timeslice = lambda tsg, us: True
    made = Guardian(tmp_path, Journal(), Files(), ObjectTable(), {})
    made.rm = rm
    made.shared.major, made.shared.perform = 1, rm.perform
    made.shared.uvm_files.perform = rm.perform
    made.path = tmp_path / "guardian.sock"
    stop = threading.Event()
    made._is_unused = stop.is_set
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    deadline = time.monotonic() + PATIENCE_S
    while made._threads:  # listeners are closed by the main loop
        assert time.monotonic() < deadline, "a listener is left"
        time.sleep(0.01)
    stop.set()
    made._wake()
    thread.join()
    _close(made)
    made.__dict__.clear()  # pytest has it until this ends
    while left := _descriptors() - before:
        assert time.monotonic() < deadline, left
        gc.collect()  # a mapping has a descriptor, too, and a thread that has just ended may hold it


def _descriptors():
    return Counter(os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path))


def _close(guardian):
    """Close what a guardian leaves to the end of its process."""
    sessions = guardian._sessions
    for number in list(sessions._sessions):
        sessions._hang_up(number)
    sessions._listening.close()
    pidfds = guardian.rm.pidfds.values()
    for fd in (
        guardian._timer.fd,
        guardian._wake_fd,
        guardian._exits.fileno(),
        guardian.shared.journal.fd,
        guardian.shared.files.fd,
        *pidfds,
    ):
        os.close(fd)


@pytest.fixture
def daemon(guardian):
    connection = wire.connect(str(guardian.path), 5.0)

    def ask(op, fds=(), **arguments):
        connection.send({"op": op, **arguments}, fds)
        answer, _ = connection.receive()
        assert answer["ok"], answer
        return answer

    yield ask
    connection.close()


def shown(daemon, name):
    """Return what the guardian tells of a pod."""
    (found,) = (pod for pod in daemon("pods")["pods"] if pod["name"] == name)
    return found


class Pod:
    """A process in a pod, which makes the calls it is told."""

    def __init__(self, ask, name, limit):
        self.child = Child()
        self.process, self.begin, self.end = self.child.process, self.child.begin, self.child.end
        grant = {"class": "offline", "cores": None, "memory": limit}
        ask("admit", name=name, cgroup=None, grants={"0": grant})
        ask("attach", [self.child.listener], name=name, pid=self.process.pid)
        os.close(self.child.listener)

    def call(self, number, argument, params=b"", **more):
        self.begin(number, argument, params, **more)
        return self.answer()

    def answer(self):
        ready, _, _ = select.select([self.child.sock], [], [], PATIENCE_S)
        assert ready, "the pod is stuck"
        return bytes.fromhex(self.child.said()["argument"])

    def allocate(self, client, handle, size):
        return alloc_status(self.call(abi.NV_ESC_RM_ALLOC, alloc(handle, 2, 0x40, client), memory_params(size)))


@pytest.fixture
def pods(guardian, daemon):
    """Two pods with a device each, of clients 7 and 8, limited to 8 pages."""
    guardian.rm.objects[8, 8] = (abi.NV01_ROOT_CLIENT, 0)
    made = [Pod(daemon, name, 1 << 30) for name in ("a", "b")]
    for client, pod in zip((7, 8), made, strict=True):
        pod.call(abi.NV_ESC_RM_ALLOC, device(client=client), DEVICE_PARAMS)
        guardian.rm.objects[client, 2] = (abi.NV01_DEVICE_0, client)
        assert alloc_status(pod.call(abi.NV_ESC_RM_ALLOC, subdevice(client=client), bytes(4))) == abi.NV_OK
    yield made
    for pod in made:
        pod.end()


def test_pods_are_served_and_their_memory_is_told_apart(pods, daemon):
    a, b = pods
    assert [a.allocate(7, 10, PAGE), b.allocate(8, 10, 2 * PAGE)] == [abi.NV_OK, abi.NV_OK]

    assert {pod["name"]: pod["memory"]["0"] for pod in daemon("pods")["pods"]} == {"a": PAGE, "b": 2 * PAGE}


def test_thread_of_a_pod_sees_notes_before_it_drops_capabilities(guardian, monkeypatch, request):
    """Without CAP_SYS_ADMIN it would not, and would ask every process of the host for its cgroup."""
    order, keep_only = [], capabilities.keep_only
    monkeypatch.setattr(cgroup, "keeps_times", order.append)
    monkeypatch.setattr(capabilities, "keep_only", lambda *those, at_hand: order.append(those) or keep_only(*those))
    request.getfixturevalue("pods")
    kept = (capabilities.CAP_SYS_PTRACE, capabilities.CAP_DAC_READ_SEARCH)

    assert sorted(map(str, order)) == sorted(map(str, ["/qgpu/a", "/qgpu/b", kept, kept]))
    assert isinstance(order[0], str)
    assert order[-1] == kept


def test_joined_cgroups_are_told_and_outlive_a_changed_grant(pods, guardian, daemon):
    daemon("join", name="a", cgroups=["/container-1", "/container-2"])
    daemon("amend", name="a", grants={"0": {"class": "offline", "cores": 30, "memory": 1 << 30}})
    daemon("join", name="b", cgroups=[])

    assert [pod["joined"] for pod in daemon("pods")["pods"]] == [["/container-1", "/container-2"], []]
    heir = ObjectTable()
    for fact in guardian.shared.table.facts():
        heir.note(fact)
    assert heir.pods["a"].cgroups == (guardian.shared.table.pods["a"].cgroup, "/container-1", "/container-2")


INSTANCES = [MigInstance(0, 1), MigInstance(0, 2), MigInstance(7, 1)]


@pytest.mark.parametrize("devices", [[FakeDevice(3, each.index, mig.place_of(0, each), each) for each in INSTANCES]])
def test_instances_of_cards_to_be_shared_are_pgpus(guardian, daemon):
    for name, index in (("a", 101), ("b", 102), ("c", 801)):
        grant = {"class": "offline", "cores": None, "memory": PAGE}
        daemon("admit", name=name, cgroup=None, grants={str(index): grant})
    places = [mig.place_of(0, each) for each in INSTANCES]
    with guardian.lock:
        allowed = {name: guardian._allowance(name) for name in "abc"}

    assert {index: card.device.mig for index, card in guardian.cards.items()} == {101: INSTANCES[0], 102: INSTANCES[1]}
    assert guardian.shared.uuids == {bytes(16): 0, b"e" * 16: places[0], b"f" * 16: places[1]}
    assert {name: dict(each.minors) for name, each in allowed.items()} == {
        "a": {places[0]: 3},
        "b": {places[1]: 3},
        "c": {},
    }
    assert {name: dict(each.limits) for name, each in allowed.items()} == {
        "a": {places[0]: PAGE},
        "b": {places[1]: PAGE},
        "c": {},
    }
    assert [daemon("sample", pgpu=index)["pgpu"] for index in (101, 102)] == [101, 102]


def test_removed_socket_is_recreated_while_pods_exist(pods, guardian):
    guardian.path.unlink()
    until(guardian.path.exists)


def test_a_guardian_that_is_alone_leaves_no_directory_behind(guardian):
    guardian.path.unlink()
    with guardian.lock:
        guardian._looked_ns = 0
        guardian._run_due()

    assert not guardian.path.exists()


def test_a_pod_with_a_process_is_not_retired_wherever_that_is(pods, daemon):
    alive = {pod["name"]: pod["alive"] for pod in daemon("pods")["pods"]}
    with pytest.raises(AssertionError, match="a process of it still runs"):
        daemon("retire", name="a")
    pods[0].end()
    until(lambda: not shown(daemon, "a")["alive"])
    daemon("retire", name="a")

    assert alive == {"a": True, "b": True}
    assert [pod["name"] for pod in daemon("pods")["pods"]] == ["b"]


def test_memory_that_outlives_its_pod_is_told_of(pods, guardian, daemon):
    a, _ = pods
    a.allocate(7, 10, PAGE)
    reading, writing = os.pipe()
    guardian.shared.quota.export(7, [10], reading)
    a.end()
    guardian.rm._free(7, 7)
    until(lambda: not shown(daemon, "a")["alive"])
    daemon("retire", name="a")
    left = daemon("pods")["left"]
    os.close(reading)
    os.close(writing)
    until(lambda: not daemon("pods")["left"])

    assert left == {"0": PAGE}


GRANT = {"class": "offline", "cores": None, "memory": 1 << 30}


def end_and_retire(pod, daemon, name="a"):
    pod.end()
    until(lambda: not shown(daemon, name)["alive"])
    daemon("retire", name=name)


def test_the_name_of_a_pod_whose_client_is_left_is_refused(pods, guardian, daemon):
    """The next pod of that name, somebody else's, would be charged for it, and run its kernels in its own turns."""
    end_and_retire(pods[0], daemon)
    left = daemon("pods")["names_in_use"]
    with pytest.raises(AssertionError, match="other processes still have files or memory"):
        daemon("admit", name="a", cgroup=None, grants={"0": GRANT})
    guardian.rm._free(7, 7)  # the last file of it is closed
    daemon("admit", name="a", cgroup=None, grants={"0": GRANT})
    daemon("admit", name="a", cgroup=None, grants={"0": GRANT})  # the first answer was lost

    assert left == ["a"]
    until(lambda: not daemon("pods")["names_in_use"])


def exported(guardian, a, b):
    """Keep a's memory by an open file."""
    ends = os.pipe()
    guardian.shared.quota.export(7, [10], ends[0])
    return lambda: [os.close(fd) for fd in ends]


def imported(guardian, a, b):
    """Keep a's memory by a handle of b's."""
    memory = guardian.table.allocations.by_handle[7, 10].number
    guardian.rm.objects[8, 10] = guardian.rm.objects[7, 10]
    fact = {"fact": "object", "client": 8, "handle": 10, "parent": 2, "class": 0x40, "detail": PAGE}
    guardian.shared.note(fact | {"memory": memory, "confirmed": 0})
    return lambda: guardian.shared.note({"fact": "gone", "client": 8, "handle": 10})


def mapped(guardian, a, b):
    """Keep a's memory by a mapping of b's process."""
    number = guardian.table.allocations.by_handle[7, 10].number
    place = {"pid": b.process.pid, "base": 0, "length": PAGE, "uuid": bytes(16).hex()}
    guardian.shared.note({"fact": "map", "memory": number} | place)
    return lambda: guardian.shared.note({"fact": "unmap"} | place)


@pytest.mark.parametrize("keep", [exported, imported, mapped])
def test_the_name_of_a_pod_whose_memory_is_left_is_refused(pods, guardian, daemon, keep):
    a, b = pods
    a.allocate(7, 10, PAGE)
    with guardian.lock:
        let_go = keep(guardian, a, b)
    guardian.rm._free(7, 7)
    end_and_retire(a, daemon)
    until(lambda: not guardian.table.clients_of("a"))
    with pytest.raises(AssertionError, match="other processes still have files or memory"):
        daemon("admit", name="a", cgroup=None, grants={"0": GRANT})
    left = daemon("pods")["names_in_use"]
    with guardian.lock:
        let_go()
    until(lambda: not daemon("pods")["names_in_use"])
    daemon("admit", name="a", cgroup=None, grants={"0": GRANT})

    assert left == ["a"]


def test_what_goes_by_itself_keeps_no_name(pods, guardian, daemon):
    """Emptying UVM files of ended processes takes as long as freeing their memory, and a container restarts sooner."""
    a, _ = pods
    a.allocate(7, 10, PAGE)
    with guardian.lock:
        number = guardian.table.allocations.by_handle[7, 10].number
        mapping = {"pid": a.process.pid, "base": 0, "length": PAGE, "uuid": bytes(16).hex(), "memory": number}
        guardian.shared.note({"fact": "map"} | mapping)
        guardian.rm._free(7, 7)
        a.end()
        guardian.shared.note({"fact": "pod_retired", "name": "a"})
        kept, names = guardian.table.is_kept_elsewhere("a"), guardian.table.names_in_use()

    assert (kept, names) == (False, {"a"})


def test_a_limit_can_be_changed_while_a_pod_runs(pods, daemon):
    a, _ = pods
    a.allocate(7, 10, 4 * PAGE)
    grant = {"class": "offline", "cores": None}
    daemon("amend", name="a", grants={"0": grant | {"memory": 2 * PAGE}})
    less = a.allocate(7, 11, PAGE)
    daemon("amend", name="a", grants={"0": grant | {"memory": 5 * PAGE}})

    assert (less, a.allocate(7, 12, PAGE)) == (abi.NV_ERR_NO_MEMORY, abi.NV_OK)


def test_a_pod_keeps_the_grant_of_a_card_that_it_runs_on(pods, guardian, daemon):
    """What it had on a card without a TSG, such as a device, does not keep the grant."""
    a, _ = pods
    assert alloc_status(a.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)) == abi.NV_OK
    with pytest.raises(AssertionError, match="pod a: it runs on pGPU 0; stop its work there first"):
        daemon("amend", name="a", grants={})
    kept = shown(daemon, "a")["grants"].keys()
    a.call(abi.NV_ESC_RM_FREE, free(TSG))
    daemon("amend", name="a", grants={})

    assert (kept, shown(daemon, "a")["grants"]) == ({"0"}, {})


def test_programs_started_without_limit_get_none_later(pods, guardian, daemon):
    """They may have set UVM up so that memory comes to the card with no call."""
    a, _ = pods
    grant = {"class": "offline", "cores": None}
    for name in "ab":
        daemon("amend", name=name, grants={"0": grant | {"memory": None}})
    guardian.shared.quota.will_use_uvm(a.process.pid)
    daemon("amend", name="b", grants={"0": grant | {"memory": PAGE}})

    with pytest.raises(AssertionError, match="end them first"):
        daemon("amend", name="a", grants={"0": grant | {"memory": PAGE}})
    assert a.allocate(7, 10, 2 * PAGE) == abi.NV_OK


def test_limit_changed_while_it_is_looked_up_takes_effect(guardian, daemon):
    """Pods' threads look it up without the lock."""
    grant = {"class": "offline", "cores": None}
    daemon("admit", name="a", cgroup=None, grants={"0": grant | {"memory": 2 * PAGE}})

    class Changing(dict):
        def values(self):
            guardian.table.pods["a"].grants = {}  # the main loop must not come here
            daemon("amend", name="a", grants={"0": grant | {"memory": PAGE}})
            return super().values()

    with guardian.lock:
        guardian.table.pods["a"].grants = Changing(guardian.table.pods["a"].grants)
    guardian._allowances.clear()
    guardian._allowance("a")

    assert list(guardian._allowance("a").limits.values()) == [PAGE]


def test_a_pod_whose_memory_never_comes_holds_up_nobody_else(pods, daemon):
    a, b = pods
    a.begin(abi.NV_ESC_RM_CONTROL, bytes(32), slow=True)  # its argument lies where nobody answers a page fault
    ready, _, _ = select.select([a.child.sock], [], [], 0.5)

    assert not ready
    assert b.allocate(8, 10, PAGE) == abi.NV_OK
    assert daemon("pods")["pods"]


def test_calls_that_outlive_their_pods_are_told_of(pods, guardian, daemon, monkeypatch):
    """Only a process outside the pod can deliver the page that such a call waits for."""
    monkeypatch.setattr(listeners, "_STUCK_S", 0)
    a, b = pods
    a.begin(abi.NV_ESC_RM_CONTROL, bytes(32), slow=True)
    fds, process = f"/proc/{a.process.pid}/fd", os.pidfd_open(a.process.pid)
    until(lambda: waits_for_pages(os.getpid()))
    (fault,) = (int(fd) for fd in os.listdir(fds) if "userfaultfd" in os.readlink(f"{fds}/{fd}"))
    page = abi.pidfd_getfd(process, fault)
    before = daemon("pods")["stuck"]
    a.end()
    until(lambda: daemon("pods")["stuck"])
    during = daemon("pods")["stuck"], b.allocate(8, 10, PAGE)
    for fd in (page, process):
        os.close(fd)
    until(lambda: not daemon("pods")["stuck"])

    assert (before, during) == (0, (1, abi.NV_OK))


def test_memory_comes_back_when_a_process_is_killed(pods, guardian, daemon):
    a, _ = pods
    a.allocate(7, 10, PAGE)
    a.end()
    guardian.rm._free(7, 7)
    until(lambda: not shown(daemon, "a")["memory"]["0"])


def test_uvm_of_killed_process_is_unregistered_before_its_exit(pods, guardian, daemon):
    a, _ = pods
    fd = os.open("/dev/null", os.O_RDWR)
    files = guardian.shared.uvm_files
    files.hold("a", a.process.pid, fd, fd, [bytes(16)])
    os.close(fd)
    a.end()
    until(lambda: a.process.pid not in guardian.table.processes)

    assert (uvm.UNREGISTER_GPU, bytes(20)) in guardian.rm.seen


def test_listing_pods_does_not_walk_all_their_objects(pods, guardian, daemon, monkeypatch):
    monkeypatch.setattr(type(guardian.table), "facts", lambda self: pytest.fail("went through everything"))

    assert {pod["name"] for pod in daemon("pods")["pods"]} == {"a", "b"}


def test_a_listener_that_no_thread_can_be_had_for_is_given_back(pods, guardian, daemon, monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    known = set(guardian.shared.listeners)
    with monkeypatch.context() as patch:
        patch.setattr(server.threading.Thread, "start", start)
        with pytest.raises(AssertionError, match="it cannot be served"):
            daemon("attach", [guardian.shared.listeners[2][1].fd], name="a", pid=pods[0].process.pid)

    assert set(guardian.shared.listeners) == known


def test_a_listener_that_is_brought_again_is_known(pods, guardian, daemon):
    known = set(guardian.shared.listeners)
    again = [guardian.shared.listeners[1][1].fd]

    assert daemon("attach", again, name="a", pid=pods[0].process.pid)["listener"] == 1
    assert set(guardian.shared.listeners) == known


def test_a_pods_process_is_not_heard_though_it_is_root(pods, guardian, monkeypatch):
    monkeypatch.setattr(cgroup, "of", lambda pid: "/qgpu/a/inner")
    connection = wire.connect(str(guardian.path), 5.0)

    assert connection.receive() is None
    connection.close()


@contextmanager
def ended_at_once(guardian):
    """Let MANY processes that a guardian watches end at the same time."""
    fds = [os.eventfd(0) for _ in range(MANY)]
    for pid, fd in enumerate(fds, 1 << 22):
        guardian.shared.watch(pid, fd)
    until(lambda: len(guardian._watched) >= MANY)
    with guardian.lock:
        for fd in fds:
            os.eventfd_write(fd, 1)
    yield
    for fd in fds:
        os.close(fd)


def test_many_processes_that_end_at_once_change_the_card_once(guardian, monkeypatch):
    """Gates and timeslices are looked at for all TSGs of all pods: once for each process would take seconds."""
    ended, refreshed = [], []
    monkeypatch.setattr(SharedState, "exited", lambda self, pid: ended.append(pid) or True)
    monkeypatch.setattr(Enforcer, "refresh", lambda self, now_ns: refreshed.append(now_ns))
    with ended_at_once(guardian):
        until(lambda: len(ended) == MANY)

    assert 0 < len(refreshed) < MANY / 5


def test_main_loop_serves_others_while_it_forgets_processes(guardian, daemon, monkeypatch):
    """A pod can end thousands of processes at once."""
    ended = []
    monkeypatch.setattr(SharedState, "exited", lambda self, pid: bool(time.sleep(0.02) or ended.append(pid)))
    with ended_at_once(guardian):
        until(lambda: ended)
        daemon("pods")
        before = len(ended)
        until(lambda: len(ended) == MANY)

    assert before < MANY / 2


def test_open_exports_are_listed_seldom_if_that_takes_long(guardian):
    """The kernel lists all control files of all pods with them: a pod can have hundreds of thousands."""
    listed = []

    def slowly():
        listed.append(time.sleep(0.2))
        return set()

    guardian.shared.quota.closed_carriers = slowly
    with guardian.lock:
        guardian.table.allocations._carries["web"] = 1
    until(lambda: listed and not guardian._file_work.waiting(""))
    with guardian.lock:
        guardian._looked_ns = time.monotonic_ns()
        guardian._look_at_files()

    assert (len(listed), guardian._file_work.waiting("")) == (1, 0)


def test_many_ends_of_processes_that_mapped_need_few_searches(guardian, monkeypatch):
    """Each search reads what all processes of the pod map."""
    searched, look = [], ManagedSearch._unclaimed
    monkeypatch.setattr(ManagedSearch, "_unclaimed", lambda self, pod: searched.append(pod) or look(self, pod))
    with guardian.lock:
        for pid in range(1 << 22, (1 << 22) + MANY):
            guardian.shared.note({"fact": "process", "pid": pid, "pod": "web"})
            guardian.shared.note({"fact": "managed", "pid": pid, "bytes": 1 << 21})
    charged = guardian.table.allocations.managed_of["web"]
    with ended_at_once(guardian):
        until(lambda: not guardian.table.pids_of("web"))
        until(lambda: not guardian.table.allocations.managed_left)

    assert charged == MANY << 21
    assert 0 < len(searched) < MANY / 5


def test_search_holds_up_neither_main_loop_nor_other_pods(pods, guardian, daemon, monkeypatch):
    """A pod can make it take long to read what its processes map."""
    _, b = pods
    another = subprocess.Popen(["sleep", "60"])
    guardian.shared.clients.register_process("a", another.pid)
    over, began = threading.Event(), threading.Event()
    monkeypatch.setattr(ManagedSearch, "_unclaimed", lambda self, pod: (began.set(), over.wait(PATIENCE_S), 0)[2])
    with guardian.lock:
        guardian.shared.note({"fact": "managed", "pid": another.pid, "bytes": 1 << 21})
    another.kill()
    another.wait()
    assert began.wait(PATIENCE_S)
    during = daemon("pods") and b.allocate(8, 10, PAGE), dict(guardian.table.allocations.managed_left)
    over.set()
    until(lambda: not guardian.table.allocations.managed_left)

    assert during == (abi.NV_OK, {"a": 1 << 21})

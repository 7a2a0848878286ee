"""What the daemon does when asked, where that is not seen from outside."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from qgpu import units
from qgpu.cli.status import warnings
from qgpu.config import Config, GpuSettings
from qgpu.daemon import caller, container_requests
from qgpu.daemon.control_requests import ControlRequests
from qgpu.daemon.events import Events
from qgpu.daemon.plane_choice import PlaneChoice
from qgpu.daemon.settings_file import SettingsFile
from qgpu.errors import InvalidValueError, PermissionDeniedError, QgpuError, RefusedError
from qgpu.ipc import wire
from qgpu.ipc.control_socket import Client, Server, Session
from qgpu.ipc.systemd import FdStore
from qgpu.linux import cgroup
from qgpu.load.workload import Workload
from qgpu.model import Grant
from qgpu.model.plane_api import ExcludedCard, Pgpu
from qgpu.model.plane_names import Plane
from qgpu.planes.sim.host import Clock, SimHost
from qgpu.runtime.oci_container import Container
from tests.linux.test_untrusted_fds import lingering

AT = "/machine/one"


@pytest.fixture
def host() -> SimHost:
    return SimHost(1, Clock.REAL)


@pytest.fixture
def requests(host: SimHost, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlRequests]:
    """A daemon's requests, to which pods run as long as they are there."""
    made = ControlRequests(host, PlaneChoice(Plane.SIM, "test"), Config(), SettingsFile(None))
    monkeypatch.setattr(made.pods, "runs", lambda pod: True)
    monkeypatch.setattr(Container, "cgroup", lambda self: AT)
    monkeypatch.setattr(
        container_requests,
        "described",
        lambda raw, policy: Container("two", 1, {"qgpu.io/cores": str(raw["cores"])}, {"QGPU_GPU_0": ""}),
    )
    yield made
    made.close()


def bind(requests: ControlRequests, cores: int) -> None:
    me = Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=os.pidfd_open(os.getpid()))
    requests.handle(me, {"op": "container.bind", "cores": cores}, [])


def test_refused_container_leaves_its_last_run_unchanged(host: SimHost, requests: ControlRequests) -> None:
    host.admit("other", {0: Grant(cores=50)})
    host.admit("one", {0: Grant(cores=50)}, AT)
    with pytest.raises(RefusedError, match="does not fit"):
        bind(requests, 60)

    assert [pod.name for pod in host.pods()] == ["other", "one"]


def test_status_tells_utilisation_and_who_is_below_its_quota(host: SimHost, requests: ControlRequests) -> None:
    host.admit("one", {0: Grant(cores=50)})
    host.start_load("one", 0, Workload(kernel_us=100, period_us=10_000))
    me = Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=os.pidfd_open(os.getpid()))
    usage: dict[str, Any] = {}
    while not usage.get("below_quota"):
        usage = requests.handle(me, {"op": "pod.list"}, [])["pods"][0]["usage"][0]
        time.sleep(0.05)
    (gpu,) = requests.handle(me, {"op": "gpu.list"}, [])["gpus"]

    assert usage["below_quota_reason"].startswith("asks for less")
    assert usage["share"] < 0.5
    assert usage["switch_time_ns"] >= usage["switches"] > 0
    assert 0 <= gpu["utilization"] <= 1
    assert 0 <= gpu["engine_active"] <= 1


def test_restarted_container_takes_its_last_runs_place(host: SimHost, requests: ControlRequests) -> None:
    host.admit("other", {0: Grant(cores=50)})
    host.admit("one", {0: Grant(cores=50)}, AT)
    bind(requests, 50)

    assert [pod.name for pod in host.pods()] == ["other", "two"]


@pytest.mark.parametrize("joined", [False, True])
def test_listener_goes_only_to_the_container_it_was_sent_for(
    host: SimHost, requests: ControlRequests, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    """A process that a runtime brings into a container may end, with children left behind the listener."""
    host.admit("one", {0: Grant()}, "/llm" if joined else AT)
    host.join("one", [AT] if joined else [])
    attached: list[int] = []
    monkeypatch.setattr(host, "attach", lambda name, pid, fds: attached.append(pid) or [os.close(fd) for fd in fds])
    monkeypatch.setattr(cgroup, "of", lambda pid: AT)
    note = json.dumps({"container": "one-id", "devices": [], "names": [], "pod_uid": "", "pid": 1, "since_ns": 0})
    monkeypatch.setattr(cgroup, "get_xattr", lambda path, key: note if (path, key) == (AT, "container") else None)
    listener = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(RefusedError, match="its listener was sent for other-id"):
        requests.take_listener(7, "other-id", listener)
    requests.take_listener(7, "one-id", listener)
    os.close(listener)

    assert attached == [7]


def test_what_is_no_listener_is_not_taken_into_a_pod(host: SimHost, requests: ControlRequests) -> None:
    host.admit("one", {0: Grant()})
    me = Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=os.pidfd_open(os.getpid()))
    fds = list(os.pipe())
    with pytest.raises(InvalidValueError, match="no seccomp listener"):
        requests.handle(me, {"op": "pod.attach", "name": "one"}, fds)

    assert len(fds) == 2, "they are whoever's carries the request, to be closed under no lock"
    for fd in fds:
        os.close(fd)


def test_process_that_ends_while_it_waits_is_not_attached(
    host: SimHost, requests: ControlRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has got its pid by then must not come into the pod."""
    requests.handle(root_session(), {"op": "pod.create", "name": "one", "grants": {"0": {}}}, [])
    requests.pods.by_cgroup = {"/elsewhere": "one"}
    child = os.posix_spawn("/bin/sleep", ["sleep", "600"], {})
    launcher = Session(wire.Peer(child, 0, 0), may_change=True, process=os.pidfd_open(child))
    attached: list[int] = []
    monkeypatch.setattr(host, "attach", lambda name, pid, fds: attached.append(pid))

    def named(name: str) -> None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    monkeypatch.setattr(requests.pods, "named", named)
    with pytest.raises(PermissionDeniedError, match="it has ended"):
        requests.handle(launcher, {"op": "pod.attach", "name": "one"}, [])

    assert attached == []


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "gpu.set", "gpu": 0, "offline_floor": 10},
        {"op": "gpu.set_temporarily", "gpu": 0, "policy": "best-effort", "pods": ["one"]},
        {"op": "pod.set", "name": "one", "cores": 10},
        {"op": "pod.create", "name": "two", "grants": {"0": {}}},
        {"op": "pod.remove", "name": "one"},
    ],
    ids=lambda request_: request_["op"],
)
def test_who_asks_is_found_out_under_no_lock(
    requests: ControlRequests, monkeypatch: pytest.MonkeyPatch, request_: dict[str, Any]
) -> None:
    """The caller decides how long its command line takes to read."""
    me, free = root_session(), []
    requests.handle(me, {"op": "pod.create", "name": "one", "grants": {"0": {}}}, [])
    monkeypatch.setattr(requests.pods, "runs", lambda pod: pod.name == "two")

    def take() -> bool:
        if there := requests.pods.lock.acquire(blocking=False):
            requests.pods.lock.release()
        return there

    def of(_: Session) -> dict[str, Any]:
        with ThreadPoolExecutor() as other:
            free.append(other.submit(take).result())
        return {}

    monkeypatch.setattr(caller, "of", of)
    requests.handle(me, request_, [])

    assert free == [True]


def root_session() -> Session:
    return Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=os.pidfd_open(os.getpid()))


@pytest.mark.parametrize("op", ["pod.create", "pod.set"])
def test_a_limit_below_any_context_is_refused(host: SimHost, requests: ControlRequests, op: str) -> None:
    me = Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=os.pidfd_open(os.getpid()))
    if op == "pod.set":
        requests.handle(me, {"op": "pod.create", "name": "one", "grants": {"0": {}}}, [])
    for memory in (16, units.LEAST_LIMIT - 1):
        grant = {"memory": memory} if op == "pod.set" else {"grants": {"0": {"memory": memory}}}
        with pytest.raises(InvalidValueError, match="less than any CUDA context takes"):
            requests.handle(me, {"op": op, "name": "one"} | grant, [])
    assert all(pod.grants == {0: Grant()} for pod in host.pods())


def test_a_descriptor_that_lingers_does_not_stop_other_requests(tmp_path: Path, requests: ControlRequests) -> None:
    server = Server(tmp_path, 0o600, None, requests.handle, FdStore())
    try:
        with Client(tmp_path) as attacker, Client(tmp_path) as other:
            attacker.call("pod.create", name="one", grants={"0": {}})
            fd = lingering()
            body = json.dumps({"op": "pod.attach", "name": "one"}).encode()
            message = len(body).to_bytes(4, "little") + body
            socket.send_fds(attacker._connection.sock, [message[:9]], [fd])
            os.close(fd)  # before anybody looks at it: the last close is the daemon's
            attacker._connection.sock.sendall(message[9:])
            assert attacker._connection.receive()
            assert other.call("pod.set", name="one", cores=10)["ok"]
    finally:
        server.close()


def test_a_pod_is_not_retired_for_want_of_descriptors(monkeypatch: pytest.MonkeyPatch, host: SimHost) -> None:
    requests = ControlRequests(host, PlaneChoice(Plane.SIM, "test"), Config(), SettingsFile(None))
    host.admit("one", {0: Grant()}, cgroup.of(os.getpid()))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        cgroup.mount()
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        requests.reap()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        requests.close()
    assert [pod.name for pod in host.pods()] == ["one"]


class MigHost(SimHost):
    """Two cards at nvidia-smi, of which MIG divides the first."""

    def pgpus(self) -> Sequence[Pgpu]:
        return [pgpu for pgpu in super().pgpus() if pgpu.index == 1]

    def excluded_cards(self) -> Sequence[ExcludedCard]:
        return [ExcludedCard(0, "00000000:3a:00.0", "MIG mode is on")]


def test_a_card_left_out_is_named_and_the_others_work() -> None:
    requests = ControlRequests(MigHost(2, Clock.REAL), PlaneChoice(Plane.SIM, "test"), Config(), SettingsFile(None))
    me = Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=os.pidfd_open(os.getpid()))
    try:
        status = requests.handle(me, {"op": "status"}, [])
        assert [gpu["index"] for gpu in status["gpus"]] == [1]
        assert list(warnings(status)) == ["GPU 0 (00000000:3a:00.0) excluded: MIG mode is on"]
        requests.handle(me, {"op": "pod.create", "name": "one", "grants": {"1": {"cores": 30}}}, [])
        with pytest.raises(QgpuError, match="0"):
            requests.handle(me, {"op": "pod.create", "name": "two", "grants": {"0": {"cores": 30}}}, [])
    finally:
        requests.close()


def test_request_that_shows_no_pods_lists_none(
    host: SimHost, requests: ControlRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=os.pidfd_open(os.getpid()))
    listed: list[int] = []
    pods = SimHost.pods
    monkeypatch.setattr(SimHost, "pods", lambda self: listed.append(1) or pods(self))

    requests.handle(me, {"op": "events"}, [])
    assert not listed
    requests.handle(me, {"op": "pod.list"}, [])
    assert len(listed) == 1


def test_new_pods_processes_are_not_heard(requests: ControlRequests) -> None:
    me = Session(wire.Peer(os.getpid(), 1, 0), may_change=True, process=os.pidfd_open(os.getpid()))
    requests.handle(me, {"op": "status"}, [])
    requests.pods.make("one", {0: Grant()}, cgroup.of(os.getpid()))

    with pytest.raises(PermissionDeniedError, match="in pod one"):
        requests.handle(me, {"op": "status"}, [])


def test_a_limit_comes_too_late_for_who_reaches_past_it(host: SimHost, requests: ControlRequests, at: str) -> None:
    host.admit("one", {0: Grant()}, at)
    me = Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=os.pidfd_open(os.getpid()))
    cgroup.set_xattr(at, "beyond", "/dev/dri")
    with pytest.raises(RefusedError, match="its container reaches /dev/dri"):
        requests.handle(me, {"op": "pod.set", "name": "one", "memory": 1 << 30}, [])
    assert requests.handle(me, {"op": "pod.set", "name": "one", "cores": 10}, [])["notes"] == []
    cgroup.set_xattr(at, "beyond", "")

    assert requests.handle(me, {"op": "pod.set", "name": "one", "memory": 1 << 30}, [])["notes"] == []


@pytest.fixture
def at() -> Iterator[str]:
    """A cgroup that is there."""
    try:
        path = cgroup.create(f"test-{os.getpid()}")
    except QgpuError as error:
        pytest.skip(str(error))
    yield path
    cgroup.remove("", path)


FORGED: dict[str, Any] = {
    "uid": "forged",
    "grants": {"0": {"cores": 99, "forged": 1}},
    "gpu": 7,
    "old": {"cores": 1},
    "new": {"cores": 99},
}


def recorded(requests: ControlRequests, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Make requests as root, and return what is recorded of them but when and by whom."""
    me = Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=os.pidfd_open(os.getpid()))
    for message in messages:
        with suppress(QgpuError):
            requests.handle(me, message, [])
    found = requests.handle(me, {"op": "events"}, [])["events"]
    return [{key: event[key] for key in event.keys() - {"at", "by", "number"}} for event in found]


def test_what_a_client_adds_to_a_request_is_not_recorded(
    requests: ControlRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests.suspensions, "suspend", lambda *_: None)
    created = {"op": "pod.create", "name": "one", "grants": {"0": {"cores": 30, "forged": "x"}}, "uid": "u", "old": 1}
    bound = {"op": "container.bind", "cores": 20, "name": "one"}
    events = recorded(requests, created, FORGED | bound, FORGED | {"op": "pod.suspend", "name": "one"})
    grants = events[0].pop("grants")

    assert events == [
        {"what": "pod created", "name": "one", "made": True},
        {"what": "container bound", "name": "two", "made": True},
        {"what": "pod told to suspend", "name": "one"},
    ]
    assert grants["0"]["cores"] == 30
    assert "forged" not in grants["0"]


@pytest.mark.parametrize("uid", ["unknown", "x" * 64, "x" * (1 << 20), "a/b", ""])
def test_a_drop_of_no_claim_is_not_recorded(requests: ControlRequests, uid: str) -> None:
    assert recorded(requests, FORGED | {"op": "grant.drop", "name": "one", "uid": uid}) == []


def test_a_pod_without_a_name_gets_none_of_a_retired_one(
    host: SimHost, requests: ControlRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the retired pod left would be the new one's, so the plane refuses such a name."""
    monkeypatch.setattr(host, "names_in_use", lambda: ["pod-1", "pod-3"])
    names = [requests.pods.admit(None, {0: Grant()}) for _ in range(2)]

    assert names == ["pod-2", "pod-4"]


def test_a_launcher_that_has_ended_leaves_no_name_as_begun(
    host: SimHost, requests: ControlRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later pod of that name would begin without asking whether there is room."""

    def ended(*_: object) -> str:
        raise RefusedError("its launcher has ended")

    launcher = Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=None)
    with monkeypatch.context() as patched:
        patched.setattr(requests.pods, "_home_of", ended)
        with pytest.raises(RefusedError, match="has ended"):
            requests.pods.launch("one", {0: Grant()}, launcher, may_wait=False)

    assert not requests.pods.begun
    assert not host.pods()


@pytest.fixture
def on_disk(host: SimHost, tmp_path: Path) -> Iterator[ControlRequests]:
    """The requests of a daemon that keeps its settings and its record of events on a disk."""
    directory = tmp_path / "state"
    settings_file = SettingsFile(directory)
    made = ControlRequests(host, PlaneChoice(Plane.SIM, "test"), Config(), settings_file, events=Events(directory))
    yield made
    made.close()


def meanwhile(monkeypatch: pytest.MonkeyPatch, what: Callable[[], object]) -> list[object]:
    """Do something in another thread while the disk writes for the first time; return what it returned."""
    plain, found = os.fsync, list[object]()

    def fsync(fd: int) -> None:
        if not found:
            found.append(None)
            with ThreadPoolExecutor(1) as other:
                found[0] = other.submit(what).result()
        plain(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


SETTING = {
    "gpu.set": {"op": "gpu.set", "gpu": 0, "policy": "fixed-share"},
    "pod.set": {"op": "pod.set", "name": "one", "cores": 40},
}


@pytest.mark.parametrize("op", SETTING)
def test_a_slow_disk_that_records_a_change_stops_no_pod(
    host: SimHost, on_disk: ControlRequests, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    host.admit("one", {0: Grant(cores=50)})

    def take() -> bool:
        if taken := on_disk.pods.lock.acquire(timeout=1):
            on_disk.pods.lock.release()
        return taken

    found = meanwhile(monkeypatch, take)
    me = Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=os.pidfd_open(os.getpid()))
    on_disk.handle(me, SETTING[op], [])

    assert found == [True]


@pytest.mark.parametrize(
    ("op", "comes", "why"),
    [
        ("gpu.set", lambda host: host.admit("two", {0: Grant()}), "pod two has none; give it a quota"),
        ("pod.set", lambda host: host.amend("one", {0: Grant(cores=60)}), "it has just changed; try again"),
        ("pod.set", lambda host: host.join("one", ["/llm"]), "it has just changed; try again"),
        ("pod.set", lambda host: host.admit("two", {0: Grant(cores=70)}), "40 % for pod one does not fit"),
        ("pod.set", lambda host: host.retire("one"), "there is none of that name"),
    ],
)
def test_a_change_that_does_not_fit_once_recorded_is_none(
    host: SimHost,
    on_disk: ControlRequests,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    op: str,
    comes: Callable[[SimHost], None],
    why: str,
) -> None:
    host.admit("one", {0: Grant(cores=30)})
    me = Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=os.pidfd_open(os.getpid()))
    meanwhile(monkeypatch, lambda: comes(host))
    with pytest.raises(QgpuError, match=why):
        on_disk.handle(me, SETTING[op], [])

    (card,) = on_disk.handle(me, {"op": "gpu.list"}, [])["gpus"]
    events = on_disk.handle(me, {"op": "events"}, [])["events"]
    assert card["policy"] == "burst-share"
    assert SettingsFile(tmp_path / "state").settings(card["uuid"], GpuSettings()) == GpuSettings()
    assert not any(pod.name == "one" and pod.grants[0].cores == 40 for pod in host.pods())
    assert why in events[-1]["failed"]

"""A member of the socket's group cannot speak for runtimes, enter others' pods, or make pods without end."""

from __future__ import annotations

import os
import subprocess
import uuid
from contextlib import suppress

import pytest

from qgpu.daemon import pod_users, pods
from qgpu.daemon.pod_users import PodUsers
from qgpu.errors import PermissionDeniedError, QgpuError, RefusedError, UnknownNameError
from qgpu.ipc import wire
from qgpu.ipc.control_socket import Session
from qgpu.linux import cgroup
from qgpu.model import Grant
from qgpu.model.plane_api import PodInfo
from tests.daemon.claim_rig import GIB, Rig

pytestmark = pytest.mark.root


def member(uid: int = 1234, pid: int | None = None) -> Session:
    """Return a client of the socket's group, which is neither root nor the daemon's user."""
    pid = os.getpid() if pid is None else pid
    return Session(wire.Peer(pid, uid, uid), may_change=True, process=os.pidfd_open(pid))


@pytest.mark.parametrize(
    "op", ["container.bind", "slurm.bind", "grant.prepare", "grant.drop", "group.changed", "module.switched"]
)
def test_member_does_not_speak_for_what_is_root(rig: Rig, op: str) -> None:
    with pytest.raises(PermissionDeniedError, match="only root and the daemon's own user may ask for this"):
        rig.requests.handle(member(), {"op": op}, [])


def test_member_makes_no_service_of_the_hosts_a_pod(rig: Rig) -> None:
    service = rig.container(
        names=("", "", ""), uid="", env=["QGPU_GPU_0="], annotations={"qgpu.io/name": "k8s.service"}
    )
    with pytest.raises(PermissionDeniedError):
        rig.requests.handle(member(), service.message(), [])

    assert not rig.host.pods()


def test_member_takes_nothing_of_a_claim_by_a_forged_hook(rig: Rig) -> None:
    (device,) = rig.prepare("c1", rig.device(cores=60, memory=8 * GIB))
    victim = rig.bind(rig.container(device))
    thief = rig.container(device, names=("shop", "web", "thief"))
    with suppress(QgpuError):
        rig.requests.handle(member(), thief.message(), [])

    assert rig.grant(victim) == ("offline", 60, 8 * GIB)


@pytest.mark.parametrize(("uid", "enters"), [(1234, True), (1235, False), (0, True)])
def test_only_root_and_its_user_enter_a_pod(rig: Rig, uid: int, enters: bool) -> None:
    name = f"p-{uuid.uuid4().hex}"
    at = cgroup.create(name)
    rig.host.admit(name, {0: Grant()}, at)
    rig.requests.pods.users.note(name, at, 1234)

    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            with suppress(PermissionDeniedError):
                rig.requests.handle(member(uid, child.pid), {"op": "pod.attach", "name": name}, [])
            assert (cgroup.of(child.pid) == at) == enters
        finally:
            child.kill()
            child.wait()
            rig.host.retire(name)
            cgroup.remove(name, at)


def test_launcher_of_a_member_enters_its_own_pod(rig: Rig) -> None:
    launcher = member()
    rig.requests.handle(launcher, {"op": "pod.create", "name": "mine", "grants": {"0": {}}}, [])
    rig.requests.handle(member(), {"op": "pod.attach", "name": "mine"}, [])

    assert rig.host.pods()[0].pids == (os.getpid(),)
    with pytest.raises(PermissionDeniedError, match="only root and the user who started it"):
        rig.requests.handle(member(1235), {"op": "pod.attach", "name": "mine"}, [])


def test_member_enters_no_pod_of_a_container(rig: Rig) -> None:
    web = rig.bind(rig.container(names=("", "", ""), uid="", env=["QGPU_GPU_0="]))
    with pytest.raises(PermissionDeniedError, match="only root and the user who started it"):
        rig.requests.handle(member(), {"op": "pod.attach", "name": web}, [])


def test_next_daemon_knows_who_started_a_pod() -> None:
    name = f"p-{uuid.uuid4().hex}"
    at = cgroup.create(name)
    try:
        PodUsers([]).note(name, at, 1234)
        pod = PodInfo(name, {0: Grant()}, cgroup=at)
        users = PodUsers([pod])
        users.check_entrant(pod, member(1234))
        with pytest.raises(PermissionDeniedError):
            users.check_entrant(pod, member(1235))
    finally:
        cgroup.remove(name, at)


def test_one_connection_of_a_member_makes_one_pod_at_a_time(rig: Rig) -> None:
    launcher = member()
    create = {"op": "pod.create", "name": "one", "grants": {"0": {}}}
    rig.requests.handle(launcher, create, [])
    with pytest.raises(RefusedError, match="its connection has made a pod already"):
        rig.requests.handle(launcher, create | {"name": "two"}, [])
    rig.requests.handle(launcher, {"op": "pod.remove", "name": "one"}, [])

    assert rig.requests.handle(launcher, create | {"name": "two"}, [])["name"] == "two"


def test_member_makes_a_bounded_number_of_pods(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_users, "MOST_OF_USER", 2)
    monkeypatch.setattr(pod_users, "MOST_OF_MEMBERS", 3)

    def create(uid: int) -> str:
        answer = rig.requests.handle(member(uid), {"op": "pod.create", "grants": {"0": {}}}, [])
        return str(answer["name"])

    first = create(1234)
    create(1234)
    with pytest.raises(RefusedError, match="too many pods: each user but root may have 2"):
        create(1234)
    create(1235)
    with pytest.raises(RefusedError, match="too many pods"):
        create(1236)
    rig.ask("pod.remove", name=first)
    create(1236)
    create(0)


@pytest.fixture
def left(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the ended pods of which something is left; an owner may have two of them."""
    names: list[str] = []
    monkeypatch.setattr(rig.host, "names_in_use", lambda: names)
    monkeypatch.setattr(pod_users, "MOST_LEFT_OF_OWNER", 2)
    monkeypatch.setattr(pod_users, "LEAST_LEFT", 1)
    monkeypatch.setattr(pods, "_LEFT_S", 0.0)
    return names


def test_member_leaves_a_bounded_number_of_pods(rig: Rig, left: list[str]) -> None:
    """Each takes a place of the module, as long as another process has its files."""
    left += ["a", "b", "c"]

    def make_and_end(name: str, uid: int) -> None:
        rig.requests.handle(member(uid), {"op": "pod.create", "name": name, "grants": {"0": {}}}, [])
        rig.ask("pod.remove", name=name)

    make_and_end("a", 1234)
    make_and_end("x", 1234)  # of which nothing is left
    make_and_end("b", 1234)
    with pytest.raises(RefusedError, match="files or memory of 2 ended pods of user 1234"):
        make_and_end("y", 1234)
    make_and_end("c", 1235)
    make_and_end("d", 0)
    left.remove("a")
    make_and_end("y", 1234)


def test_namespace_leaves_a_bounded_number_of_pods(rig: Rig, left: list[str]) -> None:
    (device,) = rig.prepare("c1", rig.device(memory=GIB))

    def start_and_end(namespace: str, pod: str) -> None:
        container = rig.container(device, names=(namespace, pod, "main"))
        left.append(rig.bind(container))
        container.end()
        rig.requests.reap()

    start_and_end("shop", "one")
    rig.restart()
    start_and_end("shop", "two")
    start_and_end("shop", "three")
    with pytest.raises(RefusedError, match="files or memory of 2 ended pods of namespace shop"):
        start_and_end("shop", "four")
    start_and_end("bank", "one")
    left.remove("shop.two.main")
    start_and_end("shop", "four")


def test_owner_of_a_running_container_outlives_the_daemon(rig: Rig, left: list[str]) -> None:
    (device,) = rig.prepare("c1", rig.device(memory=GIB))
    containers = [rig.container(device, names=("shop", pod, "main")) for pod in ("one", "two")]
    left += [rig.bind(container) for container in containers]
    rig.restart()
    for container in containers:
        container.end()
    rig.requests.reap()

    with pytest.raises(RefusedError, match="files or memory of 2 ended pods of namespace shop"):
        rig.bind(rig.container(device, names=("shop", "three", "main")))


def test_pods_that_have_just_ended_are_waited_for(rig: Rig, left: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (device,) = rig.prepare("c1", rig.device(memory=GIB))
    for pod in ("one", "two"):
        container = rig.container(device, names=("shop", pod, "main"))
        left.append(rig.bind(container))
        container.end()
        rig.requests.reap()
    looks = iter(range(5))
    monkeypatch.setattr(rig.host, "names_in_use", lambda: left if next(looks, None) is not None else [])
    monkeypatch.setattr(pods, "_LEFT_S", 60.0)

    assert rig.bind(rig.container(device, names=("shop", "three", "main"))) == "shop.three.main"


def test_all_owners_together_leave_room_for_others() -> None:
    """The module has a place for each of 256 pods."""
    users, names = PodUsers([]), list[str]()

    def leave(whose: str, name: str) -> None:
        users.check_left(whose, lambda: names)
        users.note_owner(name, "", whose)
        users.forget(name)
        names.append(name)

    for owner in range(20):
        with suppress(RefusedError):
            while True:
                leave(f"user {owner}", f"p{len(names)}")

    assert len(names) <= pod_users.MOST_LEFT + 20 * pod_users.LEAST_LEFT


def test_pod_that_is_gone_is_nobodys(rig: Rig) -> None:
    rig.requests.handle(member(), {"op": "pod.create", "name": "one", "grants": {"0": {}}}, [])
    rig.ask("pod.remove", name="one")
    with pytest.raises(UnknownNameError):
        rig.requests.handle(member(), {"op": "pod.attach", "name": "one"}, [])
    rig.ask("pod.create", name="one", grants={"0": {}})
    with pytest.raises(PermissionDeniedError):
        rig.requests.handle(member(), {"op": "pod.attach", "name": "one"}, [])

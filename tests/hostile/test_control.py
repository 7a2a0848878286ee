"""What clients can do to the control socket: run into a defect, come in crowds, send much. The daemon goes on."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest

from qgpu.errors import DaemonUnreachableError, QgpuError
from qgpu.ipc import control_socket, wire
from qgpu.ipc.codec import grants_to_json
from qgpu.ipc.control_socket import Client, Server
from qgpu.ipc.systemd import FdStore
from qgpu.linux import untrusted_fds
from qgpu.model import Grant, PodClass
from qgpu.paths import socket_path
from tests.linux.test_untrusted_fds import lingering


def test_a_defect_is_its_clients_to_hear_and_nobody_elses(tmp_path):
    def handle(session, message, fds):
        if message["op"] == "bad":
            raise KeyError("gone")
        return {"value": 1}

    server = Server(tmp_path, 0o600, None, handle, FdStore())
    try:
        with Client(tmp_path) as client:
            with pytest.raises(QgpuError, match="KeyError"):
                client.call("bad")
            assert client.call("good")["value"] == 1
    finally:
        server.close()


def answering(session, message, fds):
    return {"value": len(message.get("text", ""))}


@pytest.fixture
def guests(tmp_path, monkeypatch):
    """A server that takes everybody for one that may only look, but for whom ``allowed`` is set."""
    allowed = threading.Event()
    monkeypatch.setattr(Server, "_may_change", lambda self, connection: allowed.is_set())
    server = Server(tmp_path, 0o600, None, answering, FdStore())
    yield allowed
    server.close()


@pytest.fixture
def pods(tmp_path):
    """A server of root's that takes everybody for a process of the pod that is set, if any."""
    said = {"pod": ""}
    server = Server(tmp_path, 0o666, None, answering, FdStore(), lambda session: said["pod"])
    yield said
    server.close()


@pytest.fixture
def members(tmp_path, monkeypatch):
    """A server that takes everybody for the user that is set, who may change things; at first not its own user."""
    said = {"uid": os.geteuid() + 1}
    monkeypatch.setattr(Server, "_may_change", lambda self, connection: True)
    monkeypatch.setattr(wire.Connection, "peer", lambda self: wire.Peer(os.getpid(), said["uid"], 0))
    server = Server(tmp_path, 0o600, None, answering, FdStore())
    yield said
    server.close()


def refused(runtime_dir):
    """Tell whether a client is refused for there being too many."""
    try:
        with Client(runtime_dir) as client:
            return not client.call("look")
    except QgpuError:
        return True


def test_root_in_a_pod_takes_no_place_from_root_outside(pods, tmp_path, monkeypatch):
    monkeypatch.setattr(control_socket, "MAX_CLIENTS", 16)
    monkeypatch.setattr(control_socket, "FOR_ROOT", 4)
    crowd = []
    for pod in ("web", "train", "batch"):
        pods["pod"] = pod
        crowd += [Client(tmp_path) for _ in range(8)]
        assert refused(tmp_path)
    pods["pod"] = ""
    assert not refused(tmp_path)
    for client in crowd:
        client.close()


def test_a_pod_takes_no_place_from_another(pods, tmp_path):
    pods["pod"] = "web"
    crowd = [Client(tmp_path) for _ in range(control_socket.MAX_OF_POD)]
    assert refused(tmp_path)
    pods["pod"] = "train"
    assert not refused(tmp_path)
    for client in crowd:
        client.close()


def test_a_user_takes_no_place_from_another(guests, tmp_path, monkeypatch):
    uids = [1000]
    monkeypatch.setattr(wire.Connection, "peer", lambda self: wire.Peer(1, uids[0], 0))
    crowd = [Client(tmp_path) for _ in range(control_socket.MAX_OF_USER)]
    assert refused(tmp_path)
    uids[0] = 1001
    assert not refused(tmp_path)
    for client in crowd:
        client.close()


def test_a_group_member_leaves_places_to_others(members, tmp_path, monkeypatch):
    monkeypatch.setattr(control_socket, "MAX_CLIENTS", 16)
    monkeypatch.setattr(control_socket, "FOR_ROOT", 4)
    crowd = [Client(tmp_path) for _ in range(12)]
    assert refused(tmp_path)
    members["uid"] += 1
    assert not refused(tmp_path)
    for client in crowd:
        client.close()


def test_guests_are_answered_one_at_a_time(tmp_path, monkeypatch):
    """However long that takes: each listing of the pods takes time from the data plane."""
    monkeypatch.setattr(Server, "_may_change", lambda self, connection: False)
    met, both = [], threading.Barrier(2)

    def handle(session, message, fds):
        try:
            met.append(both.wait(0.5))
        except threading.BrokenBarrierError:
            both.reset()
        return {}

    server = Server(tmp_path, 0o600, None, handle, FdStore())
    crowd = [Client(tmp_path, 60) for _ in range(2)]
    asking = [threading.Thread(target=client.call, args=("look",)) for client in crowd]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    for client in crowd:
        client.close()
    server.close()

    assert met == []


def test_only_one_member_of_a_crowd_is_parsed_at_a_time(members, tmp_path, monkeypatch):
    """Nothing interrupts a parser, and the scheduling loops would wait for as many as there are clients."""
    met, both = [], threading.Barrier(2)

    def loads(body):
        try:
            met.append(both.wait(0.5))
        except threading.BrokenBarrierError:
            both.reset()
        return {}

    monkeypatch.setattr(wire.json, "loads", loads)
    crowd = [wire.connect(str(socket_path(tmp_path))).sock for _ in range(2)]
    for client in crowd:
        client.sendall(b"\x02\0\0\0{}")
    for client in crowd:
        assert client.recv(1)
        client.close()

    assert met == []


def test_a_guest_that_says_nothing_is_hung_up_on(guests, tmp_path, monkeypatch):
    monkeypatch.setattr(control_socket, "_TIMEOUT_S", 0.2)
    with wire.connect(str(socket_path(tmp_path))).sock as silent:
        silent.sendall(b"\0")
        assert silent.recv(1) == b""
    guests.set()
    with wire.connect(str(socket_path(tmp_path))).sock as launcher:
        launcher.settimeout(1)
        with pytest.raises(TimeoutError):
            launcher.recv(1)


def test_group_member_that_does_not_finish_is_hung_up_on(members, tmp_path, monkeypatch):
    monkeypatch.setattr(control_socket, "_TIMEOUT_S", 0.2)
    with Client(tmp_path) as launcher, wire.connect(str(socket_path(tmp_path))).sock as slow:
        assert launcher.call("look")["value"] == 0
        slow.sendall(b"\x10\0\0\0{")
        assert slow.recv(1) == b""
        assert launcher.call("look")["value"] == 0, "between two messages it may be silent for as long as it likes"


def send_lingering(path):
    """Connect, and leave a socket whose close waits in the connection's queue."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    fd = lingering()
    socket.send_fds(sock, [b"\0"], [fd])
    os.close(fd)
    return sock


def test_lingering_fd_of_refused_client_blocks_no_other_client(tmp_path, monkeypatch):
    sent, attackers = threading.Event(), [True, False]
    monkeypatch.setattr(Server, "_may_change", lambda self, connection: sent.wait() and not attackers.pop(0))
    monkeypatch.setattr(control_socket, "MAX_GUESTS", 0)
    server = Server(tmp_path, 0o600, None, answering, FdStore())
    with send_lingering(str(socket_path(tmp_path))):
        sent.set()
        while len(attackers) > 1:  # two threads accept: root's client must not be taken for the attacker
            time.sleep(0.001)
        with Client(tmp_path) as root:
            assert root.call("look")["value"] == 0
    server.close()


def test_lingering_fd_does_not_keep_its_senders_client_slot(pods, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGURG)
    untrusted_fds.install_signal_handler()
    monkeypatch.setattr(control_socket, "MAX_CLIENTS", 1)
    send_lingering(str(socket_path(tmp_path))).close()
    until_heard(tmp_path)
    signal.signal(signal.SIGURG, before)


def test_who_may_only_look_passes_no_descriptors(tmp_path, monkeypatch):
    got = []
    monkeypatch.setattr(Server, "_may_change", lambda self, connection: False)
    server = Server(tmp_path, 0o600, None, lambda session, message, fds: got.append(list(fds)) or {}, FdStore())
    try:
        with Client(tmp_path) as client:
            client.call("look", [0])
    finally:
        server.close()
    assert got == [[]]


def test_read_only_clients_take_no_slot_of_privileged_ones(guests, tmp_path, monkeypatch):
    monkeypatch.setattr(control_socket, "MAX_GUESTS", 3)
    crowd = [Client(tmp_path) for _ in range(3)]
    assert [client.call("look")["value"] for client in crowd] == [0, 0, 0]
    with pytest.raises(QgpuError, match=r"too many clients|hung up|connection lost"), Client(tmp_path) as one_more:
        one_more.call("look")
    guests.set()
    with Client(tmp_path) as root:
        assert root.call("look")["value"] == 0
    guests.clear()
    for client in crowd:
        client.close()
    until_heard(tmp_path)


def until_heard(runtime_dir):
    """Ask until there is an answer; the test's timeout is the bound."""
    while True:
        try:
            with Client(runtime_dir) as client:
                return client.call("look")
        except QgpuError:
            time.sleep(0.01)


def test_next_client_is_served_after_thread_creation_fails(guests, tmp_path, monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(QgpuError), Client(tmp_path) as client:
            client.call("look")
    until_heard(tmp_path)


def test_who_may_only_look_sends_little_at_once(guests, tmp_path):
    with pytest.raises(DaemonUnreachableError), Client(tmp_path) as client:
        client.call("look", text="x" * (1 << 17))
    guests.set()
    with Client(tmp_path) as client:
        assert client.call("look", text="x" * (1 << 17))["value"] == 1 << 17
    assert socket_path(tmp_path).exists()


def test_a_group_member_sends_little_at_once(members, tmp_path):
    with pytest.raises(DaemonUnreachableError), Client(tmp_path) as client:
        client.call("look", text="x" * (1 << 17))
    members["uid"] = os.geteuid()
    with Client(tmp_path) as client:
        assert client.call("look", text="x" * (1 << 17))["value"] == 1 << 17


def test_a_pod_on_every_mig_instance_of_a_host_fits(members, tmp_path):
    grant = Grant(PodClass.ONLINE, 100, 1 << 40, 10**8, profiling=True, graphics=True)
    with Client(tmp_path) as client:
        client.call("pod.create", name="x" * 64, grants=grants_to_json(dict.fromkeys(range(16 * 7), grant)))

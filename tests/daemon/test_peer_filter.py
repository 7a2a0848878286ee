"""Who may talk to the daemon at all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from qgpu.daemon.peer_filter import pod_of, refuse_pods
from qgpu.errors import PermissionDeniedError
from qgpu.ipc import wire
from qgpu.linux import cgroup

WEB = {"/qgpu/web": "web"}


@pytest.fixture
def own():
    """A pidfd of this process."""
    process = os.pidfd_open(os.getpid())
    yield process
    os.close(process)


def test_a_process_of_a_pod_is_not_heard(monkeypatch, own):
    monkeypatch.setattr(cgroup, "of", lambda pid: {7: "/qgpu/web/inner", 8: "/qgpu/web2"}[pid])

    with pytest.raises(PermissionDeniedError, match="it is in pod web"):
        refuse_pods(7, own, WEB)
    refuse_pods(8, own, WEB)


def test_the_kernels_word_is_taken_on_where_a_process_is(own):
    here = cgroup.of(os.getpid())

    with pytest.raises(PermissionDeniedError):
        refuse_pods(os.getpid(), own, {here: "own"})
    refuse_pods(os.getpid(), own, {"/qgpu/no-such-pod": "other"})


def test_ended_process_is_refused_where_pods_exist():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    with pytest.raises(PermissionDeniedError, match="ended"):
        refuse_pods(ended.pid, None, WEB)
    refuse_pods(ended.pid, None, {})


@contextmanager
def left_by_its_maker(path):
    """A connection whose maker has ended, taken on by a child of its."""
    listener = wire.listen(str(path), 0o600)
    made = (
        "import os, socket, sys; sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1])\n"
        "if os.fork() == 0: sock.recv(1)"
    )
    maker = subprocess.Popen([sys.executable, "-c", made, str(path)])
    sock, _ = listener.accept()
    process = wire.Connection(sock).peer_process()
    maker.wait()
    yield wire.Connection(sock), process
    os.close(process)
    sock.close()
    listener.close()


def test_connection_with_reused_pid_is_refused(tmp_path, monkeypatch):
    with left_by_its_maker(tmp_path / "socket") as (connection, process):
        monkeypatch.setattr(cgroup, "of", lambda pid: "/host")  # the number has been given out again, outside

        with pytest.raises(PermissionDeniedError, match="ended"):
            refuse_pods(connection.peer().pid, process, WEB)


def test_peer_is_looked_up_by_pid_on_older_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "_SO_PEERPIDFD", 250)
    one, other = socket.socketpair()
    with one, other:
        process = wire.Connection(one).peer_process()

        assert not wire.has_ended(process)
        os.close(process)


@pytest.mark.parametrize(("root", "found"), [(True, ""), (False, "slurm-7")])
def test_slurmstepd_is_no_pods_process_but_a_user_beside_it_is(monkeypatch, own, root, found):
    job = "/system.slice/slurmstepd.scope/job_7"
    monkeypatch.setattr(cgroup, "of", lambda pid: f"{job}/step_0/slurm")

    assert pod_of(os.getpid(), own, {job: "slurm-7"}, root=root) == found

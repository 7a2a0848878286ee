"""A guardian that does not answer is told from one that is slow."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qgpu.errors import BackendGoneError, NotSupportedError
from qgpu.ipc.codec import PROTOCOL
from qgpu.planes.seccomp import backend, host
from qgpu.planes.seccomp.backend import SeccompBackend
from qgpu.planes.seccomp.guardian_link import GuardianHangsError, GuardianLink
from qgpu.planes.seccomp.hang_detector import is_in_driver
from qgpu.planes.seccomp.host import SeccompHost

_ANSWERS = """
import os, signal, sys
from qgpu.ipc import wire
server = wire.listen(sys.argv[1], 0o600)
print("ready", flush=True)
state = os.memfd_create("journal"), os.memfd_create("files")
while True:
    connection = wire.Connection(server.accept()[0])
    while (message := connection.receive()) is not None:
        if message[0]["op"] == "last event":
            connection.send({"event": "changed"})
        while message[0]["op"] in ("spin", "last event"):
            pass
        while message[0]["op"] == "sleep":
            signal.pause()
        hello = message[0]["op"] == "hello"
        answer = {"ok": True, "pid": os.getpid(), "protocol": int(sys.argv[2]), "listeners": {}}
        connection.send(answer, state if hello else [])
"""


@pytest.fixture
def answering(tmp_path, request):
    path, protocol = tmp_path / "guardian.sock", getattr(request, "param", PROTOCOL)
    process = subprocess.Popen([sys.executable, "-c", _ANSWERS, str(path), str(protocol)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process, path
    process.kill()
    process.wait()
    process.stdout.close()


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        pass


def test_a_guardian_that_was_stopped_is_given_up_as_such(answering):
    process, path = answering
    link = GuardianLink(path)
    link.call("renew")
    _stop(process.pid)
    with pytest.raises(BackendGoneError, match="its process is stopped"):
        link.call("renew")
    with pytest.raises(BackendGoneError, match="connection closed"):
        link.call("renew")
    link.close()


def test_stopped_guardian_is_reported_as_hung(answering):
    process, path = answering
    _stop(process.pid)
    with pytest.raises(GuardianHangsError, match=f"process {process.pid}.*its process is stopped"):
        GuardianLink(path)


@pytest.mark.parametrize("answering", [PROTOCOL - 1, PROTOCOL + 1], indirect=True)
def test_a_guardian_of_another_protocol_is_refused(answering):
    with pytest.raises(NotSupportedError, match="left by another version"):
        GuardianLink(answering[1])


@pytest.mark.parametrize("how", ["spin", "sleep", "last event"])
def test_guardian_that_hangs_unstopped_is_given_up(answering, how):
    _, path = answering
    link = GuardianLink(path)
    with pytest.raises(BackendGoneError, match=r"it does not answer$"):
        link.call(how)

    assert isinstance(link.failure, TimeoutError)
    link.close()


def test_a_guardian_that_died_does_not_hang(answering):
    process, path = answering
    link = GuardianLink(path)
    process.kill()
    process.wait()
    with pytest.raises(BackendGoneError):
        link.call("renew")

    assert not isinstance(link.failure, TimeoutError)
    link.close()


_IN_AN_IOCTL = """
import fcntl
from qgpu.guardian.proxy.seccomp_filter import install
listener = install()
print("ready", flush=True)
fcntl.ioctl(listener, 0xC0502100, bytearray(80))  # SECCOMP_IOCTL_NOTIF_RECV: nobody makes a call
"""


def test_process_in_driver_is_told_from_sleeping_one():
    process = subprocess.Popen([sys.executable, "-c", _IN_AN_IOCTL], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        pass
    kept = is_in_driver(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()
    asleep = subprocess.Popen(["sleep", "100"])
    while Path(f"/proc/{asleep.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        pass
    other = is_in_driver(asleep.pid)
    asleep.kill()
    asleep.wait()

    assert (kept, other) == (True, False)


_WAITS = """
import fcntl, signal, sys, threading
from qgpu.guardian.proxy.seccomp_filter import install
listener = install()
lock = threading.Lock()
lock.acquire()
def another():
    print("ready", flush=True)
    if sys.argv[1] == "in the driver":
        fcntl.ioctl(listener, 0xC0502100, bytearray(80))
    else:
        signal.sigwait({signal.SIGUSR1})
threading.Thread(target=another).start()
lock.acquire()
"""


@pytest.mark.parametrize("where", ["in the driver", "asleep"])
def test_process_waiting_on_thread_in_driver_counts_as_in_driver(where):
    process = subprocess.Popen([sys.executable, "-c", _WAITS, where], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    tasks = Path(f"/proc/{process.pid}/task")
    while {(each / "stat").read_text().rpartition(")")[2].split()[0] for each in tasks.iterdir()} != {"S"}:
        pass
    kept = is_in_driver(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()

    assert kept == (where == "in the driver")


def test_host_and_backend_ask_for_the_events_that_they_read(monkeypatch, tmp_path):
    asked = []

    class Link:
        def __init__(self, path, *, watch):
            asked.append(watch)
            self.hello = {"pid": 1, "listeners": {}}

    monkeypatch.setattr(host, "GuardianLink", Link)
    monkeypatch.setattr(backend, "GuardianLink", Link)
    plane = SeccompHost.__new__(SeccompHost)
    plane.socket, plane._standby = tmp_path, None
    plane._find(None)
    SeccompBackend(tmp_path, lambda link: None, 0)

    assert asked == ["listener-gone", "changed"]

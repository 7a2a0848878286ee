"""Who passes listeners on to the agent: runtimes, and no process of a pod, not even root's."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from qgpu.linux import untrusted_fds
from qgpu.runtime import agent
from qgpu.runtime.agent import LISTENER, UNKNOWN, Agent
from tests.runtime.test_agent import Store


class Heard:
    """An agent that takes any descriptor for a listener, and this process for one of the pod ``peer``."""

    def __init__(self, directory: Path) -> None:
        self.peer = ""
        self.attached: list[str] = []
        self.store = Store()
        self.path = directory / "seccomp.sock"
        self.agent = self.start()

    def start(self) -> Agent:
        """Start the agent."""
        return Agent(self.path, self._attach, self.store, lambda _pid, _process: self.peer)

    def _attach(self, _pid: int, container: str, _listener: int) -> None:
        self.attached.append(container)

    def connect(self) -> socket.socket:
        """Connect as a runtime does."""
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(60)
        sock.connect(str(self.path))
        return sock

    def tell(self, container: str) -> None:
        """Pass a listener on, and wait until it was heard."""
        with self.connect() as sock:
            say(sock, container)
            hung_up(sock)


def say(sock: socket.socket, container: str) -> None:
    """Say what a runtime says."""
    state = {"pid": 1, "fds": ["seccompFd"], "state": {"id": container}}
    socket.send_fds(sock, [json.dumps(state).encode()], [0])


def hung_up(sock: socket.socket) -> bool:
    """Wait until the agent hangs up, perhaps on what it has not read."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    monkeypatch.setattr(untrusted_fds, "kind", lambda _fd: LISTENER)
    monkeypatch.setattr(agent, "_SILENCE_S", 600.0)
    made = Heard(tmp_path)
    yield made
    made.agent.close()


def test_root_in_a_pod_passes_no_listener_on(heard: Heard) -> None:
    """Its calls would be served as another pod's, with that pod's limits and objects."""
    heard.peer = "web"
    with heard.connect() as sock:
        assert hung_up(sock)
    heard.peer = ""
    heard.tell("true")

    assert heard.attached == ["true"]


@pytest.mark.parametrize("peer", ["web", UNKNOWN])
def test_silent_process_keeps_no_runtime_waiting(heard: Heard, peer: str) -> None:
    heard.peer = peer
    with heard.connect() as silent:
        assert hung_up(silent)
        heard.peer = ""
        heard.tell("true")

    assert heard.attached == ["true"]
    assert heard.store.kept.keys() == {"agent"}


def test_runtime_that_has_ended_is_heard(heard: Heard) -> None:
    heard.agent.close()
    heard.peer = UNKNOWN
    runtime, left = socket.socketpair()
    say(runtime, "true")
    heard.store.put("start.1", left.fileno())
    left.close()
    heard.agent = heard.start()
    runtime.settimeout(60)
    assert hung_up(runtime)
    runtime.close()

    assert heard.attached == ["true"]
    assert os.listdir(heard.path.parent) == ["seccomp.sock"]

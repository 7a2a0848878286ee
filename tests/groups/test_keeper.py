"""The keeper of a group, with a stand-in for NVIDIA's control daemon: the real one needs a GPU."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from qgpu.errors import NotSupportedError, QgpuError
from qgpu.groups import keeper as keeping
from qgpu.groups.keeper import Keeper
from qgpu.groups.mps_server import MpsServer, is_mps
from qgpu.ipc.control_socket import Client
from qgpu.linux import proc
from qgpu.linux.proc import start_time
from qgpu.linux.shutdown import Shutdown
from tests.cli.programs import Daemon, daemon
from tests.groups import stand_in

GRANT = {"class": "offline", "cores": 60, "memory": None, "latency_target_ns": None}
#: A member that has the stand-in for a card open.
MEMBER = (
    "import os, signal; os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY); print(os.getpid(), flush=True); signal.pause()"
)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Put the stand-ins on the path."""
    program = stand_in.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


@pytest.fixture
def host(tmp_path, installed):
    with daemon(tmp_path / "run") as running:
        yield running


class Kept:
    """A group that a thread keeps."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir, self.stop = runtime_dir, Shutdown()
        self.server = MpsServer(runtime_dir / "groups" / "llm")
        self.keeper = Keeper(runtime_dir, "llm", {"0": GRANT}, with_mps={"sim"}, card_major=stand_in.MAJOR)
        self.keeper.begin()
        self.thread = threading.Thread(target=self.keeper.keep, args=(self.stop,))
        self.thread.start()

    def inside(self) -> list[int]:
        """Return the processes of the group's pod; none while there is no daemon."""
        try:
            with Client(self.runtime_dir) as client:
                return [pid for pod in client.call("pod.list")["pods"] for pid in pod["pids"]]
        except QgpuError:
            return []

    def control(self) -> list[int]:
        return [pid for pid in self.inside() if is_mps(pid) and b"-f" in proc.cmdline(pid)]

    def servers(self) -> list[int]:
        return [pid for pid in self.inside() if is_mps(pid) and b"-f" not in proc.cmdline(pid)]

    def await_whole(self, *gone: int) -> tuple[int, int]:
        """Wait until MPS runs in the group's pod without these processes; return its control daemon and server."""
        found: tuple[int, ...] = ()

        def whole() -> bool:
            nonlocal found
            found = *self.control(), *self.servers()
            return self.server.answers and len(found) == 2 and not set(gone) & set(found)

        self.until(whole)
        return found[0], found[1]

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until this holds, as long as the group is kept."""
        while not holds():
            assert self.thread.is_alive()
            time.sleep(0.05)

    def end(self) -> None:
        self.stop.set()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def kept(host):
    running = Kept(host.runtime_dir)
    yield running
    running.end()


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def member(host: Daemon, command: str = MEMBER) -> Iterator[int]:
    """Run a member that has a card open; give its pid."""
    launched = host.start("run", "--group", "llm", "--", sys.executable, "-c", command)
    assert launched.stdout is not None
    pid = int(launched.stdout.readline())
    try:
        yield pid
    finally:
        kill(pid)
        launched.communicate(timeout=60)


def test_group_has_its_control_daemon_in_its_pod(kept):
    assert kept.server.answers
    assert len(kept.control()) == 1


def test_killed_control_daemon_is_started_again(kept):
    for _ in range(2):
        (before,) = kept.control()
        os.kill(before, signal.SIGKILL)
        kept.await_whole(before)


def test_members_end_with_the_control_daemon(host, kept):
    with member(host) as pid:
        (before,) = kept.control()
        os.kill(before, signal.SIGKILL)
        kept.await_whole(before)

        assert not start_time(pid)


def test_members_that_ignore_sigterm_end_as_well(host, kept):
    with member(host, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + MEMBER) as pid:
        (before,) = kept.control()
        os.kill(before, signal.SIGKILL)
        kept.await_whole(before)

        assert not start_time(pid)


def test_member_without_a_card_outlives_the_server(host, kept):
    with member(host, "import os, signal; print(os.getpid(), flush=True); signal.pause()") as pid:
        (before,) = kept.control()
        os.kill(before, signal.SIGKILL)
        kept.await_whole(before)

        assert start_time(pid)


def test_clients_of_a_killed_server_end_too(host, kept):
    with member(host) as pid:
        _, server = kept.await_whole()
        kept.until(lambda: server in kept.keeper._mps_servers)
        os.kill(server, signal.SIGKILL)
        kept.until(lambda: not start_time(pid))


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to choose a process's number")
def test_who_got_an_ended_members_pid_is_not_killed(host, kept, monkeypatch):
    """A member makes looking at it slow, by its many descriptors, and meanwhile another ends."""
    look, others = proc.devices, []
    with member(host) as first, member(host) as second:

        def slow(pid):
            if pid in (first, second) and not others:
                others.append(reborn({first: second, second: first}[pid]))
            return look(pid)

        monkeypatch.setattr(proc, "devices", slow)
        kept.keeper._end_clients()
        (other,) = others
        try:
            other.stdin.write(b"\n")
            other.stdin.flush()
            assert other.stdout.readline() == b"\n"
        finally:
            other.communicate()


def reborn(pid):
    """Kill a member, and run a process with its number that has a card open as well."""
    kill(pid)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)
    command = [sys.executable, "-m", "tests.reborn", str(pid), str(1 << 45)]
    card = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[card])
    os.close(card)
    assert other.stdout.readline() == b"ready\n"
    return other


def test_ended_talk_to_the_control_daemon_ends_nobody(host, kept, installed):
    with member(host) as pid:
        kept.await_whole()
        talk = host.start("run", "--group", "llm", "--", str(installed), "ps")
        while len(kept.inside()) < 4:
            assert talk.poll() is None
        time.sleep(2 * keeping._POD_POLL_S)  # so that the keeper sees it
        talk.terminate()
        talk.communicate(timeout=60)
        time.sleep(2 * keeping._POD_POLL_S)

        assert start_time(pid)


def test_pipe_directory_stays_the_same_one(kept):
    before = kept.server.pipe.stat().st_ino  # containers have it mounted
    (control,) = kept.control()
    os.kill(control, signal.SIGKILL)
    kept.await_whole(control)

    assert kept.server.pipe.stat().st_ino == before


def test_ended_group_leaves_no_process_and_no_pod(host):
    running = Kept(host.runtime_dir)
    mps = running.await_whole()
    running.end()

    assert not any(map(start_time, mps))
    assert host.json("pod", "list")["pods"] == []
    assert not running.server.directory.exists()


def test_pod_made_again_has_the_grant_that_was_set_last(tmp_path, installed):
    host = Daemon(tmp_path / "run", "--plane", "sim")
    running = Kept(host.runtime_dir)
    try:
        mps = running.await_whole()
        assert host.ctl("group", "set", "llm", "--cores", "30").returncode == 0
        running.until(lambda: running.keeper._grants["0"]["cores"] == 30)
        host.stop(signal.SIGKILL)
        host = Daemon(host.runtime_dir, "--plane", "sim")
        running.await_whole(*mps)
        (pod,) = host.json("pod", "list")["pods"]
    finally:
        running.end()
        host.stop()

    assert pod["grants"][0]["cores"] == 30


MOMENTS = int(os.environ.get("QGPU_MOMENTS", "4"))


def test_group_is_whole_again_whoever_is_killed_when(tmp_path, installed):
    """Kill its MPS processes and the daemon at random moments; members end, and nothing is left in the end."""
    chance, seen, left = random.Random(44), set[int](), None
    host = Daemon(tmp_path / "run", "--plane", "sim")
    running = Kept(host.runtime_dir)
    try:
        for _ in range(MOMENTS):
            control, server = running.await_whole()
            seen |= {control, server}
            with member(host) as pid:
                time.sleep(chance.random())
                killed = chance.choice([(control,), (server, control), (control, server), ()])
                for each in killed:
                    kill(each)
                if not killed:
                    host.stop(signal.SIGKILL)
                    host = Daemon(host.runtime_dir, "--plane", "sim")
                running.await_whole(control, server)
                assert not (
                    killed and start_time(pid)
                )  # the simulator's pods end with the daemon; members then have none
    finally:
        running.end()
        left = host.json("pod", "list")["pods"]
        host.stop()

    assert (left, [pid for pid in seen if start_time(pid)]) == ([], [])
    assert not running.server.directory.exists()


def test_without_mps_the_group_is_refused_and_leaves_nothing(host, installed):
    installed.unlink()
    with pytest.raises(NotSupportedError, match="nvidia-cuda-mps-control is not installed"):
        Keeper(host.runtime_dir, "llm", {"0": GRANT}, with_mps={"sim"}).begin()

    assert host.json("pod", "list")["pods"] == []


def test_control_daemon_that_dies_at_once_is_reported(host, installed, monkeypatch):
    monkeypatch.setattr(keeping, "_TIMEOUT_S", 20)
    installed.write_text("#!/bin/false\n")
    with pytest.raises(QgpuError, match="does not start: "):
        Keeper(host.runtime_dir, "llm", {"0": GRANT}, with_mps={"sim"}).begin()

    assert host.json("pod", "list")["pods"] == []

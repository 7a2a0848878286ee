"""What tells that an MPS server has ended that nobody saw, with a stand-in for NVIDIA's control daemon."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qgpu.groups.group_files import GroupFiles
from qgpu.groups.mps_server import child_of, ended_children
from qgpu.linux.proc import start_time
from qgpu.linux.shutdown import Shutdown
from tests.cli.programs import Daemon, daemon
from tests.groups.test_keeper import Kept, member

#: Has a server for a moment when it gets SIGUSR1.
STAND_IN = """#!{python}
import os, pathlib, signal, socket, subprocess, sys
pipe = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if sys.argv[1:] == ["-f"]:
    signal.signal(signal.SIGUSR1, lambda *_: subprocess.run(["true"]))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(pipe / "control"))
    listener.listen(4096)  # nobody takes the connections
    (pipe / "pid").write_text(str(os.getpid()))
    while True:
        signal.pause()
elif sys.stdin.read().startswith("quit"):
    os.kill(int((pipe / "pid").read_text()), signal.SIGTERM)
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Kept, Daemon]]:
    """Keep a group on a simulated card."""
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    with daemon(tmp_path / "run") as host:
        running = Kept(host.runtime_dir)
        yield running, host
        running.end()


def test_each_ended_child_shows_however_short_it_lived() -> None:
    seen = {ended_children(os.getpid())}
    for count in range(2, 5):
        subprocess.run(["true"], check=True)
        seen.add(ended_children(os.getpid()))
        assert len(seen) == count


def test_the_child_of_a_process_is_found_among_others() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        assert child_of(os.getpid(), (os.getpid(), child.pid)) == child.pid
        child.kill()
    assert child_of(os.getpid(), (os.getpid(), child.pid)) == 0
    assert ended_children(child.pid) == 0


def test_a_group_outlives_a_want_of_descriptors(kept: tuple[Kept, Daemon], monkeypatch: pytest.MonkeyPatch) -> None:
    group, looks = kept[0], list[Shutdown]()
    look, limits = group.keeper._look_after_pod, resource.getrlimit(resource.RLIMIT_NOFILE)

    def counted(stop: Shutdown) -> None:
        looks.append(stop)
        look(stop)

    monkeypatch.setattr(group.keeper, "_look_after_pod", counted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # input and outputs
    try:
        while len(looks) < 10 and group.thread.is_alive():
            time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert group.thread.is_alive()


def test_clients_of_a_server_that_nobody_saw_end_too(kept: tuple[Kept, Daemon]) -> None:
    group, host = kept
    with member(host) as pid:
        (control,) = group.control()
        os.kill(control, signal.SIGUSR1)
        group.until(lambda: not start_time(pid))


def test_a_log_is_emptied_when_it_is_too_long(tmp_path: Path) -> None:
    files = GroupFiles(tmp_path, "llm")
    logs = files.directory / "log"
    logs.mkdir(parents=True)
    (logs / "server.log").write_text("short\n")
    (logs / "control.log").write_bytes(b"x" * (17 << 20) + b"\nlast\n")
    words = files.last_words()
    files.server.bound_logs()

    assert words == "last"
    assert {each.name: each.stat().st_size for each in logs.iterdir()} == {"server.log": 6, "control.log": 0}


def test_a_log_that_is_a_link_empties_no_other_file(tmp_path: Path) -> None:
    server = GroupFiles(tmp_path, "llm").server
    logs, other = server.directory / "log", tmp_path / "other"
    logs.mkdir(parents=True)
    other.write_bytes(b"x" * (17 << 20))
    (logs / "server.log").symlink_to(other)
    os.mkfifo(logs / "control.log")
    server.bound_logs()

    assert other.stat().st_size == 17 << 20

"""A real container's calls come to the guardian by way of the runtime: libseccomp's filter, and the agent.

As in the guardian's own tests, there is no NVIDIA driver: the container calls /dev/random, whose major the guardian
watches, so a call that was let through comes back with EINVAL.
"""

from __future__ import annotations

import errno
import json
import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qgpu.errors import BackendGoneError
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.proxy.dispatcher import Dispatcher
from qgpu.guardian.proxy.seccomp_filter import WATCHED_PREFIXES
from qgpu.guardian.proxy.shared_state import SharedState
from qgpu.ipc.systemd import FdStore
from qgpu.linux import cgroup
from qgpu.nvidia import abi
from qgpu.runtime import seccomp_profile
from qgpu.runtime.agent import Agent
from qgpu.runtime.oci_container import Container as Description
from tests.cli import programs
from tests.cli.programs import Daemon
from tests.guardian.fake_rm import FakeRm
from tests.runtime import oci
from tests.runtime.oci import Container

pytestmark = [pytest.mark.root, pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")]

#: As podman's own profile is: what is not listed is no system call.
STRICT = {
    "defaultAction": "SCMP_ACT_ERRNO",
    "defaultErrnoRet": 38,
    "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
    "syscalls": [{"names": [], "action": "SCMP_ACT_ALLOW"}],
}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that runs in the containers."""
    program = tmp_path_factory.mktemp("calls") / "calls"
    source = Path(__file__).with_name("calls.c")
    subprocess.run(["cc", "-O2", "-static", "-Wall", "-Werror", "-o", str(program), str(source)], check=True)
    return program


class Guard:
    """A dispatcher in a thread, given listeners by an agent."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "seccomp.sock"
        self.pids: list[int] = []
        self.containers: list[str] = []
        self.asked: list[int] = []
        rm = FakeRm()
        self.shared = SharedState(
            ObjectTable(),
            Journal(),
            rm,
            lambda keys: None,
            lambda keys: None,
            lambda pid, pidfd: None,
            time.monotonic_ns,
            major=1,  # /dev/random's
            perform=rm.perform,
        )
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.agent = Agent(self.socket, self._attach, FdStore())

    def _attach(self, pid: int, container: str, listener: int) -> None:
        self.containers.append(container)
        self.take(pid, os.dup(listener))

    def take(self, pid: int, listener: int) -> None:
        """Serve a process's listener in a thread of its own."""
        self.pids.append(pid)
        number = self.shared.listeners.add("web", listener)
        self._threads.append(threading.Thread(target=self._serve, args=(number, listener)))
        self._threads[-1].start()

    def _serve(self, number: int, listener: int) -> None:
        judge = Dispatcher(self.shared, "web")
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while not self._stop.is_set():
            for _, event in poll.poll(50):
                if not event & select.POLLIN:
                    return
                mine = self.shared.listeners[number][1]
                if (call := mine.receive()) is not None:
                    judge.serve(mine, call)
                    self.asked.append(number)

    def close(self) -> None:
        self.agent.close()
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Guard]:
    made = Guard(tmp_path)
    made.shared.note({"fact": "pod", "name": "web", "grants": {}})
    yield made
    made.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon on the simulator, for the containers' hook."""
    with programs.daemon(tmp_path_factory.mktemp("qgpu") / "run") as running:
        yield running


@pytest.fixture(params=oci.RUNTIMES)
def container(
    tmp_path: Path, calls: Path, guard: Guard, daemon: Daemon, request: pytest.FixtureRequest
) -> Iterator[Container]:
    """A container behind the profile."""
    made = Container(request.param, tmp_path, daemon.runtime_dir, "sleep", "600").ask({}, QGPU_GPU_0="")
    shutil.copy(calls, made.bundle / "rootfs" / "bin")
    made.config["linux"]["seccomp"] = seccomp_profile.profile(seccomp_profile.UNCONFINED, guard.socket)
    yield made
    made.end()


CONTROL = f"{abi.NV2080_FIFO_DISABLE_CHANNELS:#x}"
REFUSED = f"0 0 {abi.NV_ERR_INSUFFICIENT_PERMISSIONS}\n"


def test_containers_scheduling_control_is_refused_by_rm_status(container, guard):
    started = container.start()
    assert started.returncode == 0, started.stdout

    assert container.exec("/bin/calls", "control", CONTROL).stdout == REFUSED
    assert container.exec("/bin/calls", "control", "0x20801303").stdout == "0 0 0\n"
    assert guard.shared.refusals.counts["web", "NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS"] == 1


def test_init_and_each_exec_send_listener_from_containers_cgroup(container, guard):
    container.start()
    init = container.state()["pid"]
    container.do("exec", "-d", container.id, "sleep", "601")
    until(lambda: len(guard.pids) == 2)  # a runtime that goes to the background does not wait for it

    assert guard.pids[0] == init
    assert guard.containers == [container.id] * 2
    assert container.id in cgroup.of(init)
    if guard.pids[1]:  # crun 1.8 says 0
        assert cgroup.of(guard.pids[1]) == cgroup.of(init)


def listed() -> list[str]:
    """Every word of podman's profile, all calls among them."""
    if not seccomp_profile.BASE.exists():
        pytest.skip(f"needs {seccomp_profile.BASE}")
    return sorted({"ioctl", *(name for name in seccomp_profile.BASE.read_text().split('"') if name.isidentifier())})


@pytest.mark.parametrize("strict", [False, True], ids=["unconfined", "strict"])
def test_libseccomp_watches_what_our_own_filter_watches(container, guard, strict):
    if strict:
        base = {**STRICT, "syscalls": [{"names": listed(), "action": "SCMP_ACT_ALLOW"}]}
        container.config["linux"]["seccomp"] = seccomp_profile.profile(base, guard.socket)
    started = container.start()
    assert started.returncode == 0, started.stdout
    before = len(guard.asked)
    said = container.exec("/bin/calls", "all").stdout.splitlines()
    rows = dict(map(int, line.split()) for line in said if line[0].isdigit())  # crun warns of names it does not know

    # RM's calls of that size: the table answers some, and one is refused. All others go to /dev/random itself.
    answered = {abi.NV_ESC_RM_CONTROL: 0, abi.NV_ESC_RM_I2C_ACCESS: errno.EOPNOTSUPP}
    answered |= {abi.NV_ESC_ATTACH_GPUS_TO_FD: rows[abi.NV_ESC_ATTACH_GPUS_TO_FD]}  # of any size
    assert rows == dict.fromkeys(range(256), errno.EINVAL) | answered
    assert len(guard.asked) - before == sum(mask == 0xFF for mask, _ in WATCHED_PREFIXES)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="int 0x80 is x86's")
@pytest.mark.parametrize("strict", [False, True], ids=["unconfined", "strict"])
def test_no_mapping_by_another_architectures_call_succeeds(container, guard, strict):
    if strict:
        base = {**STRICT, "syscalls": [{"names": listed(), "action": "SCMP_ACT_ALLOW"}]}
        container.config["linux"]["seccomp"] = seccomp_profile.profile(base, guard.socket)
    container.config["root"]["readonly"] = False
    started = container.start()
    assert started.returncode == 0, started.stdout
    found = dict(line.split() for line in container.exec("/bin/calls", "foreign").stdout.splitlines())

    assert found.keys() == {"mmap2", "old_mmap", "x32"}
    assert "mapped" not in found.values(), found


def test_without_an_agent_no_container_starts(container, guard):
    guard.agent.close()
    guard.agent = Agent(guard.socket.with_name("elsewhere.sock"), guard._attach, FdStore())
    started = container.start()

    assert started.returncode != 0


class Store(FdStore):
    """What a service manager keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.kept = True, {}

    def put(self, name, fd, *, until_dropped=False):
        self.kept[name] = os.dup(fd)

    def drop(self, name):
        if name in self.kept:
            os.close(self.kept.pop(name))

    def take(self, prefix):
        return {name.removeprefix(prefix): self.kept.pop(name) for name in [*self.kept] if name.startswith(prefix)}


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


def test_agent_asks_again_while_the_guardian_is_replaced(container, guard):
    gone, take = iter(range(3)), guard.agent._attach

    def attach(*arguments):
        if next(gone, None) is not None:
            raise BackendGoneError("guardian: it has died")
        take(*arguments)

    guard.agent._attach = attach
    container.start()
    until(lambda: guard.pids)

    assert guard.pids == [container.state()["pid"]]


def test_the_next_agent_finishes_what_one_has_left(container, guard):
    store, asked = Store(), threading.Event()

    def gone(*_):
        asked.set()
        raise BackendGoneError("guardian: it has died")

    guard.agent.close()
    guard.agent = Agent(guard.socket, gone, store)
    container.start()
    asked.wait()
    guard.agent.close()
    left = [name for name in store.kept if name.startswith("start.")]
    guard.agent = Agent(guard.socket, guard._attach, store)
    until(lambda: guard.pids)

    assert len(left) == 1
    assert guard.pids == [container.state()["pid"]]
    until(lambda: store.kept.keys() == {"agent"})


@pytest.mark.parametrize("said", [b"", b"{", b"[]", b'{"pid": 1}', b'{"pid": "x", "fds": ["seccompFd"]}'])
def test_nonsense_is_no_harm_to_the_agent(guard, said):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(guard.socket))
        read, write = os.pipe()
        socket.send_fds(sock, [said or b" "], [write])
        os.close(write)
        sock.shutdown(socket.SHUT_WR)
        assert os.read(read, 1) == b""  # the other end was closed
        os.close(read)
    assert guard.pids == []
    assert threading.active_count() >= 2


@pytest.fixture
def podman() -> Iterator[Callable[..., str]]:
    """Podman with stores of its own."""
    stores = Path(tempfile.mkdtemp(prefix="qgpu-", dir="/tmp"))  # podman wants a short path

    def run(*arguments: str) -> str:
        where = ("--root", str(stores / "root"), "--runroot", str(stores / "run"), "--storage-driver", "vfs")
        command = ["podman", *where, "--runtime", "runc", "--cgroup-manager", "cgroupfs", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=oci.TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield run
    run("rm", "-f", "-t", "0", "--all")
    shutil.rmtree(stores)


@pytest.mark.skipif(
    bool(oci.missing("podman")) or not seccomp_profile.BASE.exists(), reason="needs podman with its profile"
)
def test_podman_carries_the_profile_to_the_runtime_unharmed(podman, tmp_path, calls, guard):
    files = oci.rootfs(tmp_path / "rootfs")
    shutil.copy(calls, files / "bin")
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(seccomp_profile.profile(json.loads(seccomp_profile.BASE.read_text()), guard.socket)))

    limits = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")  # not above this process's own
    made = ("run", "--name", "web", "--network", "none", *limits, "--security-opt", f"seccomp={profile}", "--rootfs")
    assert podman(*made, str(files), "/bin/calls", "control", CONTROL) == REFUSED
    if os.uname().machine == "x86_64":
        again = tuple(part if part != "web" else "old" for part in made)
        assert "mapped" not in podman(*again, str(files), "/bin/calls", "foreign")
    config = json.loads(Path(podman("inspect", "-f", "{{.OCIConfigPath}}", "web").strip()).read_text())
    seccomp_profile.check(Description("web", 7, seccomp=config["linux"]["seccomp"]), guard.socket)

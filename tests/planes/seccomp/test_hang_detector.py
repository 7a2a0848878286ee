"""Who has not answered is given up for time it had, not for time that others took from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from qgpu.linux import proc
from qgpu.planes.seccomp import hang_detector
from qgpu.planes.seccomp.hang_detector import LOOK_MS, HangDetector, waits_for_pages
from tests import fuse
from tests.guardian.pod import until

_LOOK_NS = LOOK_MS * 1_000_000


@dataclass
class Process:
    """Ours by its number; what it does is said here, look by look."""

    now_ns: int = 0
    ran_ns: int = 1
    waited_ns: int = 0
    state: str = "S"
    #: The CPU time of all its threads, and whether its first thread waits for one that runs or wants to.
    used_ns: int = 0
    behind_thread: bool = False

    def pass_time(self, ran_ns: int = 0, waited_ns: int = 0, used_ns: int = 0) -> None:
        self.now_ns += _LOOK_NS
        self.ran_ns += ran_ns
        self.waited_ns += waited_ns
        self.used_ns += used_ns


@pytest.fixture
def process(monkeypatch):
    made = Process()
    monkeypatch.setattr(hang_detector, "time", SimpleNamespace(monotonic=lambda: made.now_ns / 1e9))
    monkeypatch.setattr(hang_detector, "_stat", lambda pid: [made.state, *["0"] * 20])
    monkeypatch.setattr(hang_detector, "_spent", lambda pid: (made.ran_ns, made.waited_ns))
    monkeypatch.setattr(hang_detector.proc, "cpu_s", lambda pid: made.used_ns / 1e9)
    monkeypatch.setattr(hang_detector, "_waits_for_running_thread", lambda pid: made.behind_thread)
    monkeypatch.setattr(hang_detector, "is_in_driver", lambda pid, before: False)
    return made


def _looks(process, **each) -> int:
    """Return how many looks it takes until it is given up."""
    watched = HangDetector(os.getpid())
    for count in range(1, 100):
        process.pass_time(**each)
        try:
            watched.look()
        except TimeoutError:
            return count
    raise AssertionError("never")


@pytest.mark.parametrize(("state", "ran_ns"), [("S", 0), ("R", _LOOK_NS)])
def test_hung_guardian_is_given_up_long_before_a_starved_one(process, state, ran_ns):
    process.state = state
    hangs = _looks(process, ran_ns=ran_ns)
    process.state = "R"
    starved = _looks(process)

    assert starved >= 4 * hangs


def test_what_it_waited_is_not_counted_when_it_sleeps_again(process):
    alone = _looks(process)
    busy = _looks(process, waited_ns=_LOOK_NS * 3 // 4)

    assert busy >= 3 * alone


def test_waiting_for_a_starved_thread_is_no_hang(process):
    alone = _looks(process)
    process.behind_thread = True
    starved, hangs = _looks(process, used_ns=_LOOK_NS // 8), _looks(process, used_ns=_LOOK_NS)

    assert starved >= 3 * alone
    assert hangs <= alone + 1


@pytest.mark.skipif(not Path(f"/proc/self/task/{os.getpid()}/syscall").exists(), reason="no /proc/PID/syscall here")
def test_thread_that_holds_the_interpreter_is_seen():
    """A real process whose first thread waits for a lock, with one that spins and without."""
    program = "import threading,sys\nthreading.Thread(target={},daemon=True).start()\nprint(1,flush=True)\n{}"
    spin, sleep = "lambda: [0 for _ in iter(int, 1)]", "threading.Event().wait"
    seen = {}
    for target in (spin, sleep):
        code = program.format(target, "l=threading.Lock(); l.acquire(); l.acquire()")
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            seen[target] = any(_looked(child.pid) for _ in range(100))
            child.kill()

    assert seen == {spin: True, sleep: False}


_WAITS_FOR_PAGE = """
import ctypes, os, sys
from qgpu.linux.seccomp_notify import ProcessMemory
from tests.guardian.child import never
page = never(ctypes.CDLL(None))
memory = ProcessMemory()
print("ready", flush=True)
memory.write(os.getpid(), [(page, b"x")]) if sys.argv[1] == "write" else memory.read(os.getpid(), page, 1)
"""


@pytest.fixture
def waiting(request):
    """A process that waits for a page, which it reads or writes as if it were another's."""
    command = [sys.executable, "-c", _WAITS_FOR_PAGE, request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as started:
        assert started.stdout is not None
        started.stdout.readline()
        until(lambda: hang_detector._read(started.pid, "wchan") == "handle_userfault")
        yield started.pid
        started.kill()


@pytest.mark.parametrize("waiting", ["read", "write"], indirect=True)
def test_thread_that_waits_for_a_page_of_another_is_seen(waiting):
    assert waits_for_pages(waiting)
    assert not waits_for_pages(os.getpid())


@pytest.mark.parametrize(
    ("waiting", "where", "ends"),
    [
        ("read", "folio_wait_bit_common", True),
        ("write", "folio_wait_bit_common", False),
        ("read", "request_wait_answer", False),
    ],
    indirect=["waiting"],
)
def test_wait_that_sigkill_may_not_end_is_none_for_pages(waiting, where, ends, monkeypatch):
    """A thread of a killed guardian would keep its successor waiting."""
    read = hang_detector._read
    monkeypatch.setattr(
        hang_detector, "_read", lambda pid, what, tid: where if what == "wchan" else read(pid, what, tid)
    )

    assert waits_for_pages(waiting) == ends


_WAITS_FOR_PAGE_AND_MORE = """
import ctypes, os, sys, threading, time
from qgpu.linux.seccomp_notify import ProcessMemory
from tests.guardian.child import never
page, file = never(ctypes.CDLL(None)), None
threading.Thread(target=ProcessMemory().read, args=(os.getpid(), page, 1)).start()
print("ready", flush=True)
path = input()
if sys.argv[1] == "spawn":
    while True:
        files = [(os.POSIX_SPAWN_OPEN, 0, path, os.O_RDONLY, 0)]
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}, file_actions=files), 0)
file = os.open(path, os.O_RDWR)
os.fstat(file) if sys.argv[1] == "fstat" else os.close(os.dup(file))
"""


@contextmanager
def waiting_for_page_and(what: str, path: Path) -> Iterator[int]:
    """A process of which one thread waits for a page, and the first for a file as well."""
    command = [sys.executable, "-c", _WAITS_FOR_PAGE_AND_MORE, what]
    where = Path(__file__).parents[3]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=where, start_new_session=True
    ) as process:
        process.stdout.readline()
        until(lambda: "handle_userfault" in {proc.wchan(process.pid, tid) for tid in proc.threads(process.pid)})
        process.stdin.write(f"{path}\n")
        process.stdin.flush()
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # what it was about to start, too


@pytest.mark.parametrize(("what", "silent"), [("fstat", fuse.GETATTR), ("close", fuse.FLUSH)])
def test_wait_for_a_fuse_server_outlives_sigkill(what, silent, tmp_path):
    with ExitStack() as process, fuse.served(tmp_path, silent) as served:
        pid = process.enter_context(waiting_for_page_and(what, served.file))
        served.asked()
        until(lambda: proc.wchan(pid, pid) == "request_wait_answer")

        assert not waits_for_pages(pid)


@pytest.mark.parametrize("wakes", [True, False])
def test_sleep_in_the_kernel_matters_only_if_it_lasts(wakes, tmp_path):
    """The first thread sleeps as one does that waits for a lock of the driver's; a fifo that is opened wakes it up."""
    os.mkfifo(fifo := tmp_path / "fifo")
    over = threading.Event()

    def wake():
        while wakes and not over.wait(hang_detector.LOOK_MS / 2000):
            with suppress(OSError):
                os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))

    with waiting_for_page_and("spawn", fifo) as pid:
        until(lambda: proc.stat(pid, pid)[0] == "D")
        waker = threading.Thread(target=wake)
        waker.start()
        seen = [waits_for_pages(pid) for _ in range(3)]
        over.set()
        waker.join()

    assert any(seen) == wakes


def _looked(pid):
    time.sleep(0.01)
    return hang_detector._waits_for_running_thread(pid)


def test_on_a_kernel_that_counts_no_waiting_all_time_is_its_own(process):
    process.ran_ns = 0
    process.state = "R"
    uncounted = _looks(process)
    process.ran_ns, process.state = 1, "S"

    assert uncounted == _looks(process)


def test_one_that_is_frozen_is_given_up_first(process, monkeypatch):
    hangs = _looks(process)
    monkeypatch.setattr(hang_detector.cgroup, "is_frozen", lambda pid: True)

    assert _looks(process) < hangs

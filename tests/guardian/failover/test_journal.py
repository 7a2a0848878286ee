"""A successor gets the journal of a killed guardian, even if a thread of that one outlives SIGKILL."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from qgpu.errors import AlreadyRunningError
from qgpu.guardian.failover.journal import Journal
from qgpu.linux import proc
from tests import fuse
from tests.guardian.pod import until

_OWNS = """
import os, sys, threading
from qgpu.guardian.failover.journal import Journal
journal = Journal(int(sys.argv[1]))
journal.own()
files = [os.open(path, os.O_RDWR) for path in sys.argv[2:]]
threads = [threading.Thread(target=os.close, args=(os.dup(file),)) for file in files]
for each in threads: each.start()
print("owned", flush=True)
sys.stdin.read()
"""


@contextmanager
def owner(journal: Journal, *files: Path) -> Iterator[subprocess.Popen]:
    """Run a process that owns a journal and closes files, until it is told to end."""
    command = [sys.executable, "-c", _OWNS, str(journal.fd), *map(str, files)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[journal.fd], cwd=Path(__file__).parents[3]
    ) as process:
        assert process.stdout.readline() == b"owned\n"
        yield process


def is_refused(journal):
    try:
        journal.own()
    except AlreadyRunningError:
        return True
    return False


@pytest.fixture
def journal():
    made = Journal()
    yield made
    os.close(made.fd)


def test_killed_owner_that_waits_for_fuse_has_a_successor(journal, tmp_path):
    """It has one only when it was killed. Another owner is refused then, also once the killed one has ended."""
    with ExitStack() as ends, fuse.served(tmp_path, fuse.FLUSH) as served:
        killed = ends.enter_context(owner(journal, served.file))
        served.asked()
        until(lambda: "request_wait_answer" in {proc.wchan(killed.pid, tid) for tid in proc.threads(killed.pid)})
        before = is_refused(journal)
        killed.kill()
        until(lambda: not is_refused(journal))
        waits, second = killed.poll() is None, refused_elsewhere(journal)
    assert (before, waits, second, refused_elsewhere(journal)) == (True, True, True, True)


_OWNS_AND_READS = """
import os, sys
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.gpu.userd_mapping import ProcessMemory
from qgpu.linux import proc
journal = Journal(int(sys.argv[1]))
journal.own()
memory = ProcessMemory(int(sys.argv[2]), proc.start_time(int(sys.argv[2])))
print("owned", flush=True)
os.pread(memory.fd, 8, int(sys.argv[3]))
"""
_MAPS = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
print(libc.mmap(None, ctypes.c_size_t(4096), 1, 1, os.open(sys.argv[1], os.O_RDONLY), ctypes.c_long(0)), flush=True)
sys.stdin.read()
"""


def test_killed_owner_that_reads_fuse_memory_has_a_successor(journal, tmp_path):
    """A page of a file behind /proc/PID/mem is waited for whatever signals come."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with ExitStack() as ends, fuse.served(tmp_path, fuse.READ) as served:
        pod = ends.enter_context(subprocess.Popen([sys.executable, "-c", _MAPS, served.file], **pipes))
        ends.callback(pod.kill)
        base = pod.stdout.readline().decode().strip()
        command = [sys.executable, "-c", _OWNS_AND_READS, str(journal.fd), str(pod.pid), base]
        where = Path(__file__).parents[3]
        killed = ends.enter_context(subprocess.Popen(command, pass_fds=[journal.fd], cwd=where, **pipes))
        ends.callback(killed.kill)
        assert killed.stdout.readline() == b"owned\n"
        served.asked()
        until(lambda: proc.stat(killed.pid)[0] == "D")
        before = is_refused(journal)
        killed.kill()
        until(lambda: not is_refused(journal))

        assert (before, killed.poll()) == (True, None)


def refused_elsewhere(journal):
    """Tell whether another process may not own the journal."""
    if (child := os.fork()) == 0:
        os._exit(is_refused(Journal(journal.fd)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_living_owner_has_no_successor_until_it_ends(journal):
    with owner(journal) as alive:
        assert is_refused(journal)
        alive.communicate()

    assert not is_refused(journal)

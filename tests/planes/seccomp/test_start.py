"""A guardian in reserve: a process that has everything loaded, and does nothing until it is needed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.failover.standby import Standby
from qgpu.ipc import wire
from qgpu.linux.open_file_set import FileSets
from tests.guardian.pod import PATIENCE_S

_POD = {"fact": "pod", "name": "web", "cgroup": "/web", "grants": {}}


class Daemon:
    """Its end of the connection to a reserve over a journal."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        ours, self.theirs = socket.socketpair()
        self.connection = wire.Connection(ours)
        ours.settimeout(PATIENCE_S)

    def standby(self) -> Standby:
        return Standby(Journal(os.dup(self.journal.fd)), wire.Connection(self.theirs))


@pytest.fixture
def daemon():
    made = Daemon(Journal())
    yield made
    made.connection.close()
    made.theirs.close()
    os.close(made.journal.fd)


@pytest.fixture
def process(daemon, tmp_path):
    fds = daemon.journal.fd, FileSets().fd, daemon.theirs.fileno()
    command = [sys.executable, "-m", "qgpu.guardian", str(tmp_path), *map(str, fds)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=fds)
    daemon.theirs.close()
    yield started
    started.kill()
    started.communicate()
    os.close(fds[1])


def test_one_that_is_told_to_end_does_without_a_word(daemon, process):
    daemon.connection.send({"op": "end"})

    assert process.communicate(timeout=PATIENCE_S) == (b"", None)
    assert (process.returncode, daemon.connection.receive()) == (0, None)


def test_numbers_of_the_sets_of_files_are_taken_from_the_first(daemon, process):
    daemon.connection.send({"op": "hold", "number": 1})  # it reads what it is told only when it has begun
    deadline = time.monotonic() + PATIENCE_S
    while not all(Path(f"/proc/{process.pid}/fd/{number}").exists() for number in (1000, 1001, 1002)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="there is a driver here")
def test_one_that_is_told_to_begin_says_what_it_lacks(daemon, process):
    daemon.connection.send({"op": "begin", "killed": False})
    said = daemon.connection.receive()[0]
    code = process.wait(PATIENCE_S)

    assert (said["ready"], said["code"]) == (False, code)
    assert said["error"].startswith("/proc/driver/nvidia/version: ")


def test_standby_has_read_journal_at_begin_despite_compaction(daemon):
    daemon.journal.append(_POD)
    daemon.journal.append(_POD | {"name": "gone"})
    standby = daemon.standby()
    standby._follow()
    before = set(standby.table.pods)
    daemon.journal.append({"fact": "ended", "name": "gone"})
    daemon.journal.compact(iter([_POD]))
    while daemon.journal._compaction:
        daemon.journal.append(_POD | {"name": "late"})
    daemon.journal.append(_POD | {"name": "last"})
    daemon.connection.send({"op": "begin", "killed": False})

    assert (before, standby.wait()) == ({"web", "gone"}, True)
    assert set(standby.table.pods) == {"web", "late", "last"}


def test_journal_reader_reads_each_fact_once_when_complete(daemon):
    journal = Journal(os.dup(daemon.journal.fd))
    daemon.journal.append(_POD)
    first = [fact["name"] for fact in journal.read()[1]]
    line = b'{"fact":"pod_retired","name":"web"}\n'
    end = os.fstat(daemon.journal.fd).st_size
    os.pwrite(daemon.journal.fd, line[:9], end)
    cut = list(journal.read()[1])
    os.pwrite(daemon.journal.fd, line, end)

    anew, facts = journal.read()
    assert (first, cut, anew, [fact["fact"] for fact in facts]) == (["web"], [], False, ["pod_retired"])


def test_standby_holds_current_listeners_and_no_departed_ones(daemon):
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    daemon.connection.send({"op": "hold", "inherited": {1: ("web", fds[0]), 2: ("job", fds[1])}})
    daemon.connection.send({"op": "hold", "number": 3, "pod": "late"}, [fds[2]])
    daemon.connection.send({"op": "hold", "number": 2})
    daemon.connection.send({"op": "begin", "killed": False})
    standby = daemon.standby()

    assert standby.wait()
    assert {number: pod for number, (pod, _) in standby.listeners.items()} == {1: "web", 3: "late"}
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fds[1])
    for _, fd in standby.listeners.values():
        os.close(fd)  # it is one
    os.close(fds[2])


def test_standby_begins_alone_when_daemon_and_guardian_are_gone(daemon, tmp_path):
    standby = daemon.standby()
    daemon.connection.close()

    assert standby.wait()


def test_it_ends_when_the_daemon_is_gone_and_the_guardian_stays(daemon):
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNS, str(daemon.journal.fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[daemon.journal.fd],
    )
    assert owner.stdout.readline() == b"owned\n"
    standby = daemon.standby()
    daemon.connection.close()
    stood_in = standby.wait()
    owner.communicate(timeout=PATIENCE_S)

    assert not stood_in
    assert standby.table == ObjectTable()


_OWNS = """
import sys
import time
from qgpu.linux.open_file_set import FileSets
from qgpu.guardian.failover.journal import Journal
journal = Journal(int(sys.argv[1]))
journal.own()
print("owned", flush=True)
sys.stdin.read()
"""

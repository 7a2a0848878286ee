"""Siblings of a thread are kept still, and only they, and only for as long as it is asked for."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from qgpu.linux import cgroup, kcmp, pod_processes, proc, thread_freezer
from qgpu.linux.descriptor_tables import DescriptorTables

#: Four threads that count, a handler that does, and a process that shares the descriptors if asked for.
_PROGRAM = """
import ctypes, mmap, os, signal, struct, sys, threading, time
page = mmap.mmap(int(sys.argv[1]), 4096)
def count(at):
    while not page[500 + at]: page[at] = (page[at] + 1) % 251
signal.signal(signal.SIGUSR1, lambda *_: page.__setitem__(100, page[100] + 1))
if sys.argv[2] == "shares":
    child = ctypes.CDLL(None).syscall(56, 0x400 | signal.SIGCHLD, 0, 0, 0, 0)
    if not child: signal.pause()
    page[200:208] = struct.pack("<Q", child)
if sys.argv[2] == "by a thread":  # whose process has a table of its own
    if not ctypes.PyDLL(None).syscall(56, 0x400 | signal.SIGCHLD, 0, 0, 0, 0):
        import _thread
        _thread.start_new_thread(time.sleep, (600,))
        ctypes.CDLL(None).unshare(0x400)
        page[200:208] = struct.pack("<Q", os.getpid())
        signal.pause()
    while not page[200]: time.sleep(0.01)
for at in range(4): threading.Thread(target=count, args=(at,), daemon=True).start()  # no lock is held in a copy
page[300] = 1
while not page[400]: time.sleep(0.001)
ctypes.CDLL(None).syscall(*((272, 0x400) if page[400] == 1 else (60, 0)))  # unshare, exit
while True: time.sleep(0.01)
"""


@pytest.fixture
def program():
    made = []

    def start(how="alone"):
        fd = os.memfd_create("page")
        os.ftruncate(fd, 4096)
        process = subprocess.Popen([sys.executable, "-c", _PROGRAM, str(fd), how], pass_fds=[fd])
        made.append((process, fd))
        while not os.pread(fd, 1, 300)[0]:
            time.sleep(0.01)
        return process.pid, fd

    yield start
    for process, fd in made:
        if child := int.from_bytes(os.pread(fd, 8, 200), "little"):
            os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()
        os.close(fd)


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def counts(fd):
    return os.pread(fd, 4, 0)


def counting(fd):
    before, deadline = counts(fd), time.monotonic() + 60
    while counts(fd) == before and time.monotonic() < deadline:
        time.sleep(0.005)
    return counts(fd) != before


def test_siblings_stop_while_held_and_continue_after(program):
    pid, fd = program()
    with thread_freezer.frozen_siblings(pid, pid, tuple, DescriptorTables()):
        first = counts(fd)
        time.sleep(0.1)
        second = counts(fd)

    assert first == second
    assert counting(fd)


def test_a_signal_that_comes_meanwhile_is_not_lost(program):
    pid, fd = program()
    for _ in range(10):
        before = os.pread(fd, 1, 100)
        os.kill(pid, signal.SIGUSR1)
        with thread_freezer.frozen_siblings(pid, pid, tuple, DescriptorTables()):
            pass
        deadline = time.monotonic() + 60
        while os.pread(fd, 1, 100) == before:
            assert time.monotonic() < deadline
            time.sleep(0.005)


@pytest.mark.parametrize("how", ["shares", "by a thread"])
def test_process_that_shares_descriptors_cannot_be_frozen(program, how):
    pid, fd = program(how)
    other = int.from_bytes(os.pread(fd, 8, 200), "little")

    with (
        pytest.raises(OSError, match="shares the descriptors"),
        thread_freezer.frozen_siblings(pid, pid, lambda: [pid, other], DescriptorTables()),
    ):
        pass
    assert counting(fd)


@pytest.mark.parametrize("how", [b"\1", b"\2"], ids=["own table", "ended"])
def test_first_thread_that_leaves_the_table_is_seen(program, monkeypatch, how):
    """Files are taken from its table; by then, another thread may have exchanged one in the caller's."""
    pid, fd = program()
    tid, real = max(proc.threads(pid)), proc.threads

    def threads(of):
        os.pwrite(fd, how, 400)
        until(lambda: not kcmp.same_table(pid, tid))
        return real(of)

    monkeypatch.setattr(proc, "threads", threads)
    with (
        pytest.raises(OSError, match=r"has its own descriptor table|has ended"),
        thread_freezer.frozen_siblings(pid, tid, tuple, DescriptorTables()),
    ):
        pass


@pytest.mark.root
def test_process_that_left_the_cgroup_is_listed_if_known(program):
    at = f"/freezer-{uuid.uuid4().hex}"
    (cgroup.mount() / at[1:]).mkdir()
    (inside, _), (left, _) = program(), program()
    gone = subprocess.Popen(["true"])
    gone.wait()
    try:
        cgroup.enter("", inside, at)
        assert thread_freezer.threads_of((at,), ()) == proc.threads(inside)
        found = thread_freezer.threads_of((at,), (inside, left, gone.pid))
        assert found == proc.threads(inside) | proc.threads(left)
    finally:
        cgroup.enter("", inside, "/")
        (cgroup.mount() / at[1:]).rmdir()


@pytest.fixture
def divided():
    """A cgroup with two below it, and what moves a process between these until the test ends."""
    at, movers = f"/freezer-{uuid.uuid4().hex}", []
    parts = [cgroup.mount() / at[1:] / name for name in "ab"]
    for part in parts:
        part.mkdir(parents=True)

    def hop(pid):
        movers.append(mover := os.fork())
        while not mover:
            for part in parts:
                (part / "cgroup.procs").write_text(str(pid))

    yield at, parts, hop
    for mover in movers:
        os.kill(mover, signal.SIGKILL)
        os.waitpid(mover, 0)
    for part in (*parts, parts[0].parent):
        for pid in (part / "cgroup.procs").read_text().split():
            (cgroup.mount() / "cgroup.procs").write_text(pid)
        part.rmdir()


@pytest.mark.root
def test_process_that_hops_between_cgroups_is_always_listed(program, divided):
    """Cgroups read one after the other show it in none when it moves from one to the next-to-last read."""
    at, parts, hop = divided
    pid, _ = program()
    (parts[0] / "cgroup.procs").write_text(str(pid))
    hop(pid)
    until = time.monotonic() + 2
    while time.monotonic() < until:
        assert pid in thread_freezer.threads_of((at,), ())


@pytest.mark.root
def test_helper_that_hops_between_cgroups_is_always_found(program, divided):
    at, parts, hop = divided
    pid, fd = program("shares")
    helper = int.from_bytes(os.pread(fd, 8, 200), "little")
    tables = DescriptorTables()
    for each in (pid, helper):
        (parts[0] / "cgroup.procs").write_text(str(each))
    hop(helper)
    for _ in range(150):
        with (
            pytest.raises(OSError, match="shares the descriptors"),
            thread_freezer.frozen_siblings(pid, pid, lambda: pod_processes.processes_of((at,), (pid,)), tables),
        ):
            pass


def test_process_that_ends_while_it_is_asked_is_listed(monkeypatch):
    def ended(pid):
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))

    monkeypatch.setattr(cgroup, "undivided_threads", lambda *_, **__: None)
    monkeypatch.setattr(cgroup, "of", ended)

    assert os.getpid() in thread_freezer.threads_of(("/web",), ())


def test_process_of_a_number_below_those_listed_is_found(monkeypatch):
    """Numbers begin again: it was made by one that was not listed yet, and has ended."""
    rounds = iter([["1", "self"], ["1", str(os.getpid()), "self"]])
    monkeypatch.setattr(cgroup, "undivided_threads", lambda *_, **__: None)
    monkeypatch.setattr(cgroup, "of", lambda pid: "/web/inner" if pid == os.getpid() else "/")
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: next(rounds) if path == "/proc" else real(path))

    assert thread_freezer.threads_of(("/web",), ()) == proc.threads(os.getpid())


def test_listing_with_a_thread_that_has_ended_is_not_the_last(monkeypatch):
    """Threads behind it may be missing."""
    times = {7: iter(["5", "", ""]), 8: iter(["6", "6"])}
    monkeypatch.setattr(proc, "start_time", lambda thread: next(times[thread]))
    listings = iter([[7], [7], [7, 8], [8]])

    assert list(pod_processes.each_task(lambda: next(listings))) == [7, 7, 8]


def test_who_is_gone_when_it_is_looked_at_hides_no_child_of_its(program):
    """A process that shares the descriptors makes another one and ends, again and again."""
    pid, fd = program("by a thread")
    other = int.from_bytes(os.pread(fd, 8, 200), "little")
    gone = subprocess.Popen(["true"])
    gone.wait()
    lists = iter([[gone.pid], [other]])

    with (
        pytest.raises(OSError, match="shares the descriptors"),
        thread_freezer.frozen_siblings(pid, pid, lambda: next(lists), DescriptorTables()),
    ):
        pass


def test_call_is_refused_while_new_threads_keep_coming(program, monkeypatch):
    monkeypatch.setattr(pod_processes, "_PATIENCE_S", 0.05)
    pid, _ = program()
    pids = iter(range(1 << 22, 1 << 30))  # of no process

    with (
        pytest.raises(OSError, match="come and go"),
        thread_freezer.frozen_siblings(pid, pid, lambda: [next(pids)], DescriptorTables()),
    ):
        pass


def test_who_is_traced_by_somebody_else_cannot_be_kept_still(program):
    pid, _ = program()
    (thread, *_) = sorted(proc.threads(pid) - {pid})
    tracer = os.fork()
    if not tracer:
        thread_freezer._libc.ptrace(thread_freezer._SEIZE, thread, None, None)
        signal.pause()

    def hold():
        with thread_freezer.frozen_siblings(pid, pid, tuple, DescriptorTables()):
            pass

    try:
        while f"TracerPid:\t{tracer}" not in Path(f"/proc/{pid}/task/{thread}/status").read_text():
            time.sleep(0.005)
        with pytest.raises(OSError, match="not permitted"):
            thread_freezer.run_as_tracer(pid, hold)
    finally:
        os.kill(tracer, signal.SIGKILL)
        os.waitpid(tracer, 0)


def test_call_is_refused_while_a_debugger_keeps_an_ended_thread(program, monkeypatch):
    """If it lets go of that during a listing of the threads, the kernel lists none behind it."""
    monkeypatch.setattr(thread_freezer, "_PATIENCE_S", 0.05)
    pid, fd = program()
    thread = max(proc.threads(pid))  # it counts at 3
    keeps = os.fork()
    if not keeps:
        thread_freezer._libc.ptrace(thread_freezer._SEIZE, thread, None, None)
        signal.pause()

    try:
        until(lambda: f"TracerPid:\t{keeps}" in Path(f"/proc/{pid}/task/{thread}/status").read_text())
        os.pwrite(fd, b"\1", 503)
        until(lambda: proc.stat(pid, thread)[0] == "Z")
        with (
            pytest.raises(OSError, match=f"thread {thread} has ended"),
            thread_freezer.frozen_siblings(pid, pid, tuple, DescriptorTables()),
        ):
            pass
    finally:
        os.kill(keeps, signal.SIGKILL)
        os.waitpid(keeps, 0)


def test_number_of_a_thread_that_ended_is_looked_at_again(program, monkeypatch):
    """A thread that is made meanwhile may have it."""
    pid, fd = program()
    thread, interrupt, asked = max(proc.threads(pid)), thread_freezer._interrupt, []
    listings = iter([{thread}, {thread}, set()])

    def interrupt_late(of, each):
        asked.append(each)
        if asked == [thread]:
            thread_freezer._libc.ptrace(thread_freezer._SEIZE, thread, None, None)
            os.pwrite(fd, b"\1", 503)  # it ends
            return True
        return interrupt(of, each)

    def hold():
        with thread_freezer.frozen_siblings(pid, pid, tuple, DescriptorTables()):
            pass

    monkeypatch.setattr(thread_freezer, "_interrupt", interrupt_late)
    monkeypatch.setattr(proc, "threads", lambda of: next(listings))
    thread_freezer.run_as_tracer(pid, hold)

    assert asked == [thread, thread]


def test_thread_that_misses_stop_deadline_is_not_stopped_later(program, monkeypatch):
    monkeypatch.setattr(thread_freezer, "_PATIENCE_S", 0)
    monkeypatch.setattr(thread_freezer, "_signal_of_stop", lambda thread: None)
    pid, fd = program()

    def hold():
        with thread_freezer.frozen_siblings(pid, pid, tuple, DescriptorTables()):
            pass

    with pytest.raises(OSError, match="does not stop"):
        thread_freezer.run_as_tracer(pid, hold)
    assert counting(fd)


_EXECUTES = """
import os, sys, threading
never, now = map(int, sys.argv[1:])
threading.Thread(target=os.read, args=(never, 1), daemon=True).start()
print(flush=True)
os.read(now, 1)
os.execv("/bin/sleep", ["sleep", "600"])
"""


def test_thread_that_executes_a_program_is_not_waited_for(monkeypatch):
    """It waits for its siblings to be gone, which are stopped until it is seen that it has left its call."""
    monkeypatch.setattr(thread_freezer, "_STUCK_S", 60)
    never, now = os.pipe(), os.pipe()
    asked = [sys.executable, "-c", _EXECUTES, str(never[0]), str(now[0])]
    process = subprocess.Popen(asked, pass_fds=[never[0], now[0]], stdout=subprocess.PIPE)
    process.stdout.readline()

    def hold():
        with thread_freezer.frozen_siblings(process.pid, process.pid, tuple, DescriptorTables()):
            os.write(now[1], b".")
            until(lambda: proc.syscall(process.pid, process.pid)[:1] == ["59"])
            return thread_freezer.leaves_kernel(process.pid, lambda: True, time.monotonic())

    try:
        assert not thread_freezer.run_as_tracer(process.pid, hold)
        until(lambda: proc.name(process.pid) == "sleep")
    finally:
        process.kill()
        process.communicate()
        for end in never + now:
            os.close(end)


_SIBLING_EXECUTES = """
import os, sys, threading
never, now = map(int, sys.argv[1:])
def execute():
    os.read(now, 1)
    os.execv("/bin/sleep", ["sleep", "600"])
for run in (os.read, os.read, execute):
    threading.Thread(target=run, args=(never, 1) if run is os.read else (), daemon=True).start()
print(flush=True)
os.read(never, 1)
"""


def test_sibling_that_executes_program_is_not_waited_for(monkeypatch):
    """It waits for its siblings to be gone, whose tracer waits to trace the next one of them."""
    never, now = os.pipe(), os.pipe()
    asked = [sys.executable, "-c", _SIBLING_EXECUTES, str(never[0]), str(now[0])]
    process = subprocess.Popen(asked, pass_fds=[never[0], now[0]], stdout=subprocess.PIPE)
    pid, interrupt, asked_for = process.pid, thread_freezer._interrupt, []

    def interrupt_late(of, thread):
        if not asked_for and thread == max(proc.threads(of)):  # it executes; the next round has it
            return False
        asked_for.append(thread)
        if len(asked_for) == 2:
            os.write(now[1], b".")
            until(lambda: proc.stat(of, asked_for[0])[:1] in (["Z"], []))
        return interrupt(of, thread)

    def hold():
        with suppress(OSError), thread_freezer.frozen_siblings(pid, pid, tuple, DescriptorTables()):
            pass

    monkeypatch.setattr(thread_freezer, "_interrupt", interrupt_late)
    process.stdout.readline()
    holding = threading.Thread(target=thread_freezer.run_as_tracer, args=(pid, hold))
    holding.start()
    try:
        holding.join(5)
        assert not holding.is_alive()
        until(lambda: proc.name(pid) == "sleep")
    finally:
        process.kill()
        process.communicate()
        holding.join()
        for end in never + now:
            os.close(end)


_EXECUTES_AND_RUNS = """
import os, sys, threading
def run():
    while True: pass
threading.Thread(target=run, daemon=True).start()
print(flush=True)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_thread_is_looked_at_once_while_program_is_opened(tmp_path, monkeypatch):
    """The kernel lets nobody trace the process until the holder of a lease on the interpreter gives it up."""
    script, interpreter = tmp_path / "script", tmp_path / "interpreter"
    script.write_text(f"#!{interpreter}\n")
    interpreter.touch()
    for file in (script, interpreter):
        file.chmod(0o755)
    monkeypatch.setattr(thread_freezer, "_PATIENCE_S", 0.01)
    default = signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel asks for the lease by it
    with interpreter.open("w") as leased:
        fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        process = subprocess.Popen([sys.executable, "-c", _EXECUTES_AND_RUNS, str(script)], stdout=subprocess.PIPE)
        try:
            process.stdout.readline()
            until(lambda: "break_lease" in proc.wchan(process.pid, process.pid))
            (runs,) = proc.threads(process.pid) - {process.pid}
            before = threading.active_count()
            for _ in range(9):
                assert not thread_freezer.leaves_kernel(runs, lambda: True, time.monotonic())
            looks = threading.active_count() - before
        finally:
            process.kill()
            process.communicate()
            signal.signal(signal.SIGIO, default)

    assert looks == 1
    until(lambda: threading.active_count() == before)

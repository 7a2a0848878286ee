"""A process that shares a descriptor table is found; one that was seen to share none is not looked at again."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import subprocess
import time

import pytest

from qgpu.linux import descriptor_tables, kcmp, proc
from qgpu.linux.descriptor_tables import DescriptorTables


@pytest.fixture
def others():
    """Two processes with tables of their own."""
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    time.sleep(0.02)  # two clock ticks: younger ones are not remembered
    yield [process.pid for process in processes]
    for process in processes:
        process.kill()
        process.wait()


class Compared(list):
    """The threads whose tables were compared; those in ``sharers`` share the asked process's."""

    sharers = frozenset()

    def taken(self):
        """Return them, and begin again."""
        threads = sorted(self)
        self.clear()
        return threads


@pytest.fixture
def compared(monkeypatch):
    found, same_table = Compared(), kcmp.same_table

    def compare(pid, thread):
        found.append(thread)
        return thread in found.sharers or same_table(pid, thread)

    monkeypatch.setattr(kcmp, "same_table", compare)
    return found


def test_process_seen_apart_is_not_compared_again(others, compared):
    tables, me = DescriptorTables(), os.getpid()
    tables.check_alone(me, lambda: [me, *others])
    assert compared.taken() == sorted(others)

    tables.check_alone(me, lambda: [me, *others])
    assert compared.taken() == []


def test_process_that_came_since_is_compared(others, compared):
    tables, me = DescriptorTables(), os.getpid()
    tables.check_alone(me, lambda: others[:1])
    compared.sharers = {others[1]}

    with pytest.raises(OSError, match=f"thread {others[1]} shares the descriptors of process {me}"):
        tables.check_alone(me, lambda: others)


def test_process_that_shared_is_compared_each_time(others, compared):
    tables, me = DescriptorTables(), os.getpid()
    compared.sharers = set(others)
    for _ in range(2):
        with pytest.raises(OSError, match="shares the descriptors"):
            tables.check_alone(me, lambda: others)


def test_number_of_a_new_process_is_compared_again(others, compared, monkeypatch):
    tables, me = DescriptorTables(), os.getpid()
    tables.check_alone(me, lambda: others)
    compared.taken()
    real = proc.start_time
    monkeypatch.setattr(proc, "start_time", lambda task: "1" if task == others[0] else real(task))
    tables.check_alone(me, lambda: others)

    assert compared.taken() == others[:1]


def test_process_that_ended_is_not_remembered():
    tables, me = DescriptorTables(), os.getpid()
    gone = subprocess.Popen(["true"])
    gone.wait()
    tables.check_alone(me, lambda: [gone.pid])

    assert tables._separate[(me, proc.start_time(me))] == set()


def test_what_is_remembered_is_bounded(others, monkeypatch):
    monkeypatch.setattr(descriptor_tables, "_MOST_OTHERS", 1)
    monkeypatch.setattr(descriptor_tables, "_MOST_PROCESSES", 1)
    tables, me = DescriptorTables(), os.getpid()
    tables.check_alone(me, lambda: others)
    assert [len(each) for each in tables._separate.values()] == [0]

    tables.check_alone(others[0], lambda: [me])
    assert list(tables._separate) == [(others[0], proc.start_time(others[0]))]


def start_sharer(number):
    """Start a process of this number that shares our descriptors (clone3), and waits; 0 if the number is taken."""
    numbers = (ctypes.c_int * 1)(number)
    fields = 0x400, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(numbers), 1, 0  # struct clone_args; CLONE_FILES
    asked = ctypes.create_string_buffer(struct.pack("<11Q", *fields), 88)
    child = ctypes.CDLL(None).syscall(435, asked, ctypes.c_long(88))
    if not child:
        signal.pause()
    return max(0, child)


def end(pid):
    assert pid > 0
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.root
def test_who_gets_a_number_within_a_clock_tick_is_compared(monkeypatch):
    """Where the kernel has few pids, a pod can have one that it has just freed; start times are the same then.

    A tick lasts a second here: on a busy host no two processes start within a hundredth.
    """
    me, per_second = os.getpid(), os.sysconf("SC_CLK_TCK")
    start_time, clock_ticks = proc.start_time, proc.clock_ticks
    monkeypatch.setattr(proc, "start_time", lambda pid: str(int(start_time(pid)) // per_second))
    monkeypatch.setattr(proc, "clock_ticks", lambda: clock_ticks() // per_second)
    for _ in range(100):
        if not (apart := os.fork()):
            signal.pause()
        started, tables = proc.start_time(apart), DescriptorTables()
        tables.check_alone(me, lambda: [apart])
        end(apart)
        if not (sharer := start_sharer(apart)):
            continue
        try:
            if proc.start_time(sharer) != started:
                continue
            with pytest.raises(OSError, match="shares the descriptors"):
                tables.check_alone(me, lambda: [sharer])
            return
        finally:
            end(sharer)
    pytest.fail("no process started in the tick of another one with its number")

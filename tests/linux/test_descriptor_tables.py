"""A process that shares a descriptor table is found; one that was seen to share none is not looked at again."""

from __future__ import annotations

import os
import subprocess

import pytest

from qgpu.linux import descriptor_tables, kcmp, proc
from qgpu.linux.descriptor_tables import DescriptorTables


@pytest.fixture
def others():
    """Two processes with tables of their own."""
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
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

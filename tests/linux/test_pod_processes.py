"""All processes of a pod are listed: in its cgroups or known, wherever they move, whatever they start meanwhile."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest

from qgpu.errors import NotSupportedError
from qgpu.linux import cgroup, kcmp, pod_processes
from qgpu.linux.pod_processes import each_task, processes_of


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


def test_cgroup_with_none_below_it_is_asked_alone(monkeypatch):
    monkeypatch.setattr(cgroup, "undivided_pids", lambda *paths: {len(paths)})
    monkeypatch.setattr(cgroup, "of", lambda pid: pytest.fail("asked a process"))

    assert processes_of(["/a", "/b"], [5]) == {2, 5}


def test_process_that_moves_between_cgroups_is_listed(sleeper, monkeypatch):
    """It is in neither cgroup when that is read."""
    monkeypatch.setattr(cgroup, "undivided_pids", lambda *_: None)
    monkeypatch.setattr(cgroup, "pids", lambda *_: ())
    monkeypatch.setattr(cgroup, "of", lambda pid: {sleeper: "/a/below", os.getpid(): "/ab"}.get(pid, "/"))

    assert processes_of(["/a"], []) == {sleeper}


def test_pod_with_too_many_cgroups_is_listed_by_process(sleeper, monkeypatch):
    monkeypatch.setattr(cgroup, "undivided_pids", lambda *_: None)
    monkeypatch.setattr(cgroup, "_MOST_BELOW", -1)
    monkeypatch.setattr(cgroup, "of", lambda pid: "/" if pid != sleeper else "/a")

    assert processes_of(["/a"], []) == {sleeper}


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESRCH, errno.ENAMETOOLONG])
def test_process_whose_cgroup_is_untold_may_be_in_it(monkeypatch, code):
    """Otherwise anybody's process in a cgroup with a long path would have the calls of pods refused."""

    def untold(_pid):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cgroup, "undivided_pids", lambda *_: None)
    monkeypatch.setattr(cgroup, "pids", lambda *_: ())
    monkeypatch.setattr(cgroup, "of", untold)

    assert os.getpid() in processes_of(["/a"], [])


def test_host_without_cgroups_lists_known_processes(monkeypatch):
    def unmounted(*_):
        raise NotSupportedError("not mounted")

    monkeypatch.setattr(cgroup, "undivided_pids", unmounted)
    monkeypatch.setattr(cgroup, "pids", unmounted)
    monkeypatch.setattr(cgroup, "of", lambda pid: "/")

    assert processes_of(["/a"], [5]) == {5}
    assert processes_of([], [5]) == {5}


def test_processes_started_during_a_listing_are_yielded():
    listings = [{1 << 22}, {1 << 22, 1 + (1 << 22)}, {1 + (1 << 22)}]

    assert list(each_task(lambda: listings.pop(0), lambda _: False)) == [1 << 22, 1 + (1 << 22)]
    assert listings == []


def test_wanted_processes_of_a_listing_come_first():
    pids = range(1 << 22, (1 << 22) + 9)

    assert next(each_task(lambda: pids, lambda pid: pid == pids[5])) == pids[5]


def test_number_that_another_process_gets_is_yielded_again(monkeypatch):
    started = iter("1233")
    monkeypatch.setattr(pod_processes.proc, "start_time", lambda pid: next(started))

    assert list(each_task(lambda: {5}, lambda _: False)) == [5, 5, 5]


def test_processes_without_end_raise_an_error(monkeypatch):
    monkeypatch.setattr(pod_processes, "_PATIENCE_S", 0.0)
    numbers = iter(range(1 << 22, 1 << 23))

    with pytest.raises(OSError, match="come and go"):
        list(each_task(lambda: {next(numbers)}, lambda _: False))


def test_memory_is_compared_in_an_order(sleeper):
    """The third of them has ended."""
    own = os.getpid()

    assert kcmp.order_of_memory(own, own) == 0
    assert kcmp.order_of_memory(own, sleeper) == -(kcmp.order_of_memory(sleeper, own) or 0) != 0
    assert kcmp.order_of_memory(own, 1 << 22) is None

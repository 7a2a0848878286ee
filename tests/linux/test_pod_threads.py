"""Work on pods' files: in order within a pod, and no pod waits for another's."""

from __future__ import annotations

import threading
import time

import pytest

from qgpu.linux import pod_threads
from qgpu.linux.pod_threads import PodThreads

PATIENCE_S = 60


@pytest.fixture
def threads():
    return PodThreads("test-work")


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_work_that_never_ends_holds_up_its_own_pod_alone(threads):
    stuck, other = threading.Event(), threading.Event()
    threads.do("a", stuck.wait)
    threads.do("a", other.wait)
    threads.do("b", other.set)

    assert other.wait(PATIENCE_S)
    assert (threads.waiting("a"), threads.stalled_s("a") > 0) == (2, True)
    stuck.set()
    until(lambda: threads.waiting("a") == 0)
    assert threads.stalled_s("a") == 0


def test_work_of_a_pod_is_done_in_order_after_a_failure_too(threads):
    done = []

    def fail():
        done.append(0)
        raise OSError("no")

    threads.do("a", fail)
    for number in range(1, 20):
        threads.do("a", lambda number=number: done.append(number))
    until(lambda: threads.waiting("a") == 0)

    assert done == list(range(20))


def test_thread_of_a_pod_without_work_ends(threads, monkeypatch):
    monkeypatch.setattr(pod_threads, "_IDLE_S", 0.01)
    ran = []
    threads.do("a", lambda: ran.append(threading.current_thread()))
    until(lambda: ran)
    ran[0].join(PATIENCE_S)

    assert not ran[0].is_alive()
    threads.do("a", lambda: ran.append(threading.current_thread()))
    until(lambda: len(ran) == 2)


def test_work_for_which_no_thread_was_free_is_done_later(threads, monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    done = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(pod_threads.threading.Thread, "start", start)
        threads.do("a", done.set)
    threads.retry()

    assert done.wait(PATIENCE_S)

"""Bindings of the card's monitors: what ends one waits for the pod's own turn."""

import os
import threading

import pytest

from qgpu.guardian.proxy import bound_monitors
from qgpu.guardian.proxy.bound_monitors import HELD_NS, BoundMonitors

CLIENT, PROFILER, PID = 7, 30, 4711


class Turn:
    """A pod's turn, which begins when a test says so."""

    def __init__(self):
        self.begun, self.asked = threading.Event(), []

    def until(self, pod, client, held_ns):
        self.asked.append((pod, client, held_ns))
        self.begun.wait(10)
        return 0


@pytest.fixture
def turn():
    return Turn()


@pytest.fixture
def closed():
    return []


@pytest.fixture
def monitors(turn, closed):
    def close(pod, fd):
        os.close(fd)
        closed.append(pod)

    return BoundMonitors(close, turn.until)


@pytest.fixture
def file():
    """A pipe's end that tells when its last reference is closed."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, write
    os.close(read)


def is_open(read):
    try:
        return os.read(read, 1) != b""
    except BlockingIOError:
        return True


def test_a_dead_process_keeps_its_file_until_its_turn(monitors, turn, file):
    read, write = file
    monitors.bound("web", PID, CLIENT, PROFILER, write)
    os.close(write)
    monitors.exited(PID)
    assert is_open(read)

    turn.begun.set()
    while is_open(read):
        pass
    assert turn.asked == [("web", CLIENT, HELD_NS)]


def test_a_new_binding_leaves_a_dead_process_its_turn(monitors, turn, closed, file):
    read, write = file
    monitors.bound("web", PID, CLIENT, PROFILER, write)
    monitors.exited(PID)
    with open("/dev/null") as other:
        monitors.bound("web", PID + 1, CLIENT, PROFILER, other.fileno())
    os.close(write)
    assert is_open(read)
    assert not closed

    turn.begun.set()
    while is_open(read):
        pass
    monitors.retired("web")
    assert closed == ["web"]


def test_another_process_that_ends_changes_nothing(monitors, turn, file):
    read, write = file
    monitors.bound("web", PID, CLIENT, PROFILER, write)
    os.close(write)
    monitors.exited(PID + 1)

    assert is_open(read)
    assert not turn.asked
    monitors.unbound("web", CLIENT)


def test_one_file_is_kept_for_each_pod(monitors, closed, file):
    read, write = file
    for pid in range(20):
        monitors.bound("web", pid, CLIENT, PROFILER, write)
    assert closed == ["web"] * 19

    os.close(write)
    assert is_open(read)
    monitors.unbound("web", CLIENT)
    assert not is_open(read)


def test_only_the_profiler_and_what_is_above_it_unbind(monitors, file):
    _, write = file
    assert not monitors.unbinds("web", CLIENT, PROFILER, holds_others=False)
    monitors.bound("web", PID, CLIENT, PROFILER, write)
    os.close(write)

    assert monitors.unbinds("web", CLIENT, PROFILER, holds_others=False)
    assert monitors.unbinds("web", CLIENT, 3, holds_others=True)
    assert not monitors.unbinds("web", CLIENT, 31, holds_others=False)
    assert not monitors.unbinds("web", CLIENT + 1, PROFILER, holds_others=True)
    assert not monitors.unbinds("other", CLIENT, PROFILER, holds_others=False)
    monitors.unbound("web", CLIENT)
    assert not monitors.unbinds("web", CLIENT, PROFILER, holds_others=False)


def test_memory_of_a_stream_unbinds_with_its_profiler(monitors, file):
    """RM frees a profiler with the memory into which it streams."""
    monitors.streams("web", [(CLIENT, 40), (CLIENT, 41)], bool)
    assert not monitors.unbinds("web", CLIENT, 40, holds_others=False)

    monitors.bound("web", PID, CLIENT, PROFILER, file[1])
    assert [monitors.unbinds("web", CLIENT, each, holds_others=False) for each in (40, 41, 42)] == [True, True, False]

    monitors.retired("web")
    monitors.bound("web", PID, CLIENT, PROFILER, file[1])
    assert not monitors.unbinds("web", CLIENT, 40, holds_others=False)
    monitors.retired("web")


def test_memory_of_streams_that_is_gone_is_forgotten(monitors):
    for handle in range(1000):
        monitors.streams("web", [(CLIENT, handle)], lambda key: key[1] % 100 == 0)

    assert len(monitors._streams["web"]) <= bound_monitors._FEW_STREAMS
    assert (CLIENT, 0) in monitors._streams["web"]


def test_an_unbinding_by_another_client_keeps_the_file(monitors, file):
    read, write = file
    monitors.bound("web", PID, CLIENT, PROFILER, write)
    os.close(write)
    monitors.unbound("web", CLIENT + 1)
    assert is_open(read)

    monitors.retired("web")
    assert not is_open(read)


def test_two_calls_of_a_pod_do_not_share_a_turn(monitors, turn):
    turn.begun.set()
    order = []

    def other():
        with monitors.turn("web", CLIENT):
            order.append("other")

    with monitors.turn("web", CLIENT):
        thread = threading.Thread(target=other)
        thread.start()
        with monitors.turn("neighbour", CLIENT):
            order.append("neighbour")
        order.append("web")
    thread.join()
    assert order == ["neighbour", "web", "other"]

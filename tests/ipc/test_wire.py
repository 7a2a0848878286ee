"""Messages between qgpu's processes: whole or not at all, with the descriptors that belong to them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qgpu.ipc import wire

Pair = tuple[wire.Connection, wire.Connection]
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
messages = st.dictionaries(st.text(max_size=8), values, max_size=4)


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two connected ends."""
    ends = tuple(wire.Connection(sock) for sock in socket.socketpair())
    for end in ends:
        end.sock.settimeout(5)
    yield ends[0], ends[1]
    for end in ends:
        end.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(sent=st.lists(messages, max_size=5))
def test_messages_arrive_whole_and_in_order(pair: Pair, sent: list[dict[str, object]]) -> None:
    for message in sent:
        pair[0].send(message)

    assert sent == [pair[1].receive()[0] for _ in sent]  # type: ignore[index]


def test_descriptors_ride_on_their_message(pair: Pair, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+") as file:
        pair[0].send({"n": 1}, [file.fileno()])
        received = pair[1].receive()
    assert received is not None
    message, (descriptor,) = received
    try:
        assert (message, os.fstat(descriptor).st_ino) == ({"n": 1}, (tmp_path / "file").stat().st_ino)
    finally:
        os.close(descriptor)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(counts=st.lists(st.integers(0, 3), max_size=6))
def test_messages_arriving_together_keep_their_descriptors(pair: Pair, counts: list[int]) -> None:
    with open(os.devnull) as file:
        for count in counts:
            pair[0].send({"count": count}, [file.fileno()] * count)
    received = [pair[1].receive() for _ in counts]
    for _, descriptors in filter(None, received):
        for descriptor in descriptors:
            os.close(descriptor)

    assert [len(each[1]) for each in received if each] == counts


def test_the_end_of_the_stream_is_no_message(pair: Pair) -> None:
    pair[0].close()

    assert pair[1].receive() is None


@pytest.mark.parametrize("data", [b"\x02\0\0\0[]", b"\x01\0\0\0{", b"\xff\xff\xff\xff", b"\x01\0\0\0\xff"])
def test_what_is_no_message_is_refused(pair: Pair, data: bytes) -> None:
    pair[0].sock.sendall(data)

    with pytest.raises(wire.WireError):
        pair[1].receive()


def test_the_peer_is_who_the_kernel_says(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    listener = wire.listen(path, 0o600)
    client = wire.connect(path, 5)
    server = wire.Connection(listener.accept()[0])
    try:
        assert (os.getpid(), os.getuid()) == (server.peer().pid, server.peer().uid)
    finally:
        for end in (client, server, listener):
            end.close()


def test_listening_replaces_a_dead_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    wire.listen(path, 0o600).close()
    listener = wire.listen(path, 0o640)
    try:
        assert os.stat(path).st_mode & 0o777 == 0o640
        wire.connect(path, 5).close()
    finally:
        listener.close()


def test_listen_removes_leftover_of_killed_listener(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / f"socket.{os.getpid()}"))
    wire.listen(str(tmp_path / "socket"), 0o600).close()

    assert [each.name for each in tmp_path.iterdir()] == ["socket"]


def test_descriptors_of_an_endless_message_are_bounded(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    pair[0].sock.send((1000).to_bytes(4, "little"))
    for _ in range(3):
        socket.send_fds(pair[0].sock, [b" "], [pair[0].fileno()] * 8)
    pair[1].fill()
    pair[1].fill()
    with pytest.raises(wire.WireError, match="descriptors"):
        pair[1].fill()
    pair[1].close()

    assert len(os.listdir("/proc/self/fd")) == before - 1


@pytest.fixture
def full(tmp_path: Path) -> Iterator[socket.socket]:
    """A listening socket whose queue is full."""
    with full_listener(tmp_path / "sock") as listener:
        yield listener


@contextmanager
def full_listener(path: Path) -> Iterator[socket.socket]:
    """Listen with a queue of one place, which another client has."""
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with closing(wire.connect(str(path), 0)):
            yield listener


def test_a_client_waits_for_a_place_in_the_queue(full: socket.socket) -> None:
    with ThreadPoolExecutor() as pool:
        client = pool.submit(wire.connect, full.getsockname(), 60)
        wait([client], 0.2)  # it waits by now, or fails
        full.accept()[0].close()

    with closing(client.result()) as connection:
        assert connection.sock.gettimeout() == 60
        assert not any(connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16))


def test_a_client_that_must_not_wait_is_refused_at_once(full: socket.socket) -> None:
    with pytest.raises(BlockingIOError):
        wire.connect(full.getsockname(), 0)


def test_a_client_waits_for_its_place_no_longer_than_told(full: socket.socket) -> None:
    with pytest.raises(TimeoutError):
        wire.connect(full.getsockname(), 0.05)


def test_a_signal_does_not_end_the_wait_for_a_place(full: socket.socket) -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(TimeoutError):
            wire.connect(full.getsockname(), 0.3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

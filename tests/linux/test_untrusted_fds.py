"""What others sent is closed without anybody waiting for it."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from qgpu.linux import untrusted_fds

#: No test waits so long.
LINGER_S = 10_000


def lingering() -> int:
    """Return the one descriptor of a socket whose close waits until its peer has read, which it never does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sock = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
    sock.setblocking(False)
    try:
        while True:
            sock.send(b"x" * 65536)
    except BlockingIOError:
        pass
    sock.setblocking(True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
    peer.detach()  # stays open to the end, and is not read
    return sock.detach()


@pytest.fixture
def roused() -> Iterator[None]:
    before = signal.getsignal(signal.SIGURG)
    untrusted_fds.install_signal_handler()
    yield
    signal.signal(signal.SIGURG, before)


def test_a_close_that_waits_holds_nobody_up(roused):
    fd = lingering()
    untrusted_fds.close(fd)
    read, write = os.pipe()
    untrusted_fds.close(write)

    assert os.read(read, 1) == b""
    os.close(read)


def test_a_close_that_lingers_is_roused(roused):
    closer = threading.Thread(target=untrusted_fds.close_here, args=(lingering(),))
    closer.start()
    closer.join()  # the test's timeout is the bound


def test_many_closes_that_linger_come_to_an_end(roused, monkeypatch):
    monkeypatch.setattr(untrusted_fds, "_MOST", 2)
    for _ in range(5):
        untrusted_fds.close(lingering())
    read, write = os.pipe()
    untrusted_fds.close(write)

    assert os.read(read, 1) == b""
    os.close(read)


def test_without_threads_it_is_closed_with_the_next(roused, monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    (first, one), (second, other) = os.pipe(), os.pipe()
    while untrusted_fds._ours:  # a closer of an earlier test would take this one too
        time.sleep(0.01)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        untrusted_fds.close(one)
    os.set_blocking(first, False)
    with pytest.raises(BlockingIOError):
        os.read(first, 1)
    untrusted_fds.close(other)
    os.set_blocking(first, True)

    assert (os.read(first, 1), os.read(second, 1)) == (b"", b"")
    os.close(first)
    os.close(second)


def test_the_kernel_says_what_a_descriptor_is(tmp_path):
    with (tmp_path / "anon_inode:seccomp notify").open("w") as file:
        assert untrusted_fds.kind(file.fileno()).startswith("/")
    assert untrusted_fds.kind(-1) == ""


def test_nothing_is_left_of_the_closers(roused):
    untrusted_fds.close(os.dup(0))
    while untrusted_fds._ours or untrusted_fds._interrupting:
        time.sleep(0.01)

    assert not untrusted_fds._closing

"""A FUSE server with one file, which leaves one kind of request unanswered: whoever waits for that waits on.

Run as ``python -m tests.fuse DIRECTORY SILENT``; it says "ready", and "asked" for each request that gets no answer. Its
end fails them all; it ends after ``LIFE_S``, or with its starter, because not even SIGKILL ends such a wait.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

#: Requests, as in linux/fuse.h.
LOOKUP, FORGET, GETATTR, OPEN, RELEASE, FLUSH, INIT = 1, 2, 3, 14, 18, 25, 26
READ = 15
_SIZE, _ASYNC_READ = 4096, 1
LIFE_S = 30
_ROOT, _FILE = 1, 2
_ENOSYS = 38
_MNT_DETACH = 2
_HEADER = struct.Struct("<IIQQ16x")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Served:
    """The file, what waits for the next unanswered request, and whether the server lives."""

    file: Path
    asked: Callable[[], str]
    lives: Callable[[], bool]


@contextmanager
def served(directory: Path, silent: int) -> Iterator[Served]:
    """Serve a file meanwhile; skip the test where there is no FUSE."""
    command = [sys.executable, "-m", "tests.fuse", str(directory), str(silent)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    ) as server:
        assert server.stdout is not None
        if server.stdout.readline() != "ready\n":
            pytest.skip("no FUSE here")
        try:
            yield Served(directory / "x", server.stdout.readline, lambda: server.poll() is None)
        finally:
            server.kill()
            _libc.umount2(os.fsencode(directory), _MNT_DETACH)


def _attributes(node: int) -> bytes:
    return struct.pack("<6Q10I", node, _SIZE, *(0,) * 7, 0o40755 if node == _ROOT else 0o100666, 1, 0, 0, 0, 512, 0)


def _answer(kind: int, node: int) -> bytes | None:
    """Return the body of an answer, which is valid for no time; None for a request that is not served."""
    match kind:
        case k if k == INIT:
            return struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 16, _ASYNC_READ, 16, 12, 1 << 16, 1, 32, 0, 0)
        case k if k == LOOKUP:
            return struct.pack("<QQQQII", _FILE, 0, 0, 0, 0, 0) + _attributes(_FILE)
        case k if k == GETATTR:
            return struct.pack("<QII", 0, 0, 0) + _attributes(node)
        case k if k == OPEN:
            return struct.pack("<QII", 1, 0, 0)
        case k if k in (RELEASE, FLUSH):
            return b""
    return None


def main() -> None:
    directory, silent = os.fsencode(sys.argv[1]), int(sys.argv[2])
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if _libc.mount(b"fuse", directory, b"fuse", 0, options):
        sys.exit(os.strerror(ctypes.get_errno()))
    print("ready", flush=True)
    end_s = time.monotonic() + LIFE_S
    while (left_s := end_s - time.monotonic()) > 0:
        ready = select.select([device, sys.stdin], [], [], left_s)[0]
        if sys.stdin in ready:
            return
        if not ready:
            continue
        _, kind, unique, node = _HEADER.unpack_from(os.read(device, 1 << 20))
        if kind == silent and node != _ROOT:
            print("asked", flush=True)
        elif kind != FORGET:
            body = _answer(kind, node)
            error, body = (-_ENOSYS, b"") if body is None else (0, body)
            os.write(device, struct.pack("<IiQ", 16 + len(body), error, unique) + body)


if __name__ == "__main__":
    main()

"""Attacks on a guardian that a pod can make from where it is, on the emulated driver: ``attacker.py ATTACK CLIENT``.

Each does its worst, says "done", and goes on or stays as it is until it is killed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from qgpu.errors import QgpuError
from qgpu.ipc.control_socket import MAX_OF_POD, Client
from qgpu.nvidia import abi
from tests.guardian.asked import DEVICE_PARAMS, TSG_PARAMS, alloc, control, device, free, memory_params, subdevice
from tests.guardian.fake_rm import PAGE
from tests.hostile.allocator import Program

_LINGER_S = 60
#: How long what is done again and again is watched.
_WORST_S = 2.0
_MEMORY, _TSG, _CHANNEL = 10, 30, 40
_MANY = 500
_HEAVY_BYTES, _NO_HUGE_PAGES = 1 << 30, 15


def _begin(client: int) -> Program:
    program = Program(client)
    program.call(abi.NV_ESC_RM_ALLOC, device(client=client), DEVICE_PARAMS)
    program.call(abi.NV_ESC_RM_ALLOC, subdevice(client=client), bytes(4))
    return program


def _schedule(program: Program) -> None:
    program.make(_TSG, 2, abi.KEPLER_CHANNEL_GROUP_A, TSG_PARAMS)
    program.make(_CHANNEL, _TSG, 0xC86F, bytes(368))


def idle(client: int) -> None:
    """Begin, and do nothing: what others pay for any pod that starts."""
    _begin(client)
    print("done", flush=True)
    time.sleep(3600)


def hoard(client: int) -> None:
    """Use a client through many descriptors, open thousands more, and close the client's file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    program = _begin(client)
    _schedule(program)
    mine, copies = program.file, [os.dup(program.file) for _ in range(256)]
    for copy in copies:
        program.file = copy
        program.call(abi.NV_ESC_RM_CONTROL, control(0x20800110, 3, 64, client), bytes(64))
    hoarded = [os.open("/dev/null", os.O_RDWR) for _ in range(min(hard, 1 << 16) - 1000)]
    for fd in (mine, *copies):
        os.close(fd)
    print("done", len(hoarded), flush=True)
    time.sleep(3600)


def linger(client: int) -> None:
    """Export to a socket whose last close waits for a peer that does not read, again and again."""
    program = _begin(client)
    program.make(_MEMORY, 2, abi.NV01_MEMORY_LOCAL_USER, memory_params(PAGE))
    listening = socket.create_server(("127.0.0.1", 0))
    peers = []

    def fill() -> socket.socket:
        sock = socket.create_connection(listening.getsockname())
        peers.append(listening.accept()[0])
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, _LINGER_S))
        sock.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                sock.send(bytes(1 << 16))
        return sock

    def give(sock: socket.socket) -> None:
        """Let the guardian take the socket, and close ours while it has it."""
        number = sock.detach()
        params = struct.pack("<IIIIiI", 1, 2, 2, _MEMORY, number, 0)
        command = control(abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD, client, len(params), client)
        closing = threading.Timer(0.0005, os.close, [number])
        closing.start()
        program.call(abi.NV_ESC_RM_CONTROL, command, params)
        closing.join()

    # It may be held up itself.
    threading.Timer(_WORST_S, print, ["done"], {"flush": True}).start()
    while True:
        give(fill())


def answers(client: int) -> None:
    """Make calls that fail as fast as may be."""
    program, count = _begin(client), 0
    until = time.monotonic() + _WORST_S
    while True:
        program.call(abi.NV_ESC_RM_FREE, free(99_999, client))
        program.call(abi.NV_ESC_RM_ALLOC, alloc(99, 98, 0x40, client), memory_params(PAGE))
        count += 1
        if until and time.monotonic() > until:
            print("done", count, flush=True)
            until = 0.0


def processes(client: int) -> None:
    """Start and end processes that make calls, all the time."""
    until, count = time.monotonic() + _WORST_S, 0
    while True:
        if os.fork() == 0:
            program = Program(client)
            program.call(abi.NV_ESC_RM_CONTROL, control(0x20800110, 3, 64, client), bytes(64))
            os._exit(0)
        count += 1
        if count % 16 == 0:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                os.wait()
        if until and time.monotonic() > until:
            print("done", count, flush=True)
            until = 0.0


def objects(client: int) -> None:
    """Make objects, and let them all go at once by closing the file."""
    program = _begin(client)
    for handle in range(100_000, 100_300):
        program.call(abi.NV_ESC_RM_ALLOC, alloc(handle, 2, 0x40, client), memory_params(1))
    os.close(program.file)
    print("done", flush=True)
    time.sleep(3600)


def page(client: int) -> None:
    """Name arguments in a page that never comes, from many threads."""
    from tests.guardian.child import never

    libc = ctypes.CDLL(None, use_errno=True)
    address, program = never(libc), _begin(client)

    def ask() -> None:
        libc.ioctl(program.file, ctypes.c_ulong(abi.request(abi.NV_ESC_RM_CONTROL, 32)), ctypes.c_void_p(address))

    for _ in range(100):
        threading.Thread(target=ask, daemon=True).start()
    time.sleep(2)
    print("done", flush=True)
    time.sleep(3600)


def crowd(client: int) -> None:
    """Have many processes use the card, and ask the daemon over all connections that a pod may have."""
    program = _begin(client)
    for _ in range(_MANY):
        if os.fork() == 0:
            program.call(abi.NV_ESC_RM_CONTROL, control(0x20800110, 3, 64, client), bytes(64))
            time.sleep(3600)

    def ask() -> None:
        while True:
            with suppress(QgpuError), Client(Path(sys.argv[3]).parent / "run") as daemon:
                daemon.call("pod.list")

    for _ in range(MAX_OF_POD):
        threading.Thread(target=ask, daemon=True).start()
    time.sleep(2 * _WORST_S)
    print("done", flush=True)
    time.sleep(3600)


def execs(client: int) -> None:
    """Execute programs whose memory takes long to free, while another process makes TSGs of the same client."""
    program = _begin(client)
    _schedule(program)
    os.set_inheritable(program.file, True)
    if os.fork() == 0:
        threading.Timer(2 * _WORST_S, print, ["done"], {"flush": True}).start()
        while True:
            program.make(_TSG + 1, 2, abi.KEPLER_CHANNEL_GROUP_A, TSG_PARAMS)
            program.make(_CHANNEL + 1, _TSG + 1, 0xC86F, bytes(368))
            time.sleep(0.05)
            program.free(_TSG + 1)
    _execute(_HEAVY_BYTES)


def _execute(size: int) -> None:
    """Fill memory, and execute a program that does the same."""
    filled = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    filled.madvise(_NO_HUGE_PAGES)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(filled)), 1, size)
    os.execv(sys.executable, [sys.executable, "-m", "tests.hostile.attacker", "again", str(size), *sys.argv[3:]])


ATTACKS: dict[str, Callable[[int], None]] = {
    each.__name__: each for each in (idle, hoard, linger, answers, processes, objects, page, crowd, execs)
}

if __name__ == "__main__":
    if sys.argv[1] == "again":
        _execute(int(sys.argv[2]))
    ATTACKS[sys.argv[1]](int(sys.argv[2]))

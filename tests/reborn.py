"""A process with the number of one that has ended: ``python -m tests.reborn PID ADDRESS``, as root.

It has a page of bytes 0xFF at the address, and says "ready". For each line that it reads, it says what else is there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys

_SYS_CLONE3, _MAP_FIXED_PRIVATE_ANONYMOUS, _PAGE = 435, 0x32, 4096


def main() -> None:
    wanted, address = int(sys.argv[1]), int(sys.argv[2])
    libc = ctypes.CDLL(None, use_errno=True)
    number = (ctypes.c_int * 1)(wanted)
    # struct clone_args: exit_signal is the fifth field, set_tid and set_tid_size the ninth and tenth (linux/sched.h)
    asked = ctypes.create_string_buffer(
        struct.pack("<11Q", 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(number), 1, 0), 88
    )
    if child := libc.syscall(_SYS_CLONE3, asked, ctypes.c_long(88)):
        if child < 0:
            raise OSError(ctypes.get_errno(), "clone3")
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    libc.mmap.restype = ctypes.c_void_p
    place = address - address % _PAGE
    where = libc.mmap(ctypes.c_void_p(place), ctypes.c_size_t(_PAGE), 3, _MAP_FIXED_PRIVATE_ANONYMOUS, -1, 0)
    assert where == place
    page = (ctypes.c_char * _PAGE).from_address(place)
    ctypes.memset(page, 0xFF, _PAGE)
    os.write(1, b"ready\n")
    while os.read(0, 1):
        os.write(1, page.raw.replace(b"\xff", b"").hex().encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()

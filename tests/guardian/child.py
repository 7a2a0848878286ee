"""A pod for tests: puts the filter on itself, hands the listener over, then makes the calls it is told.

Run as ``python -m tests.guardian.child SOCKET_FD``. Each line it reads is JSON: {"request", "argument", "params"}
in hex, and it answers {"result", "errno", "argument"} with the argument as the call left it. "fork" makes a
child of its own that does the same from then on; "exit" ends it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import sys

from qgpu.guardian.filter import install

POINTER_AT = 16


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    device = os.open("/dev/null", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    socket.send_fds(sock, [b"listener"], [install()])
    lines = sock.makefile("rw")
    page = mmap.mmap(-1, mmap.PAGESIZE)
    place = ctypes.addressof(ctypes.c_char.from_buffer(page))
    readonly = False
    for line in lines:
        if line.startswith("exit"):
            os._exit(0)
        if line.startswith("fork"):
            if pid := os.fork():
                os.waitpid(pid, 0)
                os._exit(0)
            lines.write(f"{os.getpid()}\n")
            lines.flush()
            continue
        if line.startswith("readonly"):
            readonly = True
            continue
        call = json.loads(line)
        argument = ctypes.create_string_buffer(bytes.fromhex(call["argument"]), len(call["argument"]) // 2)
        params = ctypes.create_string_buffer(bytes.fromhex(call["params"]), max(1, len(call["params"]) // 2))
        if call["params"]:
            ctypes.memmove(
                ctypes.byref(argument, POINTER_AT), ctypes.byref(ctypes.c_uint64(ctypes.addressof(params))), 8
            )
        pointer = ctypes.addressof(argument)
        if readonly:
            pointer = place
            ctypes.memmove(pointer, argument, len(argument))
            libc.mprotect(ctypes.c_void_p(place), mmap.PAGESIZE, mmap.PROT_READ)
        result = libc.ioctl(device, ctypes.c_ulong(call["request"]), ctypes.c_void_p(pointer))
        answer = {"result": result, "errno": ctypes.get_errno(), "argument": argument.raw.hex()}
        lines.write(json.dumps(answer) + "\n")
        lines.flush()


if __name__ == "__main__":
    main()

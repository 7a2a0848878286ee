"""A pod for tests: puts the filter on itself, hands the listener over, then makes the calls it is told.

Run as ``python -m tests.guardian.child SOCKET_FD``. Each line it reads is JSON: {"request", "argument", "params"}
in hex, and it answers {"result", "errno", "argument"} with the argument as the call left it. "fork" makes a
child of its own that does the same from then on; "exit" ends it, and "exec" lets it execute another program.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import socket
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path

from qgpu.guardian.proxy.seccomp_filter import install

POINTER_AT = 16


def point(argument: ctypes.Array, at: int, to: ctypes.Array) -> None:
    """Let a structure point to another."""
    ctypes.memmove(ctypes.byref(argument, at), ctypes.byref(ctypes.c_uint64(ctypes.addressof(to))), 8)


def never(libc: ctypes.CDLL) -> int:
    """Return the address of a page whose first access waits for an answer that nobody gives (userfaultfd)."""
    uffd = libc.syscall(323, os.O_CLOEXEC)
    api = struct.pack("<QQQ", 0xAA, 0, 0)
    fcntl.ioctl(uffd, 0xC018AA3F, bytearray(api))
    pages = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    fcntl.ioctl(uffd, 0xC020AA00, bytearray(struct.pack("<QQQQ", address, mmap.PAGESIZE, 1, 0)))
    KEPT.append(pages)
    return address


KEPT: list = []


def mapfile(libc: ctypes.CDLL, device: int, size: int, offset: int) -> dict:
    """Map a file, shared and writable, at an offset."""
    with tempfile.TemporaryFile() as file:
        file.truncate(size + offset)
        libc.mmap.restype = ctypes.c_void_p
        address = libc.mmap(None, ctypes.c_size_t(size), 3, 1, file.fileno(), ctypes.c_long(offset))
        failed = address == ctypes.c_void_p(-1).value
        return {"result": -1 if failed else 0, "errno": ctypes.get_errno() if failed else 0, "argument": ""}


def mapfixed(libc: ctypes.CDLL, device: int, size: int, address: int) -> dict:
    """Map a file at an address and at an offset equal to it, as UVM wants it."""
    with tempfile.TemporaryFile() as file:
        libc.mmap.restype = ctypes.c_void_p
        where = ctypes.c_void_p(address)
        got = libc.mmap(where, ctypes.c_size_t(size), 3, 0x11, file.fileno(), ctypes.c_long(address))
        return {"result": 0 if got == address else -1, "errno": ctypes.get_errno(), "argument": ""}


def int80(libc: ctypes.CDLL, device: int, command: int) -> dict:
    """Issue an RM control by the 32-bit way into the kernel."""
    low = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40, 7)  # MAP_32BIT
    place = ctypes.addressof(ctypes.c_char.from_buffer(low))
    low[:32] = struct.pack("<IIIIQII", 7, 7, command, 0, 0, 0, 0xFFFF)
    code = b"\x53\xb8\x36\0\0\0\xbb" + struct.pack("<I", device)  # push rbx; mov eax, 54; mov ebx, device
    code += b"\xb9" + struct.pack("<I", 3 << 30 | 32 << 16 | ord("F") << 8 | 0x2A)  # mov ecx, request
    code += b"\xba" + struct.pack("<I", place) + b"\xcd\x80\x5b\xc3"  # mov edx, argument; int 0x80; pop rbx; ret
    low[64 : 64 + len(code)] = code
    result = ctypes.CFUNCTYPE(ctypes.c_int)(place + 64)()
    return {"result": result, "errno": 0, "argument": bytes(low[:32]).hex()}


def x32(libc: ctypes.CDLL, device: int) -> dict:
    """Issue an ioctl by the number it would have on x32."""
    result = libc.syscall(0x40000000 + 514, device, 0, 0)
    return {"result": result, "errno": ctypes.get_errno(), "argument": ""}


def start_sharer(libc: ctypes.CDLL, code: bytes) -> int:
    """Start a process that shares this one's memory and runs x86-64 machine code."""
    stack, page = mmap.mmap(-1, 1 << 16), mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
    KEPT.extend([stack, page])
    page[: len(code)] = code
    start, top = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (page, stack))
    return libc.clone(ctypes.c_void_p(start), ctypes.c_void_p(top + (1 << 16) - 64), 0x111, None)  # CLONE_VM, SIGCHLD


def vmsharer(libc: ctypes.CDLL, device: int, size: int, address: int) -> dict:
    """Let a process that shares this one's memory map a file as UVM wants it, and end; say which, and if it failed."""
    KEPT.append(file := os.memfd_create("mapped"))
    code = b"\x48\xbf" + struct.pack("<Q", address) + b"\x48\xbe" + struct.pack("<Q", size)  # rdi, rsi
    code += b"\x48\xba" + struct.pack("<Q", 3) + b"\x49\xba" + struct.pack("<Q", 0x11)  # rdx, r10
    code += b"\x49\xb8" + struct.pack("<Q", file) + b"\x49\xb9" + struct.pack("<Q", address)  # r8, r9
    code += b"\xb8\x09\0\0\0\x0f\x05"  # mmap
    code += b"\x48\xc1\xe8\x3f\x89\xc7\xb8\x3c\0\0\0\x0f\x05"  # exit(whether it failed)
    pid = start_sharer(libc, code)
    _, status = os.waitpid(pid, 0)
    return {"result": pid, "errno": os.waitstatus_to_exitcode(status), "argument": ""}


def vmsilent(libc: ctypes.CDLL, device: int) -> dict:
    """Start a process that shares this one's memory and makes no call that the filter stops."""
    return {"result": start_sharer(libc, b"\xb8\x22\0\0\0\x0f\x05\xeb\xf7"), "errno": 0, "argument": ""}  # pause


def hammer(libc: ctypes.CDLL, device: int, times: int) -> dict:
    """Allocate memory of 64 KiB, while another thread writes 1 TiB and another handle over the arguments."""
    argument, params = ctypes.create_string_buffer(48), ctypes.create_string_buffer(128)
    fair = [(struct.pack("<IIII", 7, 2, 0x40 + i, 0x40), struct.pack("<Q", 1 << 16)) for i in range(times)]
    turn, over = [0], []

    def rewrite() -> None:
        while not over:
            call, size = fair[turn[0]]
            argument[8:12] = struct.pack("<I", 0x99)
            params[64:72] = struct.pack("<Q", 1 << 40)
            argument[0:16] = call
            params[64:72] = size

    point(argument, POINTER_AT, params)
    argument[0:16], params[64:72] = fair[0]
    thread = threading.Thread(target=rewrite)
    thread.start()
    statuses = b""
    for i in range(times):
        turn[0] = i
        libc.ioctl(device, ctypes.c_ulong(3 << 30 | 48 << 16 | ord("F") << 8 | 0x2B), argument)
        statuses += argument[40:44]
    over.append(True)
    thread.join()
    return {"result": 0, "errno": 0, "argument": statuses.hex()}


def exchange(libc: ctypes.CDLL, device: int, times: int, own: int) -> dict:
    """Ask for root clients while another file, that answers ENOTTY to anything, is put in the descriptor's place.

    With ``own``, by a thread that has a table of its own where it is in that place all along.
    """
    other, place, over, errors = os.open("/dev/null", os.O_RDWR), 200, [], []
    argument = ctypes.create_string_buffer(struct.pack("<IIIIQQIIII", 0, 0, 0, 0x41, 0, 0, 0, 0, 0xFFFF, 0), 48)

    def ask() -> None:
        if own:
            libc.unshare(0x400)  # CLONE_FILES
            os.dup2(other, place)
        for _ in range(times):
            libc.ioctl(place, ctypes.c_ulong(3 << 30 | 48 << 16 | ord("F") << 8 | 0x2B), argument)
            errors.append(ctypes.get_errno())
        over.append(True)

    os.dup2(device, place)
    thread = threading.Thread(target=ask)
    thread.start()
    while not over:
        if not own:
            os.dup2(other, place)
            time.sleep(0.0003)
            os.dup2(device, place)
        time.sleep(0.0003)
    thread.join()
    return {"result": len(errors), "errno": errors.count(errno.ENOTTY), "argument": ""}


def exchange_while(libc, device, request, argument, flag):
    """Make a call on a descriptor into whose place another thread puts /dev/null once a file appears."""
    place = os.dup2(device, 200)

    def exchange():
        while not flag.exists():
            time.sleep(0.001)
        os.dup2(os.open(os.devnull, os.O_RDWR), place)
        flag.unlink()

    threading.Thread(target=exchange, daemon=True).start()
    result = libc.ioctl(place, ctypes.c_ulong(request), ctypes.create_string_buffer(argument, len(argument)))
    return {"result": result, "errno": ctypes.get_errno(), "argument": ""}


def with_own_table(libc, device, request, argument):
    """Make a call on a thread whose own descriptor table has /dev/null where the process's table has the device."""
    place, answers = os.dup2(device, 200), []
    other = os.open(os.devnull, os.O_RDWR)

    def ask():
        libc.unshare(0x400)  # CLONE_FILES
        os.dup2(other, place)
        result = libc.ioctl(place, ctypes.c_ulong(request), ctypes.create_string_buffer(argument, len(argument)))
        answers.append({"result": result, "errno": ctypes.get_errno(), "argument": ""})

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return answers[0]


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    device = os.open("/dev/random", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    socket.send_fds(sock, [b"listener"], [install()])
    lines = sock.makefile("rw")
    page = mmap.mmap(-1, mmap.PAGESIZE)
    place = ctypes.addressof(ctypes.c_char.from_buffer(page))
    readonly = False
    for line in lines:
        if line.startswith("exit"):
            os._exit(0)
        if line.startswith("exec"):
            os.execvp("sleep", ["sleep", "60"])
        if line.startswith("fork"):
            if pid := os.fork():
                os.waitpid(pid, 0)
                os._exit(0)
            lines.write(f"{os.getpid()}\n")
            lines.flush()
            continue
        if line.startswith("hammer"):
            lines.write(json.dumps(hammer(libc, device, int(line.split()[1]))) + "\n")
            lines.flush()
            continue
        if line.startswith(("vmsharer", "vmsilent", "mapfile", "mapfixed", "int80", "x32", "exchange ")):
            lines.write(json.dumps(globals()[line.split()[0]](libc, device, *map(int, line.split()[1:]))) + "\n")
            lines.flush()
            continue
        if line.startswith("reopen"):  # the device; its old file gets number 300
            os.dup2(device, 300)
            os.dup2(os.open("/dev/random", os.O_RDWR), device)
            lines.write("{}\n")
            lines.flush()
            continue
        if line.startswith("open"):  # a file, under number 300
            os.dup2(os.open(line.split()[1], os.O_RDWR), 300)
            lines.write("{}\n")
            lines.flush()
            continue
        if line.startswith("own_table"):
            _, request, argument = line.split()
            lines.write(json.dumps(with_own_table(libc, device, int(request), bytes.fromhex(argument))) + "\n")
            lines.flush()
            continue
        if line.startswith("exchange_while"):
            _, request, argument, flag = line.split()
            answer = exchange_while(libc, device, int(request), bytes.fromhex(argument), Path(flag))
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
            continue
        if line.startswith("name"):
            libc.prctl(15, bytes.fromhex(line.split()[1]), 0, 0, 0)
            continue
        if line.startswith("readonly"):
            readonly = True
            continue
        call = json.loads(line)
        argument = ctypes.create_string_buffer(bytes.fromhex(call["argument"]), len(call["argument"]) // 2)
        params = ctypes.create_string_buffer(bytes.fromhex(call["params"]), max(1, len(call["params"]) // 2))
        nested = ctypes.create_string_buffer(bytes.fromhex(call.get("nested", "")) or b"0")
        if call["params"]:
            point(argument, call.get("pointer_at", POINTER_AT), params)
        if "nested" in call:
            point(params, call["nested_at"], nested)
        pointer = ctypes.addressof(argument)
        if call.get("slow"):
            pointer = never(libc)
        if readonly:
            pointer = place
            ctypes.memmove(pointer, argument, len(argument))
            libc.mprotect(ctypes.c_void_p(place), mmap.PAGESIZE, mmap.PROT_READ)
        result = libc.ioctl(call.get("fd", device), ctypes.c_ulong(call["request"]), ctypes.c_void_p(pointer))
        answer = {
            "result": result,
            "errno": ctypes.get_errno(),
            "argument": argument.raw.hex(),
            "params": params.raw.hex() if call["params"] else "",
            "nested": nested.raw[:-1].hex() if "nested" in call else "",
        }
        lines.write(json.dumps(answer) + "\n")
        lines.flush()


if __name__ == "__main__":
    main()

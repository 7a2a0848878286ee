"""A pod on the emulated driver: makes and frees objects all the time, and ends when an answer is not the right one.

allocator.py CLIENT STEPS PAUSE: writes down when it was done with a round, and rests with nothing made while there is
PAUSE.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import time
from pathlib import Path

from qgpu.nvidia import abi
from tests.guardian.asked import (
    DEVICE_PARAMS,
    TSG_PARAMS,
    alloc,
    alloc_status,
    control,
    device,
    dup,
    dup_status,
    free,
    memory_params,
    status,
    subdevice,
)
from tests.guardian.fake_rm import PAGE
from tests.guardian.lasting import REGISTER_VIDMEM, UNREGISTER_VIDMEM

_libc = ctypes.CDLL(None, use_errno=True)


class Program:
    """Speaks RM on one file, as one client."""

    def __init__(self, client: int) -> None:
        self.client = client
        self.file = os.open("/dev/random", os.O_RDWR)

    def call(self, number: int, argument: bytes, params: bytes = b"") -> tuple[int, bytes, bytes]:
        """Make a call; return errno, the argument, the parameters after it."""
        given, behind = ctypes.create_string_buffer(argument, len(argument)), ctypes.create_string_buffer(params)
        if params:
            ctypes.memmove(ctypes.byref(given, 16), struct.pack("<Q", ctypes.addressof(behind)), 8)
        failed = _libc.ioctl(self.file, ctypes.c_ulong(abi.request(number, len(argument))), given)
        return ctypes.get_errno() if failed else 0, given.raw, behind.raw[:-1]

    def expect(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            print(f"{what}: {found} and not {expected}", flush=True)
            sys.exit(1)

    def make(self, handle: int, parent: int, rm_class: int, params: bytes) -> bytes:
        error, argument, after = self.call(abi.NV_ESC_RM_ALLOC, alloc(handle, parent, rm_class, self.client), params)
        self.expect(f"made {rm_class:#x}", (error, alloc_status(argument)), (0, abi.NV_OK))
        return after

    def control(self, what: str, command: int, params: bytes) -> None:
        argument = control(command, 3, len(params), self.client)
        error, argument, _ = self.call(abi.NV_ESC_RM_CONTROL, argument, params)
        self.expect(what, (error, status(argument)), (0, abi.NV_OK))

    def free(self, handle: int) -> None:
        error, argument, _ = self.call(abi.NV_ESC_RM_FREE, free(handle, self.client))
        self.expect("freed", (error, struct.unpack_from("<I", argument, 12)[0]), (0, abi.NV_OK))

    def round(self, number: int) -> None:
        """Make one of each, and free it."""
        memory, second, group, channel = (base + number % 1000 for base in (10_000, 20_000, 30_000, 40_000))
        after = self.make(memory, 2, abi.NV01_MEMORY_LOCAL_USER, memory_params(PAGE + 1))
        self.expect("size", struct.unpack_from("<Q", after, 64)[0], 2 * PAGE)
        self.control("registered with peers", REGISTER_VIDMEM, struct.pack("<IIQQQ", memory, 0, 0, PAGE, 0))
        error, argument, _ = self.call(
            abi.NV_ESC_RM_DUP_OBJECT, dup(second, memory, client=self.client, source_client=self.client)
        )
        self.expect("second handle", (error, dup_status(argument)), (0, abi.NV_OK))
        self.make(group, 2, abi.KEPLER_CHANNEL_GROUP_A, TSG_PARAMS)
        self.make(channel, group, 0xC86F, bytes(368))
        self.control("control", 0x20800110, bytes(64))
        self.control("no longer", UNREGISTER_VIDMEM, struct.pack("<I", memory))
        for handle in (second, memory, group):
            self.free(handle)


def main() -> None:
    """Go on until an answer is wrong."""
    program, steps, pause = Program(int(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    program.call(abi.NV_ESC_RM_ALLOC, device(client=program.client), DEVICE_PARAMS)
    _, argument, _ = program.call(abi.NV_ESC_RM_ALLOC, subdevice(client=program.client), bytes(4))
    program.expect("subdevice", alloc_status(argument), abi.NV_OK)
    with steps.open("w", buffering=1) as file:
        number = 0
        while True:
            if pause.exists():
                file.write("rests\n")
                while pause.exists():
                    time.sleep(0.01)
            program.round(number)
            file.write(f"{time.monotonic()}\n")
            number += 1


if __name__ == "__main__":
    main()

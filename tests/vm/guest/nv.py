"""RM calls as a CUDA program makes them, for tests: packs the structs, returns RM's status.

Layouts: NVIDIA's nvos.h from 535.43 on. Only what tests need.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct

CTL = "/dev/nvidiactl"
GPU = "/dev/nvidia{}"
FLOOD = 2**64 - 1

ROOT, MEM, DEVICE, SUBDEVICE, TSG, CHANNEL, VASPACE = 0x41, 0x40, 0x80, 0x2080, 0xA06C, 0xC86F, 0x90F1
NO_MEMORY, NO_PERMISSION, BAD_CLIENT, BAD_ARGUMENT = 0x51, 0x1B, 0x23, 0x1F
BAD_CLASS, BAD_HANDLE, NOT_SUPPORTED, NO_RESOURCES = 0x22, 0x33, 0x56, 0x1A
LATENCIES = 512

_ALLOC = struct.Struct("IIIIQQIIII")
_CONTROL = struct.Struct("IIIIQII")
_QUERY = struct.Struct(f"II4QQ{LATENCIES}I")


class RmError(Exception):
    """RM said no; ``status`` says how."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status

    def __str__(self) -> str:
        return hex(self.status)


def word(nr: int, size: int) -> int:
    return 3 << 30 | size << 16 | ord("F") << 8 | nr


def call(fd: int, nr: int, data: bytearray) -> None:
    fcntl.ioctl(fd, word(nr, len(data)), data, True)


def xfer(fd: int, nr: int, data: bytearray) -> None:
    """The same call, wrapped (IOCTL_XFER_CMD)."""
    inner = ctypes.create_string_buffer(bytes(data), len(data))
    fcntl.ioctl(fd, word(211, 16), struct.pack("IIQ", nr, len(data), ctypes.addressof(inner)))
    data[:] = inner.raw


class Program:
    """A process's view of the driver: one control file, one client, one card, objects by handle."""

    def __init__(self, gpu: int = 0, *, send=call) -> None:
        self.send = send
        self.ctl = os.open(CTL, os.O_RDWR)
        self.card = os.open(GPU.format(gpu), os.O_RDWR)
        self.last = 0x5C000000
        self.client = 0
        self.client = self.alloc(0, ROOT, handle=0)
        self.device = self.alloc(self.client, DEVICE, struct.pack("I52x", gpu))
        self.subdevice = self.alloc(self.device, SUBDEVICE, bytes(4))

    def alloc(self, parent: int, cls: int, params: bytes = b"", handle: int | None = None) -> int:
        if handle is None:
            self.last += 1
            handle = self.last
        block = ctypes.create_string_buffer(params, max(len(params), 1))
        at = ctypes.addressof(block) if params else 0
        root = 0 if cls == ROOT else self.client  # a client's handle is RM's choice
        data = bytearray(_ALLOC.pack(root, parent, handle, cls, at, 0, 0, 0, 0xFFFF, 0))
        self.send(self.ctl, 0x2B, data)
        fields = _ALLOC.unpack(data)
        if fields[8]:
            raise RmError(fields[8])
        return int(fields[2])

    def memory(self, size: int, handle: int | None = None, *, huge: bool = False) -> int:
        """Memory of the card, of pages of 64 KiB or 2 MiB: RM rounds up."""
        return self.alloc(self.device, MEM, struct.pack("24xI36xQ56x", (huge and 3) << 23, size), handle)

    def old_memory(self, cls: int, handle: int | None = None, *, flags: int = 1 << 30) -> int:
        """Memory by RM_ALLOC_MEMORY, which goes through a card's file that is tied to the control file; not mapped."""
        with contextlib.suppress(OSError):  # it is tied
            call(self.card, 201, bytearray(struct.pack("I", self.ctl)))
        if handle is None:
            self.last += 1
            handle = self.last
        data = bytearray(
            struct.pack("6IQQIIiI", self.client, self.device, handle, cls, flags, 0, 0, 0, 0xFFFF, 0, -1, 0)
        )
        self.send(self.card, 0x27, data)
        (status,) = struct.unpack_from("I", data, 40)
        if status:
            raise RmError(status)
        return handle

    def tsg(self, engine: int = 1) -> int:
        return self.alloc(self.device, TSG, struct.pack("12xI4x", engine))

    def channel(self, parent: int, userd: int = 0, *, error: int = 0, ecc: int = 0) -> int:
        """A channel, with handles of memory that the card writes: USERD, error notifiers."""
        return self.alloc(parent, CHANNEL, struct.pack("I28xI104xI224x", error, userd, ecc))

    def compute(self, channels: int = 1) -> tuple[int, list[int]]:
        tsg = self.tsg()
        return tsg, [self.channel(tsg) for _ in range(channels)]

    def free(self, handle: int, parent: int = 0) -> int:
        data = bytearray(struct.pack("IIII", self.client, parent, handle, 0xFFFF))
        self.send(self.ctl, 0x29, data)
        return int(struct.unpack("IIII", data)[3])

    def control(self, handle: int, cmd: int, params: bytes = b"", *, client: int = 0, flags: int = 0) -> bytes:
        block = ctypes.create_string_buffer(params, max(len(params), 1))
        data = bytearray(
            _CONTROL.pack(client or self.client, handle, cmd, flags, ctypes.addressof(block), len(params), 0xFFFF)
        )
        self.send(self.ctl, 0x2A, data)
        status = _CONTROL.unpack(data)[6]
        if status:
            raise RmError(status)
        return block.raw[: len(params)]

    def dup(self, source_client: int, source: int) -> int:
        self.last += 1
        data = bytearray(struct.pack("7I", self.client, self.device, self.last, source_client, source, 0, 0xFFFF))
        self.send(self.ctl, 0x34, data)
        fields = struct.unpack("7I", data)
        if fields[6]:
            raise RmError(fields[6])
        return int(fields[2])

    def export(self, handle: int, *, plural: bool = False) -> int:
        """A descriptor that keeps an object, by either of the two calls."""
        fd = os.open(CTL, os.O_RDWR)
        if plural:
            params = struct.pack("iIH66x512IHH", fd, self.device, 1, handle, *bytes(511), 1, 0)
            self.control(self.client, 0x3D0B, params)
        else:
            self.control(self.client, 0x3D05, struct.pack("IIIIiI", 1, self.device, self.device, handle, fd, 0))
        return fd

    def import_(self, fd: int, *, plural: bool = False, handle: int | None = None) -> int:
        """Another handle on what a descriptor keeps, by either of the two calls; 0: RM chooses it."""
        if handle is None:
            self.last += 1
            handle = self.last
        if plural:
            params = struct.pack("iI128I128xHH", fd, self.device, handle, *bytes(127), 1, 0)
            answer = self.control(self.client, 0x3D0C, params)
            return int(struct.unpack_from("I", answer, 8)[0])
        params = struct.pack("iIIII", fd, 1, self.device, self.device, handle)
        return int(struct.unpack("iIIII", self.control(self.client, 0x3D06, params))[4])

    def import_all(self, fd: int, *handles: int, count: int) -> None:
        """Name handles for what a descriptor keeps; RM looks at the first ``count`` of them."""
        places = struct.pack(f"{len(handles)}I", *handles).ljust(512, b"\0")
        self.control(self.client, 0x3D0C, struct.pack("iI", fd, self.device) + places + struct.pack("128xHH", count, 0))

    def heap(self, function: int, **at: int) -> bytearray:
        """VID_HEAP_CONTROL; ``at`` places words: u88=4096 puts a u64 at 88, w44=7 a u32 at 44."""
        data = bytearray(184)
        struct.pack_into("III", data, 0, self.client, self.device, function)
        for name, value in at.items():
            struct.pack_into("Q" if name[0] == "u" else "I", data, int(name[1:]), value)
        self.send(self.ctl, 0x4A, data)
        return data

    def fb_info(self, *indices: int) -> dict[int, int]:
        """Card memory by index in KiB (FB_GET_INFO_V2)."""
        params = bytearray(1028)
        struct.pack_into("I", params, 0, len(indices))
        for i, index in enumerate(indices):
            struct.pack_into("I", params, 4 + 8 * i, index)
        answer = self.control(self.subdevice, 0x20801303, bytes(params))
        return {index: struct.unpack_from("I", answer, 8 + 8 * i)[0] for i, index in enumerate(indices)}

    def submit(self, channel: int, kernel_us: float, count: int = FLOOD, period_us: float = 0) -> None:
        """Give the simulated card work: ``count`` kernels, once or every period."""
        times = (int(kernel_us * 1000), count, int(period_us * 1000))
        data = bytearray(struct.pack("IIQQQ", self.client, channel, *times))
        self.send(self.ctl, 0xF0, data)

    def query(self, channel: int) -> dict[str, object]:
        data = bytearray(_QUERY.size)
        struct.pack_into("II", data, 0, self.client, channel)
        call(self.ctl, 0xF1, data)
        fields = _QUERY.unpack(data)
        count = fields[6]
        return {
            "now_ns": fields[2],
            "kernels": fields[3],
            "run_ns": fields[4],
            "starts": fields[5],
            "nr_latencies": count,
            "latencies_us": [fields[7 + i % LATENCIES] / 1000 for i in range(max(0, count - LATENCIES), count)],
        }

    def close(self) -> None:
        os.close(self.card)
        os.close(self.ctl)

"""The guardian's judge before an RM that keeps count: whatever a pod asks, and however its memory changes meanwhile,
what RM really holds for it stays within the limit.

This process is the pod: its calls lie in memory of its own, and its descriptor is /dev/null, whose major the judge is
told to watch. The model of RM refuses what RM refuses (taken handles, unknown parents) and shares memory as RM does.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from random import Random

from qgpu.guardian.accounting.memory_quota import Allowance
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.proxy.dispatcher import Dispatcher
from qgpu.guardian.proxy.shared_state import SharedState
from qgpu.guardian.rules.classes import PHYSICAL
from qgpu.linux.seccomp_notify import Notification
from qgpu.nvidia import abi, uvm
from tests.fuzz import mutate
from tests.guardian.fake_rm import HANDLE_PROVIDED, FakeRm
from tests.traces import TRACES, rows

LIMIT = 64 << 20
_NULL_MAJOR, _NULL_MINOR = 1, 3
_X86_64, _IOCTL = 0xC000003E, 16
_CLIENTS = (7, 8)
#: Functions that make memory: where their attributes and their size lie.
_HEAP_MAKES = {2: (56, 88), 6: (64, 88), 14: (56, 80)}
_HEAP_VIRTUAL = 0x00080000
_DUPLICATE_NAME, _INVALID_PARENT = 0x19, 0x36
_EXPORT, _IMPORT = abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD, abi.NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD


class CountingRm(FakeRm):
    """RM with memory that is there as long as somebody has a handle of it, or a descriptor."""

    def __init__(self) -> None:
        super().__init__({(client, client): (abi.NV01_ROOT_CLIENT, 0) for client in _CLIENTS})
        #: By object: the memory behind it; by memory: its size.
        self.memory: dict[tuple[int, int], int] = {}
        self.blocks: dict[int, int] = {}
        self.exported: list[int] = []
        self._count = 0

    @property
    def held(self) -> int:
        """Return the bytes that are really in use."""
        alive = {*self.memory.values(), *self.exported}
        return sum(size for block, size in self.blocks.items() if block in alive)

    def _make(self, client, handle, rm_class, parent, size=0):
        if (client, handle) in self.objects or handle == 0:
            raise _Refused(_DUPLICATE_NAME)
        if (client, parent or client) not in self.objects:
            raise _Refused(abi.NV_ERR_INVALID_ARGUMENT)
        if rm_class == abi.NV01_MEMORY_LOCAL_USER and not self._on_a_card(client, parent):
            raise _Refused(_INVALID_PARENT)
        super()._make(client, handle, rm_class, parent or client, size)
        if rm_class == abi.NV01_MEMORY_LOCAL_USER or rm_class in PHYSICAL:
            self._count += 1
            self.memory[client, handle] = self._count
            self.blocks[self._count] = self.sizes.get((client, handle), 1 << 40)

    def _on_a_card(self, client, handle):
        while (client, handle) in self.objects and handle != client:
            rm_class, parent = self.objects[client, handle]
            if rm_class == abi.NV01_DEVICE_0:
                return True
            handle = parent
        return False

    def _free(self, client, handle):
        found = super()._free(client, handle)
        for key in [key for key in self.memory if key not in self.objects]:
            del self.memory[key]
            self.sizes.pop(key, None)
        return found

    def _dup(self, data):
        client, parent, handle, source_client, source, _, _ = struct.unpack("<7I", data)
        if (client, handle) in self.objects or handle == 0 or (client, parent or client) not in self.objects:
            self._status(data, 24, abi.NV_ERR_INVALID_ARGUMENT)
            return
        super()._dup(data)
        if (source_client, source) in self.memory and (client, handle) in self.objects:
            self.memory[client, handle] = self.memory[source_client, source]

    def _control(self, data):
        client, _, command, _, params, size, _ = struct.unpack("<IIIIQII", data)
        if command == _EXPORT and params:
            block = self._params(params, size)
            key = (client, struct.unpack_from("<I", block, 12)[0])
            if key in self.memory:
                self.exported.append(self.memory[key])
        if command == _IMPORT and params and self.exported:
            handle = struct.unpack_from("<I", self._params(params, size), 16)[0]
            if (client, handle) not in self.objects and handle:
                self.objects[client, handle] = (abi.NV01_MEMORY_LOCAL_USER, client)
                self.memory[client, handle] = self.exported[-1]
                self.sizes[client, handle] = self.blocks[self.exported[-1]]
        return super()._control(data)

    def _hand_over(self, command, client, params):
        """Done above."""

    def is_same(self, file, key, parent, other):
        return self.memory.get(key) == self.memory.get(other)

    def _params(self, address, size):
        return bytes(abi.ffi.buffer(abi.ffi.cast("char *", address), size))

    def _heap(self, data):
        """Make memory by the old interface: where it lies is in its attributes (nvos.h: NVOS32)."""
        client, parent, function = struct.unpack_from("<III", data)
        handle, flags = (struct.unpack_from("<I", data, at)[0] for at in (44, 52))
        if function in _HEAP_MAKES:
            attributes_at, size_at = _HEAP_MAKES[function]
            place = struct.unpack_from("<I", data, attributes_at)[0] >> 25 & 3
            video = not flags & _HEAP_VIRTUAL and place in (0, 3)
            rm_class = abi.NV01_MEMORY_LOCAL_USER if video else abi.NV01_MEMORY_SYSTEM
            if not flags & HANDLE_PROVIDED:
                handle = 1 + max(0xCAF00000, *(key[1] for key in self.objects))
                struct.pack_into("<I", data, 44, handle)
            self._make(client, handle, rm_class, parent, struct.unpack_from("<Q", data, size_at)[0])
            if video:
                struct.pack_into("<Q", data, size_at, self.sizes[client, handle])
        elif function == 3:
            self._free(client, handle)
        self._status(data, 20, abi.NV_OK)

    def perform(self, fd, request, argument):
        try:
            if request & 0xFF == abi.NV_ESC_RM_VID_HEAP_CONTROL:
                self._heap(abi.ffi.buffer(argument))
                return 0
            return super().perform(fd, request, argument)
        except _Refused as refused:
            data = abi.ffi.buffer(argument)
            at = {48: 40, 32: 28, 184: 20}.get(len(data))
            if at is None:
                return errno.EINVAL
            self._status(data, at, refused.status)
            return 0


class _Refused(Exception):  # noqa: N818 - it is no error
    def __init__(self, status: int) -> None:
        self.status = status


class _Listener:
    """Takes answers; a pod's thread that proceeds makes its call to a driver that is not there."""

    number = 1

    def begin(self, before=None):
        pass

    def proceed(self, _id):
        pass

    answer_ok = proceed

    def answer_error(self, _id, _code):
        pass

    def still_waiting(self, _id):
        return True


class _Flickering:
    """Memory that another thread of the pod rewrites between two reads.

    The pod is this process. A pointer that was changed must not have answers written over what is our own, so only the
    ``buffers`` can be written.
    """

    def __init__(self, memory, random: Random, change, buffers) -> None:
        self._memory, self._random, self._change = memory, random, change
        starts = [int(abi.ffi.cast("uintptr_t", buffer)) for buffer in buffers]
        self._places = [(at, at + len(buffer)) for at, buffer in zip(starts, buffers, strict=True)]

    def read(self, tid, address, size):
        if self._random.randrange(10) == 0:
            self._change()
        return self._memory.read(tid, address, size)

    def read_some(self, tid, address, size):
        if self._random.randrange(10) == 0:
            self._change()
        return self._memory.read_some(tid, address, size)

    def next_call(self):
        self._memory.next_call()

    def write(self, tid, writes):
        for address, data in writes:
            if not any(start <= address and address + len(data) <= end for start, end in self._places):
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
            self._memory.write(tid, [(address, data)])


class Pod:
    """One pod with a judge of its own, and the bytes its calls lie in."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.rm = CountingRm()
        self.shared = SharedState(
            ObjectTable(),
            Journal(),
            self.rm,
            lambda _: None,
            lambda _: None,
            lambda pid, pidfd: None,
            time.monotonic_ns,
            lambda _pod: Allowance({0: _NULL_MINOR}, {0: LIMIT}),
            major=_NULL_MAJOR,
            uvm_layouts=uvm.layouts("580.1"),
            perform=self.rm.perform,
        )
        self.shared.note({"fact": "pod", "name": "web", "grants": {}})
        self.listener = _Listener()
        self.dispatcher = Dispatcher(self.shared, "web")
        self.call, self.params, self.outer = (abi.ffi.new("char[]", size) for size in (4096, 1 << 16, 16))
        proxy = self.dispatcher._proxy
        proxy.memory = _Flickering(proxy.memory, random, self._rewrite, (self.call, self.params, self.outer))
        self.fd = os.open("/dev/null", os.O_RDWR)
        self.size = self.nr_params = 0
        for client in _CLIENTS:
            self.ask(*_alloc(client, client, 1, abi.NV01_DEVICE_0, bytes(56)))
            self.ask(*_alloc(client, 1, 2, abi.NV20_SUBDEVICE_0, bytes(4)))

    def close(self) -> None:
        os.close(self.fd)
        for pid in list(self.rm.pidfds):
            self.rm.unwatch(pid)
        os.close(self.shared.journal.fd)

    def ask(self, number: int, argument: bytes, params: bytes) -> None:
        """Make one call, wrapped or not."""
        where = int(abi.ffi.cast("uintptr_t", self.params))
        if params and len(argument) >= 24:
            argument = argument[:16] + struct.pack("<Q", where) + argument[24:]
        abi.ffi.buffer(self.call)[: len(argument)] = argument
        abi.ffi.buffer(self.params)[: len(params)] = params
        self.size, self.nr_params = len(argument), len(params)
        address, request = int(abi.ffi.cast("uintptr_t", self.call)), abi.request(number, len(argument))
        if self.random.randrange(8) == 0:
            abi.ffi.buffer(self.outer)[:] = struct.pack("<IIQ", number, len(argument), address)
            address = int(abi.ffi.cast("uintptr_t", self.outer))
            request = abi.request(abi.NV_ESC_IOCTL_XFER_CMD, 16)
        self.dispatcher.serve(
            self.listener,
            Notification(1, threading.get_native_id(), _X86_64, _IOCTL, (self.fd, request, address, 0, 0, 0)),
        )

    def _rewrite(self) -> None:
        for buffer, size in ((self.call, self.size), (self.params, self.nr_params)):
            if size and self.random.randrange(2):
                changed = mutate.data(self.random, bytes(abi.ffi.buffer(buffer)[:size]))
                abi.ffi.buffer(buffer)[: len(changed)] = changed


def _seeds() -> list[tuple[int, bytes, bytes]]:
    found = {
        (row.number, row.before, row.params): None
        for trace in TRACES
        for row in rows(trace)
        if len(row.before) < 4096 and len(row.params) < 1 << 16
    }
    return list(found)


def _alloc(client, parent, handle, made, params, *, short=False) -> tuple[int, bytes, bytes]:
    head = struct.pack("<IIIIQ", client, parent, handle, made, 0)
    tail = struct.pack("<II", 0, 0xFFFF) if short else struct.pack("<QIIII", 0, 0, 0, 0xFFFF, 0)
    return abi.NV_ESC_RM_ALLOC, head + tail, params


def _made_up(random: Random) -> tuple[int, bytes, bytes]:
    """Return a call that a pod at its limit would make: few handles, so that they collide, and sizes that matter."""
    client, other = random.choice(_CLIENTS), random.choice(_CLIENTS)
    handle, parent, source = (random.choice([1, 2, *range(3, 14), *range(3, 14)]) for _ in range(3))
    size = random.choice([1, 1 << 16, 1 << 20, 1 << 24, LIMIT // 2, LIMIT, LIMIT + 1, 1 << 63])
    kind = random.randrange(12)
    if kind < 6:
        classes = (
            abi.NV01_DEVICE_0,
            abi.NV20_SUBDEVICE_0,
            0x40,
            0x40,
            0x40,
            0x40,
            0xA06C,
            0xC86F,
            0x90F1,
            0x3E,
            0xC2,
            0x82,
        )
        made = random.choice(classes)
        parent = client if made == abi.NV01_DEVICE_0 else random.choice([parent, 1, 1, 1, 1, 2])
        params = bytes(64) + struct.pack("<Q", size) + bytes(56) if made == 0x40 else bytes(368)
        return _alloc(client, parent, handle, made, params, short=random.randrange(3) == 0)
    if kind == 6:
        return (
            abi.NV_ESC_RM_FREE,
            struct.pack("<IIII", client, parent, client if random.randrange(30) == 0 else handle, 0xFFFF),
            b"",
        )
    if kind in (7, 8):
        source_of = (client, random.choice([parent, 1]), handle, other, source, 0, 0xFFFF)
        return abi.NV_ESC_RM_DUP_OBJECT, struct.pack("<7I", *source_of), b""
    if kind == 9:
        data = bytearray(184)
        struct.pack_into("<III", data, 0, client, random.choice([parent, 1, 1]), random.choice([2, 2, 3, 5, 6, 14]))
        struct.pack_into("<I", data, 44, handle)
        struct.pack_into("<I", data, 52, random.choice([0, HANDLE_PROVIDED]))
        struct.pack_into("<I", data, 56, random.choice([0, 0, 3 << 25, 1 << 25]))
        struct.pack_into("<Q", data, random.choice([80, 88]), size)
        return abi.NV_ESC_RM_VID_HEAP_CONTROL, bytes(data), b""
    command = random.choice([_EXPORT, _IMPORT])
    params = (
        struct.pack("<IIIIiI", 1, 2, 2, handle, 0, 0)
        if command == _EXPORT
        else struct.pack("<iI2xxII8x", 0, 1, 2, handle)
    )
    return abi.NV_ESC_RM_CONTROL, struct.pack("<IIIIQII", client, client, command, 0, 0, len(params), 0xFFFF), params


def judged(random: Random):
    """Return a function that makes one call and checks what RM holds."""
    seeds = _seeds()
    pod = Pod(random)
    tried = 0

    def attempt() -> None:
        nonlocal pod, tried
        tried += 1
        if tried % 400 == 0:
            pod.close()
            pod = Pod(random)
        number, argument, params = random.choice(seeds) if random.randrange(4) == 0 else _made_up(random)
        if random.randrange(5) == 0:
            argument, params = mutate.data(random, argument), mutate.data(random, params)
        pod.ask(number, argument, params)
        if random.randrange(20) == 0:
            pod.shared.reconciler.run_due(time.monotonic_ns() + random.randrange(3) * 10**9)
        if pod.rm.held > LIMIT:
            raise AssertionError(f"RM holds {pod.rm.held} after {number:#x} {argument.hex()} {params.hex()}")

    return attempt

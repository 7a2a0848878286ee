"""Carries a pod's ioctl out in its place, on its own open file, with arguments copied once.

What is checked is thereby what is done: the pod's other threads can change their memory as they like. What is to be
written back is put together here, and written by the judge when all is known. Which calls are carried out so is decided
elsewhere.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from qgpu.guardian.failover.journal import Writes
from qgpu.guardian.rules.rows import Pointer
from qgpu.linux.seccomp_notify import ProcessMemory
from qgpu.nvidia import abi
from qgpu.nvidia.abi import ffi

#: Issues an ioctl (descriptor, request, argument) and returns an errno, 0 for none.
Perform = Callable[[int, int, Any], int]

#: No control of RM's has more.
MAX_BYTES = 1 << 16
#: No class that a pod may make has parameters larger than this (the largest known: 368 bytes).
_ALLOC_PARAMS_BYTES = 1024
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")


class IoctlBuffer:
    """Some of a process's memory, copied once: ``data`` is ours to hand to RM, ``store`` puts it into the answer."""

    def __init__(self, answer: Writes, address: int, before: bytes) -> None:
        self._answer = answer
        self.address = address
        self._before = before
        self.data = bytearray(before)
        self.pointer = ffi.from_buffer(self.data)

    @property
    def at(self) -> int:
        """Return where our copy lies."""
        return int(ffi.cast("uintptr_t", self.pointer))

    def patch_u64(self, at: int, value: int) -> None:
        """Put a number of ours in the place of the pod's."""
        _U64.pack_into(self.data, at, value)

    def patch_u32(self, at: int, value: int) -> None:
        """As patch_u64, with four bytes."""
        _U32.pack_into(self.data, at, value & 0xFFFFFFFF)

    def restore(self, at: int, size: int) -> None:
        """Put the pod's own bytes back."""
        self.data[at : at + size] = self._before[at : at + size]

    def store(self) -> None:
        """Have all of it written back, as RM does, if anything changed."""
        if self.data != self._before:
            self._answer.append((self.address, bytes(self.data)))

    def store_changes(self) -> None:
        """Have only words written back that changed: where it is not known how much of it is RM's."""
        if self.data == self._before:
            return
        for at in range(0, len(self.data), 8):
            word = self.data[at : at + 8]
            if word != self._before[at : at + 8]:
                self._answer.append((self.address + at, bytes(word)))


class IoctlProxy:
    """Performs calls for the threads of one pod. Not shared between threads of ours."""

    def __init__(self, perform: Perform) -> None:
        self._perform = perform
        self.memory = ProcessMemory()
        #: What the answer to the call in hand puts into the caller's memory, in order.
        self.answer: Writes = []

    def escape(self, file: int, number: int, block: IoctlBuffer) -> int:
        """Ask RM; return an errno, 0 for none."""
        return self._perform(file, abi.request(number, len(block.data)), block.pointer)

    def uvm(self, file: int, request: int, block: IoctlBuffer) -> int:
        """Ask UVM; return an errno, 0 for none."""
        return self._perform(file, request, block.pointer)

    def block(self, data: bytes) -> IoctlBuffer:
        """Make a block of our own, which no process has."""
        return IoctlBuffer([], 0, data)

    def read(self, tid: int, address: int, size: int) -> IoctlBuffer | None:
        """Copy ``size`` bytes; None when they are not there."""
        data = self.memory.read(tid, address, size) if size <= MAX_BYTES else None
        return IoctlBuffer(self.answer, address, data) if data is not None else None

    def read_params(self, tid: int, address: int) -> IoctlBuffer | None:
        """Copy an allocation's parameters, whose size only RM knows: what is there of it, zeros for the rest."""
        data = self.memory.read_some(tid, address, _ALLOC_PARAMS_BYTES)
        if not data:
            return None
        return (IoctlBuffer if len(data) == _ALLOC_PARAMS_BYTES else _Padded)(self.answer, address, data)

    def read_nested(self, tid: int, params: IoctlBuffer, where: Sequence[Pointer]) -> list[IoctlBuffer] | None:
        """Copy what parameters point to, and let them point to the copies; None when it is not there."""
        blocks = []
        for each in where:
            if len(params.data) < each.at + 8:
                return None
            (address,) = _U64.unpack_from(params.data, each.at)
            count = 1 if each.count_at is None else _U32.unpack_from(params.data, each.count_at)[0]
            size = each.unit * count
            if size == 0 or address == 0:
                params.patch_u64(each.at, 0)
                continue
            if (block := self.read(tid, address, size)) is None:
                return None
            blocks.append(block)
            params.patch_u64(each.at, block.at)
        return blocks


class _Padded(IoctlBuffer):
    """A block that ends where the process's memory does; RM may look further in our copy, and finds zeros."""

    def __init__(self, answer: Writes, address: int, before: bytes) -> None:
        super().__init__(answer, address, before + bytes(_ALLOC_PARAMS_BYTES - len(before)))
        self._there = len(before)

    def store_changes(self) -> None:
        self.data[self._there :] = bytes(len(self.data) - self._there)
        super().store_changes()

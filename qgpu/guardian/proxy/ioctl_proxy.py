"""Performs a pod's ioctl in its place, on its own open file, with arguments that were copied once.

RM therefore acts on what was checked; the pod's other threads may change their memory meanwhile. This file collects
what to write back, and the dispatcher writes it once the outcome is known. Other files decide which calls are performed
this way.
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

#: No RM control has larger parameters.
MAX_BYTES = 1 << 16
#: No allowed class has larger parameters (the largest known: 368 bytes).
_ALLOC_PARAMS_BYTES = 1024
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")


class IoctlBuffer:
    """Process memory that was copied once: ``data`` is our copy for RM, ``store`` adds it to the answer."""

    #: The offset of RM's or UVM's status, once the call is known.
    status_at: int

    def __init__(self, answer: Writes, address: int, before: bytes) -> None:
        self._answer = answer
        self.address = address
        self._before = before
        self.data = bytearray(before)
        self.pointer = ffi.from_buffer(self.data)

    @property
    def at(self) -> int:
        """Return the address of our copy."""
        return int(ffi.cast("uintptr_t", self.pointer))

    def view(self, structure: str, status: str = "status") -> Any:
        """Return it as a structure that is declared, and learn where its status lies."""
        self.status_at = abi.offsetof(structure, status)
        return ffi.cast(f"{structure} *", self.pointer)

    @property
    def status(self) -> int:
        """The call's status."""
        return int(_U32.unpack_from(self.data, self.status_at)[0])

    @status.setter
    def status(self, status: int) -> None:
        _U32.pack_into(self.data, self.status_at, status)

    def answer(self, status: int) -> int:
        """Answer with a status without calling RM."""
        self.status = status
        self.store()
        return 0

    def u32(self, at: int = 0) -> int:
        """Read a number of four bytes."""
        return int(_U32.unpack_from(self.data, at)[0])

    def u64(self, at: int) -> int:
        """Read a number of eight bytes."""
        return int(_U64.unpack_from(self.data, at)[0])

    def patch_u64(self, at: int, value: int) -> None:
        """Replace a number of the pod's by ours."""
        _U64.pack_into(self.data, at, value)

    def patch_u32(self, at: int, value: int) -> None:
        """Do as patch_u64, with four bytes."""
        _U32.pack_into(self.data, at, value & 0xFFFFFFFF)

    def restore(self, at: int, size: int) -> None:
        """Put the pod's own bytes back."""
        self.data[at : at + size] = self._before[at : at + size]

    def store(self) -> None:
        """Write all of it back if anything changed, as RM does."""
        if self.data != self._before:
            self._answer.append((self.address, bytes(self.data)))

    def store_changes(self) -> None:
        """Write back the words that changed, for structures whose length only RM knows."""
        # As one number: to compare words one by one would take a tenth of the time of a whole call.
        left = int.from_bytes(self.data, "little") ^ int.from_bytes(self._before, "little")
        begin = end = 0
        while left:
            same = ((left & -left).bit_length() - 1) // 64
            if same:
                self._store(8 * begin, 8 * end)
                begin = end + same
            end += same + 1
            left >>= 64 * (same + 1)
        self._store(8 * begin, 8 * end)

    def _store(self, begin: int, end: int) -> None:
        if begin < end:
            self._answer.append((self.address + begin, bytes(self.data[begin:end])))


class IoctlProxy:
    """Performs calls for the threads of one pod. Our threads do not share one."""

    def __init__(self, perform: Perform) -> None:
        self._perform = perform
        self.memory = ProcessMemory()
        #: What the current call's answer writes into the caller's memory, in order.
        self.answer: Writes = []

    def next_call(self) -> None:
        """Forget what the last call read and was about to write."""
        self.memory.next_call()
        self.answer.clear()

    def escape(self, file: int, number: int, block: IoctlBuffer) -> int:
        """Call RM; return an errno, 0 for success."""
        return self._perform(file, abi.request(number, len(block.data)), block.pointer)

    def uvm(self, file: int, request: int, block: IoctlBuffer) -> int:
        """Call UVM; return an errno, 0 for success."""
        return self._perform(file, request, block.pointer)

    def block(self, data: bytes, status_at: int | None = None) -> IoctlBuffer:
        """Make a buffer of our own, which is written back nowhere."""
        block = IoctlBuffer([], 0, data)
        if status_at is not None:
            block.status_at = status_at
        return block

    def read(self, tid: int, address: int, size: int) -> IoctlBuffer | None:
        """Copy ``size`` bytes; None if they are not readable."""
        data = self.memory.read(tid, address, size) if size <= MAX_BYTES else None
        return IoctlBuffer(self.answer, address, data) if data is not None else None

    def read_params(self, tid: int, address: int) -> IoctlBuffer | None:
        """Copy an allocation's parameters, whose size only RM knows: as much as is readable, then zeros."""
        data = self.memory.read_some(tid, address, _ALLOC_PARAMS_BYTES)
        if not data:
            return None
        return (IoctlBuffer if len(data) == _ALLOC_PARAMS_BYTES else _Padded)(self.answer, address, data)

    def read_nested(self, tid: int, params: IoctlBuffer, where: Sequence[Pointer]) -> list[IoctlBuffer] | None:
        """Copy what parameters point to, and point them at the copies; None if that is not readable."""
        blocks = []
        for each in where:
            if len(params.data) < each.at + 8:
                return None
            address = params.u64(each.at)
            size = each.unit * (1 if each.count_at is None else params.u32(each.count_at))
            if size == 0 or address == 0:
                params.patch_u64(each.at, 0)
                continue
            if (block := self.read(tid, address, size)) is None:
                return None
            blocks.append(block)
            params.patch_u64(each.at, block.at)
        return blocks


class _Padded(IoctlBuffer):
    """A buffer longer than the process's readable memory; RM finds zeros behind the end."""

    def __init__(self, answer: Writes, address: int, before: bytes) -> None:
        super().__init__(answer, address, before + bytes(_ALLOC_PARAMS_BYTES - len(before)))
        self._there = len(before)

    def store_changes(self) -> None:
        self.data[self._there :] = bytes(len(self.data) - self._there)
        super().store_changes()

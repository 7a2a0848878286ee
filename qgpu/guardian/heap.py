"""One pod's calls to RM's older heap interface (NVOS32), which no CUDA library of today uses but RM still answers."""

from __future__ import annotations

import struct

from qgpu.guardian import calls
from qgpu.guardian.desk import Case, Desk, status_of
from qgpu.guardian.objects import CHOSEN_PLACE, PAGE_TABLES, Objects
from qgpu.guardian.register import RmObject
from qgpu.guardian.standin import Block
from qgpu.rm import abi


class Heap:
    """Judges calls to the heap."""

    def __init__(self, desk: Desk, objects: Objects) -> None:
        self._desk = desk
        self._supervisor = desk.supervisor
        self._hands = desk.supervisor.hands
        self._standin = desk.standin
        self._objects = objects

    def heap(self, case: Case, block: Block, asked: calls.Heap) -> int:
        """Judge a call."""
        match asked.function:
            case calls.HEAP_FREE:
                number = abi.NV_ESC_RM_VID_HEAP_CONTROL
                return self._objects.free(case, number, block, asked.client, asked.handle, asked.status_at)
            case calls.HEAP_INFO:
                error = self._standin.escape(case.file, abi.NV_ESC_RM_VID_HEAP_CONTROL, block)
                return self._shown(block, asked, error)
            case calls.HEAP_ALLOC_SIZE | calls.HEAP_ALLOC_TILED | calls.HEAP_ALLOC_SIZE_RANGE:
                return self._alloc(case, block, asked)
        return self._desk.refuse(block, asked.status_at, abi.NV_ERR_NOT_SUPPORTED, f"heap function {asked.function}")

    def _alloc(self, case: Case, block: Block, asked: calls.Heap) -> int:
        rm = RmObject(asked.client, asked.handle, asked.parent, abi.NV01_MEMORY_LOCAL_USER, asked.size)
        if not self._supervisor.know_client(case.pid, case.call.fd, case.file, asked.client):
            return self._desk.answer(block, asked.status_at, abi.NV_ERR_INVALID_CLIENT)
        if calls.is_virtual(asked) and calls.takes_tables(asked.flags) and self._desk.limited():
            return self._desk.refuse(block, asked.status_at, abi.NV_ERR_NOT_SUPPORTED, PAGE_TABLES)
        claimed = calls.may_be_video(asked)
        if calls.heap_chooses_place(asked) and self._desk.limited():
            return self._desk.refuse(block, asked.status_at, abi.NV_ERR_NOT_SUPPORTED, CHOSEN_PLACE)
        self._objects.undo(case, (asked.client, asked.handle))
        if claimed and (refusal := self._objects.admit(case.pid, rm) or self._desk.claim(rm)):
            return self._desk.answer(block, asked.status_at, refusal)
        case.begin()
        error = self._standin.escape(case.file, abi.NV_ESC_RM_VID_HEAP_CONTROL, block)
        if claimed and not error and status_of(block, asked.status_at) == abi.NV_OK:
            about = self._hands.about(case.file, *rm.key)
            if about is None or about[0] != abi.NV01_MEMORY_LOCAL_USER:
                self._supervisor.not_made(rm.key)
            elif not self._supervisor.made(rm.key, calls.heap_size(block.data, asked.function)):
                self._hands.free(case.file, *rm.key)
                return self._desk.refuse(block, asked.status_at, abi.NV_ERR_NO_MEMORY, "memory over the limit")
        elif claimed:
            self._supervisor.not_made(rm.key)
        return self._shown(block, asked, error)

    def _shown(self, block: Block, asked: calls.Heap, error: int) -> int:
        """Every answer tells the card's total and free bytes."""
        if (shown := self._desk.shown(asked.client, asked.parent)) is not None:
            total, free = struct.unpack_from("<QQ", block.data, calls.HEAP_TOTAL_AT)
            struct.pack_into("<QQ", block.data, calls.HEAP_TOTAL_AT, min(total, shown[0]), min(free, shown[1]))
        if not error:
            block.store()
        return error

"""Address space that could be managed memory: what of a process is mapped as UVM demands of its mappings.

Managed memory is a shared mapping at an offset equal to its address (uvm.c:uvm_mmap; docs/decisions/0008), which
/proc/PID/maps shows, whatever part of it is left. That it is UVM's is not shown there: the device in it is the one
that the file lies on.
"""

from __future__ import annotations

from collections.abc import Iterable

from qgpu.linux import proc

#: UVM deals with managed memory in blocks of this size and alignment (uvm_va_block_types.h), takes memory of the card
#: in pieces as large, which several blocks may share, and needs at most two page tables for each.
BLOCK = 2 << 20
_TABLES = 2 << 12
#: It takes them by 64 (uvm_pmm_gpu.c: uvm_perf_pma_batch_nonpinned_order): on an H200 1468 and 1508 MiB of managed
#: memory were 1536 MiB of the card. A CUDA program that uses none has one block, for semaphores.
_BATCH = 64 * BLOCK


def cost(areas: Iterable[tuple[int, int]]) -> int:
    """Return what address space is charged: bytes for areas from start to end, in order."""
    blocks, behind = 0, 0
    for start, end in areas:
        first = max(start // BLOCK, behind)
        behind = max(behind, -(-end // BLOCK))
        blocks += max(0, behind - first)
    return blocks * (BLOCK + _TABLES) + (_BATCH if blocks > 1 else 0)


def cost_of(address: int | None, size: int) -> int:
    """Return what a mapping is charged that is about to be made, wherever it may lie if no address is known."""
    start = address if address is not None else BLOCK - 1
    return cost([(start, start + size)])


def mapped(pid: int) -> int:
    """Return what is charged of all that a process maps that could be managed memory; 0 for a process that is gone."""
    return cost(areas(proc.maps(pid)))


def areas(maps: Iterable[bytes]) -> list[tuple[int, int]]:
    """Return, of lines of /proc/PID/maps, from where to where those are that could be managed memory."""
    found = []
    for line in maps:
        area, rights, offset, _ = line.split(maxsplit=3)
        if rights.endswith(b"s"):
            start, _, end = area.partition(b"-")
            if int(start, 16) == int(offset, 16):
                found.append((int(start, 16), int(end, 16)))
    return found

"""Address space for managed memory: the mappings of a process that meet UVM's conditions.

Managed memory is a shared mapping at an offset equal to its address (uvm.c:uvm_mmap; docs/decisions/0008).
/proc/PID/maps shows such mappings, and any part that is left of one. It does not show that one is UVM's: it lists the
device that the file lies on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qgpu.linux import proc

#: UVM manages memory in blocks of this size and alignment (uvm_va_block_types.h). It takes card memory in pieces of the
#: same size, which several blocks may share, and needs at most two page tables for each block.
BLOCK = 2 << 20
_TABLES = 2 << 12
#: UVM takes pieces in batches of 64 (uvm_pmm_gpu.c: uvm_perf_pma_batch_nonpinned_order): on an H200, 1468 and 1508 MiB
#: of managed memory took 1536 MiB of the card. A CUDA program without managed memory has one block, for semaphores.
_BATCH = 64 * BLOCK


def cost(areas: Iterable[tuple[int, int]]) -> int:
    """Return the charge in bytes for areas of address space, given in order as (start, end)."""
    blocks, behind = 0, 0
    for start, end in areas:
        first = max(start // BLOCK, behind)
        behind = max(behind, -(-end // BLOCK))
        blocks += max(0, behind - first)
    return blocks * (BLOCK + _TABLES) + (_BATCH if blocks > 1 else 0)


def cost_of(address: int | None, size: int) -> int:
    """Return the charge for a mapping that is about to be made; without an address, for the worst place."""
    start = address if address is not None else BLOCK - 1
    return cost([(start, start + size)])


def mapped(pid: int) -> int | None:
    """Return the charge for a process's mappings that could be managed memory; 0 if it has ended, None if unknown."""
    return None if (lines := proc.maps(pid)) is None else cost(areas(lines))


def areas(maps: Iterable[bytes]) -> Iterator[tuple[int, int]]:
    """Yield the areas, from lines of /proc/PID/maps, that could be managed memory."""
    for line in maps:
        area, rights, offset, _ = line.split(maxsplit=3)
        if rights.endswith(b"s"):
            start, _, end = area.partition(b"-")
            if int(start, 16) == int(offset, 16):
                yield int(start, 16), int(end, 16)

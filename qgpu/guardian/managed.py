"""Address space that could be managed memory: what of a process is mapped as UVM demands of its mappings.

Managed memory is a shared mapping at an offset equal to its address (uvm.c:uvm_mmap; docs/decisions/0008), which
/proc/PID/maps shows, whatever part of it is left. That it is UVM's is not shown there: the device in it is the one
that the file lies on.
"""

from __future__ import annotations

from pathlib import Path


def mapped(pid: int, maps: str | None = None) -> int:
    """Add up what a process maps that could be managed memory, in bytes; 0 for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text() if maps is None else maps
    except OSError:
        return 0
    total = 0
    for line in text.splitlines():
        area, rights, offset, _ = line.split(maxsplit=3)
        if rights.endswith("s"):
            start, _, end = area.partition("-")
            if int(start, 16) == int(offset, 16):
                total += int(end, 16) - int(start, 16)
    return total

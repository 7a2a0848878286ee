"""Address space that could be managed memory: what of a process is mapped from /dev/nvidia-uvm.

UVM makes managed memory of mappings of its own file only, which /proc/PID/maps shows (docs/decisions/0008).
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_SYS_KCMP = {"x86_64": 312, "aarch64": 272}
_KCMP_VM = 1
_libc = ctypes.CDLL(None, use_errno=True)


def mapped(pid: int, major: int | None, maps: str | None = None) -> int:
    """Add up what a process maps of the device with this major number, in bytes; 0 for a process that is gone."""
    if major is None:
        return 0
    try:
        text = Path(f"/proc/{pid}/maps").read_text() if maps is None else maps
    except OSError:
        return 0
    total = 0
    device = f" {major:02x}:"
    for line in text.splitlines():
        if device in line:
            area, _, _, number, *_ = line.split(maxsplit=4)
            if number.startswith(device.strip()):
                start, _, end = area.partition("-")
                total += int(end, 16) - int(start, 16)
    return total


def threads(pid: int) -> int:
    """Count a process's threads. Raises OSError when it is gone."""
    return len(os.listdir(f"/proc/{pid}/task"))


def same_memory(pid: int, other: int) -> bool:
    """Tell whether two processes share their address space, as after vfork or clone(CLONE_VM)."""
    return pid == other or _libc.syscall(_SYS_KCMP[os.uname().machine], pid, other, _KCMP_VM, 0, 0) == 0

"""Where a process maps its channels' USERD, and what stands there, read as hints through /proc.

USERD is card memory that a program maps to submit work: 512 bytes for each channel. The mapping is found by its device,
its size and its content. A process can put anything there, replace the mapping at any time, and make a read as slow as
it likes, so only a thread of its pod's own may read.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import NamedTuple

from qgpu.guardian.accounting.rm_object import Key
from qgpu.linux import fd_budget, proc
from qgpu.nvidia import abi

#: GP_GET and GP_PUT.
_INDICES = struct.Struct("<II")
#: No more is read of a process's list of mappings: a CUDA program has some thousands, of a hundred bytes each.
_MOST_MAPS_BYTES = 2 << 20
#: No more mappings of the right size are looked at: a CUDA program has dozens of them.
_MOST_CANDIDATES = 256

#: The first and the last address of a mapping, the latter exclusive.
Area = tuple[int, int]
#: Returns the number of the character device that a process maps in an area; None for anything else.
MappedDevice = Callable[[int, Area], int | None]


class Slot(NamedTuple):
    """The USERD of one channel, and the process that maps it."""

    pid: int
    #: When the process started, as ``proc.start_time`` has it.
    started: str
    #: The memory's name, and its size in bytes, 0 while that is unknown.
    memory: Key
    memory_bytes: int
    offset: int
    #: How many entries the channel's GPFIFO has.
    ring_size: int
    #: The channel's context, which tells it from a later one in the same place.
    context: int


class ProcessMemory:
    """The memory of a running process, open for reading."""

    def __init__(self, pid: int, started: str) -> None:
        """Open it. Raises OSError, also if another process has the number by now."""
        self.pid = pid
        self.fd = fd_budget.check_headroom(os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC))
        try:
            if proc.start_time(pid) != started:
                raise ProcessLookupError(f"process {pid} is gone")
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close it."""
        os.close(self.fd)

    def indices(self, base: int, slot: Slot) -> tuple[int, int] | None:
        """Read GP_GET and GP_PUT, given where the memory is mapped; None if no channel can have these."""
        with suppress(OSError):  # unmapped
            read = os.pread(self.fd, _INDICES.size, base + slot.offset + abi.USERD_GP_GET_AT)
            if len(read) == _INDICES.size:  # else the process has ended, or executes another program
                get, put = _INDICES.unpack(read)
                return (get, put) if get < slot.ring_size and put < slot.ring_size else None
        return None


def mapped_device(pid: int, area: Area) -> int | None:
    """Ask the kernel which character device a process maps in an area, whatever the file is called there.

    It tells nobody without CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE. A file's server is not asked.
    """
    with suppress(OSError):
        file = os.open(f"/proc/{pid}/map_files/{area[0]:x}-{area[1]:x}", os.O_PATH | os.O_CLOEXEC)
        try:
            return proc.device_of(file)
        finally:
            os.close(file)
    return None


def find(
    memory: ProcessMemory, slots: Collection[Slot], devices: Collection[int], device_at: MappedDevice = mapped_device
) -> dict[Slot, int]:
    """Return, by slot, where a process maps its memory, as far as that is certain. Raises OSError."""
    areas, bases = _shared_areas(memory.pid), dict[Slot, int]()
    for key in {slot.memory for slot in slots}:
        own = [slot for slot in slots if slot.memory == key]
        end = max(slot.offset for slot in own) + abi.USERD_BYTES
        large = [area for area in areas if area[1] - area[0] >= end]
        alike = [area for area in large if area[1] - area[0] == own[0].memory_bytes] or large
        if len(alike) <= _MOST_CANDIDATES:
            base = _only_fit(memory, own, [area[0] for area in alike if device_at(memory.pid, area) in devices])
            bases |= dict.fromkeys(own, base) if base is not None else {}
    return bases


def _only_fit(memory: ProcessMemory, slots: Collection[Slot], bases: Iterable[int]) -> int | None:
    """Return where all slots hold indices, and not only zeros, if that is in one place only.

    Any memory that was never used holds zeros. A program submits work as soon as it has channels.
    """
    fitting = []
    for base in bases:
        found = [memory.indices(base, slot) for slot in slots]
        if None not in found and any(any(indices or ()) for indices in found):
            fitting.append(base)
    return fitting[0] if len(fitting) == 1 else None


def _shared_areas(pid: int) -> list[Area]:
    """List a process's shared mappings; none if it shows more than is read: the only fit may be another one then."""
    areas, left = list[Area](), _MOST_MAPS_BYTES
    for line in proc.maps(pid) or ():
        left -= len(line)
        if left < 0:
            return []
        area, rights, _ = line.split(maxsplit=2)
        if rights.endswith(b"s"):
            start, _, end = area.partition(b"-")
            areas.append((int(start, 16), int(end, 16)))
    return areas

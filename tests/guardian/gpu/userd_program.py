"""A real process that maps files in the place of card memory; a test changes what stands in them."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
from pathlib import Path

from qgpu.guardian.gpu.userd_mapping import Area, Slot
from qgpu.linux import proc

SIZE = 2 << 20
ENTRIES = 1024
#: Stands for the card's number.
DEVICE = os.makedev(195, 3)
CLIENT, USERD_MEMORY = 7, 0x5C000017

_MAP = """
import mmap, sys
kept = []
for path in sys.argv[1:]:
    with open(path, "r+b") as file:
        kept.append(mmap.mmap(file.fileno(), 0))
print("mapped", flush=True)
sys.stdin.read()
"""


class UserdProgram:
    """The process, with one file that holds USERD of a channel that was used, and any number of others."""

    def __init__(self, folder: Path, sizes: tuple[int, ...] = (SIZE,)) -> None:
        self.paths = [folder / f"memory{number}" for number, _ in enumerate(sizes)]
        self.words = []
        for path, size in zip(self.paths, sizes, strict=True):
            with path.open("w+b") as file:
                file.truncate(size)
                self.words.append(mmap.mmap(file.fileno(), size))
        self.put(0, 1)
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", _MAP, *map(str, self.paths)]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"mapped\n"
        self.started = proc.start_time(self.process.pid)

    def slot(self, offset: int = 0x2000, ring_size: int = ENTRIES, memory_bytes: int = SIZE) -> Slot:
        """Return where a channel of it stands."""
        memory = CLIENT, USERD_MEMORY
        return Slot(self.process.pid, self.started, memory, memory_bytes, offset, ring_size, offset)

    def put(self, get: int, put: int | None = None, offset: int = 0x2000, file: int = 0) -> None:
        """Set GP_GET and GP_PUT of a slot."""
        struct.pack_into("<II", self.words[file], offset + 0x88, get, get if put is None else put)

    def device_at(self, pid: int, area: Area) -> int | None:
        """Take its files, and nothing else, for the card's memory."""
        shown = f"{area[0]:x}-{area[1]:x} ".encode()
        lines = [line for line in proc.maps(pid) or () if line.startswith(shown)]
        return DEVICE if any(str(path).encode() in line for path in self.paths for line in lines) else None

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()

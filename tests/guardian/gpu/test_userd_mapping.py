"""Where a process maps USERD: by device, size and content, and nowhere unless that is certain."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qgpu.guardian.gpu import userd_mapping
from qgpu.guardian.gpu.userd_mapping import ProcessMemory, Slot, mapped_device
from qgpu.linux import proc
from tests import fuse
from tests.guardian.gpu.userd_program import DEVICE, ENTRIES, SIZE, UserdProgram

_PAGE = mmap.PAGESIZE


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., UserdProgram]]:
    """Start programs that map files of these sizes."""
    started = []

    def begin(*sizes: int) -> UserdProgram:
        started.append(UserdProgram(tmp_path, sizes or (SIZE,)))
        return started[-1]

    yield begin
    for program in started:
        program.end()


def find(program: UserdProgram, *slots: Slot) -> list[tuple[int, int] | None]:
    """Return GP_GET and GP_PUT of each slot that is found."""
    memory = ProcessMemory(program.process.pid, program.started)
    try:
        found = userd_mapping.find(memory, slots, {DEVICE}, program.device_at)
        return [memory.indices(base, slot) for slot, base in sorted(found.items())]
    finally:
        memory.close()


def test_the_only_mapping_of_the_right_size_is_found(start):
    program = start(SIZE, 2 * SIZE, _PAGE)
    program.put(3, 9)
    program.put(5, 5, offset=0x5000)

    assert find(program, program.slot(), program.slot(0x5000)) == [(3, 9), (5, 5)]


def test_memory_of_unknown_size_is_found_where_all_slots_fit(start):
    program = start(SIZE, _PAGE)
    program.put(3, 9)

    assert find(program, program.slot(memory_bytes=0)) == [(3, 9)]


def test_no_mapping_of_another_device_is_taken(start):
    program = start()
    program.device_at = lambda pid, area: DEVICE + 1

    assert find(program, program.slot()) == []


@pytest.mark.parametrize("value", [ENTRIES, 0xFFFFFFFF])
def test_numbers_beyond_the_ring_are_no_indices(start, value):
    program = start()
    for get, put in ((value, 0), (0, value)):
        program.put(get, put)

        assert find(program, program.slot()) == []


def test_content_of_each_slot_tells_mappings_of_one_size_apart(start):
    program = start(SIZE, SIZE)
    program.put(3, 9)
    program.put(3, 9, file=1)
    program.put(ENTRIES, offset=0x5000, file=1)

    assert find(program, program.slot(), program.slot(0x5000)) == [(3, 9), (0, 0)]


def test_a_used_mapping_is_told_from_those_with_zeros(start):
    program = start(SIZE, SIZE, SIZE)
    program.put(0)
    assert find(program, program.slot()) == []
    program.put(3, 9, file=1)

    assert find(program, program.slot()) == [(3, 9)]


def test_of_two_mappings_that_fit_none_is_taken(start):
    program = start(SIZE, SIZE)
    program.put(3, 9)
    program.put(4, 4, file=1)

    assert find(program, program.slot()) == []


def test_nothing_is_certain_beyond_what_is_read(start, monkeypatch):
    program = start()
    lines = list(proc.maps(program.process.pid) or ())
    monkeypatch.setattr(userd_mapping, "_MOST_MAPS_BYTES", sum(map(len, lines)))
    assert find(program, program.slot()) == [(0, 1)]
    monkeypatch.setattr(userd_mapping, "_MOST_MAPS_BYTES", sum(map(len, lines)) - 1)

    assert find(program, program.slot()) == []


def test_nothing_is_certain_among_too_many_mappings(start, monkeypatch):
    program = start(SIZE, SIZE)
    monkeypatch.setattr(userd_mapping, "_MOST_CANDIDATES", 2)
    assert find(program, program.slot()) == [(0, 1)]
    monkeypatch.setattr(userd_mapping, "_MOST_CANDIDATES", 1)

    assert find(program, program.slot()) == []


def test_memory_of_a_later_process_with_the_number_stays_closed(start):
    program = start()
    before = len(os.listdir("/proc/self/fd"))
    for started in ("", "1", f"{program.started}0"):
        with pytest.raises(ProcessLookupError):
            ProcessMemory(program.process.pid, started)

    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_of_an_ended_process_holds_no_indices(start):
    program = start()
    memory = ProcessMemory(program.process.pid, program.started)
    base = 1 << 40
    assert memory.indices(base, program.slot()) is None  # nothing is mapped there
    program.end()

    assert memory.indices(base, program.slot()) is None
    memory.close()


def area_of(pid: int, name: bytes) -> tuple[int, int]:
    """Return where a process maps a file."""
    (line,) = (line for line in proc.maps(pid) or () if line.endswith(name))
    start, _, end = line.split()[0].partition(b"-")
    return int(start, 16), int(end, 16)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to ask which file is mapped")
def test_the_kernel_tells_which_device_is_mapped(tmp_path):
    path = tmp_path / "nvidia0"
    path.write_bytes(bytes(_PAGE))
    with path.open("rb") as file, open("/dev/zero", "rb") as zero:
        of_file = mmap.mmap(file.fileno(), _PAGE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        of_zero = mmap.mmap(zero.fileno(), _PAGE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    at_zero = area_of(os.getpid(), b"/dev/zero")

    assert mapped_device(os.getpid(), at_zero) == os.stat("/dev/zero").st_rdev
    assert mapped_device(os.getpid(), area_of(os.getpid(), b"nvidia0")) is None
    of_zero.close()
    of_file.close()
    assert mapped_device(os.getpid(), at_zero) is None


_MAP_FILE = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
file = os.open(sys.argv[1], os.O_RDONLY)
ctypes.CDLL(None).mmap(None, ctypes.c_size_t(4096), 1, 1, file, ctypes.c_long(0))
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to ask which file is mapped")
def test_no_file_server_is_asked_what_is_mapped(tmp_path):
    with fuse.served(tmp_path, fuse.GETATTR) as served:
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, "-c", _MAP_FILE, served.file], stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"
        area = area_of(process.pid, bytes(served.file))

        assert mapped_device(process.pid, area) is None
        assert served.lives()
        process.kill()
        process.communicate()

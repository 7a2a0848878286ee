"""Reading and writing other processes' memory: this process stands for them."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.linux.seccomp_notify import Notification, ProcessMemory

_PAGES = 3


@pytest.fixture
def pages():
    """Three pages of which the last is not there, and the address of the first."""
    found = mmap.mmap(-1, _PAGES * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(found))
    libc = ctypes.CDLL(None, use_errno=True)
    last = ctypes.c_void_p(address + (_PAGES - 1) * mmap.PAGESIZE)
    assert libc.mprotect(last, mmap.PAGESIZE, 0) == 0
    return found, address


def test_a_call_sees_memory_as_its_first_read_found_it(pages):
    found, at = pages
    memory = ProcessMemory()
    assert memory.read(os.getpid(), at, 8) == bytes(8)

    found[16:24] = b"changed!"

    assert memory.read(os.getpid(), at + 16, 8) == bytes(8)
    memory.next_call()
    assert memory.read(os.getpid(), at + 16, 8) == b"changed!"


def test_what_was_read_of_one_thread_is_not_anothers(pages):
    _, at = pages
    memory = ProcessMemory()
    assert memory.read(os.getpid(), at, 8) is not None

    assert memory.read(1 << 30, at, 8) is None


def test_reading_ahead_does_not_touch_the_next_page(pages):
    _, at = pages
    end = at + (_PAGES - 1) * mmap.PAGESIZE
    memory = ProcessMemory()

    assert memory.read(os.getpid(), end - 16, 8) == bytes(8)
    assert memory.read(os.getpid(), end - 8, 8) == bytes(8)
    assert memory.read(os.getpid(), end - 8, 16) is None
    assert memory.read_some(os.getpid(), end - 8, 16) == bytes(8)


def test_writes_end_what_was_read_and_reach_every_address(pages):
    found, at = pages
    memory = ProcessMemory()
    memory.read(os.getpid(), at, 8)

    memory.write(os.getpid(), [(at, b"one"), (at + mmap.PAGESIZE, bytearray(b"two")), (at + 1, b"N")])

    assert memory.read(os.getpid(), at, 3) == b"oNe"
    assert found[mmap.PAGESIZE : mmap.PAGESIZE + 3] == b"two"


def test_more_writes_than_one_system_call_takes_are_all_made(pages):
    found, at = pages

    ProcessMemory().write(os.getpid(), [(at + each, b"x") for each in range(2000)])

    assert found[:2001] == b"x" * 2000 + b"\0"


def test_a_write_to_memory_that_is_not_there_fails(pages):
    _, at = pages
    with pytest.raises(OSError, match="Bad address"):
        ProcessMemory().write(os.getpid(), [(at, b"x"), (at + (_PAGES - 1) * mmap.PAGESIZE, b"x")])


@given(reads=st.lists(st.tuples(st.integers(0, 2 * mmap.PAGESIZE), st.integers(0, 64)), max_size=8))
def test_every_read_of_a_call_is_what_lies_there(reads):
    data = bytes(i * 7 & 0xFF for i in range(_PAGES * mmap.PAGESIZE))
    there = ctypes.create_string_buffer(data, len(data))
    memory = ProcessMemory()
    for at, size in reads:
        assert memory.read(os.getpid(), ctypes.addressof(there) + at, size) == data[at : at + size]


@pytest.mark.parametrize(("arguments", "alike"), [((5, 1, 2, 3), True), ((6, 1, 2, 3), False), ((5, 1, 9, 3), False)])
def test_a_call_on_another_descriptor_is_no_restart(arguments, alike):
    first, second = Notification(1, 77, 8, 16, (5, 1, 2, 3)), Notification(2, 77, 8, 16, arguments)

    assert first.asks_as(second) == alike

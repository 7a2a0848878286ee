"""Calls of UVM, for tests: as libcuda makes them, as far as they do without a card that works.

Layouts: uvm_ioctl.h of 535 to 595. A pod's process runs these with a ``state`` of its own (qg.Process).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct

import modules

MIB = 1 << 20
BLOCK, BLOCK_TABLES, BATCH, TABLE = 2 * MIB, 8 << 10, 128 * MIB, 4 << 10
INITIALIZE, FREE, MAP_EXTERNAL, PAGEABLE, PREFER, SEMAPHORES = 0x30000001, 34, 33, 39, 42, 68
VALIDATE, CREATE_EXTERNAL, REGISTER_GPU, DYNAMIC_PARALLELISM = 72, 73, 37, 65
DISABLE_HMM, SHARING = 1, 2
OK, BAD_ARGUMENT, NO_MEMORY = 0, 0x1F, 0x51
PROT_NONE, PROT_RW, SHARED, PRIVATE, FIXED, ANONYMOUS = 0, 3, 0x01, 0x02, 0x10, 0x20
_UNSET = 0xFFFFFFFF
#: Parameters hold 36 bytes for each of so many cards, by branch; what stands behind them is written at both places.
_CARDS = (32, 256)

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def cost(size):
    """Bytes that managed memory which fills its blocks is charged (docs/decisions/0008)."""
    blocks = size // BLOCK
    return blocks * (BLOCK + BLOCK_TABLES) + (BATCH if blocks > 1 else 0)


def tables(base, length):
    """Bytes that the page tables of a mapping are charged: tables of each level that it touches."""
    return TABLE * sum((base + length - 1 >> bits) - (base >> bits) + 1 for bits in (21, 29, 38, 47))


def ask(fd, number, *words, size=64):
    """Make a call of 64-bit words; the status in the first 32-bit word behind them."""
    data = bytearray(struct.pack(f"{len(words)}QI", *words, _UNSET).ljust(size, bytes(1)))
    fcntl.ioctl(fd, number, data, True)
    return struct.unpack_from("I", data, 8 * len(words))[0]


def start(state, flags=0):
    """Open UVM and initialise the file; its status."""
    state["uvm"] = os.open(modules.UVM, os.O_RDWR)
    return ask(state["uvm"], INITIALIZE, flags)


def again(state, flags):
    """Initialise a file once more: UVM accepts the flags that it has."""
    return ask(state["uvm"], INITIALIZE, flags)


def reserve(size):
    """Return address space that nobody uses, from a block on."""
    at = libc.mmap(None, size + BLOCK, PROT_NONE, PRIVATE | ANONYMOUS, -1, 0)
    return at + -at % BLOCK


def take(state, size, protection=PROT_RW):
    """Map managed memory over a reservation, at an offset equal to its address; the address, or -errno."""
    at = reserve(size)
    got = libc.mmap(at, size, protection, SHARED | FIXED, state["uvm"], at)
    return got if got == at else -ctypes.get_errno()


def give_back(state, at, size):
    """Unmap it."""
    return libc.munmap(at, size)


def touch(state, at, size):
    """Write a word into each page and read it back; the words that are not as written."""
    pages = range(at, at + size, 4096)
    for page in pages:
        ctypes.c_uint64.from_address(page).value = page
    return sum(ctypes.c_uint64.from_address(page).value != page for page in pages)


def semaphores(state, size=BLOCK):
    """Make a pool of semaphores that no card uses; its status and address."""
    base = reserve(size)
    return _for_cards(state["uvm"], SEMAPHORES, (base, size), b"", 0, status_at=8), base


def map_external(state, base, length):
    """Map memory of a card that UVM does not have; the status."""
    return _for_cards(state["uvm"], MAP_EXTERNAL, (base, length, 0), b"\1" * 36, 1, status_at=20)


def _for_cards(fd, number, words, card, count, status_at):
    """Make a call with a row of attributes for each card; status_at: from the count of rows."""
    data = bytearray(struct.pack(f"{len(words)}Q", *words) + card).ljust(16384, bytes(1))
    counts_at = [8 * len(words) + 36 * cards for cards in _CARDS]
    for at in counts_at:
        struct.pack_into("Q", data, at, count)
        struct.pack_into("I", data, at + status_at, _UNSET)
    fcntl.ioctl(fd, number, data, True)
    said = [struct.unpack_from("I", data, at + status_at)[0] for at in counts_at]
    return next((status for status in said if status != _UNSET), _UNSET)


def free(state, base, length):
    """Free a range. Until 535 the call has the length, and the status behind it."""
    data = bytearray(struct.pack("QQII", base, length, _UNSET, 0).ljust(64, bytes(1)))
    fcntl.ioctl(state["uvm"], FREE, data, True)
    return data[8:20]

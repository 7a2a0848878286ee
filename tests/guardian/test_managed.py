"""What of a process's address space could be managed memory."""

from __future__ import annotations

import os

from qgpu.guardian import kcmp, managed

MAPS = """\
204a00000-204c00000 rw-s 204a00000 00:06 381 /dev/nvidia-uvm
55d0c8a00000-55d0c8a21000 rw-p 00000000 00:00 0 [heap]
7fcd76000000-7fcd96000000 rw-s 7fcd76000000 00:06 381                      /dev/nvidia-uvm
7fcd96000000-7fcd97000000 rw-s 00000000 00:06 380 /dev/nvidiactl
7fcd98000000-7fcd99000000 r--s 7fcd98000000 00:06 381 /dev/nvidia-uvm (deleted)
7fcda0000000-7fcda1000000 rw-p 7fcda0000000 00:06 99 /data/file
7ffd11000000-7ffd11021000 rw-p 00000000 00:00 0 [stack]
"""


def test_shared_mappings_at_their_own_address_are_added_up_wherever_their_file_lies():
    assert managed.mapped(1, MAPS) == 0x200000 + 0x20000000 + 0x1000000


def test_a_process_that_is_gone_maps_nothing():
    assert managed.mapped(0) == 0


def test_an_ordinary_process_maps_no_managed_memory():
    assert managed.mapped(os.getpid()) == 0


def test_processes_share_their_memory_with_themselves_alone():
    child = os.fork()
    if child == 0:
        os.read(0, 1) if os.isatty(0) else None
        os._exit(0)
    try:
        assert kcmp.same_memory(os.getpid(), os.getpid())
        assert not kcmp.same_memory(os.getpid(), child)
    finally:
        os.waitpid(child, 0)

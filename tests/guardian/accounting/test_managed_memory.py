"""What of a process's address space could be managed memory."""

from __future__ import annotations

import os
import threading

from qgpu.guardian.accounting.managed_memory import BLOCK, areas, cost, cost_of, mapped
from qgpu.guardian.accounting.memory_quota import Allowance, MemoryQuota
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.linux import kcmp

MAPS = b"""\
204a00000-204c00000 rw-s 204a00000 00:06 381 /dev/nvidia-uvm
55d0c8a00000-55d0c8a21000 rw-p 00000000 00:00 0 [heap]
7fcd76000000-7fcd96000000 rw-s 7fcd76000000 00:06 381                      /dev/nvidia-uvm
7fcd96000000-7fcd97000000 rw-s 00000000 00:06 380 /dev/nvidiactl
7fcd98000000-7fcd99000000 r--s 7fcd98000000 00:06 381 /dev/nvidia-uvm (deleted)
7fcda0000000-7fcda1000000 rw-p 7fcda0000000 00:06 99 /data/file
7fcdb0000000-7fcdb1000000 r--p 00000000 00:06 98 /data/\xff\x0c1000-2000 rw-s 1000 \xe2\x80\xa8-
7ffd11000000-7ffd11021000 rw-p 00000000 00:00 0 [stack]
"""


def test_shared_mappings_at_own_address_count_for_any_file_path():
    alone = [(0x204A00000, 0x204C00000), (0x7FCD76000000, 0x7FCD96000000), (0x7FCD98000000, 0x7FCD99000000)]

    assert areas(MAPS.split(b"\n")[:-1]) == alone


def test_managed_charge_is_never_less_than_touched_blocks():
    block = BLOCK
    one = cost([(block, 2 * block)])

    assert block < one < block + block // 100
    assert cost([(block + 4096, block + 8192)]) == one
    assert cost([(block, block + 4096), (2 * block - 4096, 2 * block)]) == one
    assert cost([(2 * block - 4096, 2 * block + 4096)]) == cost([(block, 3 * block)]) > 2 * one


def test_what_uvm_keeps_besides_is_bounded():
    large = 1 << 40

    assert large < cost([(0, large)]) < large + large // 200 + (256 << 20)


def test_mapping_at_unknown_address_costs_the_worst_case():
    for size in (4096, BLOCK, BLOCK + 4096):
        assert cost_of(None, size) >= max(cost_of(at, size) for at in range(0, BLOCK, 4096))


def test_a_process_that_is_gone_maps_nothing():
    assert mapped(0) == 0


def test_an_ordinary_process_maps_no_managed_memory():
    assert mapped(os.getpid()) == 0


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


def test_processes_without_uvm_cost_no_look_at_what_they_map():
    """A pod can have thousands, and each of its allocations asks what it uses, under the lock."""
    table, looked = ObjectTable(), []
    table.note({"fact": "pod", "name": "web", "cgroup": "/web", "grants": {}})
    for pid in range(10, 20):
        table.note({"fact": "process", "pid": pid, "pod": "web"})
    table.note({"fact": "managed", "pid": 15, "bytes": 1 << 21})
    allowance = Allowance({0: 0}, {0: 1 << 30})
    quota = MemoryQuota(
        table, threading.RLock(), table.note, lambda _: allowance, None, dict, lambda pid: looked.append(pid) or 0, None
    )

    assert (quota.used("web", 0), looked) == (1 << 21, [15])

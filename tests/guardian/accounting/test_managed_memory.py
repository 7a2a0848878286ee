"""What of a process's address space could be managed memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tracemalloc

import pytest

from qgpu.guardian.accounting import managed_memory
from qgpu.guardian.accounting.address_space import table_bytes
from qgpu.guardian.accounting.managed_memory import BLOCK, areas, cost, cost_of, mapped
from qgpu.guardian.accounting.memory_quota import Allowance, MemoryQuota
from qgpu.guardian.accounting.object_table import ObjectTable

CARD = bytes(16)
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

    assert list(areas(MAPS.split(b"\n")[:-1])) == alone


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


MAPPING = """
import ctypes, os, sys
libc, most = ctypes.CDLL(None), 200
for _ in range(15):
    os.mkdir("n" * most)
    os.chdir("n" * most)
file = os.open("f" * most, os.O_RDWR | os.O_CREAT)
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
for _ in range(4000):
    assert libc.mmap(None, 4096, 1, 1, file, 0) != -1
print(flush=True)
input()
"""


def test_mappings_of_files_with_long_names_take_little_memory(tmp_path):
    """A process can have a million of them, and nothing but its own kernel memory bounds it."""
    child = subprocess.Popen(
        [sys.executable, "-c", MAPPING], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    tracemalloc.start()
    charge = mapped(child.pid)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    child.communicate(b"\n")

    assert (charge, most < 1 << 20) == (0, True)


@pytest.fixture
def quota():
    """A pod under a limit with ten processes, of which each uses UVM."""
    table, limit, lock = ObjectTable(), Allowance({0: 0}, {0: 1 << 30}), threading.RLock()
    table.note({"fact": "pod", "name": "web", "cgroup": "/web", "grants": {}})
    made = MemoryQuota(table, lock, table.note, lambda _: limit, lambda _: False, lambda: {CARD: 0}, lambda _: 0, None)
    for pid in range(10, 20):
        table.note({"fact": "process", "pid": pid, "pod": "web"})
        table.note({"fact": "managed", "pid": pid, "bytes": 1 << 21})
        made.map(pid, 1 << 40, 4096, [CARD], (0, 0))
        assert made.reserve_mapping("web", pid, 1 << 20)
    return made


def end(quota, pid):
    quota.exited(pid)
    quota._table.note({"fact": "exit", "pid": pid})


def test_charge_is_known_without_a_walk_over_processes(quota, monkeypatch):
    """A pod can have thousands, and each of its allocations asks what it uses, under the lock."""
    monkeypatch.setattr(ObjectTable, "pids_of", lambda *_: pytest.fail("looked at each"))

    assert quota.used("web", 0) == 10 * (3 << 20) + 10 * table_bytes(1 << 40, 4096)


def test_ended_process_is_charged_for_nothing_of_uvm(quota, monkeypatch):
    monkeypatch.setattr(managed_memory, "mapped", lambda pid: 1 << 21)
    for pid in range(11, 20):
        end(quota, pid)
    quota.search.clear("web")
    one = quota.used("web", 0)
    end(quota, 10)
    quota.search.clear("web")

    assert one == (3 << 20) + table_bytes(1 << 40, 4096)
    assert quota.used("web", 0) == 0
    while quota._table.allocations.forget_some(3):
        pass
    assert quota._table.records("web") == (0, 0)


def test_mapping_settled_after_its_process_ended_gains_nothing(quota):
    """A process that gets its number later would start with room that nobody granted."""
    end(quota, 10)
    before = quota.used("web", 0)
    quota.rescan_mappings(10, 1 << 20)
    quota._table.note({"fact": "process", "pid": 10, "pod": "web"})

    assert quota.used("web", 0) == before


def test_ended_process_maps_nothing_more(quota):
    """Nobody would ever take such a mapping back."""
    end(quota, 10)
    quota.map(10, 1 << 41, 4096, [CARD], (0, 0))
    quota.will_use_uvm(10)

    assert 10 not in quota._table.allocations.mappings
    assert 10 not in quota._table.allocations.managed

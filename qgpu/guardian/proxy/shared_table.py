"""The object table that all pods' dispatchers share: its journal, its lock, and what else its parts use.

Every fact goes into both under one lock, which no thread holds while it waits for a pod's memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qgpu.guardian.accounting.memory_quota import Allowance, MemoryQuota
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.rm_object import Fact, Key
from qgpu.guardian.failover.journal import Journal, Writes
from qgpu.guardian.gpu.gpu_ops import GpuOps
from qgpu.guardian.gpu.reconciler import Reconciler
from qgpu.guardian.proxy.held_uvm_files import UvmFiles
from qgpu.guardian.proxy.ioctl_proxy import Perform
from qgpu.guardian.proxy.refusals import Refusals
from qgpu.linux.open_file_set import FileSets
from qgpu.nvidia import abi, uvm

#: How long a call waits until the main loop has dropped all objects below one that is gone.
_FORGETTING_S, _LOOK_S = 5.0, 0.002


@dataclass(slots=True)
class SharedTable:
    """The table, how it is recorded, and what the guardian asks of RM and of its main loop."""

    table: ObjectTable
    journal: Journal
    gpu_ops: GpuOps
    #: Open the gate over channels that are about to be freed; gate them again if RM did not free them.
    open_for_free: Callable[[list[Key]], None]
    cancel_free: Callable[[list[Key]], None]
    #: Called with every new process and its pidfd.
    watch: Callable[[int, int], None]
    clock: Callable[[], int]
    allowance: Callable[[str], Allowance] = lambda _pod: Allowance()
    #: Returns the ns until RM's lock may be held for so many ns in a pod's turn, on the cards of one of its clients.
    until_own_turn: Callable[[str, int, int], int] = lambda _pod, _client, _ns: 0
    #: Wakes the main loop.
    wake: Callable[[], None] = lambda: None
    major: int = abi.NV_MAJOR
    uvm_major: int | None = None
    uvm_layouts: Mapping[int, uvm.Layout] = field(default_factory=dict)
    #: Whether multicast objects keep memory (``Branch``).
    multicast_keeps: bool = True
    #: Device instances by the UUID that UVM uses; also, once registered, the places of MIG instances.
    uuids: Mapping[bytes, int] = field(default_factory=dict)
    perform: Perform = abi.perform
    lock: threading.RLock = field(default_factory=threading.RLock)
    #: What this guardian and earlier ones recorded about pods' open files.
    files: FileSets = field(default_factory=FileSets)
    #: Dictionaries by pod. A pod leaves all of them when it is retired.
    by_pod: list[dict[str, Any]] = field(default_factory=list)
    #: Open files of /dev/nvidia-uvm that processes under a memory limit use.
    uvm_files: UvmFiles = field(init=False)
    refusals: Refusals = field(init=False)
    quota: MemoryQuota = field(init=False)
    reconciler: Reconciler = field(init=False)

    def note(self, fact: Fact) -> None:
        """Enter a fact in the object table and the journal, under the lock."""
        with self.lock:
            self.table.note(fact)
            self.journal.append(fact)
            self._compact_journal()

    def _compact_journal(self) -> None:
        if self.journal.should_compact:
            self.journal.compact(self.table.facts())

    def record_answer(self, number: int, call: int, writes: Writes) -> None:
        """Write to the journal what a call is about to be answered with."""
        with self.lock:
            self.journal.answer(number, call, writes)
            self._compact_journal()

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Wait for the main loop to drop objects, for a while."""
        until = time.monotonic() + _FORGETTING_S
        while not done() and time.monotonic() < until:
            time.sleep(_LOOK_S)


class SharedPart:
    """What every part of the shared state uses."""

    def __init__(self, shared: SharedTable) -> None:
        self._shared, self._table, self._lock = shared, shared.table, shared.lock
        self._gpu_ops, self._note = shared.gpu_ops, shared.note

    def _kept_by_pod(self) -> dict[str, Any]:
        """Return a dictionary that forgets a pod once it is retired."""
        self._shared.by_pod.append({})
        return self._shared.by_pod[-1]

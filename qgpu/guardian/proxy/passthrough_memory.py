"""Looks at what the kernel made where it continued a pod's RM_ALLOC_MEMORY.

RM pins the caller's own pages, so the kernel performs that call (``old_memory_calls.py``). Another thread can change
its class meanwhile, to one that reaches any memory or all registers of the card. Such an object is freed before
anything can use it:

- The call starts when no mapping is in progress, because the kernel may perform mappings, too, and their arguments can
  change as well.
- The pod's next call waits until it is over. Then the guardian frees such objects in each client of the pod.
- Another handle than the one that was asked for may have come by then: what is not found under that is counted.
- A client whose file cannot be found stays unseen. Nothing is duplicated, exported or mapped from it, and the kernel
  maps nothing for the pod while RM has the client.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterable, Sequence
from functools import partial

import structlog

from qgpu.guardian.accounting.rm_object import Key
from qgpu.guardian.proxy.handler_context import Handler, HandlerContext, PodCall
from qgpu.guardian.proxy.passthrough import Passthrough
from qgpu.linux import fd_budget, proc, thread_freezer
from qgpu.linux.inflight_syscalls import InflightSyscalls
from qgpu.linux.pod_processes import each_task
from qgpu.nvidia import abi, uvm

_log = structlog.get_logger("guardian")

#: The refusal of what was found, and of what may use what was not looked at.
BY_ADDRESS = "memory by its address on the card"
UNSEEN = "mapping while a client's file is not found"
#: How often a waiting call's thread is checked to be there still.
_LOOK_S = 0.5
#: How long mappings wait for clients whose process is ending, and how often they look: a worker may be restarted while
#: the driver still frees its predecessor's memory.
_ENDING_S, _ENDING_LOOK_S = 10.0, 0.05


class PassthroughMemory(Handler):
    """Follows the calls that the kernel continues, and frees what they may not have made."""

    def __init__(self, ctx: HandlerContext, passthrough: Passthrough) -> None:
        super().__init__(ctx)
        self._passthrough = passthrough
        self._calls, self._cpu_mappings, self._asked = InflightSyscalls(), InflightSyscalls(), list[Key]()
        self._continued = True  # a dead guardian may have let one continue
        self._found_left = False
        #: Until when mappings wait for clients to end that were not looked at.
        self._patience_ends = 0.0

    def find_left(self) -> None:
        """Find what a dead guardian let continue, among the threads of the pod. If that fails, tell so and go on."""
        pod = self._shared.table.pods.get(self._pod)
        if self._found_left or pod is None:
            return
        try:
            self._search(pod.cgroups)
        except OSError as error:  # the call that the dead guardian did not answer still gets its answer
            _log.warning("not all calls in progress are found", pod=self._pod, error=str(error))
        else:
            self._found_left = True

    def _search(self, cgroups: Sequence[str]) -> None:
        threads = _threads(cgroups, self._shared.table.pids_of(self._pod))
        for calls, is_wanted in (
            (self._calls, lambda request: request & 0xFF == abi.NV_ESC_RM_ALLOC_MEMORY),
            (self._cpu_mappings, lambda request: request & 0xFF == abi.NV_ESC_RM_MAP_MEMORY),
            (self._ctx.uvm_mappings, lambda request: request in uvm.KERNEL_MAPPINGS),
            (self._ctx.registering, lambda request: request == uvm.REGISTER_CHANNEL),
        ):
            calls.find(threads, is_wanted)

    def begin(self, pod_call: PodCall, key: Key, rm_class: int) -> None:
        """Record a call that the kernel is about to continue, and its object. Raises OSError if its thread is gone."""
        _wait(self._ctx.uvm_mappings, pod_call)
        _wait(self._cpu_mappings, pod_call)
        self._calls.add(pod_call.call, pod_call.pid)
        self._untracked.add(*key, rm_class)
        self._asked.append(key)
        self._continued = True

    def next_call(self, tid: int) -> None:
        """Record that a thread makes its next call: its last one is over."""
        self._calls.remove(tid)
        self._cpu_mappings.remove(tid)

    def look(self, pod_call: PodCall, file: int | None = None) -> None:
        """Free what no pod may have before a call on RM's ``file`` or another. Raises OSError if the caller is gone."""
        if self._continued:
            _wait(self._calls, pod_call)
            self._continued = False
            self._untracked.count_unnamed(self._asked)
            self._asked = []
            self._patience_ends = time.monotonic() + _ENDING_S
            self._look_through(self._shared.table.clients_of(self._pod))
        if self._ctx.unseen and file is not None:
            self._look_through(self._ctx.unseen, file)

    def before_mapping(self, pod_call: PodCall) -> None:
        """Look before the kernel performs a mapping, from whichever client. Raises OSError if one stays unseen."""
        self.look(pod_call)
        while self._ctx.unseen:
            self._look_through(self._ctx.unseen)
            if self._ctx.unseen and time.monotonic() > self._patience_ends:
                self._count(UNSEEN)
                raise OSError(errno.EBUSY, UNSEEN)
            time.sleep(_ENDING_LOOK_S if self._ctx.unseen else 0)

    def before_cpu_mapping(self, pod_call: PodCall) -> None:
        """Look before the kernel performs RM_MAP_MEMORY, and record that it does. Raises OSError as above."""
        self.before_mapping(pod_call)
        self._cpu_mappings.add(pod_call.call, pod_call.pid)

    def _look_through(self, clients: Iterable[int], file: int | None = None) -> None:
        self._ctx.unseen = {client for client in clients if not self._is_clean(client, file)}

    def _is_clean(self, client: int, file: int | None) -> bool:
        """Free what a client may not have, through its own file or one of ours; False if that does not reach it."""
        if client not in self._shared.table.clients:
            return True
        found = None
        if not self._passthrough.may_have_device(client):
            devices = tuple(self._shared.table.devices.of(client))
            found = self._gpu_ops.free_children(client, devices, abi.CLASS_IDS_BY_ADDRESS, file)
        if found:
            self._count(BY_ADDRESS)
        return found is not None or (file is None and not self._gpu_ops.has_client(client))


def _threads(cgroups: Sequence[str], pids: Iterable[int]) -> set[int]:
    """List the threads in a pod's cgroups and of all processes that made calls; those only if the rest fails."""
    threads: set[int] = set()
    known = tuple(pids)

    def listing() -> set[int]:
        return thread_freezer.threads_of(cgroups, known)

    try:
        fd_budget.retry_on_emfile(lambda: threads.update(each_task(listing)))
    except OSError as error:
        _log.warning("threads of a pod are not listed", cgroups=cgroups, error=str(error))
        for pid in known:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                threads |= fd_budget.retry_on_emfile(partial(proc.threads, pid))
    return threads


def _wait(calls: InflightSyscalls, pod_call: PodCall) -> None:
    """Wait until no call is in progress: only the pod's own calls wait. Raises OSError if the caller is gone."""
    while not calls.wait(_LOOK_S):
        if not pod_call.still_waits():
            raise InterruptedError(errno.EINTR, "the caller is gone")

"""Frees and unmaps a pod's memory, and finds out from RM's figures what is really gone.

A handle is not all that keeps memory. UVM's mappings keep it too, and what they map is only claimed (``uvm_calls.py``).
RM counts for each process how much of its memory nobody else refers to (GPU_GET_PID_INFO: memPrivate). When private
memory is freed, that figure falls by its size. If the figure does not fall, something keeps the memory, and it stays
charged. Memory that is freed while it is mapped first gets another handle of ours in the pod's client; we free that
handle in the same way when the last mapping goes. Memory that the figures do not show as gone stays charged until the
pod's last process has ended. RM has one figure for each card. If a call frees several allocations there, the figure
must fall by the size of all of them, also of those that stay charged in any case. Otherwise the fall that one causes
would end the charge of another.

Nothing else may move the figures while they are read. The pod's calls are served one at a time, none of its mappings is
in progress, no other pod is duplicating its memory (``SharedState.pod_lock``), and none of its files was closed.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from qgpu.guardian.accounting.allocations import Allocation
from qgpu.guardian.accounting.rm_object import Key
from qgpu.guardian.proxy.handler_context import Handler, HandlerContext, PodCall
from qgpu.nvidia import abi

_log = structlog.get_logger("guardian")

#: RM looks through all objects of a process to say what it has. Only of one with very many does that take longer.
_LONG_NS = 10**6
#: How long a free waits for UVM mappings in progress before it treats their memory as still in use.
_MAPPING_PATIENCE_S = 0.02
#: Our handles in pods' clients start here, far from those that libcuda chooses.
_FIRST_HANDLE, _HANDLES = 0x6FFF0000, 0x10000
#: How many of them are tried; without an unused one, RM's figures decide whether the memory is gone.
_MOST_TRIES = 1000
#: A pod with this many objects or fewer is searched without asking RM first.
_FEW = 1000


class FreedMemory(Handler):
    """Frees and unmaps for one pod."""

    def __init__(self, ctx: HandlerContext) -> None:
        super().__init__(ctx)
        self._next = _FIRST_HANDLE

    def free(self, pod_call: PodCall, key: Key, carry_out: Callable[[], bool]) -> bool:
        """Free an object, and keep the charge of memory that outlives it; return whether RM freed it."""
        entry = self._shared.table.clients.get(key[0])
        # With many objects, ask RM first whether this file owns the client: a pod must not cause long searches. Nor may
        # it hold the lock of another pod, whose clients it can guess.
        few = self._shared.clients.owns(self._pod, key[0]) and self._shared.table.handles.counts[self._pod] <= _FEW
        mine = few or self._gpu_ops.reaches(pod_call.file, key[0])
        by_handle = self._shared.table.allocations.by_handle
        ending = self._shared.table.ending_with(key) if mine else []
        below = self._shared.table.below(key) if mine else ()
        on_fabric = [rm.key for rm in below if rm.rm_class == abi.NV_MEMORY_FABRIC]
        with self._shared.lock:
            memories = [memory for memory in ending if self._matters(memory)]
            cards = {memory.instance for memory in memories}
            # They keep memory that matters, or that must show in a figure.
            kept = {each: by_handle[each] for each in on_fabric if each in by_handle}
            on_fabric = [each for each, memory in kept.items() if self._matters(memory) or memory.instance in cards]
        if entry is None or not (memories or on_fabric):
            pod_call.begin()
            return carry_out()
        self._ctx.rare.wait()
        quiet = self._ctx.uvm_mappings.wait(_MAPPING_PATIENCE_S)
        with self._shared.pod_lock(entry.pod):
            if not memories:
                return self._free_on_fabric(pod_call, on_fabric, carry_out, quiet=quiet)
            if key in memories[0].handles and self._keep_by_own_handle(pod_call.file, key, memories[0]):
                pod_call.begin()
                return carry_out()
            for each in on_fabric:  # the memory that it keeps shows in the figures only after that
                self._free_first(each)
            clients = self._clients(key)
            before = self._private_before(pod_call, key, entry.maker, cards)
            sizes = {card: sum(memory.size for memory in ending if memory.instance == card) for card in cards}
            if not carry_out():
                return False
            after = {card: self._private_bytes(card, entry.maker) for card in cards}
            shows = quiet and self._clients(key) == clients
            for card in cards:
                here = [memory for memory in memories if memory.instance == card]
                self._judge(here, before.get(card), after[card], sizes[card] if shows else None)
            return True

    def _judge(self, memories: list[Allocation], before: int | None, after: int | None, size: int | None) -> None:
        """Discharge freed memory of a card if RM's figure fell by ``size``; charge it on otherwise, or with no size."""
        if after is None:
            return  # this driver gives no figures: rely on the claims
        if before is not None and size is not None and before - after >= size:
            for memory in memories:
                self._shared.quota.unmap_memory(memory.number)
        else:
            _log.info("memory outlives its handle", pod=self._pod, bytes=sum(memory.size for memory in memories))
            for memory in memories:
                self._shared.quota.pin(memory.number)

    def unmap(
        self, pod_call: PodCall, base: int, length: int, card: bytes | None, carry_out: Callable[[], bool]
    ) -> None:
        """Unmap a range, and free memory that only our own handle still keeps."""
        pid, allocations = pod_call.pid, self._shared.table.allocations
        pod_call.begin()
        with self._shared.lock:
            reach = allocations.space_of(pid).reaching_into(base, base + length)
            every = list(allocations.memories.values()) if pod_call.is_retry else []
        # Without the lock: a process can have very many mappings.
        mapped = allocations.among(reach, base, card)
        if pod_call.is_retry:  # the dead guardian has already dropped the mappings here
            mapped = [memory for memory in every if memory.pod == self._pod]
        kept = [memory for memory in mapped if (own := tuple(memory.handles)) and all(map(self.is_ours, own))]
        if not kept or not self._limited(kept[0]):
            if carry_out():
                self._shared.quota.unmap(pid, base, length, card)
            return
        self._ctx.rare.wait()
        quiet = self._ctx.uvm_mappings.wait(_MAPPING_PATIENCE_S)
        with self._shared.pod_lock(self._pod):
            if not carry_out():
                return
            self._shared.quota.unmap(pid, base, length, card)
            with self._shared.lock:
                gone = [memory for memory in kept if not allocations.is_mapped(memory.number)]
            for memory in gone:
                for key in list(memory.handles):
                    self._free_own_handle(pod_call, key, memory, quiet=quiet)

    def _free_own_handle(self, pod_call: PodCall, key: Key, memory: Allocation, *, quiet: bool) -> None:
        """Free one of our handles; memory that something else still keeps stays charged."""
        entry = self._shared.table.clients.get(key[0])
        maker = entry.maker if entry is not None else 0
        clients = self._clients(key)
        before = self._private_before(pod_call, key, maker, {memory.instance}).get(memory.instance)
        freed = self._gpu_ops.free_anywhere(key) or (pod_call.is_retry and not self._gpu_ops.exists(key))
        after = self._private_bytes(memory.instance, maker)
        shows = quiet and self._clients(key) == clients
        if before is not None and after is not None and (not shows or before - after < memory.size):
            self._shared.quota.pin(memory.number)
        if freed:
            self._shared.claims.freed(key)

    def _free_on_fabric(
        self, pod_call: PodCall, going: list[Key], carry_out: Callable[[], bool], *, quiet: bool
    ) -> bool:
        """Free objects of the fabric, and then our own handles of memory that only they kept."""
        allocations = self._shared.table.allocations
        kept = [memory for each in going if (memory := allocations.by_handle.get(each)) is not None]
        pod_call.begin()
        if not carry_out():
            return False
        for memory in kept:
            own = [each for each in memory.handles if each not in going]
            if own and all(map(self.is_ours, own)) and not allocations.is_mapped(memory.number):
                for each in own:
                    self._free_own_handle(pod_call, each, memory, quiet=quiet)
        return True

    def _free_first(self, key: Key) -> None:
        was = self._shared.table.objects.get(key)
        if self._gpu_ops.free_anywhere(key):
            self._shared.claims.end_free(key, was, [], gone=True)

    def is_ours(self, key: Key) -> bool:
        """Tell whether a handle is one of ours: a pod may not free it."""
        return _FIRST_HANDLE <= key[1] < _FIRST_HANDLE + _HANDLES

    def _clients(self, freed: Key) -> list[int]:
        """List the clients that RM has of the owner's pod: a file that closes takes its client's memory along."""
        with self._shared.lock:
            entry = self._shared.table.clients.get(freed[0])
            clients = self._shared.table.clients_of(entry.pod if entry is not None else self._pod)
        return [client for client in clients if (client, client) != freed and self._gpu_ops.has_client(client)]

    def _unused_handle(self, client: int) -> Key | None:
        """Return a handle for ours in a client; None if it has too many, or a dead guardian has made them."""
        for _ in range(_MOST_TRIES):
            if (ours := (client, self._next)) not in self._shared.table.objects:
                return ours
            self._next = _FIRST_HANDLE + (self._next + 1 - _FIRST_HANDLE) % _HANDLES
        return None

    def _matters(self, memory: Allocation) -> bool:
        return not memory.pinned and self._limited(memory)

    def _limited(self, memory: Allocation) -> bool:
        return memory.instance in self._shared.allowance(memory.pod).limits

    def _private_bytes(self, card: int, pid: int) -> int | None:
        with self._ctx.rare.worked(_LONG_NS):
            return self._gpu_ops.private_bytes(card, pid)

    def _private_before(self, pod_call: PodCall, key: Key, maker: int, cards: set[int]) -> dict[int, int | None]:
        """Return RM's figures before the free, by card; if a dead guardian freed the object, the one that it recorded.

        There is room for one figure. With memory on several cards none is recorded, because nobody could tell whose it
        is; memory without a figure stays charged.
        """
        if pod_call.is_retry and pod_call.unanswered is not None and not self._gpu_ops.exists(key):
            before = {card: pod_call.unanswered.before for card in cards if len(cards) == 1}
        else:
            before = {card: self._private_bytes(card, maker) for card in cards}
        pod_call.begin(next(iter(before.values())) if len(before) == 1 else None)
        return before

    def _keep_by_own_handle(self, file: int, key: Key, memory: Allocation) -> bool:
        """Make a handle of ours on memory that is still mapped or on the fabric; True if that worked."""
        rm = self._shared.table.objects.get(key)
        on_fabric = any(map(self._shared.table.is_on_fabric, memory.handles))
        if rm is None or not (on_fabric or self._shared.table.allocations.is_mapped(memory.number)):
            return False
        if (ours := self._unused_handle(key[0])) is None:
            return False
        self._shared.quota.claim_duplicate(rm, ours[1], memory.number)
        if not self._gpu_ops.duplicate(file, rm, ours[1]):
            self._shared.claims.cancel(ours)
            return False
        self._shared.claims.confirm(ours)
        return True

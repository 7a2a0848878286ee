"""Bounds a pod's objects of classes that the object table does not keep: RM holds its lock while it frees a client.

Of these objects only the handles are known. RM also frees them with what they lie below. So some of them may be gone,
which RM is asked before another one is refused. Those of which not even the handle is known have negative numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from qgpu.guardian.accounting.rm_object import Key
from qgpu.guardian.proxy.handler_context import HandlerContext
from qgpu.guardian.rules import classes
from qgpu.nvidia import abi

#: How many a client may have: system memory, of which programs have what they pin, and others, such as the objects of
#: channels. A CUDA process has about 30 and 40 of them on a card. RM frees 2,000 others in a third of a second (H100).
_MOST = {True: 1 << 15, False: 1 << 11}
#: And how many all clients of a pod may have.
_MOST_OF_POD = {True: 1 << 16, False: 1 << 14}
_MEMORY = frozenset({abi.NV01_MEMORY_SYSTEM, abi.NV01_MEMORY_SYSTEM_OS_DESCRIPTOR})
TOO_MANY = "too many objects of RM"


class PlainObjects:
    """A pod's objects of which only the handles are known."""

    def __init__(self, ctx: HandlerContext) -> None:
        self._shared, self._pod = ctx.shared, ctx.pod

    def has_room(self, client: int, handle: int, rm_class: int) -> bool:
        """Tell whether a client of the pod's may have another object; forget those that are gone before saying no.

        Nothing that the object table keeps may have its handle.
        """
        memory = rm_class in _MEMORY
        if not self._shared.clients.owns(self._pod, client) or self._shared.claims.free_handle((client, handle)):
            return False
        if not self._fits_client(client, memory=memory):
            self._forget_gone(client, memory=memory)
        if not self._fits_pod(memory=memory):
            self._shared.clients.recheck(self._pod)
            for each in self._shared.table.clients_of(self._pod):
                self._forget_gone(each, memory=memory)
        if self._fits_client(client, memory=memory) and self._fits_pod(memory=memory):
            return True
        self._shared.refusals.count(self._pod, TOO_MANY)
        return False

    def add(self, client: int, handle: int, rm_class: int) -> None:
        """Record a new one, unless the object table keeps it, or it is an event."""
        if rm_class in classes.KEPT:
            return
        if (before := self._shared.table.objects.get((client, handle))) is not None:  # RM has chosen its handle
            self._shared.claims.replaced(before)
        if rm_class not in classes.EVENTS:
            self._note((client, handle), memory=rm_class in _MEMORY, there=True)

    def count_unnamed(self, asked: Iterable[Key]) -> None:
        """Count what the kernel may have made under another handle than it was asked for, until the client ends."""
        for client, handle in asked:
            known = handle in self._shared.table.plain(client, memory=True)
            if known and not self._shared.gpu_ops.exists((client, handle)):
                self._note((client, handle), memory=True, there=False)
                self._note((client, -time.monotonic_ns()), memory=True, there=True)

    def discard(self, key: Key) -> None:
        """Record that one is gone, if it is one."""
        for memory in (False, True):
            if key[1] in self._shared.table.plain(key[0], memory=memory):
                self._note(key, memory=memory, there=False)

    def _fits_client(self, client: int, *, memory: bool) -> bool:
        return len(self._shared.table.plain(client, memory=memory)) < _MOST[memory]

    def _fits_pod(self, *, memory: bool) -> bool:
        counted = self._shared.table.plain_counts[self._pod, memory]
        return counted < _MOST_OF_POD[memory] and self._shared.quota.may_record(self._pod)

    def _forget_gone(self, client: int, *, memory: bool) -> None:
        """Ask RM, without the lock, which of a client's objects exist."""
        for handle in list(self._shared.table.plain(client, memory=memory)):
            if handle >= 0 and not self._shared.gpu_ops.exists((client, handle)):
                self.discard((client, handle))

    def _note(self, key: Key, *, memory: bool, there: bool) -> None:
        fact = {"fact": "plain", "client": key[0], "handle": key[1], "there": there}
        with self._shared.lock:
            self._shared.note(fact | ({"system": True} if memory else {}))

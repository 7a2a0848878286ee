"""Bounds a pod's objects that nothing else bounds, because RM holds its lock while it frees a client.

They are those of classes that the object table does not keep, together with its address spaces, subdevices and others
that are neither scheduled nor memory. Of the former only the handles are known. RM also frees them with what they lie
below. So some of them may be gone, which RM is asked before another one is refused. What the kernel may have made under
an unknown handle is counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable

from qgpu.guardian.accounting.rm_object import Key
from qgpu.guardian.proxy.object_claims import TOO_MANY
from qgpu.guardian.proxy.shared_state import SharedState
from qgpu.guardian.rules import classes
from qgpu.nvidia import abi

#: How many a client may have: system memory, of which programs have what they pin, and others, such as the objects of
#: channels. A CUDA process has about 30 and 40 of them on a card. RM frees 2,000 others in a third of a second (H100).
_MOST = {True: 1 << 15, False: 1 << 11}
#: And how many all clients of a pod may have.
_MOST_OF_POD = {True: 1 << 16, False: 1 << 14}
_SYSTEM_MEMORY = frozenset({abi.NV01_MEMORY_SYSTEM, abi.NV01_MEMORY_SYSTEM_OS_DESCRIPTOR})
#: How many pieces of memory the kernel may have made for a pod under unknown handles; calls that RM refused are in it.
_MOST_UNNAMED = 1 << 15


class UntrackedObjects:
    """A pod's objects of which only the handles are known, and others of the object table."""

    def __init__(self, shared: SharedState, pod: str) -> None:
        self._shared, self._pod = shared, pod

    def refusal(self, client: int, handle: int, rm_class: int) -> int:
        """Return why a client may have no other object under a handle, or NV_OK; forget those that are gone before."""
        system = rm_class in _SYSTEM_MEMORY
        if not self._shared.clients.owns(self._pod, client):
            return abi.NV_ERR_INVALID_CLIENT
        if refusal := self._shared.claims.vacate((client, handle)):
            return refusal
        if self._fits(client, system=system):
            return abi.NV_OK
        if not self._fits_client(client, system=system):
            self._forget_gone(client, system=system)
        if not self._fits_pod(system=system):
            self._shared.clients.recheck(self._pod)
            for each in self._shared.table.clients_of(self._pod):
                self._forget_gone(each, system=system)
        if self._fits(client, system=system):
            return abi.NV_OK
        self._shared.refusals.count(self._pod, TOO_MANY)
        return abi.NV_ERR_INSUFFICIENT_RESOURCES

    def add(self, client: int, handle: int, rm_class: int, memory: int | None = None) -> None:
        """Record a new one, unless the object table keeps it, or it is an event.

        ``memory`` is that of a context DMA, and 0 for host memory that may have been made for another card.
        """
        if rm_class in classes.KEPT:
            return
        if (before := self._shared.table.objects.get((client, handle))) is not None:  # RM has chosen its handle
            self._shared.claims.replaced(before)
        if rm_class not in classes.EVENTS:
            self._note((client, handle), there=True, system=rm_class in _SYSTEM_MEMORY, of=memory)

    def may_make_unnamed(self) -> bool:
        """Tell whether the kernel may make memory for the pod under a handle that another thread may change."""
        if self._shared.table.unnamed.get(self._pod, 0) < _MOST_UNNAMED:
            return True
        self._shared.refusals.count(self._pod, TOO_MANY)
        return False

    def count_unnamed(self, asked: Iterable[Key]) -> None:
        """Count what the kernel did not make under the handle that it was asked for: under another, or not at all."""
        for key in asked:
            if key[1] in self._shared.table.untracked[True].of(key[0]) and not self._shared.gpu_ops.exists(key):
                with self._shared.lock:
                    self._note(key, there=False)
                    count = self._shared.table.unnamed.get(self._pod, 0) + 1
                    self._shared.note({"fact": "unnamed", "pod": self._pod, "count": count})

    def discard(self, key: Key) -> None:
        """Record that one is gone, if it is one."""
        if self.has(key):
            self._note(key, there=False)

    def has(self, key: Key) -> bool:
        """Tell whether an object is one of those of which only the handle is known."""
        return any(key[1] in each.of(key[0]) for each in self._shared.table.untracked.values())

    def _fits(self, client: int, *, system: bool) -> bool:
        return self._fits_client(client, system=system) and self._fits_pod(system=system)

    def _fits_client(self, client: int, *, system: bool) -> bool:
        table = self._shared.table
        kept = 0 if system else len(table.other_handles.of(client))
        return len(table.untracked[system].of(client)) + kept < _MOST[system]

    def _fits_pod(self, *, system: bool) -> bool:
        table = self._shared.table
        kept = 0 if system else table.other_handles.counts[self._pod]
        counted = table.untracked[system].counts[self._pod] + kept
        return counted < _MOST_OF_POD[system] and self._shared.quota.may_record(self._pod)

    def _forget_gone(self, client: int, *, system: bool) -> None:
        """Ask RM, without the lock, which of a client's objects exist."""
        for handle in list(self._shared.table.untracked[system].of(client)):
            if not self._shared.gpu_ops.exists((client, handle)):
                self.discard((client, handle))

    def _note(self, key: Key, *, there: bool, system: bool = False, of: int | None = None) -> None:
        fact = {"fact": "untracked", "client": key[0], "handle": key[1], "there": there}
        self._shared.note(fact | ({"system": True} if system else {}) | ({"of": of} if of is not None else {}))

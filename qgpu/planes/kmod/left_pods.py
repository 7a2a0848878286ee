"""Pods that are retired although something of theirs is left: another process has files of theirs.

The module keeps such a pod until its RM clients and its memory are gone, so that both stay charged and gated. Meanwhile
it can allocate nothing more. Files without either keep no pod.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from qgpu.planes.kmod.device import Card, Device, grant_of


class LeftPods:
    """The retired pods that the module still has. A daemon that starts retires them anew."""

    def __init__(self, device: Device, cards: Sequence[Card]) -> None:
        self._device, self._cards = device, cards
        self._lock = threading.Lock()
        #: Their numbers.
        self.idents: frozenset[int] = frozenset()

    def each(self) -> Iterator[Any]:
        """Yield them as the module describes them, without those that are over."""
        with self._lock:
            self.idents -= {ident for ident in self.idents if self._remove(ident)}
        for pod in self._device.each("POD_NEXT", "pod") if self.idents else ():
            if pod.pod in self.idents:
                yield pod

    def retire(self, ident: int) -> None:
        """Remove a pod, now or as soon as nothing of it is left."""
        with self._lock:
            if self._remove(ident):
                return
            for joined in list(self._device.each("POD_JOINED_NEXT", "cgroup", pod=ident)):
                with suppress(FileNotFoundError):
                    self._device.call("POD_LEAVE", pod=ident, cgroup=joined.cgroup)
            self.idents |= {ident}

    def replace(self, ident: int) -> None:
        """Remove a pod whose cgroup is to be a pod again: the module gives that one what is left."""
        with self._lock:
            self._device.call("POD_REMOVE", pod=ident)
            self.idents -= {ident}

    def memory(self, card: Card) -> int:
        """Return what they hold of a card."""
        return sum(self._memory(pod.pod, card) for pod in self.each())

    def _memory(self, ident: int, card: Card) -> int:
        try:
            return int(self._device.call("USAGE", pod=ident, gpu=card.number).memory)
        except FileNotFoundError:  # removed meanwhile
            return 0

    def _remove(self, ident: int) -> bool:
        """Remove a pod of which nothing is left, and tell whether it is gone."""
        for _ in range(2):  # the second time it can allocate nothing: who has its files may do so before
            if self._is_held(ident):
                return False
        with suppress(FileNotFoundError):
            self._device.call("POD_REMOVE", pod=ident)
        return True

    def _is_held(self, ident: int) -> bool:
        """Limit a pod to what it holds, and tell whether that is anything."""
        held = 0
        for card in self._cards:
            held += (size := self._memory(ident, card))
            grant = grant_of(self._device, ident, card)
            if grant is None or not grant.memory or grant.memory > max(size, 1):
                with suppress(OSError):  # no limit can be enforced now, or the pod was removed meanwhile
                    self._device.call("GRANT_SET", pod=ident, gpu=card.number, memory=max(size, 1))
        return held > 0 or self._clients(ident) > 0

    def _clients(self, ident: int) -> int:
        try:
            found = self._device.call("POD_NEXT", pod=ident - 1)
        except FileNotFoundError:
            return 0
        return int(found.nr_clients) if found.pod == ident else 0

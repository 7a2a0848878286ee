"""Keeps the node's ResourceSlice as the cards are, whatever deletes or changes it.

The kubelet deletes a node's slices when it starts, and a driver's slices when its socket has been gone for half a
minute. So the publisher watches the slice, and writes it again at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import structlog
from lightkube.models.meta_v1 import OwnerReference
from lightkube.models.resource_v1 import ResourceSliceSpec
from lightkube.resources.core_v1 import Node as NodeObject

from qgpu.errors import InvalidValueError
from qgpu.k8s import resource_slices
from qgpu.k8s.card_watch import CardWatch
from qgpu.k8s.cluster import ApiServerError, Cluster, ConflictError
from qgpu.k8s.names import DRAIN_ANNOTATION, DRIVER
from qgpu.k8s.resource_slices import Condition, Effect, SharingOptions
from qgpu.k8s.threads import Threads

_log = structlog.get_logger("k8s.slice")

#: How often the slice is read back although no event asks for it.
_READ_BACK_S = 60.0
#: Waits after failures double up to this.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 30.0


class Publisher:
    """One slice, and the threads that keep it."""

    def __init__(self, cluster: Cluster, cards: CardWatch, sharing: SharingOptions) -> None:
        self._cluster = cluster
        self._cards = cards
        self._sharing = sharing
        self._name = f"{cluster.node_name}-{DRIVER}"
        self._generation = 0
        self._drain: dict[str, Effect] = {}
        #: A driver that advertises the same cards (``conflicts``); "" if there is none.
        self.conflict = ""
        self._stale = threading.Event()
        self._written_version = ""
        self._written: ResourceSliceSpec | None = None
        #: When to ask again whether the server keeps shared devices, on CLOCK_MONOTONIC; 0 once it does.
        self._try_gate_at_s = 0.0

    def start(self, threads: Threads) -> None:
        """Start the threads."""
        threads.start("publish", self._publish)
        threads.start("watch-slice", lambda: self._follow(self._cluster.watch_slices, self._slice_event))
        threads.start("watch-node", lambda: self._follow(self._cluster.watch_node, self._node_event))

    def check_again(self) -> None:
        """Read the slice back now: the kubelet has just accepted us, and may have deleted the slice before."""
        self._stale.set()
        self._cards.wake()

    def _publish(self) -> None:
        seen, wait_s, read_at_s = -1, _FIRST_WAIT_S, 0.0
        while not self._cards.closed:
            due = self._stale.is_set() or time.monotonic() > read_at_s
            self._stale.clear()
            try:
                if self._update(due):
                    read_at_s = time.monotonic() + _READ_BACK_S
                wait_s = _FIRST_WAIT_S
            except ApiServerError as error:
                _log.warning("ResourceSlice not written, trying again", error=str(error))
                self._stale.set()
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                continue
            seen = self._cards.wait(seen, max(read_at_s - time.monotonic(), 0))

    def _update(self, read_back: bool) -> bool:
        """Write the slice if it is out of date; return whether the server was asked. Raises ApiServerError."""
        state = self._cards.value
        if state.node is None:
            return False
        condition = Condition(state.problem, self.conflict, self._drain)
        wanted = resource_slices.spec(state.node, self._cluster.node_name, self._sharing, condition, self._generation)
        if not read_back and self._written is not None and resource_slices.same(wanted, self._written):
            return False
        kept = self._cluster.slice(self._name)
        if kept is not None and kept.spec is not None:
            self._generation = max(self._generation, kept.spec.pool.generation)
            if resource_slices.same(wanted, kept.spec):
                self._written, self._written_version = wanted, _version(kept)
                return True
        if time.monotonic() < self._try_gate_at_s:
            return True
        wanted.pool.generation = self._generation + 1
        made = resource_slices.slice_object(self._name, self._node_reference(), wanted)
        try:
            if kept is None:
                write = self._cluster.create_slice
            else:
                assert made.metadata is not None
                made.metadata.resourceVersion = _version(kept)
                write = self._cluster.replace_slice
            if not self._would_keep(write(made, dry_run=True).spec):
                if kept is not None:
                    self._cluster.delete_slice(self._name)
                return True
            back = write(made)
        except ConflictError:  # the slice has changed since it was read: look again
            self.check_again()
            return False
        self._generation += 1
        self._written, self._written_version = wanted, _version(back)
        _log.info("ResourceSlice written", name=self._name, generation=self._generation)
        return True

    def _would_keep(self, trial: ResourceSliceSpec | None) -> bool:
        """Return whether the server keeps the fields that let pods share a card. Else a pod would get a whole card."""
        kept = trial is not None and resource_slices.shares_cards(trial)
        if not kept:
            if not self._try_gate_at_s:
                _log.error(
                    "no ResourceSlice: the API server drops what lets pods share a card; enable the feature gate "
                    "DRAConsumableCapacity in the whole cluster, or run qgpu-k8s device-plugin instead"
                )
            self._try_gate_at_s = time.monotonic() + _READ_BACK_S
        else:
            self._try_gate_at_s = 0.0
        return kept

    def _node_reference(self) -> OwnerReference:
        """Return a reference to our node, read now: a node that was deleted and joined again has a new UID."""
        metadata = self._cluster.node().metadata
        assert metadata is not None
        return OwnerReference(apiVersion="v1", kind="Node", name=metadata.name or "", uid=metadata.uid or "")

    def _follow(self, watch: Callable[[], Iterator[tuple[str, Any]]], event: Callable[[str, Any], None]) -> None:
        """Pass each event of a watch to ``event``; begin a new watch when one ends."""
        wait_s = _FIRST_WAIT_S
        while not self._cards.closed:
            try:
                for kind, found in watch():
                    wait_s = _FIRST_WAIT_S
                    event(kind, found)
            except ApiServerError as error:
                _log.info("watch ended, starting again", error=str(error))
            self.check_again()
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _slice_event(self, kind: str, found: Any) -> None:
        if kind == "DELETED" or _version(found) != self._written_version:
            self.check_again()

    def _node_event(self, _kind: str, found: NodeObject) -> None:
        metadata = found.metadata
        text = ((metadata.annotations if metadata is not None else None) or {}).get(DRAIN_ANNOTATION, "")
        try:
            drain = resource_slices.drained(text)
        except InvalidValueError as error:
            _log.error("drain annotation not understood, keeping what was", error=str(error))
            return
        if drain != self._drain:
            self._drain = drain
            self._cards.wake()


def _version(found: Any) -> str:
    return (found.metadata.resourceVersion or "") if found.metadata is not None else ""

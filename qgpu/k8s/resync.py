"""Compares qgpud's prepared grants with the claims of the API server, and gives up those whose claims are gone.

The kubelet gives up claims itself. But it may have lost its own record, or someone may have deleted a claim by force
while the kubelet or this driver did not run. A grant goes only if its claim is certainly gone. qgpud itself refuses to
give up a grant while a process uses it.

It also updates which pods may use a shared claim, because the kubelet prepares such a claim only once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from qgpu.errors import QgpuError, RefusedError
from qgpu.k8s import claims, pod_resources
from qgpu.k8s.cluster import Cluster, ForbiddenError, NotFoundError
from qgpu.k8s.device_units import is_device_plugins
from qgpu.k8s.dra_service import ClaimLocks
from qgpu.k8s.qgpud import Qgpud

_log = structlog.get_logger("k8s.resync")

#: How often the pods of shared claims are looked up.
_SHARED_INTERVAL_S = 1.0
#: The API server lets a node read only claims to which a pod of the node refers. Just after its start it forbids all of
#: them. So a claim counts as forbidden only after this many refusals in a row.
_CONFIRMATIONS = 3


class Resync:
    """The comparison, and the thread that repeats it."""

    def __init__(self, cluster: Cluster, qgpud: Qgpud, locks: ClaimLocks, kubelet_socket: Path) -> None:
        self._cluster = cluster
        self._qgpud = qgpud
        self._locks = locks
        self._kubelet_socket = kubelet_socket
        self._guard = threading.Lock()
        #: UIDs of claims that further pods may come to use.
        self._shared: set[str] = set()
        #: How often in a row the API server has forbidden a claim, by UID.
        self._hidden: dict[str, int] = {}

    def follow(self, uid: str) -> None:
        """Keep the pods of a claim up to date."""
        with self._guard:
            self._shared.add(uid)

    def run(self, ended: Callable[[float], bool], interval_s: float) -> None:
        """Compare repeatedly until ``ended``, which waits for the seconds that it is given, returns true."""
        due_s = 0.0
        while True:
            everything = time.monotonic() >= due_s
            try:
                self.compare(None if everything else self._followed())
                if everything:
                    due_s = time.monotonic() + interval_s
            except QgpuError as error:
                _log.info("not compared, trying again", error=str(error))
            if ended(min(_SHARED_INTERVAL_S, interval_s)):
                return

    def compare(self, only: frozenset[str] | None = None) -> None:
        """Compare all grants, or those of some claims, with the API server. Raises QgpuError if qgpud is away."""
        if only is not None and not only:
            return
        grants = {grant["uid"]: grant for grant in self._qgpud.grants() if not is_device_plugins(grant["uid"])}
        with self._guard:
            self._shared &= grants.keys()
        for uid in [uid for uid in self._hidden if uid not in grants]:
            del self._hidden[uid]
        for uid, grant in grants.items():
            if only is None or uid in only:
                try:
                    self._compare(uid, grant)
                except QgpuError as error:
                    _log.info("grant kept", claim=f"{grant['namespace']}/{grant['name']}", error=str(error))

    def _followed(self) -> frozenset[str]:
        with self._guard:
            return frozenset(self._shared)

    def _compare(self, uid: str, grant: Mapping[str, Any]) -> None:
        """Compare one grant; give it up if its claim is gone. Raises QgpuError if the grant must stay for now."""
        with self._locks.of(uid):
            gone = ""
            try:
                claim = self._cluster.claim(grant["namespace"], grant["name"])
            except NotFoundError:
                gone = "there is no such claim any more"
            except ForbiddenError:
                gone = self._hidden_for_good(uid, grant)
                if not gone:
                    return
            else:
                self._hidden.pop(uid, None)
                if claim.metadata is None or claim.metadata.uid != uid:
                    gone = "another claim has its name"
                elif not claims.results_here(claim, node := self._cluster.node_name):
                    if pool := claims.pool_of(claim, {device["gpu"] for device in grant["devices"]}):
                        raise RefusedError(
                            f"its card is in pool {pool}, and this is node {node}; start qgpu-k8s with this node's "
                            "--node-name"
                        )
                    gone = "the claim has no device here any more"
            if gone:
                self._qgpud.drop(uid)
                _log.info("grant given up", claim=f"{grant['namespace']}/{grant['name']}", uid=uid, why=gone)
                return
            if claims.may_be_shared(claim):
                self.follow(uid)
            found = claims.read(claim, uid, self._cluster.node_name)
            if sorted(found.consumers) != sorted(grant["consumers"]):
                self._qgpud.update(found)
                _log.info("pods of a claim changed", claim=f"{grant['namespace']}/{grant['name']}", uid=uid)

    def _hidden_for_good(self, uid: str, grant: Mapping[str, Any]) -> str:
        """Return why a claim that the API server forbids is gone; "" while it may exist. Raises QgpuError."""
        held = pod_resources.read(self._kubelet_socket)
        if (grant["namespace"], grant["name"]) in held.claims:
            self._hidden.pop(uid, None)
            return ""
        self._hidden[uid] = self._hidden.get(uid, 0) + 1
        return "no pod of this node refers to the claim" if self._hidden[uid] >= _CONFIRMATIONS else ""

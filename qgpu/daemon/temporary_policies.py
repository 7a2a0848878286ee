"""Temporary policies: in force while their client is connected and no other pods are on the pGPU.

The self-test measures policies this way. What an operator set stays set, on disk too, however the client ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

from qgpu.daemon.gpu_loop import GpuLoop, TemporaryPolicy
from qgpu.daemon.pods import Pods
from qgpu.daemon.request_args import Arguments
from qgpu.errors import RefusedError
from qgpu.ipc.control_socket import Session
from qgpu.policies import registry

_log = structlog.get_logger("temporary-policies")


class TemporaryPolicies:
    """At most one on each pGPU."""

    def __init__(self, pods: Pods, loop: Callable[[int], GpuLoop]) -> None:
        self._pods, self._loop = pods, loop
        self._owners: dict[int, Session] = {}

    def begin(self, session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Put ``policy`` in force among the named ``pods`` of a pGPU; another call replaces it. Raises a QgpuError."""
        index, policy = arguments.need("gpu", int), registry.find(arguments.need("policy", str))
        names = frozenset(map(str, arguments.need("pods", list)))
        with self._pods.lock:
            loop = self._loop(index)
            others = [pod.name for pod in self._pods.listed() if index in pod.grants and pod.name not in names]
            if others:
                raise RefusedError(f"pGPU {index}: {others[0]} is on it; a temporary policy needs a pGPU without pods")
            if (owner := self._owners.get(index, session)) is not session:
                raise RefusedError(f"pGPU {index}: process {owner.peer.pid} measures policies there; try again later")
            if index not in self._owners:
                self._owners[index] = session
                session.at_end.append(partial(self._end, index))
            loop.temporary = TemporaryPolicy(policy, names)
        _log.info("temporary policy begins", pgpu=index, policy=policy, pid=session.peer.pid, uid=session.peer.uid)
        return {}

    def _end(self, index: int) -> None:
        with self._pods.lock:
            self._loop(index).temporary = None
            del self._owners[index]
        _log.info("temporary policy ends", pgpu=index)

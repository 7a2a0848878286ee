"""Temporary policies: in force while their client is connected and no other pods are on the pGPU.

The self-test measures policies this way. What an operator set stays set, on disk too, however the client ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from qgpu.daemon import caller
from qgpu.daemon.events import Events
from qgpu.daemon.gpu_loop import GpuLoop, TemporaryPolicy
from qgpu.daemon.pods import Pods
from qgpu.daemon.request_args import Arguments
from qgpu.errors import RefusedError
from qgpu.ipc.control_socket import Session
from qgpu.policies import registry


class TemporaryPolicies:
    """At most one on each pGPU."""

    def __init__(self, pods: Pods, loop: Callable[[int], GpuLoop], events: Events) -> None:
        self._pods, self._loop, self._events = pods, loop, events
        self._owners: dict[int, Session] = {}

    def begin(self, session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Put ``policy`` in force among the named ``pods`` of a pGPU; another call replaces it. Raises a QgpuError."""
        index, policy = arguments.need("gpu", int), registry.find(arguments.need("policy", str))
        who = caller.of(session)
        names = frozenset(map(str, arguments.need("pods", list)))
        with self._pods.turn(session), self._pods.lock:
            loop = self._loop(index)
            others = [pod.name for pod in self._pods.listed() if index in pod.grants and pod.name not in names]
            if others:
                raise RefusedError(f"pGPU {index}: {others[0]} is on it; a temporary policy needs a pGPU without pods")
            if (owner := self._owners.get(index, session)) is not session:
                raise RefusedError(f"pGPU {index}: process {owner.peer.pid} measures policies there; try again later")
            if index not in self._owners:
                self._owners[index] = session
                session.at_end.append(partial(self._end, index, who))
            before, loop.temporary = loop.temporary, TemporaryPolicy(policy, names)
        self._note("temporary policy begins", index, who, before, loop.temporary)
        return {}

    def _end(self, index: int, who: Mapping[str, Any]) -> None:
        with self._pods.lock:
            loop = self._loop(index)
            before, loop.temporary = loop.temporary, None
            del self._owners[index]
        self._note("temporary policy ends", index, who, before, None)

    def _note(
        self,
        what: str,
        index: int,
        who: Mapping[str, Any],
        before: TemporaryPolicy | None,
        after: TemporaryPolicy | None,
    ) -> None:
        old, new = ({"temporary_policy": each and each.policy} for each in (before, after))
        self._events.noted(what, {"gpu": index}, who, old, new)

"""Moves a pod from one card of this host to another of the same model, and its grant with it.

Admission on the new card comes first, and where that card's memory is overcommitted, its limit must also fit beside the
limits of those that are on it now. The pod has grants on both cards until it has arrived, so that it may run on either,
whatever fails in between. ``suspensions.py`` does the moving, and has it in a file before the grants change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import structlog

from qgpu import units
from qgpu.daemon import container_notes
from qgpu.daemon.pods import Pods
from qgpu.daemon.suspensions import Suspensions
from qgpu.errors import NotSupportedError, QgpuError, RefusedError, no_pgpu
from qgpu.ipc.control_socket import Session
from qgpu.linux import cgroup
from qgpu.model import Grant
from qgpu.model.plane_api import PodInfo
from qgpu.model.plane_names import Plane

_log = structlog.get_logger("pod_moves")

#: How long a plane may still see a pod on the card that it has left, and how often it is asked again.
_LEAVES_S, _LEAVES_POLL_S = 3.0, 0.1


class PodMoves:
    """Moves between the cards of one host."""

    def __init__(self, pods: Pods) -> None:
        self._pods = pods
        #: Lets no pod come to a pGPU for a block, and gives the bytes that limits of the other pods leave there; None
        #: where memory is granted once.
        self.room: Callable[[int, str], AbstractContextManager[int | None]] = lambda _index, _name: nullcontext()

    def begin(self, session: Session, suspensions: Suspensions, name: str, target: int, source: int | None) -> int:
        """Begin to move a pod to pGPU ``target``, from ``source`` or its only one, and return that.

        Raises a QgpuError.
        """
        cards = self._pods.cards
        with self._pods.turn(session), self._pods.lock:
            pod = self._pods.named(name)
            source = self._source(pod, target, source)
            size = pod.memory.get(source, 0) or suspensions.state(name).memory.get(source, 0)
            self._pods.check_amended(name, _after(pod, target, source))
        moves = {cards[source].uuid: cards[target].uuid}
        admit = partial(self._admit, session, name, target, source, size)
        suspensions.relocate(name, moves, {target: size}, admit)
        return source

    def _admit(self, session: Session, name: str, target: int, source: int, size: int) -> None:
        """Give a pod its grant on the other card, too. Raises a QgpuError."""
        with self._pods.turn(session), self._pods.lock:
            pod = self._pods.named(name)
            source = self._source(pod, target, source)
            needs = max(pod.grants[source].memory or 0, size)
            with self.room(target, name) as room:
                if room is not None and needs > room:
                    raise RefusedError(
                        f"pod {name}: its {units.format_memory(needs)} do not fit on pGPU {target} beside the limits "
                        f"of pods that are on it, which leave {units.format_memory(max(0, room))}; move it later, or "
                        "suspend another there first"
                    )
                self._pods.check_amended(name, _after(pod, target, source))
                self._pods.host.amend(name, {**pod.grants, target: pod.grants[source]})

    def arrived(self, name: str, moves: Mapping[str, str], went: bool) -> None:
        """Take away the grant on the card that a pod has left, or on the one that it did not reach.

        A process that began meanwhile may run on that card: its grant stays.
        """
        lost, left = (moves, moves.values()) if went else (moves.values(), moves)
        indexes = {index for index, card in self._pods.cards.items() if card.uuid in lost}
        others = {index for index, card in self._pods.cards.items() if card.uuid in left}
        until_s = time.monotonic() + _LEAVES_S
        while True:
            try:
                with self._pods.lock:
                    grants = self._pods.named(name).grants
                    if others <= grants.keys():  # else it ended, and another has its name
                        kept = {index: grant for index, grant in grants.items() if index not in indexes}
                        self._pods.host.amend(name, kept)
                    return
            except QgpuError as error:  # unless refused, it ended, or the plane is gone; at worst a grant too many
                if not isinstance(error, RefusedError) or time.monotonic() >= until_s:
                    _log.warning("grant of a moved pod kept", pod=name, pgpus=sorted(indexes), reason=str(error))
                    return
            time.sleep(_LEAVES_POLL_S)

    def _source(self, pod: PodInfo, target: int, source: int | None) -> int:
        """Return the card that the pod leaves. Raises RefusedError, UnknownNameError."""
        name, cards = pod.name, self._pods.cards
        if self._pods.host.plane == Plane.KMOD:
            raise NotSupportedError(f"pod {name}: the module keeps a grant as long as its pod; use seccomp to move")
        for index in (target, source):
            if index is not None and index not in cards:
                raise no_pgpu(index, cards)
        if source is None and len(pod.grants) > 1:
            raise RefusedError(f"pod {name}: it has grants on several pGPUs; say which it leaves (--from)")
        leaves = next(iter(pod.grants)) if source is None else source
        if leaves not in pod.grants:
            raise RefusedError(f"pod {name}: it has no grant on pGPU {leaves}; see: qgpuctl pod show {name}")
        if target in pod.grants:
            raise RefusedError(f"pod {name}: it has a grant on pGPU {target} already; choose another")
        if container_notes.devices_of(pod):
            raise RefusedError(f"pod {name}: its cards are those of its claim; change the claim")
        if pod.cgroup and not cgroup.is_made_for(name, pod.cgroup):
            raise RefusedError(
                f"pod {name}: a container has the device files of its own cards only; start it anew there"
            )
        before, after = cards[leaves], cards[target]
        if before.mig or after.mig:
            instance = leaves if before.mig else target
            raise RefusedError(f"pod {name}: pGPU {instance} is a MIG instance; pods move between whole cards only")
        if (before.name, before.memory) != (after.name, after.memory):
            raise RefusedError(
                f"pod {name}: pGPU {leaves} is a {before.name}, pGPU {target} a {after.name}; "
                "pods move between cards of one model only"
            )
        return leaves


def _after(pod: PodInfo, target: int, source: int) -> dict[int, Grant]:
    """Return a pod's grants once it has moved: what it has on both cards meanwhile is not to be granted twice."""
    return {index: grant for index, grant in pod.grants.items() if index != source} | {target: pod.grants[source]}

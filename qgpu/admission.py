"""Admission: the one place that checks whether grants fit before a pod gets them.

Pure: each function gets the pGPUs, their settings and the pods as they would be after a change, and raises an error for
the first grant that does not fit. Without an error, the caller makes the change.

A prepared device counts from the moment it is prepared. It covers the containers that use it, so the caller lists their
pods without grants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from qgpu import units
from qgpu.config import GpuSettings
from qgpu.errors import InvalidValueError, RefusedError, no_pgpu, no_pod
from qgpu.linux import cgroup
from qgpu.model import Grant, PodClass
from qgpu.model.plane_api import Pgpu, PodInfo
from qgpu.policies.registry import POLICIES


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a pod or a prepared device holds of a pGPU, and its holder's name, such as "claim shop/model"."""

    who: str
    index: int
    grant: Grant
    #: Whether its memory never leaves the card: its limit must fit beside those of all other resident holders.
    resident: bool = False


@dataclass(frozen=True, slots=True)
class Yielding:
    """Facts that admission needs about pGPUs with overcommitted memory. By default, every pod can yield."""

    #: Pods that cannot yield, because the driver cannot suspend them.
    stuck: Collection[str] = ()
    #: How many bytes of suspended pods fit into host memory; None: any number.
    host_room: int | None = None


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What grants must fit beside: the pods and claims of this host, on these pGPUs under these settings."""

    pods: Sequence[PodInfo]
    pgpus: Sequence[Pgpu]
    settings: Mapping[int, GpuSettings]
    prepared: Sequence[Reservation] = ()
    yielding: Yielding = Yielding()

    def held(self, besides: str = "") -> list[Reservation]:
        """Return what pods and claims hold, without the pod of this name."""
        return _held([pod for pod in self.pods if pod.name != besides], self.prepared, self.yielding)


def check_new(name: str, grants: Mapping[int, Grant], beside: Occupancy) -> None:
    """Check a new pod. Raises InvalidValueError, UnknownNameError or RefusedError."""
    cgroup.check_name(name)
    if any(pod.name == name for pod in beside.pods):
        raise RefusedError(f"pod {name}: there is one of that name already; choose another --name")
    if not grants:
        raise InvalidValueError(f"pod {name}: a pod needs a grant on at least one pGPU")
    _check_fit(_held([PodInfo(name, grants)], (), beside.yielding), beside.held(), beside)


def check_amended(name: str, grants: Mapping[int, Grant], beside: Occupancy) -> None:
    """Check new grants of an existing pod. Raises UnknownNameError or RefusedError."""
    if not any(pod.name == name for pod in beside.pods):
        raise no_pod(name)
    _check_fit(_held([PodInfo(name, grants)], (), beside.yielding), beside.held(besides=name), beside)


def check_prepared(wanted: Sequence[Reservation], beside: Occupancy) -> None:
    """Check the devices of one claim together, beside all other claims' devices. Raises RefusedError."""
    _check_fit(wanted, beside.held(), beside)


def check_quotas(name: str, grants: Mapping[int, Grant], settings: Mapping[int, GpuSettings]) -> None:
    """Check that the policies in force give the pod any time. Raises RefusedError."""
    for index, grant in grants.items():
        _check_quota(Reservation(f"pod {name}", index, grant), settings[index])


def check_settings(
    index: int, pods: Sequence[PodInfo], wanted: GpuSettings, prepared: Sequence[Reservation] = ()
) -> None:
    """Check new settings of a pGPU against the existing grants. Raises RefusedError."""
    there = [each for each in _held(pods, prepared, Yielding()) if each.index == index]
    for each in there:
        _check_quota(each, wanted)
    _check_floor(index, [each.grant for each in there], wanted)


def check_overcommit(
    card: Pgpu, pods: Sequence[PodInfo], wanted: GpuSettings, now: GpuSettings, prepared: Sequence[Reservation] = ()
) -> None:
    """Check a change of a pGPU's memory overcommit against the existing grants. Raises RefusedError."""
    there = [each for each in _held(pods, prepared, Yielding()) if each.index == card.index]
    if now.memory_overcommit == 1:
        for each in there:
            _check_limit(each, wanted)
    granted = sum(each.grant.memory or 0 for each in there)
    if wanted.memory_overcommit < now.memory_overcommit and granted > wanted.memory_overcommit * card.memory:
        raise RefusedError(
            f"pGPU {card.index}: limits of {units.format_memory(granted)} do not fit into "
            f"{wanted.memory_overcommit:g} times its {units.format_memory(card.memory)}; end pods or lower limits first"
        )


def _held(pods: Iterable[PodInfo], prepared: Iterable[Reservation], yielding: Yielding) -> list[Reservation]:
    found = [
        Reservation(f"pod {pod.name}", index, grant, resident=len(pod.grants) > 1 or pod.name in yielding.stuck)
        for pod in pods
        for index, grant in pod.grants.items()
    ]
    return [*found, *prepared]


def _check_fit(wanted: Iterable[Reservation], standing: list[Reservation], occupancy: Occupancy) -> None:
    """Check each of ``wanted`` beside those in ``standing``, to which it is added."""
    cards, settings = {pgpu.index: pgpu for pgpu in occupancy.pgpus}, occupancy.settings
    for each in wanted:
        index = each.index
        if index not in cards:
            raise no_pgpu(index, cards)
        _check_one_instance(each, standing, cards)
        beside = [other for other in standing if other.index == index]
        grants = [other.grant for other in beside]
        _check_quota(each, settings[index])
        _check_cores(each, grants)
        _check_floor(index, [each.grant, *grants], settings[index])
        _check_limit(each, settings[index])
        _check_memory(each, cards[index], beside, settings[index])
        standing.append(each)
        if settings[index].memory_overcommit > 1:
            _check_host_memory(each, standing, cards, occupancy.yielding)


def _check_one_instance(held: Reservation, standing: Iterable[Reservation], cards: Mapping[int, Pgpu]) -> None:
    """Refuse a second MIG instance of a card: a program uses one, and a plane finds a pod's instance by its card."""
    if (mine := cards[held.index].mig) is None:
        return
    for other in standing:
        theirs = cards[other.index].mig if other.who == held.who and other.index in cards else None
        if theirs is not None and theirs.card == mine.card and theirs != mine:
            raise RefusedError(
                f"{held.who}: pGPUs {other.index} and {held.index} are MIG instances of one card; "
                "a pod may have one of them"
            )


def _check_quota(held: Reservation, settings: GpuSettings) -> None:
    pod_class = held.grant.pod_class
    policy = settings.online_policy if pod_class is PodClass.ONLINE else settings.policy
    if POLICIES[policy].needs_quota and held.grant.cores is None:
        raise RefusedError(
            f"pGPU {held.index}: {policy} gives nothing to a pod without a quota, and {pod_class} {held.who} "
            f"has none; give it a quota (--cores)"
        )


def _check_cores(held: Reservation, beside: Iterable[Grant]) -> None:
    left = 100 - sum(other.cores or 0 for other in beside)
    cores = held.grant.cores
    if cores is not None and cores > left:
        raise RefusedError(f"pGPU {held.index}: {cores} % for {held.who} does not fit; {left} % is left to grant")


def _check_floor(index: int, grants: Iterable[Grant], settings: GpuSettings) -> None:
    online = sum(grant.cores or 0 for grant in grants if grant.pod_class is PodClass.ONLINE)
    if settings.offline_floor and online + settings.offline_floor > 100:
        raise RefusedError(
            f"pGPU {index}: {online} % for online pods and an offline floor of {settings.offline_floor} % do not fit; "
            f"lower one of them"
        )


def _check_limit(held: Reservation, settings: GpuSettings) -> None:
    if settings.memory_overcommit > 1 and held.grant.memory is None:
        raise RefusedError(
            f"pGPU {held.index}: its memory is overcommitted, and {held.who} has no limit; give it one (--memory)"
        )


def _check_memory(held: Reservation, card: Pgpu, beside: Sequence[Reservation], settings: GpuSettings) -> None:
    memory = held.grant.memory
    if memory is None:
        return
    left = int(card.memory * settings.memory_overcommit) - sum(other.grant.memory or 0 for other in beside)
    on_card = card.memory - sum(other.grant.memory or 0 for other in beside if _resident(other) and _resident(held))
    if memory > min(left, on_card):
        raise RefusedError(
            f"pGPU {card.index}: {units.format_memory(memory)} for {held.who} does not fit; "
            f"{units.format_memory(max(0, min(left, on_card)))} is left to grant"
        )


def _resident(held: Reservation) -> bool:
    return held.resident or held.grant.pod_class is PodClass.ONLINE


def _check_host_memory(
    held: Reservation, granted: Iterable[Reservation], cards: Mapping[int, Pgpu], yielding: Yielding
) -> None:
    """Check that the memory that does not fit on the cards fits into host memory."""
    if yielding.host_room is None:
        return
    limits = Counter[int]()
    for each in granted:
        limits[each.index] += each.grant.memory or 0
    beyond = sum(max(0, limits[index] - card.memory) for index, card in cards.items())
    if beyond > yielding.host_room:
        raise RefusedError(
            f"pGPU {held.index}: {units.format_memory(held.grant.memory or 0)} for {held.who} does not fit: "
            f"{units.format_memory(beyond)} of pods would be off the cards, and host memory holds "
            f"{units.format_memory(max(0, yielding.host_room))} of them; free host memory, or lower a limit"
        )

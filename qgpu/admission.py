"""Admission: the one place that checks whether grants fit before a pod gets them.

Pure: each function gets the pGPUs, their settings and the pods as they would be, and raises an error for the first
thing that does not fit. The caller makes the change if no error was raised.

A prepared device counts from the moment it is prepared. Containers that use it take from what it holds, so the caller
lists their pods without grants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from qgpu import units
from qgpu.config import GpuSettings
from qgpu.errors import InvalidValueError, RefusedError, no_pgpu, no_pod
from qgpu.linux import cgroup
from qgpu.model import Grant, PodClass
from qgpu.model.plane_api import Pgpu, PodInfo
from qgpu.policies.registry import POLICIES


@dataclass(frozen=True, slots=True)
class Held:
    """What a prepared device holds of a pGPU, and whose it is, such as "claim shop/model"."""

    who: str
    index: int
    grant: Grant


def check_new(
    name: str,
    grants: Mapping[int, Grant],
    pods: Sequence[PodInfo],
    pgpus: Sequence[Pgpu],
    settings: Mapping[int, GpuSettings],
    prepared: Sequence[Held] = (),
) -> None:
    """Check a new pod. Raises InvalidValueError, UnknownNameError or RefusedError."""
    cgroup.check_name(name)
    if any(pod.name == name for pod in pods):
        raise RefusedError(f"pod {name}: there is one of that name already; choose another --name")
    if not grants:
        raise InvalidValueError(f"pod {name}: a pod needs a grant on at least one pGPU")
    _check_fit([Held(f"pod {name}", *each) for each in grants.items()], _held(pods, prepared), pgpus, settings)


def check_amended(
    name: str,
    grants: Mapping[int, Grant],
    pods: Sequence[PodInfo],
    pgpus: Sequence[Pgpu],
    settings: Mapping[int, GpuSettings],
    prepared: Sequence[Held] = (),
) -> None:
    """Check new grants of an existing pod. Raises UnknownNameError or RefusedError."""
    if not any(pod.name == name for pod in pods):
        raise no_pod(name)
    others = _held([pod for pod in pods if pod.name != name], prepared)
    _check_fit([Held(f"pod {name}", *each) for each in grants.items()], others, pgpus, settings)


def check_prepared(
    wanted: Sequence[Held],
    pods: Sequence[PodInfo],
    pgpus: Sequence[Pgpu],
    settings: Mapping[int, GpuSettings],
    prepared: Sequence[Held],
) -> None:
    """Check the devices of one claim together, beside all other claims' devices. Raises RefusedError."""
    _check_fit(wanted, _held(pods, prepared), pgpus, settings)


def check_quotas(name: str, grants: Mapping[int, Grant], settings: Mapping[int, GpuSettings]) -> None:
    """Check that a pod gets anything under the policies in force. Raises RefusedError."""
    for index, grant in grants.items():
        _check_quota(Held(f"pod {name}", index, grant), settings[index])


def check_settings(index: int, pods: Sequence[PodInfo], wanted: GpuSettings, prepared: Sequence[Held] = ()) -> None:
    """Check new settings of a pGPU against the existing grants. Raises RefusedError."""
    there = [each for each in _held(pods, prepared) if each.index == index]
    for each in there:
        _check_quota(each, wanted)
    _check_floor(index, [each.grant for each in there], wanted)


def _held(pods: Iterable[PodInfo], prepared: Iterable[Held]) -> list[Held]:
    return [Held(f"pod {pod.name}", *each) for pod in pods for each in pod.grants.items()] + list(prepared)


def _check_fit(
    wanted: Iterable[Held], others: Iterable[Held], pgpus: Sequence[Pgpu], settings: Mapping[int, GpuSettings]
) -> None:
    cards = {pgpu.index: pgpu for pgpu in pgpus}
    standing = list(others)
    for each in wanted:
        index = each.index
        if index not in cards:
            raise no_pgpu(index, cards)
        beside = [other.grant for other in standing if other.index == index]
        _check_quota(each, settings[index])
        _check_cores(each, beside)
        _check_floor(index, [each.grant, *beside], settings[index])
        _check_memory(each, cards[index], beside)
        standing.append(each)


def _check_quota(held: Held, settings: GpuSettings) -> None:
    pod_class = held.grant.pod_class
    policy = settings.online_policy if pod_class is PodClass.ONLINE else settings.policy
    if POLICIES[policy].needs_quota and held.grant.cores is None:
        raise RefusedError(
            f"pGPU {held.index}: {policy} gives nothing to a pod without a quota, and {pod_class} {held.who} "
            f"has none; give it a quota (--cores)"
        )


def _check_cores(held: Held, beside: Iterable[Grant]) -> None:
    left = 100 - sum(other.cores or 0 for other in beside)
    cores = held.grant.cores
    if cores is not None and cores > left:
        raise RefusedError(f"pGPU {held.index}: {cores} % for {held.who} does not fit; {left} % is left to grant")


def _check_floor(index: int, grants: Iterable[Grant], settings: GpuSettings) -> None:
    sold = sum(grant.cores or 0 for grant in grants if grant.pod_class is PodClass.ONLINE)
    if settings.offline_floor and sold + settings.offline_floor > 100:
        raise RefusedError(
            f"pGPU {index}: {sold} % for online pods and an offline floor of {settings.offline_floor} % do not fit; "
            f"lower one of them"
        )


def _check_memory(held: Held, card: Pgpu, beside: Iterable[Grant]) -> None:
    left = card.memory - sum(other.memory or 0 for other in beside)
    memory = held.grant.memory
    if memory is not None and memory > left:
        raise RefusedError(
            f"pGPU {card.index}: {units.format_memory(memory)} for {held.who} does not fit; "
            f"{units.format_memory(max(0, left))} is left to grant"
        )

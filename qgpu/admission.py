"""Admission: the one place that checks whether grants fit before a pod gets them.

Pure: each function gets the pGPUs, their settings and the pods as they would be, and raises an error for the first
thing that does not fit. The caller makes the change if no error was raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from qgpu import units
from qgpu.config import GpuSettings
from qgpu.errors import InvalidValueError, RefusedError, no_pgpu, no_pod
from qgpu.linux import cgroup
from qgpu.model import Grant, PodClass
from qgpu.model.plane_api import Pgpu, PodInfo
from qgpu.policies.registry import POLICIES


def check_new(
    name: str,
    grants: Mapping[int, Grant],
    pods: Sequence[PodInfo],
    pgpus: Sequence[Pgpu],
    settings: Mapping[int, GpuSettings],
) -> None:
    """Check a new pod. Raises InvalidValueError, UnknownNameError or RefusedError."""
    cgroup.check_name(name)
    if any(pod.name == name for pod in pods):
        raise RefusedError(f"pod {name}: there is one of that name already; choose another --name")
    if not grants:
        raise InvalidValueError(f"pod {name}: a pod needs a grant on at least one pGPU")
    _check_fit(name, grants, pods, pgpus, settings)


def check_amended(
    name: str,
    grants: Mapping[int, Grant],
    pods: Sequence[PodInfo],
    pgpus: Sequence[Pgpu],
    settings: Mapping[int, GpuSettings],
) -> None:
    """Check new grants of an existing pod. Raises UnknownNameError or RefusedError."""
    if not any(pod.name == name for pod in pods):
        raise no_pod(name)
    _check_fit(name, grants, [pod for pod in pods if pod.name != name], pgpus, settings)


def check_settings(index: int, pods: Sequence[PodInfo], wanted: GpuSettings) -> None:
    """Check new settings of a pGPU against the existing grants. Raises RefusedError."""
    for pod in pods:
        if index in pod.grants:
            _check_quota(pod.name, index, pod.grants[index], wanted)
    _check_floor(index, [pod.grants[index] for pod in pods if index in pod.grants], wanted)


def _check_fit(
    name: str,
    grants: Mapping[int, Grant],
    others: Iterable[PodInfo],
    pgpus: Sequence[Pgpu],
    settings: Mapping[int, GpuSettings],
) -> None:
    cards = {pgpu.index: pgpu for pgpu in pgpus}
    standing = list(others)
    for index, grant in grants.items():
        if index not in cards:
            raise no_pgpu(index, cards)
        beside = [pod.grants[index] for pod in standing if index in pod.grants]
        _check_quota(name, index, grant, settings[index])
        _check_cores(name, index, grant, beside)
        _check_floor(index, [grant, *beside], settings[index])
        _check_memory(name, cards[index], grant, beside)


def _check_quota(name: str, index: int, grant: Grant, settings: GpuSettings) -> None:
    policy = settings.online_policy if grant.pod_class.value == "online" else settings.policy
    if POLICIES[policy].needs_quota and grant.cores is None:
        raise RefusedError(
            f"pGPU {index}: {policy} gives nothing to a pod without a quota, and {grant.pod_class} pod {name} "
            f"has none; give it --cores"
        )


def _check_cores(name: str, index: int, grant: Grant, beside: Iterable[Grant]) -> None:
    left = 100 - sum(other.cores or 0 for other in beside)
    if grant.cores is not None and grant.cores > left:
        raise RefusedError(f"pGPU {index}: {grant.cores} % for pod {name} does not fit; {left} % is left to grant")


def _check_floor(index: int, grants: Iterable[Grant], settings: GpuSettings) -> None:
    sold = sum(grant.cores or 0 for grant in grants if grant.pod_class is PodClass.ONLINE)
    if settings.offline_floor and sold + settings.offline_floor > 100:
        raise RefusedError(
            f"pGPU {index}: {sold} % for online pods and an offline floor of {settings.offline_floor} % do not fit; "
            f"lower one of them"
        )


def _check_memory(name: str, card: Pgpu, grant: Grant, beside: Iterable[Grant]) -> None:
    left = card.memory - sum(other.memory or 0 for other in beside)
    if grant.memory is not None and grant.memory > left:
        raise RefusedError(
            f"pGPU {card.index}: {units.format_memory(grant.memory)} for pod {name} does not fit; "
            f"{units.format_memory(max(0, left))} is left to grant"
        )

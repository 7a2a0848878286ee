"""The opaque parameters of DeviceClasses and ResourceClaims: class and latency target.

    apiVersion: qgpu.io/v1
    kind: GrantParameters
    class: online            # or offline; online only in a DeviceClass
    latencyTarget: 2ms       # class online only

A claim may lower the class that its DeviceClass gives, never raise it: quotas on DeviceClasses bound who gets class
online. Limits are no parameters: the scheduler allocates them as capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from qgpu import units
from qgpu.errors import InvalidValueError
from qgpu.k8s.names import PARAMETERS_API, PARAMETERS_KIND
from qgpu.model import PodClass


class Source(StrEnum):
    """Who wrote a configuration: the cluster's administrator, or the claim's author."""

    CLASS = "FromClass"
    CLAIM = "FromClaim"


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a request's configurations come to."""

    pod_class: PodClass = PodClass.OFFLINE
    latency_target_ns: int | None = None


def merge(configurations: Iterable[tuple[str, Mapping[str, Any]]]) -> Parameters:
    """Merge the parameters of a request by their sources, in the order of the allocation. Raises InvalidValueError."""
    pod_class, latency_target_ns, target_of = PodClass.OFFLINE, None, Source.CLASS
    both = list(configurations)
    for source in Source:  # whatever their order, a class's come first
        for _, raw in (each for each in both if each[0] == source):
            found_class, found_target = _read(source, raw)
            if found_class is not None:
                if source is Source.CLAIM and found_class is PodClass.ONLINE and pod_class is not PodClass.ONLINE:
                    raise InvalidValueError(
                        "class online may not be asked for by a claim; name a DeviceClass that gives it"
                    )
                pod_class = found_class
            if found_target is not None:
                latency_target_ns, target_of = found_target, source
    if pod_class is not PodClass.ONLINE:
        if latency_target_ns is not None and target_of is Source.CLAIM:
            raise InvalidValueError("latencyTarget: only class online has one; drop it, or name another DeviceClass")
        latency_target_ns = None
    return Parameters(pod_class, latency_target_ns)


def _read(source: Source, raw: Mapping[str, Any]) -> tuple[PodClass | None, int | None]:
    where = f"parameters {source}"
    if not isinstance(raw, Mapping):
        raise InvalidValueError(f"{where}: they are no object")
    if (raw.get("apiVersion"), raw.get("kind")) != (PARAMETERS_API, PARAMETERS_KIND):
        raise InvalidValueError(
            f"{where}: apiVersion and kind are {raw.get('apiVersion')!r} and {raw.get('kind')!r}; "
            f"write {PARAMETERS_API} and {PARAMETERS_KIND}"
        )
    if unknown := sorted(raw.keys() - {"apiVersion", "kind", "class", "latencyTarget"}):
        raise InvalidValueError(f"{where}: unknown key {unknown[0]}; there are class and latencyTarget")
    values = {key: value for key in ("class", "latencyTarget") if (value := raw.get(key)) is not None}
    for key, value in values.items():
        if not isinstance(value, str):
            raise InvalidValueError(f"{where}: {key} {value!r}: write text")
    pod_class = units.parse_choice(PodClass, values["class"]) if "class" in values else None
    target_ns = units.parse_duration(values["latencyTarget"]) if "latencyTarget" in values else None
    return pod_class, target_ns

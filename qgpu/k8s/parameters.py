"""The opaque parameters of DeviceClasses and ResourceClaims: class, latency target, policy, and sharing.

    apiVersion: qgpu.io/v1
    kind: GrantParameters
    class: online            # or offline; online only in a DeviceClass
    latencyTarget: 2ms       # class online only
    policy: fixed-share      # prepared only on a card that has this policy for pods of its class
    sharing: MPS             # containers of the claim run side by side; default: TimeSlicing
    defaultActiveThreadPercentage: 50       # of each container, with MPS only; may be left out
    defaultPinnedDeviceMemoryLimit: 4Gi

A claim may lower the class that its DeviceClass gives, but not raise it, so that quotas on DeviceClasses bound who gets
class online. A claim may not name another policy than its DeviceClass. Limits are not parameters: the scheduler
allocates them as capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from qgpu import units
from qgpu.errors import InvalidValueError
from qgpu.k8s import quantities
from qgpu.k8s.names import PARAMETERS_API, PARAMETERS_KIND
from qgpu.model import PodClass
from qgpu.model.member_limits import MemberLimits
from qgpu.policies.registry import POLICIES

#: What a container of a claim with MPS gets, as NVIDIA's DRA driver calls it.
_SM, _MEMORY = "defaultActiveThreadPercentage", "defaultPinnedDeviceMemoryLimit"


class Source(StrEnum):
    """Who wrote a configuration: the cluster's administrator, or the claim's author."""

    CLASS = "FromClass"
    CLAIM = "FromClaim"


class Sharing(StrEnum):
    """How containers share a claim."""

    TIME_SLICING = "TimeSlicing"
    MPS = "MPS"


@dataclass(frozen=True, slots=True)
class Parameters:
    """A request's parameters, merged from all its configurations."""

    pod_class: PodClass = PodClass.OFFLINE
    latency_target_ns: int | None = None
    #: The policy that the card must have for pods of this class; None: any.
    policy: str | None = None
    #: What each container gets of the claim's share group; None: they take turns.
    part: MemberLimits | None = None


def merge(configurations: Sequence[tuple[str, Mapping[str, Any]]]) -> Parameters:
    """Merge the parameters of a request by their sources, in the order of the allocation. Raises InvalidValueError."""
    pod_class, latency_target_ns, target_of = PodClass.OFFLINE, None, Source.CLASS
    policy: str | None = None
    sharing: dict[str, Any] = {}
    for source in Source:  # the DeviceClass's come first, whatever their order
        for raw in [each for by, each in configurations if by == source]:
            values = _read(source, raw)
            found_class, found_target = values.get("class"), values.get("latencyTarget")
            if found_class is not None:
                if source is Source.CLAIM and found_class is PodClass.ONLINE and pod_class is not PodClass.ONLINE:
                    raise InvalidValueError(
                        "class online may not be asked for by a claim; name a DeviceClass that gives it"
                    )
                pod_class = found_class
            if found_target is not None:
                latency_target_ns, target_of = found_target, source
            if (found_policy := values.get("policy")) is not None:
                if policy not in (None, found_policy):
                    raise InvalidValueError(f"policy {found_policy}: other parameters of this request say {policy}")
                policy = found_policy
            sharing |= {key: value for key, value in values.items() if key in ("sharing", _SM, _MEMORY)}
    if pod_class is not PodClass.ONLINE:
        if latency_target_ns is not None and target_of is Source.CLAIM:
            raise InvalidValueError("latencyTarget: only class online has one; drop it, or name another DeviceClass")
        latency_target_ns = None
    return Parameters(pod_class, latency_target_ns, policy, _part(sharing))


def _part(sharing: Mapping[str, Any]) -> MemberLimits | None:
    if sharing.get("sharing") is Sharing.MPS:
        return MemberLimits(sharing.get(_SM), sharing.get(_MEMORY))
    if alone := sorted(sharing.keys() - {"sharing"}):
        raise InvalidValueError(f"{alone[0]}: only sharing MPS has it; write sharing: MPS too, or drop it")
    return None


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise InvalidValueError(f"{text!r}: choose one of {', '.join(POLICIES)}")
    return text


#: Every parameter and how to read it.
_READERS: Mapping[str, Callable[[str], Any]] = {
    "class": partial(units.parse_choice, PodClass),
    "latencyTarget": units.parse_duration,
    "policy": _policy,
    "sharing": partial(units.parse_choice, Sharing),
    _SM: quantities.whole,
    _MEMORY: quantities.whole,
}


def _read(source: Source, raw: Mapping[str, Any]) -> dict[str, Any]:
    where = f"parameters {source}"
    if not isinstance(raw, Mapping):
        raise InvalidValueError(f"{where}: they are no object")
    if (raw.get("apiVersion"), raw.get("kind")) != (PARAMETERS_API, PARAMETERS_KIND):
        raise InvalidValueError(
            f"{where}: apiVersion and kind are {raw.get('apiVersion')!r} and {raw.get('kind')!r}; "
            f"write {PARAMETERS_API} and {PARAMETERS_KIND}"
        )
    if unknown := sorted(raw.keys() - {"apiVersion", "kind", *_READERS}):
        raise InvalidValueError(f"{where}: unknown key {unknown[0]}; there are {', '.join(_READERS)}")
    found = {}
    for key, read in _READERS.items():
        value = raw.get(key)
        if key == _SM and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if value is None:
            continue
        if not isinstance(value, str):
            raise InvalidValueError(f"{where}: {key} {value!r}: write text")
        try:
            found[key] = read(value)
        except InvalidValueError as error:
            raise InvalidValueError(f"{where}: {key}: {error}") from error
    return found

"""The limits a container asks for by annotation, label or environment variable: the one table of names.

For each limit an annotation overrides a label, and a label overrides the environment: an image may set defaults, but
the user who starts the container decides. The administrator bounds what containers may ask for; a larger request is
refused, not reduced. Contradicting names in one place are refused, and so are unknown names with our prefix, so that no
container runs with another limit than its owner wrote. A container that asks for no memory limit gets the largest that
it may ask for. Admission decides whether the limits fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from qgpu import units
from qgpu.errors import InvalidValueError, RefusedError
from qgpu.model import ContainerPolicy, Grant, PodClass, RequestBounds

#: Prefix of all our annotations and labels.
PREFIX = "qgpu.io/"

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class RequestedLimits:
    """The grant that a container asks for on each of its pGPUs, and the pod name that it wants (None: any)."""

    grant: Grant = field(default_factory=Grant)
    name: str | None = None
    #: Whether its memory limit is the administrator's bound, because the container asks for no limit.
    bounded: bool = False

    def on(self, memory: int) -> Grant:
        """Return the grant on a pGPU with ``memory`` bytes. A bound of at least ``memory`` is no limit there."""
        idle = self.bounded and self.grant.memory is not None and self.grant.memory >= memory
        return replace(self.grant, memory=None) if idle else self.grant


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidValueError(f"{text!r} is not a whole number") from None


def _number_or_none(text: str) -> int | None:
    """Read a number; 0 means no limit, as HAMi defines it."""
    return _number(text) or None


def _memory_in(unit: int) -> Callable[[str], int]:
    return lambda text: units.check_memory_limit(_number(text) * unit)


def _sized_or_none(text: str) -> int | None:
    return units.parse_memory_limit(text) if units.parse_memory(text) else None


def _priority(text: str) -> PodClass:
    """Read HAMi's priority: 0 is high, 1 is low."""
    classes = {"0": PodClass.ONLINE, "1": PodClass.OFFLINE}
    if text not in classes:
        raise InvalidValueError(f"{text!r}: 0 is high (online), 1 is low (offline)")
    return classes[text]


def _per_cent_of_memory(_text: str) -> int:
    raise InvalidValueError(f"a part of the card's memory is not supported; give {PREFIX}memory")


_class = partial(units.parse_choice, PodClass)

#: Name, the limit it sets, how to read its value. Limits are the fields of Grant, and "name".
Row = tuple[str, str, Callable[[str], Any]]

#: Annotations and labels. Kubernetes does not pass resources with these names to containers: use annotations.
ANNOTATIONS: tuple[Row, ...] = (
    ("qgpu.io/name", "name", str),
    ("qgpu.io/cores", "cores", _number),
    ("qgpu.io/memory", "memory", units.parse_memory_limit),
    ("qgpu.io/class", "pod_class", _class),
    ("qgpu.io/latency-target", "latency_target_ns", units.parse_duration),
    # Tencent qGPU: per cent, GiB
    ("tke.cloud.tencent.com/qgpu-core", "cores", _number),
    ("tke.cloud.tencent.com/qgpu-memory", "memory", _memory_in(units.GIB)),
    ("tke.cloud.tencent.com/qgpu-core-greedy", "pod_class", lambda _: PodClass.OFFLINE),
    ("tke.cloud.tencent.com/app-class", "pod_class", _class),
    # HAMi: per cent, MiB; 0 cores are no limit
    ("nvidia.com/gpucores", "cores", _number_or_none),
    ("nvidia.com/gpumem", "memory", _memory_in(_MIB)),
    ("nvidia.com/gpumem-percentage", "memory", _per_cent_of_memory),
    ("nvidia.com/priority", "pod_class", _priority),
    # Alibaba cGPU: per cent, GiB
    ("aliyun.com/gpu-core.percentage", "cores", _number),
    ("aliyun.com/gpu-mem", "memory", _memory_in(units.GIB)),
)

ENVIRONMENT: tuple[Row, ...] = (
    ("QGPU_NAME", "name", str),
    ("QGPU_CORES", "cores", _number),
    ("QGPU_MEMORY", "memory", units.parse_memory_limit),
    ("QGPU_CLASS", "pod_class", _class),
    ("QGPU_LATENCY_TARGET", "latency_target_ns", units.parse_duration),
    # HAMi: per cent, a size such as 3000m for each card; 0 is no limit
    ("CUDA_DEVICE_SM_LIMIT", "cores", _number_or_none),
    ("CUDA_DEVICE_MEMORY_LIMIT", "memory", _sized_or_none),
    *((f"CUDA_DEVICE_MEMORY_LIMIT_{card}", "memory", _sized_or_none) for card in range(16)),
    ("CUDA_TASK_PRIORITY", "pod_class", _priority),
    # Alibaba cGPU: GiB
    ("ALIYUN_COM_GPU_MEM_CONTAINER", "memory", _memory_in(units.GIB)),
)


def wanted(
    annotations: Mapping[str, str],
    labels: Mapping[str, str],
    environment: Mapping[str, str],
    policy: ContainerPolicy | None = None,
) -> RequestedLimits:
    """Read the limits a container asks for. Raises InvalidValueError or RefusedError with place, name and value."""
    policy = policy or ContainerPolicy()
    found, names = _read("environment", ENVIRONMENT, environment if policy.by_environment is not None else {})
    asked = {limit: (f"environment {name}", policy.by_environment) for limit, name in names.items()}
    for place, said in (("label", labels), ("annotation", annotations)):
        _refuse_unknown(place, said)
        values, names = _read(place, ANNOTATIONS, said)
        found |= values
        asked |= {limit: (f"{place} {name}", None) for limit, name in names.items()}
    grant = Grant(**{limit: value for limit, value in found.items() if limit != "name"})
    for limit, (where, more) in asked.items():
        for may in (policy.from_anywhere, more):
            if may is not None and (bound := _bound(may, limit, found[limit])):
                hint = "say it by annotation" if may is more else "ask for less"
                key = "[containers.environment]" if may is more else "[containers]"
                raise RefusedError(f"{where}: {bound}; {hint}, or have {key} of qgpud's configuration changed")
    most = _most_memory(policy.from_anywhere, asked["memory"][1] if "memory" in asked else None)
    if bounded := grant.memory is None and most is not None:
        grant = replace(grant, memory=most)
    return RequestedLimits(grant, found.get("name"), bounded)


def _most_memory(*bounds: RequestBounds | None) -> int | None:
    """Return the lowest bound on memory; None for none."""
    return min((may.memory for may in bounds if may is not None and may.memory is not None), default=None)


def _bound(may: RequestBounds, limit: str, value: Any) -> str:
    """Return why a value is out of bounds; empty if it is within."""
    if limit == "name" and not may.name:
        return "no name may be chosen there"
    if limit == "pod_class" and value not in may.classes:
        return f"class {value} may not be asked for there"
    if limit == "latency_target_ns" and PodClass.ONLINE not in may.classes:
        return "no latency target may be asked for there"
    if limit == "cores" and value is not None and value > may.cores:
        return f"{value} % is more than the {may.cores} % that may be asked for there"
    if limit == "memory" and value is not None and may.memory is not None and value > may.memory:
        most = units.format_memory(may.memory)
        return f"{units.format_memory(value)} is more than the {most} that may be asked for there"
    return ""


def _refuse_unknown(place: str, said: Mapping[str, str]) -> None:
    known = [name for name, _, _ in ANNOTATIONS if name.startswith(PREFIX)]
    for name in said:
        if name.startswith(PREFIX) and name not in known:
            raise InvalidValueError(f"{place} {name}: there is no such limit; there are: {', '.join(known)}")


def _read(place: str, rows: tuple[Row, ...], said: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the limits that one place asks for, and the names it used for them."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, limit, read in rows:
        if name not in said:
            continue
        try:
            value = read(said[name])
        except InvalidValueError as error:
            raise InvalidValueError(f"{place} {name}: {error}") from error
        if limit in values and values[limit] != value:
            first = names[limit]
            raise InvalidValueError(
                f"{place}s {first} ({said[first]}) and {name} ({said[name]}) contradict each other; give one of them"
            )
        values[limit], names[limit] = value, name
    return values, names

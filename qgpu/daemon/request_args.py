"""Reads and checks the arguments of a request, which are untrusted input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from qgpu import units
from qgpu.errors import InvalidValueError
from qgpu.model import Grant, PodClass

_T = TypeVar("_T")


#: The most digits of a pGPU's number, and the largest absolute value of any number.
_DIGITS, _MOST = 4, 1 << 128


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one request, by name."""

    raw: Mapping[str, Any]

    def __contains__(self, name: str) -> bool:
        return name in self.raw

    def need(self, name: str, kind: type[_T]) -> _T:
        """Return a required argument. Raises InvalidValueError."""
        if name not in self.raw:
            raise InvalidValueError(f"request: {name} is missing")
        return _typed(name, self.raw[name], kind)

    def get(self, name: str, kind: type[_T]) -> _T | None:
        """Return an optional argument; None if it is missing or null. Raises InvalidValueError."""
        value = self.raw.get(name)
        return None if value is None else _typed(name, value, kind)

    def grants(self) -> dict[int, Grant]:
        """Return the argument ``grants``: what each pGPU is granted. Raises InvalidValueError."""
        result = {}
        for index, raw in self.need("grants", dict).items():
            if not index.isdecimal() or len(index) > _DIGITS or not isinstance(raw, dict):
                raise InvalidValueError(f"pGPU {index[:40]}: a pGPU is named by its number, such as 0")
            result[int(index)] = Arguments(raw).pods_grant(Grant())
        return result

    def pods_grant(self, grant: Grant) -> Grant:
        """Return what a pod is granted: ``grant`` as ``amended``, unless no CUDA context fits into a new memory limit.

        A claim may hold as little: what its containers get of it when they divide it is any size.
        """
        changed = self.amended(grant)
        if changed.memory is not None and "memory" in self:
            units.check_memory_limit(changed.memory)
        return changed

    def amended(self, grant: Grant) -> Grant:
        """Return ``grant`` changed by the arguments that are present; null removes a limit."""
        return Grant(
            pod_class=units.parse_choice(PodClass, self.need("class", str)) if "class" in self else grant.pod_class,
            cores=self.get("cores", int) if "cores" in self else grant.cores,
            memory=self.get("memory", int) if "memory" in self else grant.memory,
            latency_target_ns=(
                self.get("latency_target_ns", int) if "latency_target_ns" in self else grant.latency_target_ns
            ),
            profiling=self.need("profiling", bool) if "profiling" in self else grant.profiling,
            graphics=self.need("graphics", bool) if "graphics" in self else grant.graphics,
        )


def _typed(name: str, value: Any, kind: type[_T]) -> _T:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidValueError(f"request: {name} {value!r}: wants a value of type {kind.__name__}")
    if isinstance(value, int) and abs(value) > _MOST:
        raise InvalidValueError(f"request: {name} {value}: too large for any quantity")
    return value

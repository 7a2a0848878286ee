"""SCENARIO.toml: which pods come and go on one pGPU, what they do, and what an operator changes meanwhile.

It decides what a scenario may say, in one frozen value or one clear line naming file and key. Running it is
left to ``qgpu.sim.scenario``; whether grants fit is left to admission.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from qgpu import policies, units
from qgpu.config import GpuSettings
from qgpu.errors import ConfigError, QgpuError
from qgpu.load.spec import Workload
from qgpu.model import Grant, PodClass

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ScenarioPod:
    """One pod: its grant, what its processes do, and from when to when it is there."""

    name: str
    grant: Grant
    workloads: tuple[Workload, ...]
    arrive_ns: int
    leave_ns: int


@dataclass(frozen=True, slots=True)
class GpuChange:
    """An operator changes policies or period of the pGPU."""

    at_ns: int
    settings: GpuSettings


@dataclass(frozen=True, slots=True)
class PodChange:
    """An operator changes a pod's grant."""

    at_ns: int
    pod: str
    grant: Grant


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that happens on one pGPU; changes are in order of time."""

    name: str
    duration_ns: int
    settings: GpuSettings
    pods: tuple[ScenarioPod, ...]
    changes: tuple[GpuChange | PodChange, ...]


def load(path: Path) -> Scenario:
    """Read a scenario. Raises ConfigError with the file, the key and what to do."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    return _scenario(path.stem, _Table(str(path), "", data))


@dataclass(frozen=True, slots=True)
class _Table:
    """One table of the file, which knows where it stands so that complaints can say it."""

    file: str
    where: str
    raw: dict[str, Any]

    def error(self, key: str, what: str) -> ConfigError:
        return ConfigError(f"{self.file}: {self._at(key)}: {what}")

    def only(self, *keys: str) -> None:
        for key in self.raw:
            if key not in keys:
                raise self.error(key, f"no such key; known here: {', '.join(keys)}")

    def text(self, key: str, default: _T, read: Callable[[str], _T]) -> _T:
        """Read a value that is written as a string."""
        if key not in self.raw:
            return default
        value = self.raw[key]
        if not isinstance(value, str):
            raise self.error(key, f"write it as a string, not as {value!r}")
        return self.check(key, lambda: read(value))

    def check(self, key: str, make: Callable[[], _T]) -> _T:
        """Make a value, and name the key if that is refused."""
        try:
            return make()
        except QgpuError as error:
            raise self.error(key, str(error)) from error

    def table(self, key: str) -> _Table:
        return self._below(key, self.raw.get(key, {}))

    def tables(self, key: str) -> list[_Table]:
        value = self.raw.get(key, [])
        if not isinstance(value, list):
            raise self.error(key, f"must be a list of tables, written [[{self._at(key)}]]")
        return [self._below(f"{key}[{number}]", each) for number, each in enumerate(value)]

    def _below(self, key: str, value: object) -> _Table:
        if not isinstance(value, dict):
            raise self.error(key, f"must be a table, not {value!r}")
        return _Table(self.file, self._at(key), value)

    def _at(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where and key else self.where or key


def _scenario(name: str, top: _Table) -> Scenario:
    top.only("duration", "gpu", "pods", "events")
    duration_ns = top.text("duration", 0, units.parse_duration)
    if duration_ns <= 0:
        raise top.error("duration", 'say how long to simulate, as in duration = "60s"')
    gpu = top.table("gpu")
    gpu.only("policy", "online_policy", "period", "offline_floor")
    settings = _settings(gpu, GpuSettings())
    pods_table = top.table("pods")
    pods = tuple(_pod(key, pods_table.table(key), duration_ns) for key in pods_table.raw)
    if not pods:
        raise top.error("pods", "a scenario needs at least one pod, written [pods.NAME]")
    return Scenario(name, duration_ns, settings, pods, _changes(top.tables("events"), settings, pods, duration_ns))


def _settings(table: _Table, base: GpuSettings) -> GpuSettings:
    policy = table.text("policy", base.policy, policies.find)
    online_policy = table.text("online_policy", base.online_policy, policies.find)
    period_ns = table.text("period", base.period_ns, units.parse_duration)
    floor = table.text("offline_floor", base.offline_floor, units.parse_percent)
    kept = table.check("period", lambda: replace(base, policy=policy, online_policy=online_policy, period_ns=period_ns))
    return table.check("offline_floor", lambda: replace(kept, offline_floor=floor))


def _pod(name: str, table: _Table, duration_ns: int) -> ScenarioPod:
    table.only("class", "latency_target", "cores", "memory", "arrive", "leave", "workload", "workloads")
    arrive_ns = table.text("arrive", 0, units.parse_duration)
    leave_ns = table.text("leave", duration_ns, units.parse_duration)
    if not arrive_ns < leave_ns <= duration_ns:
        raise table.error("leave", "a pod leaves after it arrives, and not after the scenario's end")
    if ("workload" in table.raw) == ("workloads" in table.raw):
        raise table.error("workload", "give a pod one workload, or workloads for one process each")
    loads = table.tables("workloads") if "workloads" in table.raw else [table.table("workload")]
    if not loads:
        raise table.error("workloads", "a pod needs at least one")
    workloads = tuple(load.check("", partial(Workload.from_dict, load.raw)) for load in loads)
    return ScenarioPod(name, _grant(table, Grant()), workloads, arrive_ns, leave_ns)


def _grant(table: _Table, base: Grant) -> Grant:
    pod_class = table.text("class", base.pod_class, _class)
    memory = table.text("memory", base.memory, units.parse_memory)
    target_ns = table.text("latency_target", base.latency_target_ns, units.parse_duration)
    cores = table.raw.get("cores", base.cores)
    if cores is not None and (isinstance(cores, bool) or not isinstance(cores, int)):
        raise table.error("cores", f"write it as a whole number of per cent, not as {cores!r}")
    grant = table.check("cores", lambda: Grant(pod_class, cores, memory))
    return table.check("latency_target", lambda: replace(grant, latency_target_ns=target_ns))


def _class(text: str) -> PodClass:
    if text not in tuple(PodClass):
        raise ConfigError(f"{text!r}: choose one of {', '.join(PodClass)}")
    return PodClass(text)


def _changes(
    events: Sequence[_Table], settings: GpuSettings, pods: Sequence[ScenarioPod], duration_ns: int
) -> tuple[GpuChange | PodChange, ...]:
    """Read events in order of time, for each changes what the ones before it left."""
    grants = {pod.name: pod.grant for pod in pods}
    timed = []
    for event in events:
        at_ns = event.text("at", -1, units.parse_duration)
        if not 0 <= at_ns < duration_ns:
            raise event.error("at", 'say when, before the scenario ends, as in at = "20s"')
        timed.append((at_ns, event))
    changes: list[GpuChange | PodChange] = []
    for at_ns, event in sorted(timed, key=lambda pair: pair[0]):
        if "pod" not in event.raw:
            event.only("at", "policy", "online_policy", "period", "offline_floor", "pod")
            settings = _settings(event, settings)
            changes.append(GpuChange(at_ns, settings))
            continue
        event.only("at", "pod", "class", "latency_target", "cores", "memory")
        name = event.text("pod", "", str)
        if name not in grants:
            raise event.error("pod", f"there is no pod {name!r}; there are {', '.join(grants)}")
        grants[name] = _grant(event, grants[name])
        changes.append(PodChange(at_ns, name, grants[name]))
    return tuple(changes)

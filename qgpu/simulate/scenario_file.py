"""Reads SCENARIO.toml: which pods come and go on one pGPU, what they run, and what an operator changes meanwhile.

The result is one frozen value, or one error line with file and key. ``qgpu.simulate.scenario`` runs it; admission
checks whether grants fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from qgpu import toml_tables, units
from qgpu.config import GPU_KEYS, GpuSettings, gpu_settings
from qgpu.load.workload import Workload
from qgpu.model import Grant, PodClass
from qgpu.toml_tables import Table


@dataclass(frozen=True, slots=True)
class ScenarioPod:
    """One pod: its grant, the workloads of its processes, and when it arrives and leaves."""

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
    """All events on one pGPU; changes are in order of time."""

    name: str
    duration_ns: int
    settings: GpuSettings
    pods: tuple[ScenarioPod, ...]
    changes: tuple[GpuChange | PodChange, ...]


def load(path: Path) -> Scenario:
    """Read a scenario. Raises ConfigError with file, key and remedy."""
    return _scenario(path.stem, toml_tables.read(path))


def _scenario(name: str, top: Table) -> Scenario:
    top.only("duration", "gpu", "pods", "events")
    duration_ns = top.text("duration", 0, units.parse_duration)
    if duration_ns <= 0:
        raise top.error("duration", 'say how long to simulate, as in duration = "60s"')
    gpu = top.table("gpu")
    gpu.only(*GPU_KEYS)
    settings = gpu_settings(gpu, GpuSettings())
    pods_table = top.table("pods")
    pods = tuple(_pod(key, pods_table.table(key), duration_ns) for key in pods_table.raw)
    if not pods:
        raise top.error("pods", "a scenario needs at least one pod, written [pods.NAME]")
    return Scenario(name, duration_ns, settings, pods, _changes(top.tables("events"), settings, pods, duration_ns))


def _pod(name: str, table: Table, duration_ns: int) -> ScenarioPod:
    table.only(*_GRANT_KEYS, "arrive", "leave", "workload", "workloads")
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


def _grant(table: Table, base: Grant) -> Grant:
    pod_class = table.text("class", base.pod_class, partial(units.parse_choice, PodClass))
    memory = table.text("memory", base.memory, units.parse_memory_limit)
    target_ns = table.text("latency_target", base.latency_target_ns, units.parse_duration)
    cores = table.raw.get("cores", base.cores)
    if cores is not None and (isinstance(cores, bool) or not isinstance(cores, int)):
        raise table.error("cores", f"write it as a whole number of per cent, not as {cores!r}")
    grant = table.check("cores", lambda: Grant(pod_class, cores, memory))
    return table.check("latency_target", lambda: replace(grant, latency_target_ns=target_ns))


#: The keys of a pod's grant.
_GRANT_KEYS = ("class", "latency_target", "cores", "memory")


def _need_any(event: Table, keys: Sequence[str]) -> None:
    if not any(key in event.raw for key in keys):
        raise event.error("", f"it changes nothing; give at least one of {', '.join(keys)}")


def _changes(
    events: Sequence[Table], settings: GpuSettings, pods: Sequence[ScenarioPod], duration_ns: int
) -> tuple[GpuChange | PodChange, ...]:
    """Read events in order of time, because each one changes what earlier ones left."""
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
            event.only("at", *GPU_KEYS, "pod")
            _need_any(event, GPU_KEYS)
            settings = gpu_settings(event, settings)
            changes.append(GpuChange(at_ns, settings))
            continue
        event.only("at", "pod", *_GRANT_KEYS)
        name = event.text("pod", "", str)
        if name not in grants:
            raise event.error("pod", f"there is no pod {name!r}; there are {', '.join(grants)}")
        _need_any(event, _GRANT_KEYS)
        grants[name] = _grant(event, grants[name])
        changes.append(PodChange(at_ns, name, grants[name]))
    return tuple(changes)

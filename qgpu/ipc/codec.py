"""Grants, plans and samples as JSON and back: for messages between our processes, and for the guardian's journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from qgpu.model import Grant, OnIdle, Plan, PodClass, PodPlan, PodSample, Sample, Span, TsgSample, Window
from qgpu.model.plane_api import MigInstance, Pgpu
from qgpu.model.prepared_grant import PreparedGrant

#: Version of the messages between daemon and guardian and of the journal's facts.
PROTOCOL = 6


def grant_to_json(grant: Grant) -> dict[str, Any]:
    """Convert a grant to JSON types."""
    return {
        "class": grant.pod_class.value,
        "cores": grant.cores,
        "memory": grant.memory,
        "latency_target_ns": grant.latency_target_ns,
        "profiling": grant.profiling,
        "graphics": grant.graphics,
    }


def grant_from_json(data: Mapping[str, Any]) -> Grant:
    """Read a grant; missing permissions are not granted. Raises InvalidValueError, ValueError."""
    return Grant(
        PodClass(data["class"]),
        data["cores"],
        data["memory"],
        data.get("latency_target_ns"),
        data.get("profiling", False) is True,
        data.get("graphics", False) is True,
    )


def grants_to_json(grants: Mapping[int, Grant]) -> dict[str, Any]:
    """Convert a pod's grants, by pGPU, to JSON types."""
    return {str(pgpu): grant_to_json(grant) for pgpu, grant in grants.items()}


def grants_from_json(data: Mapping[str, Any]) -> dict[int, Grant]:
    """Read a pod's grants. Raises as grant_from_json."""
    return {int(pgpu): grant_from_json(grant) for pgpu, grant in data.items()}


def pgpu_from_json(data: Mapping[str, Any]) -> Pgpu:
    """Read a pGPU from the daemon's answer to ``gpu.list``."""
    mig = MigInstance(**data["mig"]) if data["mig"] else None
    return Pgpu(data["index"], data["uuid"], data["name"], data["memory"], data["minor"], mig)


def prepared_to_json(grant: PreparedGrant) -> dict[str, Any]:
    """Convert a prepared grant to the arguments of the request ``grant.prepare``."""
    return {
        "uid": grant.uid,
        "namespace": grant.namespace,
        "name": grant.name,
        "consumers": list(grant.consumers),
        "devices": [
            {"request": device.request, "gpu": device.gpu, "share": device.share} | grant_to_json(device.grant)
            for device in grant.devices
        ],
        "part": None if grant.part is None else asdict(grant.part),
    }


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Convert a plan to JSON types."""
    return {
        "pgpu": plan.pgpu,
        "period_ns": plan.period_ns,
        "pods": [
            {
                "pod": part.pod,
                "class": part.pod_class.value,
                "timeslice_us": part.timeslice_us,
                "copy_timeslice_us": part.copy_timeslice_us,
                "tsg_turn_ns": part.tsg_turn_ns,
                "windows": None
                if part.windows is None
                else [[w.start_ns, w.end_ns, w.on_idle.value] for w in part.windows],
            }
            for part in plan.pods
        ],
    }


def plan_from_json(data: dict[str, Any]) -> Plan:
    """Read a plan. Raises InvalidValueError, KeyError, TypeError, ValueError."""
    return Plan(
        data["pgpu"],
        data["period_ns"],
        tuple(
            PodPlan(
                part["pod"],
                PodClass(part["class"]),
                part["timeslice_us"],
                None
                if part["windows"] is None
                else tuple(Window(start, end, OnIdle(on_idle)) for start, end, on_idle in part["windows"]),
                copy_timeslice_us=part["copy_timeslice_us"],
                tsg_turn_ns=part["tsg_turn_ns"],
            )
            for part in data["pods"]
        ),
    )


def sample_from_json(data: dict[str, Any], grants: Mapping[str, Grant]) -> Sample:
    """Read a sample of pods with these grants. Raises as plan_from_json."""
    return Sample(
        data["pgpu"],
        data["now_ns"],
        tuple(
            PodSample(
                pod["pod"],
                grants[pod["pod"]],
                tuple(
                    TsgSample(t["tsg"], t["run_ns"], t["starts"], t["resident"], _spans(t["runs"]), t["longest_ns"])
                    for t in pod["tsgs"]
                ),
                pod["gated_ns"],
                _spans(pod["closed"]),
                pod["preempted"],
                pod["preempting"],
                pod["ended_ns"],
                pod["ended_starts"],
                pod.get("gpfifo_entries"),  # a guardian from before an upgrade does not count
            )
            for pod in data["pods"]
        ),
    )


def _spans(data: Iterable[Sequence[int]]) -> tuple[Span, ...]:
    return tuple((start_ns, end_ns) for start_ns, end_ns in data)

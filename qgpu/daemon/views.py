"""Read-only views of pGPUs and pods in JSON types, built from values the caller has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from qgpu.daemon.events import Origin
from qgpu.daemon.expected_wait import expected_wait_p99_ns
from qgpu.daemon.gpu_loop import GpuLoop
from qgpu.daemon.over_limit import over_limits
from qgpu.daemon.pod_usage import UNSEEN, PodUsage
from qgpu.ipc.codec import grant_to_json
from qgpu.model.container_labels import ContainerLabels
from qgpu.model.plane_api import Pgpu, PodInfo
from qgpu.model.suspension import Suspension
from qgpu.sched.ledger import Ledger

#: The usages of pods, by pGPU and name.
Usages = Mapping[int, Mapping[str, PodUsage]]


def gpu(pgpu: Pgpu, loop: GpuLoop, pods: Sequence[PodInfo], usages: Usages) -> dict[str, Any]:
    """Return a pGPU, its settings and its last seconds.

    ``utilization`` is NVML's: the part of the time in which any kernel ran; None if unknown. ``engine_active`` is the
    part of the last seconds in which a pod was on the engine. Both are 0 to 1.
    """
    there = usages[pgpu.index]
    used, temporary = loop.ledger.utilization, loop.temporary
    return (
        asdict(pgpu)
        | asdict(loop.settings)
        | {
            "pods": sum(pgpu.index in pod.grants for pod in pods),
            "now_ns": loop.ledger.now_ns or 0,
            "problem": loop.problem,
            "temporary_policy": temporary.policy if temporary else None,
            "utilization": None if used is None else round(used, 4),
            "engine_active": round(min(1.0, sum(each.recent.share for each in there.values())), 4),
            "below_quota": {name: each.below_quota for name, each in there.items() if each.below_quota},
            "memory_used": sum(pod.memory.get(pgpu.index, 0) for pod in pods),
        }
    )


def pod(info: PodInfo, labels: ContainerLabels, ledgers: Mapping[int, Ledger], usages: Usages) -> dict[str, Any]:
    """Return a pod with its grants and its use by pGPU."""
    return {
        "name": info.name,
        **asdict(labels),
        "cgroup": info.cgroup,
        "joined": info.joined,
        "pids": info.pids,
        "problem": "; ".join([*over_limits(info), *filter(None, [info.problem])]),
        "refused_memory": info.refused_memory,
        "refused_calls": info.refused_calls,
        "grants": [{"gpu": index} | grant_to_json(grant) for index, grant in info.grants.items()],
        "usage": [_usage(info, index, ledgers[index], usages[index]) for index in info.grants],
    }


def place(found: Suspension, waits: str, origin: Origin) -> dict[str, Any]:
    """Return where a pod is: on its cards, off them, or on the way, what it waits for, and what went wrong last.

    Also who made it, and when. A value is None if it is unknown, as of a pod that an earlier daemon has moved.
    """
    return {
        "created_at": origin.at,
        "created_by": origin.by,
        "state": found.residency.value,
        "state_since_s": found.since_s or origin.untouched_since_s,
        "state_error": found.error,
        "moving": bool(found.moves),
        "yielded": found.yielded,
        "waits_for": waits,
        "suspended_memory": {str(index): size for index, size in found.memory.items()},
    }


def _usage(info: PodInfo, index: int, ledger: Ledger, usages: Mapping[str, PodUsage]) -> dict[str, Any]:
    account, usage = ledger.accounts.get(info.name), usages.get(info.name, UNSEEN)
    return {
        "gpu": index,
        "now_ns": ledger.now_ns or 0,
        "used_ns": account.used_ns if account else 0,
        "busy": account is not None and account.busy,
        "debt_ns": account.debt_ns if account else 0,
        "tsgs": len(account.tsgs) if account else 0,
        "memory": info.memory.get(index, 0),
        "expected_wait_p99_ns": expected_wait_p99_ns(ledger, info.name),
        "share": round(usage.recent.share, 4),
        "gated": round(usage.recent.gated, 4),
        "gate_time_ns": usage.counted.gated_ns,
        "switches": usage.counted.starts,
        "switch_time_ns": usage.switch_ns,
        "below_quota": bool(usage.below_quota),
        "below_quota_reason": usage.below_quota,
    }

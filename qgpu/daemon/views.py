"""Read-only views of pGPUs and pods in JSON types, built from values the caller has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from qgpu.daemon.gpu_loop import GpuLoop
from qgpu.daemon.over_limit import over_limits
from qgpu.ipc.codec import grant_to
from qgpu.model.container_labels import ContainerLabels
from qgpu.model.plane_api import Pgpu, PodInfo
from qgpu.sched.ledger import Ledger


def gpu(pgpu: Pgpu, loop: GpuLoop, pods: Sequence[PodInfo]) -> dict[str, Any]:
    """Return a pGPU and its settings."""
    return (
        asdict(pgpu)
        | asdict(loop.settings)
        | {
            "pods": sum(pgpu.index in pod.grants for pod in pods),
            "now_ns": loop.ledger.now_ns or 0,
            "trouble": loop.trouble,
        }
    )


def pod(info: PodInfo, labels: ContainerLabels, ledgers: Mapping[int, Ledger]) -> dict[str, Any]:
    """Return a pod with its grants and its use by pGPU."""
    return {
        "name": info.name,
        **asdict(labels),
        "cgroup": info.cgroup,
        "pids": info.pids,
        "trouble": "; ".join([*over_limits(info), *filter(None, [info.trouble])]),
        "refused_memory": info.refused_memory,
        "refused_calls": info.refused_calls,
        "grants": [{"gpu": index} | grant_to(grant) for index, grant in info.grants.items()],
        "usage": [_usage(info, index, ledgers[index]) for index in info.grants],
    }


def _usage(info: PodInfo, index: int, ledger: Ledger) -> dict[str, Any]:
    account = ledger.accounts.get(info.name)
    return {
        "gpu": index,
        "now_ns": ledger.now_ns or 0,
        "used_ns": account.used_ns if account else 0,
        "busy": account is not None and account.busy,
        "debt_ns": account.debt_ns if account else 0,
        "tsgs": len(account.tsgs) if account else 0,
        "memory": info.memory.get(index, 0),
    }

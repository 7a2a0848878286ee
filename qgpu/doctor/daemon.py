"""Checks of the daemon: its directories, whether it answers, whether its loops work, and overcommitted memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qgpu import units
from qgpu.checkpoint.cuda_checkpoint import FIRST_BRANCH
from qgpu.doctor.report import Check, Verdict
from qgpu.doctor.state_directory import check_state_directory
from qgpu.errors import QgpuError
from qgpu.ipc.control_socket import Client, how_to_start


def check_daemon(runtime_dir: Path, timeout_s: float) -> list[Check]:
    """Check the daemon of this runtime directory."""
    if not runtime_dir.is_dir():
        return [Check("runtime directory", Verdict.WARN, f"{runtime_dir} does not exist", how_to_start(runtime_dir))]
    here = Check("runtime directory", Verdict.OK, str(runtime_dir))
    try:
        with Client(runtime_dir, timeout_s) as client:
            status, pods = client.call("status"), client.call("pod.list")["pods"]
    except QgpuError as error:
        found, _, remedy = str(error).partition("; ")
        return [here, Check("daemon", Verdict.WARN, found, remedy or "see the daemon's log")]
    problems = [f"pGPU {gpu['index']}: {gpu['problem']}" for gpu in status["gpus"] if gpu["problem"]]
    if problems:
        return [here, Check("daemon", Verdict.FAIL, "; ".join(problems), "see the daemon's log")]
    count = len(status["gpus"])
    found = f"qgpu {status['version']} on plane {status['plane']} ({status['why']}), {count} pGPU{'s' * (count != 1)}"
    state = check_state_directory(None if (kept_in := status["state_dir"]) is None else Path(kept_in))
    return [here, Check("daemon", Verdict.OK, found), state, *_beside(status), *check_memory(status, pods)]


def _beside(status: dict[str, Any]) -> list[Check]:
    """Check for processes that use the cards outside pods."""
    unmanaged_processes = status["unmanaged_processes"]
    found = ", ".join(f"{each['pid']} ({each['name']}) on pGPU {each['gpu']}" for each in unmanaged_processes)
    remedy = "nothing bounds them; run them in pods, or end them, unless the host gives its cards to others too"
    return [Check("processes outside pods", Verdict.WARN, found, remedy)] if unmanaged_processes else []


def check_memory(status: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Check the pGPUs whose memory is overcommitted."""
    granted_often = [gpu for gpu in status["gpus"] if gpu["memory_overcommit"] > 1]
    if granted_often and (branch := _branch(status["driver"])) is not None and branch < FIRST_BRANCH:
        cards = ", ".join(str(gpu["index"]) for gpu in granted_often)
        yield Check(
            "memory overcommit",
            Verdict.WARN,
            f"on for pGPU {cards}, but driver {status['driver']} cannot suspend pods, so none makes room",
            f"install driver branch {FIRST_BRANCH} or newer, or: qgpuctl gpu policy set N --memory-overcommit 1",
        )
    for gpu in status["gpus"]:
        name, shortage = f"memory of pGPU {gpu['index']}", gpu["memory_shortage"]
        if shortage:
            yield Check(
                name,
                Verdict.WARN,
                f"{_granted(gpu, pods)}; {units.format_memory(shortage)} still to be made free",
                "until it is, pods wait or cannot allocate up to their limits; if that lasts, move, suspend or end one",
            )
        elif gpu in granted_often:
            yield Check(name, Verdict.OK, _granted(gpu, pods))
        if stuck := gpu["memory_stuck"]:
            yield Check(
                f"pods that stay on pGPU {gpu['index']}",
                Verdict.WARN,
                "; ".join(f"{pod}: {reason}" for pod, reason in stuck.items()),
                "they make no room for others; the daemon tries again by itself; remove the reason, or end them",
            )


def _granted(gpu: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> str:
    """Say what of a pGPU's memory is granted to each class, and what of it lies in host memory."""
    grants = [grant for pod in pods for grant in pod["grants"] if grant["gpu"] == gpu["index"]]
    limits = {
        each: units.format_memory(sum(grant["memory"] or 0 for grant in grants if grant["class"] == each))
        for each in ("online", "offline")
    }
    off = sum(pod["suspended_memory"].get(str(gpu["index"]), 0) for pod in pods if pod["state"] == "suspended")
    return (
        f"{units.format_memory(gpu['memory'])}, granted {limits['online']} to online and {limits['offline']} to "
        f"offline pods; {units.format_memory(off)} in host memory"
    )


def _branch(driver: str | None) -> int | None:
    """Return the branch of a driver version; None if there is no driver."""
    major = (driver or "").partition(".")[0]
    return int(major) if major.isdigit() else None

"""Checks of the daemon: its runtime directory, whether it answers, and whether its loops work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qgpu.doctor.report import Check, Verdict
from qgpu.errors import QgpuError
from qgpu.ipc.control_socket import Client

_START = "start it: qgpud"


def check_daemon(runtime_dir: Path, timeout_s: float) -> list[Check]:
    """Check the daemon of this runtime directory."""
    if not runtime_dir.is_dir():
        return [Check("runtime directory", Verdict.WARN, f"{runtime_dir} does not exist", _START)]
    here = Check("runtime directory", Verdict.OK, str(runtime_dir))
    try:
        with Client(runtime_dir, timeout_s) as client:
            status = client.call("status")
    except QgpuError as error:
        return [here, Check("daemon", Verdict.WARN, str(error), _START)]
    problems = [f"pGPU {gpu['index']}: {gpu['problem']}" for gpu in status["gpus"] if gpu["problem"]]
    if problems:
        return [here, Check("daemon", Verdict.FAIL, "; ".join(problems), "see the daemon's log")]
    found = f"qgpu {status['version']} on plane {status['plane']} ({status['why']}), {len(status['gpus'])} pGPUs"
    return [here, Check("daemon", Verdict.OK, found), *_beside(status)]


def _beside(status: dict[str, Any]) -> list[Check]:
    """Check for processes that use the cards outside pods; a daemon of an earlier version does not report them."""
    unmanaged_processes = status.get("unmanaged_processes", ())
    found = ", ".join(f"{each['pid']} ({each['name']}) on pGPU {each['gpu']}" for each in unmanaged_processes)
    remedy = "nothing bounds them; run them in pods, or end them, unless the host gives its cards to others too"
    return [Check("processes outside pods", Verdict.WARN, found, remedy)] if unmanaged_processes else []

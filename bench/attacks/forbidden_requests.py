"""Runs in a pod: tries every request and device that only outsiders may use, and reports as JSON which succeeded.

Arguments: REPORT RUNTIME_DIR. It runs as the host's root in a pod's cgroup, which is more than any container gets.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qgpu.errors import QgpuError
from qgpu.ipc import wire
from qgpu.ipc.control_socket import Client


def main() -> None:
    """Try everything; an attempt that raises was refused."""
    report, runtime_dir = Path(sys.argv[1]), Path(sys.argv[2])
    own = os.environ["QGPU_POD"]
    grants = {"0": {"class": "online", "cores": 5, "memory": None}}

    def ask(op: str, **arguments: Any) -> dict[str, Any]:
        with Client(runtime_dir, 5) as client:
            return client.call(op, **arguments)

    def guardian() -> None:
        connection = wire.connect(str(runtime_dir / "guardian.sock"), 2)
        connection.send({"op": "hello"})
        if (answer := connection.receive()) is None or not answer[0].get("ok"):
            raise PermissionError("hung up")

    attempts: dict[str, Callable[[], Any]] = {
        "pod.set of oneself": lambda: ask("pod.set", name=own, memory=1 << 50, cores=45),
        "pod.set of the neighbour": lambda: ask("pod.set", name="neighbour", cores=1),
        "pod.create": lambda: ask("pod.create", name="mine", grants=grants),
        "pod.attach": lambda: ask("pod.attach", name="neighbour"),
        "pod.remove": lambda: ask("pod.remove", name="neighbour"),
        "gpu.set": lambda: ask("gpu.set", gpu=0, policy="best-effort"),
        "status": lambda: ask("status"),
        "the guardian's socket": guardian,
        "/dev/qgpu": lambda: os.close(os.open("/dev/qgpu", os.O_RDWR)),
    }
    opened, shut = [], {}
    for name, attempt in attempts.items():
        try:
            attempt()
            opened.append(name)
        except (QgpuError, OSError, wire.WireError) as error:
            shut[name] = str(error)
    report.with_suffix(".part").write_text(json.dumps({"opened": opened, "shut": shut}))
    report.with_suffix(".part").rename(report)


if __name__ == "__main__":
    main()

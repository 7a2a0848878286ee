"""The context of every ``qgpuctl`` command: where the daemon is and how long to wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from qgpu.errors import no_pgpu, no_pod
from qgpu.ipc.control_socket import Client


@dataclass(frozen=True, slots=True)
class Context:
    """The global options, which precede the command."""

    runtime_dir: Path
    timeout_s: float

    def connect(self) -> Client:
        """Connect to the daemon. Raises DaemonUnreachableError."""
        return Client(self.runtime_dir, self.timeout_s)

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Make one request and return its answer. Raises a QgpuError."""
        with self.connect() as client:
            return client.call(op, **arguments)

    def pod(self, name: str) -> dict[str, Any]:
        """Return one pod. Raises UnknownNameError."""
        for pod in self.ask("pod.list")["pods"]:
            if pod["name"] == name:
                return dict(pod)
        raise no_pod(name)

    def gpu(self, index: int) -> dict[str, Any]:
        """Return one pGPU. Raises UnknownNameError."""
        gpus = self.ask("gpu.list")["gpus"]
        for gpu in gpus:
            if gpu["index"] == index:
                return dict(gpu)
        raise no_pgpu(index, (gpu["index"] for gpu in gpus))


pass_context = click.make_pass_decorator(Context)

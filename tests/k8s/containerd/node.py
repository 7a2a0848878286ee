"""A node as tests see it: its daemon, its containerd, and what runs there."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qgpu.ipc.control_socket import Client
from tests.cli.programs import Daemon
from tests.k8s.containerd import cri
from tests.k8s.containerd.engine import Containerd

_PATIENCE_S = 60


@dataclass(slots=True)
class Node:
    """qgpud on simulated pGPUs, and containerd."""

    daemon: Daemon
    options: tuple[str, ...]
    runtime: cri.Runtime
    containerd: Containerd

    def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Make a request to the daemon, as qgpu-k8s does. Raises a QgpuError."""
        return Client(self.daemon.runtime_dir).call(operation, **arguments)

    def pods(self) -> dict[str, Any]:
        """Return the daemon's pods by name."""
        return {pod["name"]: pod for pod in self.daemon.json("pod", "list")["pods"]}

    def restart(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the daemon, and start it again."""
        self.daemon.stop(how)
        self.daemon = Daemon(self.daemon.runtime_dir, *self.options)

    def clear(self) -> None:
        """End all containers, and wait until the daemon has noticed."""
        self.runtime.end_all()
        until(lambda: not self.pods())


@contextmanager
def running(containerd: Containerd, home: Path) -> Iterator[Node]:
    """Run a daemon with two pGPUs beside a containerd."""
    (home / "qgpud.toml").write_text(f'[containers]\ncdi = "{containerd.cdi}"\n')
    kept = ("--state-dir", str(home / "kept"), "--config", str(home / "qgpud.toml"))
    options = ("--plane", "sim", "--sim-gpus", "2", *kept)
    with cri.runtime(containerd, cri.messages(home)) as runtime:
        node = Node(Daemon(home / "run", *options), options, runtime, containerd)
        try:
            yield node
        finally:
            runtime.end_all()
            node.daemon.stop()


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)

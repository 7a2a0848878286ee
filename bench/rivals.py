"""NVIDIA's Multi-Process Service as a rival: its control daemon, started for a measurement and always ended."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from harness import Bench

_CONTROL = "nvidia-cuda-mps-control"


@dataclass(frozen=True, slots=True)
class Mps:
    """A running control daemon: what makes a process its client."""

    environment: dict[str, str]

    def client(self, percent: int | None = None) -> dict[str, str]:
        """Return the environment of a client, held to a percentage of threads if one is given."""
        limit = {} if percent is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}
        return {**self.environment, **limit}


def mps_present() -> bool:
    """Tell whether MPS is installed here."""
    return shutil.which(_CONTROL) is not None


@contextmanager
def mps(bench: Bench) -> Iterator[Mps]:
    """Run MPS in directories of our own; end it and every client whatever happens."""
    pipes, logs = (Path(bench.directory / f"mps-{name}") for name in ("pipe", "log"))
    for directory in (pipes, logs):
        directory.mkdir(exist_ok=True)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
    everything = {**bench.environment(), **environment}
    before = _servers()
    subprocess.run([_CONTROL, "-d"], env=everything, check=True, timeout=20)
    try:
        yield Mps(environment)
    finally:
        bench.end_pods()
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([_CONTROL], input="quit -t 5\n", text=True, env=everything, timeout=15, check=False)
        left = [process for process in _servers() if process not in before]
        _, left = psutil.wait_procs(left, 5)
        for process in left:
            process.kill()


def _servers() -> list[psutil.Process]:
    return [found for found in psutil.process_iter(["name"]) if str(found.info["name"]).startswith("nvidia-cuda-mps")]

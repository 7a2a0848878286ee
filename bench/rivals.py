"""Ways to share a card: qgpu and its rivals, plain sharing and NVIDIA's Multi-Process Service. All are always ended."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
from harness import Bench
from pods import BenchError, Pod
from script import Script

_CONTROL = "nvidia-cuda-mps-control"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Mps:
    """A running MPS control daemon, and the environment of its clients."""

    environment: dict[str, str]

    def client(self, percent: int | None = None) -> dict[str, str]:
        """Return the environment of a client, limited to a percentage of threads if one is given."""
        limit = {} if percent is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}
        return {**self.environment, **limit}


def mps_present() -> bool:
    """Tell whether MPS is installed here."""
    return shutil.which(_CONTROL) is not None


@contextmanager
def mps(bench: Bench) -> Iterator[Mps]:
    """Run MPS in directories of our own; end it and every client in any case."""
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


@dataclass(frozen=True, slots=True)
class Way:
    """A way to share the card: in pods of a running daemon, or without qgpu, plainly or by MPS."""

    name: str
    script: Script
    service: Mps | None = None

    def start(
        self,
        name: str,
        kernel: str,
        *options: str,
        pod_class: str = "offline",
        cores: int | None = None,
    ) -> Pod:
        """Start a load; class and quota count for qgpu only."""
        bench = self.script.bench
        if self.name == QGPU:
            return bench.pod(name, kernel, *options, pod_class=pod_class, cores=cores)
        return bench.outside(name, kernel, *options, environment=self.service.client() if self.service else None)

    def running(self, *pods: Pod) -> None:
        """Wait until loads have run for a second."""
        if self.name == QGPU:
            self.script.running(*pods)
        else:
            self.script.running_outside(*pods)


QGPU, PLAIN, MPS = "qgpu", "plain", "MPS"


def ways(script: Script) -> list[str]:
    """Return the ways to share that are available here."""
    if script.bench.simulated:
        return [QGPU]
    return [QGPU, PLAIN, *([MPS] if mps_present() else [])]


@contextmanager
def opened(script: Script, name: str, policy: str | None = None) -> Iterator[Way]:
    """Prepare a way to share, and end every load at the end. Without a policy qgpu uses its default."""
    if name == QGPU:
        with script.bench.daemon():
            if policy is not None:
                script.bench.policy(policy)
            yield Way(name, script)
    elif name == MPS:
        with mps(script.bench) as service:
            yield Way(name, script, service)
    else:
        try:
            yield Way(name, script)
        finally:
            script.bench.end_pods()


def in_every_way(script: Script, measure: Callable[[Way], _T], policy: str | None = None) -> dict[str, _T]:
    """Measure in every way to share that is available here.

    A rival that fails is reported and left out; so are rivals when the script is told to end in the meantime.
    """
    found: dict[str, _T] = {}
    for name in ways(script):
        try:
            with opened(script, name, policy) as way:
                found[name] = measure(way)
        except (BenchError, SystemExit) as error:
            if name == QGPU:
                raise
            script.say(f"{name} is left out: {error}")
            if script.told_to_end:
                break
    return found

"""Runs the demo's own daemon and pods, and always ends them.

Every change goes through ``qgpuctl``, as it would by hand. Only readings go directly to the control socket.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from qgpu.demo.scenes import DemoPod
from qgpu.errors import DaemonUnreachableError, NoGpuError, QgpuError, TimedOutError
from qgpu.ipc.control_socket import Client
from qgpu.linux.interpreter import python

_QGPUD = python("-c", "from qgpu.daemon.main import main; main()")
_QGPUCTL = python("-c", "from qgpu.cli.main import main; main()")
_LOAD = python("-m", "qgpu.load.main")
_READY_S = 20.0
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of the daemon: GPU time by pod, and when on the daemon's clock."""

    now_ns: int
    used_ns: Mapping[str, int]
    grants: Mapping[str, Mapping[str, Any]]


@dataclass(slots=True)
class PrivateDaemon:
    """A private daemon in its own directory, and the pods that share its pGPU."""

    plane: str
    device: str = ""
    _pods: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _iterations: dict[str, int] = field(default_factory=dict)
    _directory: Path = field(default_factory=Path)
    _client: Client | None = None
    _ends: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        with ExitStack() as ends:
            self._directory = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="qgpu-demo-")))
            log = ends.enter_context((self._directory / "qgpud.log").open("wb"))
            command = [*_QGPUD, "--runtime-dir", str(self._runtime_dir), "--plane", self.plane]
            # In a session of its own: only we get Ctrl-C, and we end everything in order.
            daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            ends.callback(_end, daemon)
            self._client = self._connected(daemon)
            ends.callback(self._client.close)
            ends.callback(self._end_pods)
            status = self._client.call("status")
            self.plane, self.device = status["plane"], status["gpus"][0]["name"]
            self._ends = ends.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ends.close()

    def calibrate(self, pods: Sequence[DemoPod]) -> None:
        """Calibrate each pod's kernels while the card is free; not needed on the simulator. Raises NoGpuError."""
        for pod in pods if self.plane != "sim" else ():
            command = [*_LOAD, *pod.load[:2], "--count", "1"]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode:
                raise NoGpuError(ended.stderr.strip())
            self._iterations[pod.name] = json.loads(ended.stdout)["iterations"]

    def start_pod(self, pod: DemoPod) -> None:
        """Start a pod."""
        known = self._iterations.get(pod.name)
        load = [*_LOAD, *pod.load, "--duration", "0s", *(("--iterations", str(known)) if known else ())]
        grant = ["--class", pod.pod_class, *(("--cores", str(pod.cores)) if pod.cores else ())]
        with self._log_of(pod.name).open("wb") as log:
            self._pods[pod.name] = subprocess.Popen(
                [*self._ctl, "run", "--name", pod.name, *grant, "--", *load],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    def await_pods(self) -> None:
        """Wait until the daemon knows every started pod. Raises QgpuError if one has died, TimedOutError."""
        until = time.monotonic() + _READY_S
        while missing := self._pods.keys() - self.read().grants.keys():
            if time.monotonic() > until:
                raise TimedOutError(f"pods {', '.join(sorted(missing))} have not come after {_READY_S:g} s")
            time.sleep(0.05)

    def end_pod(self, pod: DemoPod) -> None:
        """End a pod."""
        _end(self._pods.pop(pod.name))

    def qgpuctl(self, *arguments: str) -> None:
        """Run ``qgpuctl``. Raises QgpuError with its error line."""
        ended = subprocess.run([*self._ctl, *arguments], capture_output=True, text=True, check=False)
        if ended.returncode:
            raise QgpuError(f"qgpuctl {' '.join(arguments)}: {ended.stderr.strip()}")

    def read(self) -> Reading:
        """Read what each pod has used so far. Raises QgpuError if a pod has died."""
        for name, pod in self._pods.items():
            if pod.poll() is not None:
                raise QgpuError(f"pod {name} ended: {self._log_of(name).read_text(errors='replace').strip()[-300:]}")
        assert self._client is not None
        while True:
            before = self._client.call("gpu.list")["gpus"][0]["now_ns"]
            pods = self._client.call("pod.list")["pods"]
            # The daemon may have sampled the card in between; both answers must come from the same sample.
            if self._client.call("gpu.list")["gpus"][0]["now_ns"] == before:
                break
        return Reading(
            before,
            {pod["name"]: sum(use["used_ns"] for use in pod["usage"]) for pod in pods},
            {pod["name"]: pod["grants"][0] for pod in pods},
        )

    def latency_us(self, pod: DemoPod) -> float | None:
        """Return the 99th percentile of a watched pod's last second, in µs."""
        if pod.name not in self._pods:
            return None
        for line in reversed(self._log_of(pod.name).read_text(errors="replace").splitlines()):
            with suppress(ValueError):
                latency = json.loads(line)["latency_us"]
                return float(latency["p99"]) if latency else None
        return None

    @property
    def _ctl(self) -> list[str]:
        return [*_QGPUCTL, "--runtime-dir", str(self._runtime_dir)]

    @property
    def _runtime_dir(self) -> Path:
        return self._directory / "run"

    def _log_of(self, pod: str) -> Path:
        return self._directory / f"{pod}.log"

    def _connected(self, daemon: subprocess.Popen[bytes]) -> Client:
        until = time.monotonic() + _READY_S
        while True:
            try:
                return Client(self._runtime_dir)
            except DaemonUnreachableError as error:
                log = (self._directory / "qgpud.log").read_text(errors="replace").strip()
                if daemon.poll() is not None:
                    raise QgpuError(f"qgpud did not start: {log[-500:]}") from error
                if time.monotonic() > until:
                    raise TimedOutError(f"qgpud is not ready after {_READY_S:g} s: {log[-500:]}") from error
            time.sleep(0.05)

    def _end_pods(self) -> None:
        for pod in self._pods.values():
            pod.send_signal(signal.SIGTERM)
        while self._pods:
            _end(self._pods.popitem()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process; if it does not end, kill its whole session."""
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

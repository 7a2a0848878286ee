"""A daemon, pods and loads for one measurement, and what they did.

Decides how processes are started, watched and always ended. What is measured, and what is asked of it, is
spine.py's matter. Everything is driven as a user would: ``qgpud``, ``qgpuctl``, ``qgpu-load``; only reading
GPU time between two moments goes straight to the control socket, because a moment should be short.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from qgpu.control import Client
from qgpu.errors import QgpuError

ROOT = Path(__file__).resolve().parent.parent
_LOAD = [sys.executable, "-m", "qgpu.load.main"]
_QGPUD = [sys.executable, "-c", "from qgpu.daemon.main import main; main()"]
_QGPUCTL = [sys.executable, "-c", "from qgpu.cli.main import main; main()"]
#: In the environment of every process that we start, so that we find them again whatever they do.
_MARK = "QGPU_SPINE"
_READY_S = 30.0


class BenchError(Exception):
    """A measurement could not be made."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The kernels that one load finished over time, from its own count per window."""

    result: Mapping[str, Any]

    def rate(self, span: Span) -> float:
        """Return kernels per second in a span of time.

        Pods take turns, and long kernels end rarely; so counts weigh less towards the ends of the span (a Hann
        window). Where in a turn or a kernel the span begins and ends then hardly matters.
        """
        length = span.end - span.start
        weighed = sum(
            kernels * math.sin(math.pi * (when - span.start) / length) ** 2
            for when, kernels in self._counts()
            if span.start < when < span.end
        )
        return weighed * 2 / length

    def between(self, start: float, end: float) -> int:
        """Count the kernels of the windows whose middles lie between two times (s since the epoch)."""
        return sum(kernels for when, kernels in self._counts() if start <= when < end)

    def _counts(self) -> Iterator[tuple[float, int]]:
        windows = self.result["windows"]
        started = self.result["started_ns"] / 1e9
        half = windows[1][0] / 2 if len(windows) > 1 else 0.0
        for at, kernels in windows:
            yield started + at + half, kernels


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time (s since the epoch), and the GPU time in ns that each pod got in it."""

    start: float
    end: float
    used_ns: Mapping[str, int]


@dataclass(slots=True)
class Pod:
    """A pod with one load in it."""

    name: str
    process: subprocess.Popen[bytes]
    file: Path
    log: Path

    def load_process(self) -> psutil.Process:
        """Find the load itself, below ``qgpuctl run``."""
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            for found in (top, *top.children(recursive=True)):
                with suppress(psutil.Error):
                    if found.cmdline()[1:3] == _LOAD[1:3]:
                        return found
        raise BenchError(f"pod {self.name}: its load is not running: {tail(self.log)}")

    def finish(self, timeout_s: float = 40) -> Progress:
        """Wait until the load ends by itself, and return what it did."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise BenchError(f"pod {self.name}: still running after {timeout_s:.0f} s") from None
        if code:
            raise BenchError(f"pod {self.name}: exit code {code}: {tail(self.log)}")
        return Progress(json.loads(self.file.read_text()))

    def stop(self) -> Progress:
        """End the load and return what it did."""
        self.load_process().send_signal(signal.SIGTERM)
        return self.finish()


class Bench:
    """Everything that one run of the script starts, in one temporary directory."""

    def __init__(self, plane: str, iterations: Mapping[str, int] | None = None) -> None:
        self.plane = plane
        self.directory = Path(tempfile.mkdtemp(prefix="qgpu-spine-"))
        self.runtime_dir = self.directory / "run"
        self.iterations = dict(iterations or {})
        self.daemon_log = self.directory / "qgpud.log"
        self._mark = uuid.uuid4().hex
        self._daemon: subprocess.Popen[bytes] | None = None
        self._pods: list[Pod] = []
        self._count = 0

    @property
    def simulated(self) -> bool:
        """Tell whether there is no GPU in this."""
        return self.plane == "sim"

    # The daemon

    @contextmanager
    def daemon(self) -> Iterator[None]:
        """Run a daemon; at the end, stop it and every pod."""
        try:
            self.start_daemon()
            yield
        finally:
            self._end_pods()
            self.stop_daemon()

    def start_daemon(self) -> None:
        """Start the daemon and wait until it answers."""
        command = [*_QGPUD, "--runtime-dir", str(self.runtime_dir), "--plane", self.plane]
        with self.daemon_log.open("ab") as log:
            self._daemon = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment(), cwd=ROOT
            )
        wait_for("qgpud to answer", self._answers)

    def stop_daemon(self) -> None:
        """Stop the daemon in the ordinary way, or the hard one."""
        if self._daemon is not None:
            self._daemon.terminate()
            try:
                self._daemon.wait(10)
            except subprocess.TimeoutExpired:
                self._daemon.kill()
                self._daemon.wait()
            self._daemon = None

    def kill_daemon(self) -> float:
        """Kill the daemon without a chance to tidy up; return when (s since the epoch)."""
        assert self._daemon is not None
        at = time.time()
        self._daemon.kill()
        self._daemon.wait()
        self._daemon = None
        return at

    def _answers(self) -> bool:
        assert self._daemon is not None
        if self._daemon.poll() is not None:
            raise BenchError(f"qgpud ended with code {self._daemon.returncode}: {tail(self.daemon_log)}")
        try:
            self.ask("status")
        except QgpuError:
            return False
        return True

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Ask the daemon over its socket."""
        client = Client(self.runtime_dir)
        try:
            return client.call(op, **arguments)
        finally:
            client.close()

    def ctl(self, *arguments: str) -> str:
        """Run qgpuctl and return what it prints."""
        ended = subprocess.run(
            [*_QGPUCTL, "--runtime-dir", str(self.runtime_dir), *arguments],
            env=self._environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if ended.returncode:
            raise BenchError(f"qgpuctl {' '.join(arguments)}: code {ended.returncode}: {ended.stderr.strip()}")
        return ended.stdout

    def policy(self, name: str, period: str | None = None) -> None:
        """Set the policy of pGPU 0, live."""
        self.ctl("gpu", "policy", "set", "0", name, *(("--period", period) if period else ()))

    def cores(self, **quotas: int) -> None:
        """Set quotas of pods, live; those that shrink go first, so that the sum always fits."""
        now = {pod["name"]: pod["grants"][0]["cores"] or 0 for pod in self.pods()}
        for name in sorted(quotas, key=lambda name: quotas[name] - now[name]):
            self.ctl("pod", "set", name, "--cores", str(quotas[name]))

    # Pods

    def load_options(self, kernel: str, *options: str) -> list[str]:
        """Return qgpu-load's options for kernels of one length, calibrated alone at first."""
        known = ("--iterations", str(self.iterations[kernel])) if kernel in self.iterations else ()
        # The daemon that simulates has to answer for every window.
        return ["--kernel", kernel, *known, "--window", "50ms" if self.simulated else "10ms", *options]

    def plain(self, *options: str) -> dict[str, Any]:
        """Run a load without qgpu, and return its result."""
        return self._finished(_started_at([*_LOAD, *options]), "plain")

    def run_pod(self, *options: str) -> dict[str, Any]:
        """Run a load in a pod of its own from start to end, and return its result."""
        self._count += 1
        run = ["run", "--name", f"once-{self._count}", "--", *_started_at([*_LOAD, *options])]
        return self._finished([*_QGPUCTL, "--runtime-dir", str(self.runtime_dir), *run], "pod")

    def _finished(self, command: Sequence[str], role: str) -> dict[str, Any]:
        ended = subprocess.run(
            command, env=self._environment(), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        if ended.returncode:
            raise BenchError(f"{role}: exit code {ended.returncode}: {ended.stderr.strip()}")
        result: dict[str, Any] = json.loads(ended.stdout)
        return result

    def pod(self, name: str, kernel: str, *options: str, cores: int | None = None, pod_class: str = "offline") -> Pod:
        """Start a pod whose load runs until it is stopped (unless ``options`` say otherwise)."""
        self._count += 1
        file, log = (self.directory / f"{self._count}-{name}.{suffix}" for suffix in ("json", "log"))
        grant = ["--class", pod_class, *(("--cores", str(cores)) if cores else ())]
        options = (*options, *(() if "--duration" in options else ("--duration", "0s")), "--json", str(file))
        load = [*_LOAD, *self.load_options(kernel, *options)]
        command = [*_QGPUCTL, "--runtime-dir", str(self.runtime_dir), "run", "--name", name, *grant, "--", *load]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._environment(), cwd=ROOT
            )
        pod = Pod(name, process, file, log)
        self._pods.append(pod)
        return pod

    def wait_busy(self, *pods: Pod) -> None:
        """Wait until each pod has been seen to use the GPU."""
        first: dict[str, int] = {}

        def busy() -> bool:
            for pod in pods:
                if pod.process.poll() is not None:
                    raise BenchError(f"pod {pod.name}: ended at once: {tail(pod.log)}")
            used = self.used_ns()
            for name, value in used.items():
                first.setdefault(name, value)
            return all(used.get(pod.name, 0) > first.get(pod.name, 0) for pod in pods)

        wait_for(f"pods {', '.join(pod.name for pod in pods)} to run", busy)

    def wait_gated(self, pod: Pod) -> None:
        """Wait until a busy pod gets no GPU time for a while: its gate is closed."""
        history: list[int] = []

        def still() -> bool:
            history.append(self.used_ns()[pod.name])
            return len(history) > 5 and history[-1] == history[-6]

        wait_for(f"the gate of pod {pod.name} to close", still)

    def pods(self) -> list[dict[str, Any]]:
        """Return the daemon's pods."""
        found: list[dict[str, Any]] = self.ask("pod.list")["pods"]
        return found

    def used_ns(self) -> dict[str, int]:
        """Return the GPU time of each pod so far."""
        return {pod["name"]: sum(use["used_ns"] for use in pod["usage"]) for pod in self.pods()}

    def span(self, seconds: float) -> Span:
        """Let ``seconds`` go by and return them."""
        before, start = self.used_ns(), time.time()
        time.sleep(seconds)
        end, after = time.time(), self.used_ns()
        return Span(start, end, {name: value - before.get(name, 0) for name, value in after.items()})

    # Processes

    def cpu_s(self) -> float:
        """Return the CPU time so far of the daemon, its helpers, and whatever else of qgpu waits beside loads."""
        total = 0.0
        for process in self._ours():
            with suppress(psutil.Error):
                if process.cmdline()[1:3] != _LOAD[1:3]:
                    total += sum(process.cpu_times()[:2])
        return total

    def close(self, keep_log: Path | None = None) -> None:
        """End everything that is left; keep the daemon's log if told where."""
        self._end_pods()
        self.stop_daemon()
        left = self._ours()
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, 5)
        if keep_log is not None and self.daemon_log.exists():
            shutil.copy(self.daemon_log, keep_log)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _ours(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(_MARK) == self._mark:
                    found.append(process)
        return found

    def _end_pods(self) -> None:
        pods, self._pods = self._pods, []
        running = [pod for pod in pods if pod.process.poll() is None]
        for pod in running:
            with suppress(psutil.Error, BenchError):
                pod.load_process().send_signal(signal.SIGTERM)
        for pod in running:
            try:
                pod.process.wait(10)
            except subprocess.TimeoutExpired:
                with suppress(psutil.Error, BenchError):
                    pod.load_process().kill()
                pod.process.kill()
                pod.process.wait()

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("QGPU_")}
        libcuda = {name: os.environ[name] for name in ("QGPU_LIBCUDA",) if name in os.environ}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return {**kept, **libcuda, "PYTHONPATH": path, _MARK: self._mark}


def _started_at(command: Sequence[str]) -> list[str]:
    """Return ``command`` told, to the millisecond, when it was executed."""
    return ["sh", "-c", 'exec "$@" --started-at "$(date +%s.%N)"', "sh", *command]


def wait_for(what: str, ready: Callable[[], bool]) -> None:
    """Look every 20 ms until ``ready``. Raises BenchError after half a minute."""
    until = time.monotonic() + _READY_S
    while not ready():
        if time.monotonic() > until:
            raise BenchError(f"waited {_READY_S:.0f} s for {what}")
        time.sleep(0.02)


def tail(log: Path, lines: int = 5) -> str:
    """Return the end of a log file in one line."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return " | ".join(text.strip().splitlines()[-lines:]) or "(it said nothing)"

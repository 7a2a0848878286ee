"""A daemon, pods and loads for one measurement.

This file starts processes and guarantees that they end; the scripts decide what to measure. It drives qgpu as a user
would, by ``qgpud``, ``qgpuctl`` and ``qgpu-load``. Only GPU time between two moments is read directly from the control
socket, because that is fast.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from pods import LOAD, BenchError, Pod, tail, wait_for
from progress import Span

from qgpu.errors import QgpuError
from qgpu.ipc.control_socket import Client

ROOT = Path(__file__).resolve().parent.parent
QGPUD = [sys.executable, "-c", "from qgpu.daemon.main import main; main()"]
QGPUCTL = [sys.executable, "-c", "from qgpu.cli.main import main; main()"]
#: A variable in the environment of every process that we start, by which we find it again.
_MARK = "QGPU_BENCH"


class Bench:
    """Everything that one run of a script starts, in one temporary directory."""

    def __init__(self, plane: str, qgpud: Sequence[str] = QGPUD, timeout_factor: float = 1) -> None:
        self.plane = plane
        #: The daemon's command, without options.
        self.qgpud = qgpud
        #: An emulated machine may take this many times longer to answer.
        self.timeout_factor = timeout_factor
        self.directory = Path(tempfile.mkdtemp(prefix="qgpu-bench-"))
        self.runtime_dir = self.directory / "run"
        #: The iterations of kernels by length; each is calibrated alone when first used.
        self.iterations: dict[str, int] = {}
        self.daemon_log = self.directory / "qgpud.log"
        self._mark = uuid.uuid4().hex
        self._daemon: subprocess.Popen[bytes] | None = None
        self._pods: list[Pod] = []
        self._count = 0

    @property
    def simulated(self) -> bool:
        """Tell whether the bench runs without a GPU."""
        return self.plane == "sim"

    # The daemon

    @contextmanager
    def daemon(self) -> Iterator[None]:
        """Run a daemon; at the end, stop it and every pod."""
        try:
            self.start_daemon()
            yield
        finally:
            self.end_pods()
            self.stop_daemon()

    def start_daemon(self) -> None:
        """Start the daemon and wait until it answers."""
        command = [*self.qgpud, "--runtime-dir", str(self.runtime_dir), "--plane", self.plane]
        with self.daemon_log.open("ab") as log:
            self._daemon = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment(), cwd=ROOT
            )
        wait_for("qgpud to answer", self._answers, 30 * self.timeout_factor)

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

    def daemon_is(self, process: subprocess.Popen[bytes]) -> None:
        """Use a daemon that another process has started here."""
        self._daemon = process

    def kill_daemon(self) -> float:
        """Kill the daemon with SIGKILL; return when (s since the epoch)."""
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
        with Client(self.runtime_dir, 10 * self.timeout_factor) as client:
            return client.call(op, **arguments)

    def ctl(self, *arguments: str) -> str:
        """Run qgpuctl and return what it prints."""
        ended = self._run([*QGPUCTL, "--runtime-dir", str(self.runtime_dir), *arguments], 30 * self.timeout_factor)
        if ended.returncode:
            raise BenchError(f"qgpuctl {' '.join(arguments)}: code {ended.returncode}: {ended.stderr.strip()}")
        return ended.stdout

    def policy(self, name: str, period: str | None = None) -> None:
        """Set the policy of pGPU 0, live."""
        self.ctl("gpu", "policy", "set", "0", name, *(("--period", period) if period else ()))

    def cores(self, **quotas: int) -> None:
        """Set quotas of pods, live; shrinking ones first, so that the sum always fits."""
        now = {pod["name"]: pod["grants"][0]["cores"] or 0 for pod in self.pods()}
        for name in sorted(quotas, key=lambda name: quotas[name] - now[name]):
            self.ctl("pod", "set", name, "--cores", str(quotas[name]))

    # Pods

    def load_options(self, kernel: str, *options: str) -> list[str]:
        """Return qgpu-load's options for kernels of one length, calibrated alone at first."""
        known = ("--iterations", str(self.iterations[kernel])) if kernel in self.iterations else ()
        # The simulating daemon has to answer for every window.
        return ["--kernel", kernel, *known, "--window", "50ms" if self.simulated else "10ms", *options]

    def plain(self, *options: str) -> dict[str, Any]:
        """Run a load without qgpu, and return its result."""
        return self._finished(_started_at([*LOAD, *options]), "plain")

    def run_pod(self, *options: str) -> dict[str, Any]:
        """Run a load in a pod of its own from start to end, and return its result."""
        self._count += 1
        run = ["run", "--name", f"once-{self._count}", "--", *_started_at([*LOAD, *options])]
        return self._finished([*QGPUCTL, "--runtime-dir", str(self.runtime_dir), *run], "pod")

    def _finished(self, command: Sequence[str], role: str) -> dict[str, Any]:
        ended = self._run(command, 60)
        if ended.returncode:
            raise BenchError(f"{role}: exit code {ended.returncode}: {ended.stderr.strip()}")
        result: dict[str, Any] = json.loads(ended.stdout)
        return result

    def pod(
        self,
        name: str,
        kernel: str,
        *options: str,
        cores: int | None = None,
        memory: str | None = None,
        pod_class: str = "offline",
        gpus: Sequence[int] = (0,),
    ) -> Pod:
        """Start a pod whose load runs until it is stopped (unless ``options`` say otherwise)."""
        command = self._load(kernel, *options)
        return self.start_pod(name, command, cores=cores, memory=memory, pod_class=pod_class, gpus=gpus)

    def outside(self, name: str, kernel: str, *options: str, environment: Mapping[str, str] | None = None) -> Pod:
        """Start the same load outside of any pod: plainly, or with this ``environment``."""
        return self.start_outside(name, self._load(kernel, "--watch", *options), environment)

    def start_pod(
        self,
        name: str,
        command: Sequence[str],
        *,
        cores: int | None = None,
        memory: str | None = None,
        pod_class: str = "offline",
        gpus: Sequence[int] = (0,),
    ) -> Pod:
        """Start any command that takes ``--json FILE`` in a pod."""
        grant = ["--class", pod_class, *(("--cores", str(cores)) if cores else ())]
        grant += ["--memory", memory] if memory else []
        grant += [option for gpu in gpus for option in ("--gpu", str(gpu))]
        run = [*QGPUCTL, "--runtime-dir", str(self.runtime_dir), "run", "--name", name, *grant, "--"]
        return self._start(name, command, run)

    def start_member(self, name: str, command: Sequence[str], group: str, sm: int | None = None) -> Pod:
        """Start any command that takes ``--json FILE`` as a member of a group."""
        part = ("--sm", str(sm)) if sm else ()
        run = [*QGPUCTL, "--runtime-dir", str(self.runtime_dir), "run", "--group", group, *part, "--"]
        return self._start(name, command, run)

    def load_command(self, kernel: str, *options: str) -> list[str]:
        """Return a load's command that runs until it is stopped."""
        return self._load(kernel, *options)

    def start_outside(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Pod:
        """Start any command that takes ``--json FILE`` outside of any pod."""
        return self._start(name, command, [], environment)

    def _start(
        self, name: str, command: Sequence[str], run: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> Pod:
        self._count += 1
        file, log = (self.directory / f"{self._count}-{name}.{suffix}" for suffix in ("json", "log"))
        load = [*command, "--json", str(file)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*run, *load],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.environment(), **(environment or {})},
                cwd=ROOT,
            )
        pod = Pod(name, load, process, file, log)
        self._pods.append(pod)
        return pod

    def _load(self, kernel: str, *options: str) -> list[str]:
        endless = () if "--duration" in options else ("--duration", "0s")
        return [*LOAD, *self.load_options(kernel, *options, *endless)]

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
        """Return the GPU time of each pod so far; of none without a daemon."""
        if self._daemon is None:
            return {}
        return {pod["name"]: sum(use["used_ns"] for use in pod["usage"]) for pod in self.pods()}

    def span(self, seconds: float) -> Span:
        """Wait for ``seconds`` and return the span."""
        before, start = self.used_ns(), time.time()
        time.sleep(seconds)
        end, after = time.time(), self.used_ns()
        return Span(start, end, {name: value - before.get(name, 0) for name, value in after.items()})

    # Processes

    def cpu_s(self) -> float:
        """Return the CPU time so far of the daemon, its helpers, and other qgpu processes beside the loads."""
        total = 0.0
        for process in self.processes():
            with suppress(psutil.Error):
                if process.cmdline()[1:3] != list(LOAD[1:3]):
                    total += sum(process.cpu_times()[:2])
        return total

    def end_pods(self) -> None:
        """End every load that still runs: signal all of them first, then wait for them."""
        pods, self._pods = self._pods, []
        for pod in pods:
            if pod.process.poll() is None:
                with suppress(psutil.Error, BenchError):
                    pod.load_process().send_signal(signal.SIGTERM)
        for pod in pods:
            pod.end()

    def close(self, keep_log: Path | None = None) -> None:
        """End everything that is left; keep the daemon's log if a place is given."""
        self.end_pods()
        self.stop_daemon()
        left = self.processes()
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, 5)
        if keep_log is not None and self.daemon_log.exists():
            shutil.copy(self.daemon_log, keep_log)
        shutil.rmtree(self.directory, ignore_errors=True)

    def processes(self) -> list[psutil.Process]:
        """Find every running process that this run has started, directly or indirectly."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(_MARK) == self._mark:
                    found.append(process)
        return found

    def _run(self, command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment(), cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def environment(self) -> dict[str, str]:
        """Return the environment for our processes: without qgpu settings, with our mark."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("QGPU_")}
        libcuda = {name: os.environ[name] for name in ("QGPU_LIBCUDA",) if name in os.environ}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return {**kept, **libcuda, "PYTHONPATH": path, _MARK: self._mark}


def _started_at(command: Sequence[str]) -> list[str]:
    """Return ``command`` with the time of its start as an option, to the millisecond."""
    return ["sh", "-c", 'exec "$@" --started-at "$(date +%s.%N)"', "sh", *command]

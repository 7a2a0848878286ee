"""Where attacks take place: a GPU host on plane seccomp or kmod, or the VM's simulated driver on plane kmod.

Each has a neighbour that makes steps on the card, and two measurements that neither qgpu nor the attacker can
influence: how many steps the neighbour has made, and how many bytes of the card are in use.
"""

from __future__ import annotations

import enum
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import psutil
from harness import QGPUCTL, ROOT, Bench, BenchError, tail, wait_for

from qgpu.nvidia.rm_client import RmClient

NEIGHBOUR = "neighbour"
_STEP_MS = 1


class Attacker(enum.Enum):
    """Kinds of attackers, and what follows the plane in the name of their rows."""

    POD = ""
    #: A member of a share group that has the grant of a pod.
    MEMBER = ", members of a group"
    PROFILER = ", pods that may profile"


class World(Protocol):
    """One card, one daemon, one neighbour."""

    plane: str
    bench: Bench
    #: What the attacker may have.
    quota: int
    #: Further arguments of every attacker.
    arguments: dict[str, str]
    #: How often the neighbour's steps are read, and the card's memory, s.
    look_s: float
    card_look_s: float
    #: The version of the driver.
    driver: str
    #: What the attacker is.
    attacker: Attacker

    def start_neighbour(self, cores: int | None) -> None:
        """Start the neighbour's pod and return when it makes steps; without ``cores``, start it outside of any pod."""

    def end_neighbour(self) -> None:
        """Kill the neighbour, which is in no pod."""

    def steps(self) -> float:
        """Count the neighbour's steps so far, each a millisecond of the whole card."""

    def card_used(self) -> int:
        """Tell the bytes in use on the card."""

    def clock_mhz(self) -> int:
        """Tell how fast the card runs now; 0 where it has no clock."""

    def neighbour_lives(self) -> bool:
        """Tell whether the neighbour still runs."""


def start_pod(
    bench: Bench, name: str, grant: Sequence[str] | None, command: Sequence[str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a command as a pod, as a user would; outside of any pod without a grant."""
    timeout = ("--timeout", f"{10 * bench.timeout_factor:g}")
    qgpuctl = [*QGPUCTL, "--runtime-dir", str(bench.runtime_dir), *timeout]
    run = list(command) if grant is None else [*qgpuctl, "run", "--name", name, *grant, "--", *command]
    with log.open("wb") as output:
        return subprocess.Popen(
            run, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=bench.environment(), cwd=ROOT
        )


def start_attacker(
    world: World, name: str, grant: Sequence[str], command: Sequence[str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a command as what attackers are in this world."""
    if world.attacker is Attacker.MEMBER:
        return _start_member(world.bench, name, grant, command, log)
    profiling = ["--allow-profiling"] * (world.attacker is Attacker.PROFILER)
    return start_pod(world.bench, name, [*grant, *profiling], command, log)


def _start_member(
    bench: Bench, name: str, grant: Sequence[str], command: Sequence[str], log: Path
) -> subprocess.Popen[bytes]:
    """Make a group with this grant, and start a command as its member."""
    bench.ctl("group", "create", name, *grant)
    with log.open("wb") as output:
        return subprocess.Popen(
            [*QGPUCTL, "--runtime-dir", str(bench.runtime_dir), "run", "--group", name, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=bench.environment(),
            cwd=ROOT,
        )


def end_attacker(world: World, name: str, process: subprocess.Popen[bytes]) -> None:
    """Kill an attacker with its pod or group, and wait until the daemon has forgotten it."""
    if world.attacker is Attacker.MEMBER:
        world.bench.ctl("group", "remove", name, "--force")
    end_pod(world.bench, name, process)


def policy(bench: Bench, name: str, period_ms: int) -> None:
    """Set the policy of pGPU 0, live."""
    bench.ask("gpu.set", gpu=0, policy=name, period_ns=period_ms * 1_000_000)


def neighbour_class(bench: Bench, pod_class: str) -> None:
    """Set the neighbour's class, live."""
    bench.ask("pod.set", name=NEIGHBOUR, **{"class": pod_class})


def end_pod(bench: Bench, name: str, process: subprocess.Popen[bytes] | None) -> None:
    """Kill whatever is in a pod, and wait until the daemon has forgotten it."""

    def gone() -> bool:
        found = next((each for each in bench.pods() if each["name"] == name), None)
        for pid in found["pids"] if found else ():
            try:
                psutil.Process(pid).kill()
            except psutil.NoSuchProcess:
                continue
        return found is None

    wait_for(f"pod {name} to end", gone, 30 * bench.timeout_factor)
    if process is None:
        return
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class GpuWorld:
    """A real card; NVML reports its memory in use."""

    quota = 2 << 30
    look_s, card_look_s = 0.002, 0.02

    def __init__(self, plane: str, attacker: Attacker) -> None:
        import pynvml

        self.plane, self.attacker = plane, attacker
        self.driver = Path("/sys/module/nvidia/version").read_text().strip()
        self.bench = Bench(self.plane)
        self.arguments = {"race": "0.9"}
        self._nvml = pynvml
        pynvml.nvmlInit()
        self._card = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._counter = self.bench.directory / "neighbour.steps"
        self._process: subprocess.Popen[bytes] | None = None
        load = subprocess.run(
            [sys.executable, "-m", "qgpu.load.main", "--kernel", f"{_STEP_MS}ms", "--duration", "100ms"],
            check=True,
            capture_output=True,
            cwd=ROOT,
        )
        self._iterations = str(json.loads(load.stdout)["iterations"])

    def start_neighbour(self, cores: int | None) -> None:
        """Start the contract suite's load with its counter in a file, in a pod or in none.

        It floods: its rate is then the card's, whatever else keeps the host busy.
        """
        self._counter.write_bytes(bytes(8))
        with self._counter.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
        latencies = self.bench.directory / "neighbour.latencies"
        workload = json.dumps({"kernel_us": 1000 * _STEP_MS, "batch": 0})
        command = [sys.executable, "-m", "tests.contract.live_load", str(self._counter), str(latencies), workload]
        log = self.bench.directory / "neighbour.log"
        command.append(self._iterations)
        # RM numbers clients one after the other: the neighbour's are between these two.
        with closing(RmClient()) as before:
            grant = None if cores is None else ["--cores", str(cores)]
            self._process = start_pod(self.bench, NEIGHBOUR, grant, command, log)
            wait_for("the neighbour's steps", lambda: self._started(log))
            with closing(RmClient()) as after:
                between = f"{before.handle:#x}-{after.handle:#x}"
        self.arguments |= dict.fromkeys(("profile", "monitors"), between)

    def end_neighbour(self) -> None:
        """Kill its process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _started(self, log: Path) -> bool:
        if not self.neighbour_lives():
            raise BenchError(f"the neighbour has ended: {tail(log)}")
        return self.steps() > 100

    def steps(self) -> float:
        """Read the counter."""
        return float(int.from_bytes(self._map[:8], "little"))

    def card_used(self) -> int:
        """Ask NVML, outside of every pod."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._card).used)

    def clock_mhz(self) -> int:
        """Ask NVML for the clock of the SMs."""
        return int(self._nvml.nvmlDeviceGetClockInfo(self._card, self._nvml.NVML_CLOCK_SM))

    def neighbour_lives(self) -> bool:
        """Look at its process."""
        return self._process is not None and self._process.poll() is None


class VmWorld:
    """The VM of the module's tests; the simulated driver's own totals give steps and memory."""

    plane, attacker = "kmod", Attacker.POD  # a group needs MPS; the module lets no pod profile
    quota = 64 << 20
    look_s = card_look_s = 0.04

    def __init__(self) -> None:
        sys.path.insert(0, str(ROOT / "tests" / "vm" / "guest"))
        import qg

        self._qg: Any = qg
        for module in ("nvidia", "qgpu"):
            if not qg.loaded(module):
                qg.insmod(f"{module}.ko")
        qg.nodes()
        self.driver = "simulated"
        daemon = [sys.executable, "-m", "tests.hostile.vm_daemon"]
        self.bench = Bench(self.plane, daemon, timeout_factor=6)
        self.arguments = dict.fromkeys(("control", "profile", "monitors"), "sim") | {"race": "3"}
        self._client: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start_neighbour(self, cores: int | None) -> None:
        """Start a flood; its TSG is the only one there is."""
        log = self.bench.directory / "neighbour.log"
        program = str(self.bench.directory / "control")
        report = str(self.bench.directory / "neighbour.report")
        command = [program, "none", report, str(self.quota), "sim"]
        grant = None if cores is None else ["--cores", str(cores)]
        self._process = start_pod(self.bench, NEIGHBOUR, grant, command, log)
        wait_for("the neighbour's flood", lambda: bool(self._qg.sim_tsgs()), 30 * self.bench.timeout_factor)
        self._client = self._qg.sim_tsgs()[0]["client"]

    def end_neighbour(self) -> None:
        """Kill its process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def steps(self) -> float:
        """Read its time on the engine."""
        rows = [row["run_ns"] for row in self._qg.sim_tsgs() if row["client"] == self._client]
        return sum(rows) / (_STEP_MS * 1e6)

    def card_used(self) -> int:
        """Read the simulated driver's total."""
        totals = self._qg.sim()
        return int(totals["total"] - totals["free"])

    def clock_mhz(self) -> int:
        """Tell of none."""
        return 0

    def neighbour_lives(self) -> bool:
        """Look at its process."""
        return self._process is not None and self._process.poll() is None


def here(plane: str = "seccomp", attacker: Attacker = Attacker.POD) -> World:
    """Make the world of this machine; a GPU host's has the plane. Raises BenchError where there is neither."""
    if os.environ.get("QGPU_VM_BUILD"):
        return VmWorld()
    if Path("/proc/driver/nvidia/version").exists() and os.geteuid() == 0:
        return GpuWorld(plane, attacker)
    raise BenchError("needs root and an NVIDIA driver, or the VM: python bench/isolation.py --vm")


def now() -> float:
    """Return the clock by which everything here is told."""
    return time.monotonic()

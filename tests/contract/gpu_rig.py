"""A plane under the contract suite on a real GPU: real processes, each in its pod before it opens the driver."""

from __future__ import annotations

import json
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from qgpu.ipc import wire
from qgpu.linux import cgroup
from qgpu.load.workload import Workload
from qgpu.model import NS_PER_S
from qgpu.model.plane_api import Host

_START_S = 30.0


class _Load:
    """A process in a pod."""

    def __init__(self, process: subprocess.Popen[bytes], counter: Path, latencies: Path) -> None:
        self.process = process
        self.counter = counter
        self.latencies = latencies
        self.latencies_read = 0

    def kernels(self) -> int:
        """Read how many kernels it has finished."""
        return int(struct.unpack("<Q", self.counter.read_bytes())[0])


class GpuRig:
    """One plane with GPU 0; ``open_host`` makes its host, again after each restart."""

    pgpu = 0

    tries = 1

    def __init__(self, plane: str, lease_ns: int, open_host: Callable[[], Host], directory: Path) -> None:
        self.lease_ns = lease_ns
        self._plane = plane
        self._open_host = open_host
        self._directory = directory
        self._iterations: dict[float, int] = {}
        self._loads: list[_Load] = []
        self._containers: list[str] = []
        for kernel_us in (100.0, 1000.0):
            self._iterations[kernel_us] = _calibrated(kernel_us)
        self.host = open_host()

    def start(self, pod: str, workload: Workload) -> int:
        """Start a load and return when its first kernel has run."""
        number = len(self._loads)
        counter, latencies = (self._directory / f"{what}-{number}" for what in ("counter", "latencies"))
        counter.write_bytes(bytes(8))
        latencies.touch()
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.contract.become", self._plane, str(theirs.fileno())),
                *(sys.executable, "-m", "tests.contract.live_load", str(counter), str(latencies)),
                *(json.dumps(workload.to_dict()), str(self._iterations[workload.kernel_us])),
            ],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        load = _Load(process, counter, latencies)
        self._loads.append(load)
        connection = wire.Connection(ours)
        received = connection.receive()
        assert received is not None
        self.host.attach(pod, process.pid, received[1])
        connection.send({"attached": True})
        connection.close()
        deadline = time.monotonic() + _START_S
        while not load.kernels():
            assert process.poll() is None, "the load has ended"
            assert time.monotonic() < deadline, "the load does not start"
            time.sleep(0.01)
        return number

    def container(self) -> str:
        """Make a cgroup."""
        cgroup.create("container")
        self._containers.append("container")
        return cgroup.path_of("container")

    def kill(self, load: int) -> None:
        """Kill it."""
        self._loads[load].process.send_signal(signal.SIGKILL)
        self._loads[load].process.wait()

    def kernels(self, load: int) -> int:
        """Count its kernels."""
        return self._loads[load].kernels()

    def latencies_us(self, load: int) -> list[float]:
        """Return its latencies since last asked."""
        found = self._loads[load]
        lines = found.latencies.read_text().splitlines()
        fresh, found.latencies_read = lines[found.latencies_read :], len(lines)
        return [float(line) for line in fresh]

    def pass_time(self, duration_ns: int) -> None:
        """Sleep: time is what is tested here."""
        time.sleep(duration_ns / NS_PER_S)

    def restart(self) -> None:
        """Let go of the plane and find it again."""
        self.host.close()
        self.host = self._open_host()

    def close(self) -> None:
        """Kill what runs, and forget the pods."""
        for number in range(len(self._loads)):
            self.kill(number)
        for pod in self.host.pods():
            self.host.retire(pod.name)
        for name in self._containers:
            cgroup.remove(name)
        self.host.close()


def _calibrated(kernel_us: float) -> int:
    """Ask the load generator, alone on the card, how long a kernel is."""
    result = subprocess.run(
        [sys.executable, "-m", "qgpu.load.main", "--kernel", f"{kernel_us:g}us", "--duration", "100ms"],
        check=True,
        capture_output=True,
    )
    return int(json.loads(result.stdout)["iterations"])

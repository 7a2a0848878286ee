"""What a scrape of the metrics endpoint costs with 64 busy pods on the simulator.

    python bench/scrape.py             # some seconds; writes scrape_ms_64_pods into docs/results/host.json

The daemon itself simulates the pods and is busy with them, so a scrape waits for its share of one Python process. For
comparison the script also scrapes a daemon with one pod.
"""

from __future__ import annotations

import argparse
import http.client
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import host_figures

from qgpu.ipc.control_socket import Client
from qgpu.paths import socket_path

_GPUS = 8
_KERNEL_US = 5000.0


def main() -> None:
    """Measure and print; keep the figures unless told not to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scrapes", type=int, default=100)
    parser.add_argument("--dry", action="store_true", help="do not write docs/results/host.json")
    options = parser.parse_args()
    figures: dict[str, object] = {}
    for pods in (1, 64):
        with tempfile.TemporaryDirectory(prefix="qgpu-scrape-") as directory, _daemon(Path(directory), pods) as address:
            times, size = _scrapes(address, options.scrapes)
        low, middle, high = min(times), statistics.median(times), statistics.quantiles(times, n=100)[98]
        print(
            f"{pods} pods, {size} bytes, {len(times)} scrapes, ms: {low:.2f} least, {middle:.2f} median, {high:.2f} p99"
        )
        name = f"scrape_ms_{pods}_pod{'s' * (pods > 1)}"
        figures |= {name: round(middle, 2), f"{name}_p99": round(high, 2), f"{name}_bytes": size}
    if not options.dry:
        host_figures.keep("python bench/scrape.py", "simulated pGPUs", figures)


@contextmanager
def _daemon(directory: Path, pods: int) -> Iterator[Path]:
    """Run a daemon with this many busy pods over eight pGPUs, and yield the path of its metrics socket."""
    metrics, run = directory / "metrics.sock", directory / "run"
    config = directory / "qgpu.toml"
    config.write_text(f'[metrics]\nlisten = "unix:{metrics}"\n[log]\nlevel = "error"\n')
    command = [sys.executable, "-m", "qgpu.daemon.main", "--plane", "sim", "--sim-gpus", str(_GPUS)]
    process = subprocess.Popen([*command, "--runtime-dir", str(run), "--config", str(config)])
    try:
        while not socket_path(run).exists():
            time.sleep(0.05)
        with ExitStack() as clients:
            for number in range(pods):
                client = clients.enter_context(Client(run))
                gpu, name = number % _GPUS, f"pod-{number}"
                client.call("pod.create", name=name, grants={str(gpu): {"cores": 12, "memory": 1 << 30}})
                client.call("sim.start", pod=name, gpu=gpu, workload={"kernel_us": _KERNEL_US, "batch": 0})
            time.sleep(2)
            yield metrics
    finally:
        process.terminate()
        process.wait()


def _scrapes(path: Path, count: int) -> tuple[list[float], int]:
    times, size = [], 0
    for _ in range(count):
        began = time.perf_counter()
        connection = _UnixConnection(path)
        connection.request("GET", "/metrics")
        size = len(connection.getresponse().read())
        times.append((time.perf_counter() - began) * 1000)
        connection.close()
        time.sleep(0.02)
    return times, size


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        """Connect to the path."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


if __name__ == "__main__":
    main()

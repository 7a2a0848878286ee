"""What the hook adds to a container's start: the time until the daemon answers, and Python's part of it.

    bench/container_hook.py [--rounds N]

Each round sets up what a runtime sets up before createRuntime hooks run (a process in a cgroup of its own), and runs
the hook on it; the daemon simulates its GPU. Prints one JSON object, times in ms. Needs root and a writable cgroup v2
tree; no GPU and no runtime.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from qgpu.linux import cgroup
from qgpu.paths import socket_path
from qgpu.runtime import cdi
from tests.cli import programs


def timed_ms(command: list[str], said: str) -> float:
    """Run a command that must succeed; return how long it took."""
    started = time.perf_counter()
    subprocess.run(command, input=said, text=True, check=True)
    return 1e3 * (time.perf_counter() - started)


def hook_ms(command: list[str], bundle: Path, number: int) -> float:
    """Bind one container, which ends right after."""
    home = cgroup.mount() / f"bench-{os.getpid()}-{number}"
    home.mkdir()
    with subprocess.Popen(["sleep", "60"]) as process:
        (home / "cgroup.procs").write_text(str(process.pid))
        state = {"id": f"bench{number}", "pid": process.pid, "bundle": str(bundle)}
        took = timed_ms(command, json.dumps(state))
        process.kill()
    home.rmdir()
    return took


def summary(times: list[float]) -> dict[str, float]:
    """Return the median, both quartiles, and the maximum."""
    low, middle, high = statistics.quantiles(times, n=4)
    return {"p25": round(low, 1), "p50": round(middle, 1), "p75": round(high, 1), "max": round(max(times), 1)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    hooks, starts = [], []
    with tempfile.TemporaryDirectory() as directory, programs.daemon(Path(directory) / "run") as daemon:
        config = {"process": {"env": ["QGPU_GPU_0=", "QGPU_CORES=10"]}}
        (Path(directory) / "config.json").write_text(json.dumps(config))
        command = cdi.hook_entry(socket_path(daemon.runtime_dir))["args"]
        for number in range(rounds):
            hooks.append(hook_ms(command, Path(directory), number))
            starts.append(timed_ms([*command[:3], "-c", "pass"], ""))
    result = {
        "command": f"bench/container_hook.py --rounds {rounds}",
        "host": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "python": platform.python_version(),
        "hook_ms": summary(hooks),
        "python_start_ms": summary(starts),
        "hook_over_python_start": round(statistics.median(hooks) / statistics.median(starts), 2),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

"""What the hook adds to a container's start: the time until the daemon answers, Python's part, the daemon's part.

    bench/container_hook.py [--rounds N]

Each round sets up what a runtime sets up before createRuntime hooks run (a process in a cgroup of its own), and runs
the hook on it; the daemon simulates its GPU. Then it asks the daemon the same from this process: no hook, in whatever
language, takes less than ``answer_ms``. Prints one JSON object, times in ms. Needs root and a writable cgroup v2 tree;
no GPU and no runtime.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from qgpu.linux import cgroup
from qgpu.paths import socket_path
from qgpu.runtime import cdi, hook
from tests.cli import programs

#: How long the daemon may take.
ANSWER_S = 10
ENVIRONMENT = ["QGPU_GPU_0=", "QGPU_CORES=10"]


def timed_ms(work: Callable[[], object]) -> float:
    """Do something that must succeed; return how long it took."""
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def run(command: list[str], said: str = "") -> None:
    """Run a command that must succeed."""
    subprocess.run(command, input=said, text=True, check=True)


@contextmanager
def container(number: int) -> Iterator[tuple[str, int]]:
    """Set up a container's id and process, which ends right after."""
    home = cgroup.mount() / f"bench-{os.getpid()}-{number}"
    home.mkdir()
    with subprocess.Popen(["sleep", "60"]) as process:
        (home / "cgroup.procs").write_text(str(process.pid))
        yield f"bench{number}", process.pid
        process.kill()
    home.rmdir()


def hook_ms(command: list[str], bundle: Path, number: int) -> float:
    """Bind one container as a runtime does."""
    with container(number) as (name, pid):
        state = json.dumps({"id": name, "pid": pid, "bundle": str(bundle)})
        return timed_ms(lambda: run(command, state))


def answer_ms(path: Path, number: int) -> float:
    """Bind one container from this process."""
    with container(number) as (name, pid):
        request = {"op": "container.bind", "id": name, "pid": pid, "env": ENVIRONMENT}
        request |= {"annotations": {}, "devices": [], "rules": [], "seccomp": None}
        return timed_ms(lambda: check(hook.ask(str(path), request, time.monotonic() + ANSWER_S)))


def check(answer: dict[str, object]) -> None:
    """Raise RuntimeError if the daemon refused."""
    if not answer.get("ok"):
        raise RuntimeError(answer.get("error"))


def summary(times: list[float]) -> dict[str, float]:
    """Return the median, both quartiles, and the maximum."""
    low, middle, high = statistics.quantiles(times, n=4)
    return {"p25": round(low, 1), "p50": round(middle, 1), "p75": round(high, 1), "max": round(max(times), 1)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    hooks, starts, answers = [], [], []
    with tempfile.TemporaryDirectory() as directory, programs.daemon(Path(directory) / "run") as daemon:
        (Path(directory) / "config.json").write_text(json.dumps({"process": {"env": ENVIRONMENT}}))
        path = socket_path(daemon.runtime_dir)
        command = cdi.hook_entry(path)["args"]
        for number in range(rounds):
            hooks.append(hook_ms(command, Path(directory), 2 * number))
            starts.append(timed_ms(lambda: run([*command[:3], "-c", "pass"])))
            answers.append(answer_ms(path, 2 * number + 1))
    result = {
        "command": f"bench/container_hook.py --rounds {rounds}",
        "host": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "python": platform.python_version(),
        "hook_ms": summary(hooks),
        "python_start_ms": summary(starts),
        "answer_ms": summary(answers),
        "hook_over_python_start": round(statistics.median(hooks) / statistics.median(starts), 2),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

"""The self-test beside a busy tenant, killed at a random moment: what of it is left."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from pathlib import Path

import psutil

from qgpu.ipc.control_socket import Client
from tests.cli.programs import TIMEOUT_S, Daemon

SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGKILL)
#: Longer than a self-test lasts; kills come at any moment of it.
_LASTS_S = 6.0


def settings(runtime_dir: Path) -> object:
    """Return what no self-test may change: how the pGPUs are shared."""
    with Client(runtime_dir) as client:
        gpus = client.call("gpu.list")["gpus"]
    return [[gpu[key] for key in ("policy", "online_policy", "period_ns", "offline_floor")] for gpu in gpus]


def kept(state_dir: Path) -> object:
    """Return the settings on disk."""
    file = state_dir / "state.json"
    return json.loads(file.read_text())["gpus"] if file.exists() else {}


def kill_one(daemon: Daemon, state_dir: Path, number: signal.Signals, dice: random.Random, gpu: int) -> list[str]:
    """Kill a self-test at a random moment; return what it changed or left, as text."""
    before, on_disk = settings(daemon.runtime_dir), kept(state_dir)
    test = daemon.start("doctor", "--self-test", "--gpu", str(gpu))
    end_s = time.monotonic() + dice.uniform(0, _LASTS_S)
    changed = set()
    while time.monotonic() < end_s and test.poll() is None:
        if settings(daemon.runtime_dir) != before:
            changed.add("a setting was changed meanwhile")
        time.sleep(0.05)
    test.send_signal(number)
    test.communicate(timeout=TIMEOUT_S)
    found = sorted(changed)
    if (settings(daemon.runtime_dir), kept(state_dir)) != (before, on_disk):
        found.append(f"{number.name}: settings were left changed")
    with Client(daemon.runtime_dir) as client:
        end_s = time.monotonic() + TIMEOUT_S / 4
        while tests_of(client) and time.monotonic() < end_s:
            time.sleep(0.05)
        if left := tests_of(client):
            found.append(f"{number.name}: pods still run: {left}")
        if policy := client.call("gpu.list")["gpus"][gpu]["temporary_policy"]:
            found.append(f"{number.name}: {policy} is still in force")
    if left := [each.pid for each in psutil.process_iter(["cmdline"]) if str(daemon.runtime_dir) in _words(each)]:
        found.append(f"{number.name}: processes still run: {left}")
    return found


def tests_of(client: Client) -> list[str]:
    """Return the pods of self-tests."""
    return [pod["name"] for pod in client.call("pod.list")["pods"] if pod["name"].startswith("self-test")]


def tenant(daemon: Daemon, gpu: int) -> list[str]:
    """Return the arguments of ``qgpuctl`` that start a busy tenant."""
    load = (sys.executable, "-m", "qgpu.load.main", "--duration", "0s")
    return ["run", "--name", "tenant", "--gpu", str(gpu), "--cores", "40", "--", *load]


def _words(process: psutil.Process) -> str:
    words = " ".join(process.info["cmdline"] or ())
    return words if "self-test" in words and "doctor" not in words else ""

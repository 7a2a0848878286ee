"""Many pods on simulated pGPUs behind the local page, and what a browser measures of that page."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qgpu.errors import ExitCode
from qgpu.ipc.control_socket import Client
from qgpu.load.workload import Workload
from tests.cli import programs
from tests.cli.programs import TIMEOUT_S, Daemon

GPUS = 4
#: Widths of a phone, a notebook and a desk, each with its height.
SCREENS = {375: 667, 1280: 800, 1920: 1080}
LONG = "llama-70b-finetune-of-somebody-with-a-long-name"

_OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


@contextmanager
def crowd(directory: Path, pods: int) -> Iterator[Daemon]:
    """Run a daemon with pods ``pod-1`` to ``pod-N``, of which one has a long name instead, spread over four pGPUs."""
    with programs.daemon(directory, "--sim-gpus", str(GPUS)) as running, Client(directory) as client:
        for number in range(1, pods + 1):
            start(client, LONG if number == 5 else f"pod-{number}", number)
        yield running


def start(client: Client, name: str, number: int) -> None:
    """Start a pod that lasts as long as its client: every fifth is online, every third has no quota."""
    gpu, online = number % GPUS, number % 5 == 2
    grant = {"cores": None if number % 3 == 0 else 5 + number % 4 * 5, "memory": (1 + number % 3) << 33}
    grant |= {"class": "online", "latency_target_ns": 2_000_000} if online else {}
    work = Workload(kernel_us=100.0, period_us=10_000.0) if online else Workload(batch=0)
    client.call("pod.create", name=name, grants={str(gpu): grant})
    client.call("sim.start", pod=name, gpu=gpu, workload=work.to_dict())


@contextmanager
def page(daemon: Daemon, *options: str) -> Iterator[str]:
    """Run ``qgpuctl web`` and give the address it prints."""
    process = daemon.start("web", "--listen", "127.0.0.1:0", *options)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == ExitCode.OK


def show(browser: Any, url: str, width: int, pods: int, theme: str = "light") -> None:
    """Open the page at a width and in the system's theme, and wait until it shows all pods."""
    metrics = {"width": width, "height": SCREENS[width], "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(url)
    while len(browser.find_elements("css selector", "tbody tr")) < pods:
        pass  # the test's timeout is the bound


def overflow_px(browser: Any) -> int:
    """Return by how many pixels the page is wider than its window."""
    return int(browser.execute_script(_OVERFLOW))


def script(browser: Any, name: str) -> Any:
    """Run one of the functions of ``measure.js`` in the page and return what it found."""
    text = (Path(__file__).parent / "measure.js").read_text()
    assert re.search(rf"^function {name}\b", text, re.MULTILINE)
    return browser.execute_script(f"{text}\nreturn {name}();")

"""The pictures of the local page: docs/results/page.png and page-phone.png, of twelve pods on four simulated pGPUs.

    python bench/page_pictures.py                              # six minutes
    python bench/page_pictures.py --seconds 960 --metrics 127.0.0.1:9835   # longer, with Prometheus watching

It needs Chromium and its driver (apt install chromium chromium-driver).
"""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser import chromium  # noqa: E402
from tests.cli import programs  # noqa: E402
from tests.cli.programs import Daemon  # noqa: E402
from tests.web.crowd import page, show  # noqa: E402

RESULTS = ROOT / "docs" / "results"
#: Files by the width of the screen, and how much of the page's top they show.
_PICTURES = {"page.png": (1280, 1105), "page-phone.png": (375, 1400)}
_ONLINE = "--class online"
#: pGPU, name, options of ``qgpuctl run``, and of ``qgpu-load``.
PODS = (
    (0, "chat", f"{_ONLINE} --memory 24GiB --latency-target 2ms", "--kernel 2ms --period 10ms --memory 18GiB"),
    (0, "train", "--cores 60 --memory 64GiB", "--memory 55GiB"),
    (0, "batch", "--cores 25 --memory 32GiB", "--batch 20000 --gap 40s --memory 21GiB"),
    (1, "search", f"{_ONLINE} --cores 30 --memory 40GiB", "--kernel 3ms --period 10ms --memory 12GiB"),
    (1, "nightly-2", "--memory 16GiB", "--batch 8 --gap 2ms --memory 9GiB"),
    (1, "nightly-10", "--cores 20 --memory 16GiB", "--batch 30000 --gap 30s --memory 15.7GiB"),
    (2, "notebook", "--cores 50 --memory 80GiB", "--kernel 5ms --period 60ms --memory 30GiB"),
    (2, "sweep", "--memory 20GiB", "--batch 40000 --gap 20s --memory 4GiB"),
    (3, "asr", f"{_ONLINE} --cores 10 --memory 24GiB --latency-target 5ms", "--kernel 1ms --period 8ms --memory 9GiB"),
    (3, "evaluate", "--cores 40 --memory 40GiB", "--memory 36GiB"),
    (3, "finetune-llama-70b-team-7", "--cores 40 --memory 60GiB", "--kernel 4ms --memory 52GiB"),
    (3, "embed", "--memory 12GiB", "--batch 4 --gap 9ms --memory 6GiB"),
)


@contextmanager
def scene(folder: Path, metrics: str) -> Iterator[Daemon]:
    """Run the daemon and its pods."""
    config = folder / "qgpud.toml"
    config.write_text(f'[metrics]\nlisten = "{metrics}"\n')
    load = ("--", sys.executable, "-m", "qgpu.load.main", "--duration", "0s")
    with programs.daemon(folder / "run", "--sim-gpus", "4", "--config", str(config)) as daemon:
        started = [
            daemon.start("run", "--gpu", str(gpu), "--name", name, *grant.split(), *load, *work.split())
            for gpu, name, grant, work in PODS
        ]
        yield daemon
        for pod in started:
            pod.terminate()
            pod.communicate(timeout=programs.TIMEOUT_S)


def main() -> None:
    """Let the pods run, switch a policy and back meanwhile, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="how long the pods run before")
    parser.add_argument("--metrics", default="", help="where the daemon serves metrics; default: nowhere that matters")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the pictures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="qgpu-pictures-") as name, chromium(Path(name)) as browser:
        metrics = options.metrics or f"unix:{name}/metrics.sock"
        with scene(Path(name), metrics) as daemon, page(daemon) as url:
            time.sleep(max(0, options.seconds - 160))
            daemon.ctl("gpu", "policy", "set", "0", "fixed-share")
            time.sleep(min(50, options.seconds / 3))
            daemon.ctl("gpu", "policy", "set", "0", "burst-share")
            time.sleep(min(110, options.seconds / 3))
            for file, (width, height) in _PICTURES.items():
                show(browser, url, width, len(PODS))
                browser.execute_script("return new Promise(done => setTimeout(done, 3000))")
                _keep(browser, options.out / file, width, height)


def _keep(browser: Any, file: Path, width: int, height: int) -> None:
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    main()

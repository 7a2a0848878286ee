"""Prepared claims on a real containerd: the ratio of two shares, what a start costs, and forgeries that took effect.

    python bench/kubernetes_containerd.py      # a minute, as root; docs/results/kubernetes-containerd.json

containerd is Debian's, unpacked into the cache (tests/k8s/containerd). The claims give 60 and 30 per cent of a
simulated pGPU. The processes of the containers sleep, and the daemon floods the pGPU on behalf of each pod.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import uuid
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from qgpu.ipc.control_socket import Client
from tests.k8s.containerd import engine, node
from tests.k8s.containerd.claims import claim, granted
from tests.k8s.containerd.forgeries import FORGERIES, OTHER
from tests.k8s.containerd.node import Node

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "results" / "kubernetes-containerd.json"
#: What each container's claim gives it, in per cent.
CLAIMS = {"two": 60, "one": 30}
_SETTLE_S, _WINDOW_S = 3, 10
_FLOOD = {"kernel_us": 1000.0, "batch": 0}


def main() -> None:
    """Measure and print; keep the figures unless told not to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--release", choices=sorted(engine.RELEASES), default="2.1", help="of containerd")
    parser.add_argument("--dry", action="store_true", help="do not write the results")
    options = parser.parse_args()
    if why := engine.missing():
        parser.error(why)
    with tempfile.TemporaryDirectory(prefix="qgpu-bench-") as directory:
        home = Path(directory)
        with engine.running(options.release, home, home / "cdi") as containerd, node.running(containerd, home) as there:
            ratios = [_ratio(there) for _ in range(options.repeats)]
            with_claim, without = _starts_ms(there, options.starts)
            taken = _forgeries_taken(there)
            version = there.runtime.call("Version", version="v1").runtime_version
    result = {
        "command": f"python bench/kubernetes_containerd.py --repeats {options.repeats} --starts {options.starts}",
        "device": "simulated pGPU",
        "containerd": version,
        "date": date.today().isoformat(),
        "figures": {
            "containerd_ratio_2_1": round(statistics.median(ratios), 3),
            "containerd_ratio_2_1_all": [round(ratio, 3) for ratio in ratios],
            "containerd_forgeries": len(FORGERIES),
            "containerd_forgeries_taken": len(taken),
            "containerd_start_ms_with_claim": round(statistics.median(with_claim), 1),
            "containerd_start_ms_without_device": round(statistics.median(without), 1),
        },
    }
    print(json.dumps(result, indent=2))
    if not options.dry:
        FILE.write_text(json.dumps(result, indent=2) + "\n")


def _ratio(there: Node) -> float:
    """Return how often the GPU time of the smaller claim goes into that of the larger."""
    held = []
    with Client(there.daemon.runtime_dir) as loads:
        for name, cores in CLAIMS.items():
            sandbox = there.runtime.sandbox(name)
            held.append(claim(there, [sandbox.uid], cores=cores))
            if said := there.runtime.run(sandbox, "load", *held[-1].prepare(there)):
                sys.exit(f"container {name}: {said}")
            loads.call("sim.start", pod=_pod(name), gpu=0, workload=_FLOOD)
        time.sleep(_SETTLE_S)
        before = _used_ns(there)
        time.sleep(_WINDOW_S)
        after = _used_ns(there)
    there.clear()
    for each in held:
        each.drop(there)
    two, one = (after[_pod(name)] - before[_pod(name)] for name in CLAIMS)
    return two / one


def _pod(name: str) -> str:
    return f"shop.{name}.load"


def _used_ns(there: Node) -> dict[str, int]:
    return {name: pod["usage"][0]["used_ns"] for name, pod in there.pods().items()}


def _forgeries_taken(there: Node) -> list[str]:
    """Return the forgeries that gave a pod anything but what was prepared for it."""
    taken = []
    for forgery in FORGERIES:
        uid = str(uuid.uuid4())
        held, other = claim(there, [uid], cores=20, memory=1 << 30), claim(there, [OTHER], 1, cores=99)
        (device,), (foreign,) = held.prepare(there), other.prepare(there)
        forgery.start(there, uid, device, of_another=foreign)
        held = {name: granted(pod) for name, pod in there.pods().items()}
        if held not in ({}, {"shop.forger.model": {0: (20, 1 << 30, "offline", None)}}):
            taken.append(str(forgery))
        there.clear()
        held.drop(there)
        other.drop(there)
    return taken


def _starts_ms(there: Node, count: int) -> tuple[list[float], list[float]]:
    """Return how long the start of a container takes with a claim, and without any device."""
    sandbox = there.runtime.sandbox("start")
    held = claim(there, [sandbox.uid], cores=10)
    devices = held.prepare(there)
    times: tuple[list[float], list[float]] = ([], [])
    for attempt in range(2 * count):
        container = there.runtime.create(sandbox, "model", *(devices if attempt % 2 == 0 else ()), attempt=attempt)
        began = time.perf_counter()
        if said := there.runtime.start(container):
            sys.exit(said)
        times[attempt % 2].append(1e3 * (time.perf_counter() - began))
        there.runtime.call("StopContainer", container_id=container, timeout=0)
    there.clear()
    held.drop(there)
    return times


if __name__ == "__main__":
    main()

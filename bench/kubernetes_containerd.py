"""Claims on a real containerd: the ratio of two shares, restarts in any order, what a start costs, and forgeries.

    python bench/kubernetes_containerd.py      # ten minutes, as root; docs/results/kubernetes-containerd.json

containerd is Debian's, unpacked into the cache (tests/k8s/containerd). The ratio and the restarts are those of a whole
node: the small API server and kubelet of ``tests/k8s``, the real driver and qgpud, and containers that run qgpu-load
with 60 and 30 per cent of a simulated pGPU. For starts and forgeries, claims are prepared without a driver.
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

from hypothesis import Phase

from tests.k8s.containerd import engine, node
from tests.k8s.containerd.claims import claim, granted
from tests.k8s.containerd.forgeries import FORGERIES, OTHER
from tests.k8s.containerd.node import Node
from tests.k8s.containerd.orders import ContainerdOrders
from tests.k8s.containerd.world import ContainerdWorld
from tests.k8s.order_nodes import run
from tests.k8s.orders import machine
from tests.k8s.tally import Tally

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "results" / "kubernetes-containerd.json"
#: What each container's claim gives it, in per cent.
CLAIMS = {"two": 60, "one": 30}
_SETTLE_S, _WINDOW_S = 3, 10
STEPS = 10
#: Counts of restarts: the name of the figure, and the name in the tally.
COUNTED = {
    "restart_orders": "orders",
    "restart_kills": "kills",
    "restart_containers": "containers",
    "grants_lost": "grants_lost",
    "sold_twice": "sold_twice",
    "leaks": "leaks",
    "failed_orders": "failed_orders",
}


def main() -> None:
    """Measure and print; keep the figures unless told not to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--orders", type=int, default=200)
    parser.add_argument("--release", choices=sorted(engine.RELEASES), default=engine.RELEASE, help="of containerd")
    parser.add_argument("--dry", action="store_true", help="do not write the results")
    options = parser.parse_args()
    if why := engine.missing():
        parser.error(why)
    with tempfile.TemporaryDirectory(prefix="qgpu-bench-") as directory:
        home = Path(directory)
        with engine.running(options.release, home, home / "cdi") as containerd, node.running(containerd, home) as there:
            with_claim, without = _starts_ms(there, options.starts)
            taken = _forgeries_taken(there)
            version = there.runtime.call("Version", version="v1").runtime_version
    whole = ContainerdWorld("--resync", "0.2", release=options.release)
    try:
        whole.start()
        ratios = [_ratio(whole) for _ in range(options.repeats)]
    finally:
        whole.close()
    tally = _restarts(options.release, options.orders)
    result = {
        "command": f"python bench/kubernetes_containerd.py --repeats {options.repeats} --starts {options.starts} "
        f"--orders {options.orders}",
        "device": "simulated pGPU",
        "containerd": version,
        "date": date.today().isoformat(),
        "figures": {
            "containerd_ratio_2_1": round(statistics.median(ratios), 3),
            "containerd_ratio_2_1_all": [round(ratio, 3) for ratio in ratios],
            **{f"containerd_{name}": getattr(tally, what) for name, what in COUNTED.items()},
            "containerd_restart_parts": tally.parts,
            "containerd_forgeries": len(FORGERIES),
            "containerd_forgeries_taken": len(taken),
            "containerd_start_ms_with_claim": round(statistics.median(with_claim), 1),
            "containerd_start_ms_without_device": round(statistics.median(without), 1),
        },
    }
    print(json.dumps(result, indent=2))
    if not options.dry:
        FILE.write_text(json.dumps(result, indent=2) + "\n")


def _ratio(whole: ContainerdWorld) -> float:
    """Return the GPU time of the larger claim over that of the smaller one."""
    for name, cores in CLAIMS.items():
        whole.start_pod(name, load=True, cores=str(cores))
    found = whole.ratio(*CLAIMS, _SETTLE_S, _WINDOW_S)
    whole.clear()
    return found


def _restarts(release: str, orders: int) -> Tally:
    """Try a number of random orders of restarts; count those that fail."""

    def node() -> ContainerdWorld:
        return ContainerdWorld("--resync", "0.2", release=release).start()

    tally = Tally()
    tried = machine(ContainerdOrders, node(), tally, node)
    tally.expect(tried.world.perils)
    try:
        run(tried, orders, STEPS, phases=[Phase.generate])
    finally:
        tried.world.close()
    print(*tally.said, sep="\n", file=sys.stderr)
    return tally


def _forgeries_taken(there: Node) -> list[str]:
    """Return the forgeries that gave a pod anything but what was prepared for it."""
    taken = []
    for forgery in FORGERIES:
        uid = str(uuid.uuid4())
        held, other = claim(there, [uid], cores=20, memory=1 << 30), claim(there, [OTHER], 1, cores=99)
        (device,), (foreign,) = held.prepare(there), other.prepare(there)
        forgery.start(there, uid, device, of_another=foreign)
        got = {name: granted(pod) for name, pod in there.pods().items()}
        if got not in ({}, {"shop.forger.model": {0: (20, 1 << 30, "offline", None)}}):
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

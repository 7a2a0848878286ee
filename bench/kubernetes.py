"""Restarts, times and names of the Kubernetes parts, on the simulator, as sections of docs/results/kubernetes.json.

    bench/kubernetes.py [--only 'restarts of units,prepare,aliases'] [--orders 500]

Each section replaces its own figures in the file and leaves the others. qgpud (on the simulator) and qgpu-k8s are real
processes; the kubelet and the API server are the small ones of ``tests/k8s``. Needs root (for cgroups) and the extra
``k8s``; no GPU.

- ``restarts of claims``: driver, kubelet, API server, qgpud and the whole node killed and started in any order, alone
  and in pairs, while claims come and go; ``of claims behind a guardian``: the guardian too, on the driver's emulation;
  ``of claims with groups``: what keeps groups, too; ``of units``: the device plugin. An order that fails is counted,
  with what was said of it, and the next one has a new node; a section ends after a few of them
- ``prepare``: how long a prepare call takes, for 64 claims one by one, and for all 64 at once, the
  median of five times
- ``aliases``: the resource names of other systems with which a container got its grant
- ``others``: what other commands measured, on a real containerd, on the module, on real kubelets and with Slurm
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hypothesis import Phase
from provenance import sources

from tests.k8s.order_nodes import NODES, run
from tests.k8s.orders import MOST_FAILED, machine
from tests.k8s.tally import Tally
from tests.k8s.world import GI, World, result

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results" / "kubernetes.json"
CLAIMS = 64
#: How often all claims are prepared at once; the median counts.
ROUNDS = 5
BATCH, STEPS = 10, 10
#: Which part of the orders is tried on each kind of node. Nodes with a guardian take longest.
SHARE_OF_ORDERS = {"claims": 0.5, "claims behind a guardian": 0.15, "claims with groups": 0.15, "units": 0.2}
#: The names for time and memory of other systems, and the bytes of a unit of memory.
ALIASES = {
    "qgpu": ("tke.cloud.tencent.com/qgpu-core", "tke.cloud.tencent.com/qgpu-memory", GI),
    "hami": ("nvidia.com/gpucores", "nvidia.com/gpumem", 8 * 1024**2),
    "vcuda": ("tencent.com/vcuda-core", "tencent.com/vcuda-memory", 256 * 1024**2),
}
#: Figures of other commands: the name here, their file in docs/results, and the keys to its figure.
OTHERS = {
    "forged_limits": ("kubernetes-containerd", "figures", "containerd_forgeries"),
    "forged_limits_taken": ("kubernetes-containerd", "figures", "containerd_forgeries_taken"),
    "containerd_ratio_2_1": ("kubernetes-containerd", "figures", "containerd_ratio_2_1"),
    "containerd_ratio_2_1_vm": ("kubernetes-vm", "6.1", "figures", "containerd_ratio_2_1_vm"),
    "real_kubelet": ("kubernetes-node", "figures", "real_kubelet"),
    "real_kubelet_cases": ("kubernetes-node", "figures", "real_kubelet_cases"),
    "real_kubelet_cases_failed": ("kubernetes-node", "figures", "real_kubelet_cases_failed"),
    "slurm_versions": ("slurm", "figures", "slurm_versions"),
}


def restarts(options: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """Try orders on one kind of node until all are done or too many failed; yield what happened after each batch."""
    (kind, make), before = NODES[name], _restarts_before(sources()) if options.more else {}
    tally = Tally(**before[name]) if name in before else Tally()
    wanted = tally.orders + round(options.orders * SHARE_OF_ORDERS[name])
    orders = machine(kind, make().start(), tally, lambda: make().start())
    tally.expect(orders.world.perils)
    try:
        while tally.orders < wanted and tally.failed_orders < MOST_FAILED:
            run(orders, min(BATCH, wanted - tally.orders), STEPS, phases=[Phase.generate])
            yield _with_others(name, tally)
    finally:
        orders.world.close()
    if tally.failed_orders:
        print(f"{name}: {tally.failed_orders} orders failed", *tally.said, sep="\n", flush=True)
    print(f"{name}: pairs that never failed together: {', '.join(tally.never) or 'none'}", flush=True)


def _restarts_before(digest: str) -> dict[str, Any]:
    """Return what happened on each node with these sources, by the results."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"figures": {}, "sections": {}}
    there: dict[str, Any] = found["figures"].get("restarts", {})
    made_of = {name: found["sections"].get(f"restarts of {name}", {}).get("sources") for name in there}
    return {name: tally for name, tally in there.items() if name in NODES and made_of[name] == digest}


def _with_others(name: str, tally: Tally) -> dict[str, Any]:
    """Return what happened on one node, and on all together that were tried with the same sources."""
    nodes = _restarts_before(sources()) | {name: asdict(tally)}
    counts = [what for what, found in asdict(Tally()).items() if isinstance(found, int)]
    totals = {what: sum(node[what] for node in nodes.values()) for what in counts}
    given = ("grants_lost", "sold_twice", "leaks", "failed_orders")
    return {"restarts": nodes} | {what if what in given else f"restart_{what}": n for what, n in totals.items()}


def prepare(_options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time prepare calls as the kubelet sees them."""
    node = World().start()
    try:
        node.devices()
        stub, messages = node.kubelet.stub()

        def timed_ms(claim: dict[str, Any]) -> float:
            metadata = claim["metadata"]
            asked = messages.Claim(namespace="team", name=metadata["name"], uid=metadata["uid"])
            began = time.perf_counter()
            answer = stub.NodePrepareResources(messages.NodePrepareResourcesRequest(claims=[asked]))
            took = 1e3 * (time.perf_counter() - began)
            assert not answer.claims[metadata["uid"]].error, answer
            return took

        def claims() -> list[dict[str, Any]]:
            return [node.claim(result(number % 2, memory="2Gi", cores="1")) for number in range(CLAIMS)]

        one_by_one = [timed_ms(claim) for claim in claims()]
        rounds = []
        for _ in range(ROUNDS):
            for uid in node.grants():
                node.qgpud.drop(uid)
            with ThreadPoolExecutor(CLAIMS) as pool:
                rounds.append(_percentile(list(pool.map(timed_ms, claims())), 99))
    finally:
        node.close()
    yield {
        "prepare_claims": CLAIMS,
        "prepare_ms_p50": _percentile(one_by_one, 50),
        "prepare_ms_p99": _percentile(one_by_one, 99),
        "prepare_at_once_ms_p99": statistics.median(rounds),
    }


def aliases(_options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Count the names by which a container got time and memory of one card."""
    words = [word for alias in ALIASES for word in ("--alias", alias)]
    node = World("--memory-factor", "8", "--patience", "0.5", *words, mode="device-plugin").start()
    working = 0
    try:
        for cores, memory, unit in ALIASES.values():
            given = [node.kubelet.allocate(cores, 35, cores), node.kubelet.allocate(memory, 40 * GI // unit, cores)]
            names = {device.name for each in given for device in each.cdi_devices}
            node.kubelet.pre_start(cores)
            parts = [each for grant in node.grants().values() for each in grant["devices"] if each["cdi"] in names]
            got = tuple(sum(each[what] or 0 for each in parts) for what in ("cores", "memory"))
            working += 2 * (got == (35, 40 * GI))
            node.kubelet.release(cores)
            node.eventually(lambda: not node.grants())
    finally:
        node.close()
    yield {"aliases": working}


def others(_options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Copy figures from the results of other commands."""
    yield {
        name: reduce(getitem, keys, json.loads(RESULTS.with_name(f"{file}.json").read_text()))
        for name, (file, *keys) in OTHERS.items()
    }


SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    **{f"restarts of {name}": partial(restarts, name=name) for name in NODES},
    "prepare": prepare,
    "aliases": aliases,
    "others": others,
}


def keep(section: str, figures: dict[str, Any], command: str) -> None:
    """Replace the figures of a section in the results."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"figures": {}, "sections": {}}
    found["figures"] |= figures
    found["sections"][section] = {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "host": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "sources": sources(),
        "figures": sorted(figures),
    }
    RESULTS.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")


def _percentile(times: list[float], percent: int) -> float:
    return round(statistics.quantiles(times, n=100, method="inclusive")[percent - 1], 1)


def main() -> None:
    """Measure the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--orders", type=int, default=500)
    parser.add_argument("--more", action="store_true", help="count the orders in the results too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nodes are closed
    failed = False
    for section in options.only.split(","):
        for figures in SECTIONS[section](options):
            print(json.dumps({section: figures}), flush=True)
            failed = failed or bool(figures.get("failed_orders"))
            more = f" --orders {options.orders}{' --more' * options.more}" if "restarts" in figures else ""
            keep(section, figures, f"bench/kubernetes.py --only '{section}'{more}")
    sys.exit(failed)


if __name__ == "__main__":
    main()

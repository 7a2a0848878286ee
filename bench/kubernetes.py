"""What the Kubernetes parts keep and cost, on the simulator: a section of docs/results/kubernetes.json each.

    bench/kubernetes.py [--only restarts,prepare,aliases] [--orders 500]

Each section replaces its own figures in the file and leaves the others. Real processes: qgpud on the simulator,
qgpu-k8s; the kubelet and the API server are the small ones of ``tests/k8s``. Needs root (for cgroups) and the extra
``k8s``; no GPU.

- ``restarts``: driver, kubelet, API server and qgpud killed and started in any order, alone and in pairs, while claims
  come and go
- ``prepare``: how long a prepare call takes, for 64 claims one by one, and for all 64 at once
- ``aliases``: the resource names of other systems with which a container got its grant
- ``others``: what other commands measured, on a real containerd, on real kubelets and with Slurm, from their results
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.k8s.restarts import Tally, machine
from tests.k8s.world import GI, World, result

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results" / "kubernetes.json"
CLAIMS = 64
BATCH = 25
#: The names for time and memory of other systems, and the bytes of a unit of memory.
ALIASES = {
    "qgpu": ("tke.cloud.tencent.com/qgpu-core", "tke.cloud.tencent.com/qgpu-memory", GI),
    "hami": ("nvidia.com/gpucores", "nvidia.com/gpumem", 8 * 1024**2),
    "vcuda": ("tencent.com/vcuda-core", "tencent.com/vcuda-memory", 256 * 1024**2),
}
#: Figures of other commands: the name here, their file in docs/results and its figure.
OTHERS = {
    "forged_limits": ("kubernetes-containerd", "containerd_forgeries"),
    "forged_limits_taken": ("kubernetes-containerd", "containerd_forgeries_taken"),
    "containerd_ratio_2_1": ("kubernetes-containerd", "containerd_ratio_2_1"),
    "real_kubelet": ("kubernetes-node", "real_kubelet"),
    "real_kubelet_cases": ("kubernetes-node", "real_kubelet_cases"),
    "real_kubelet_cases_failed": ("kubernetes-node", "real_kubelet_cases_failed"),
    "slurm_versions": ("slurm", "slurm_versions"),
}


def restarts(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Try orders until one breaks a promise or all are done; yield what happened so far after each batch."""
    node, tally = World("--resync", "0.2").start(), Tally()
    try:
        while tally.orders < options.orders:
            run_state_machine_as_test(
                machine(node, tally),
                settings=settings(
                    max_examples=min(BATCH, options.orders - tally.orders),
                    stateful_step_count=10,
                    deadline=None,
                    phases=[Phase.generate],  # the first failure ends it, unshrunk
                    suppress_health_check=list(HealthCheck),
                    database=None,
                ),
            )
            yield {
                "restart_orders": tally.orders,
                "restart_kills": tally.kills,
                "restart_claims": tally.claims,
                "restart_containers": tally.containers,
                "grants_lost": tally.grants_lost,
                "sold_twice": tally.sold_twice,
                "leaks": tally.leaks,
            }
    finally:
        node.close()


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
        for uid in node.grants():
            node.qgpud.drop(uid)
        with ThreadPoolExecutor(CLAIMS) as pool:
            at_once = list(pool.map(timed_ms, claims()))
    finally:
        node.close()
    yield {
        "prepare_claims": CLAIMS,
        "prepare_ms_p50": _percentile(one_by_one, 50),
        "prepare_ms_p99": _percentile(one_by_one, 99),
        "prepare_at_once_ms_p99": _percentile(at_once, 99),
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
            ((device,),) = [
                grant["devices"]
                for grant in node.grants().values()
                if {each["cdi"] for each in grant["devices"]} == names
            ]
            working += 2 * ((device["cores"], device["memory"]) == (35, 40 * GI))
            node.kubelet.release(cores)
            node.eventually(lambda: not node.grants())
    finally:
        node.close()
    yield {"aliases": working}


def others(_options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Copy figures from the results of other commands."""
    yield {
        name: json.loads(RESULTS.with_name(f"{file}.json").read_text())["figures"][figure]
        for name, (file, figure) in OTHERS.items()
    }


SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "restarts": restarts,
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
    options = parser.parse_args()
    for section in options.only.split(","):
        for figures in SECTIONS[section](options):
            print(json.dumps({section: figures}), flush=True)
            more = f" --orders {figures['restart_orders']}" if section == "restarts" else ""
            keep(section, figures, f"bench/kubernetes.py --only {section}{more}")


if __name__ == "__main__":
    main()

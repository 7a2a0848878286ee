"""Containers and metrics on the installed packages: two podman containers at 2:1, scraped by a real Prometheus.

What containers may and may not is for tests/vm/containers; here it is that the packages bring all that is needed. The
containers' files are the VM's own, so that there is no image to fetch.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOTFS = Path("/run/rootfs")
METRICS, PROMETHEUS = "127.0.0.1:9835", "127.0.0.1:9090"
SETTLE_S, MEASURE_S = 5, 20
LIMITS = {"web": ("--annotation", "qgpu.io/cores=60"), "job": ("--env", "QGPU_CORES=30")}
PODMAN = ("podman", "--root", "/run/podman/root", "--runroot", "/run/podman/run")
PODMAN += ("--cgroup-manager", "cgroupfs", "--events-backend", "none")


def check(share: Path, ctl: Callable[..., dict[str, Any]], tell: Callable[..., None], figures: dict[str, Any]) -> None:
    """Run the stage; what goes wrong is told and does not end the lane."""
    try:
        _share(share, ctl, tell, figures)
        _scrape(tell, figures)
    except (OSError, subprocess.SubprocessError, KeyError, IndexError) as error:
        tell("containers and metrics", False, f"{error!r} {getattr(error, 'stdout', '')}")
    finally:
        subprocess.run([*PODMAN, "rm", "-f", "-t", "0", "--all"], check=False, stdout=subprocess.DEVNULL)
        subprocess.run(["umount", "-l", str(ROOTFS)], check=False)
        subprocess.run(["rmdir", str(ROOTFS)], check=False)
        subprocess.run(["rm", "-rf", "/run/podman", "/run/prometheus", "/run/crun", "/run/libpod"], check=False)


def _share(share: Path, ctl: Callable[..., dict[str, Any]], tell: Callable[..., None], figures: dict[str, Any]) -> None:
    ROOTFS.mkdir()
    subprocess.run(["mount", "--bind", "/", str(ROOTFS)], check=True)
    for name, limit in LIMITS.items():
        options = ("--name", name, "--annotation", f"qgpu.io/name={name}", "--device", "qgpu.io/gpu=0", *limit)
        options += ("-d", "--network", "none", "--volume", f"{share}:{share}", "--volume", "/run:/steps")
        command = ("/usr/bin/python3", f"{share}/pod.py", f"/steps/{name}.steps")
        # files and not pipes: what stays in the background holds them open
        with Path("/run/podman.out").open("w+") as out:
            done = subprocess.run([*PODMAN, "run", *options, "--rootfs", str(ROOTFS), *command], stdout=out, stderr=out)
            out.seek(0)
            tell(f"container {name} starts", done.returncode == 0, out.read())
    Path("/run/podman.out").unlink()
    end = time.monotonic() + 120
    while not all(pod["usage"][0]["busy"] for pod in ctl("pod", "list")["pods"]):
        if time.monotonic() > end:
            raise OSError("the containers are not busy")
        time.sleep(0.5)
    time.sleep(SETTLE_S)
    before = _used(ctl)
    time.sleep(MEASURE_S)
    after = _used(ctl)
    figures["ratio_containers"] = got = round((after["web"] - before["web"]) / (after["job"] - before["job"]), 3)
    tell("two containers at 2:1", abs(got / 2 - 1) < 0.1, got)


def _used(ctl: Callable[..., dict[str, Any]]) -> dict[str, int]:
    return {pod["name"]: pod["usage"][0]["used_ns"] for pod in ctl("pod", "list")["pods"]}


def _scrape(tell: Callable[..., None], figures: dict[str, Any]) -> None:
    config = Path("/etc/qgpu/qgpud.toml")
    config.write_text(config.read_text() + f'\n[metrics]\nlisten = "{METRICS}"\n')
    subprocess.run(["systemctl", "restart", "qgpud"], check=True)
    home = Path("/run/prometheus")
    home.mkdir()
    scrape = {"job_name": "qgpu", "scrape_interval": "2s", "static_configs": [{"targets": [METRICS]}]}
    (home / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scrape]}))  # JSON is YAML
    command = ["prometheus", f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={home}/data"]
    with subprocess.Popen([*command, f"--web.listen-address={PROMETHEUS}"], stderr=subprocess.DEVNULL) as prometheus:
        try:
            end = time.monotonic() + 240
            while _query("count_over_time(qgpu_lease_gpu_seconds_total[1m])").get("web", 0) < 8:
                if time.monotonic() > end:
                    raise OSError("Prometheus has no samples")
                time.sleep(2)
            rates = _query("rate(qgpu_lease_gpu_seconds_total[1m])")
        finally:
            prometheus.terminate()
    figures["ratio_containers_by_prometheus"] = got = round(rates["web"] / rates["job"], 3)
    tell("Prometheus sees 2:1", abs(got / 2 - 1) < 0.1, got)


def _query(expression: str) -> dict[str, float]:
    """Ask Prometheus; the values by pod."""
    address = f"http://{PROMETHEUS}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            found = json.load(answer)["data"]["result"]
    except OSError:
        return {}
    return {each["metric"]["pod"]: float(each["value"][1]) for each in found}

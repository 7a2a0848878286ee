"""The metrics endpoint, scraped by Debian's Prometheus and read by promtool."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from qgpu.errors import ExitCode
from tests.cli import programs
from tests.cli.programs import TIMEOUT_S, Daemon

DASHBOARDS = Path(__file__).parent.parent.parent / "dashboards"
HAMI = {
    "hami_container_device_utilization_ratio",
    "hami_gpu_core_allocated_ratio",
    "hami_gpu_memory_allocated_bytes",
    "hami_gpu_memory_limit_bytes",
    "hami_gpu_shared_count",
    "hami_host_gpu_memory_used_bytes",
    "hami_host_gpu_utilization_ratio",
    "hami_node_gpu_memory_allocated_ratio",
    "hami_vgpu_memory_limit_bytes",
    "hami_vgpu_memory_used_bytes",
}


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name}: apt install prometheus")
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(port: int, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    response = connection.getresponse()
    return response.status, response.read().decode()


@contextmanager
def measured(directory: Path, compat: str) -> Iterator[tuple[Daemon, int]]:
    """A daemon with two pods at 2:1, and the port of its metrics."""
    port = free_port()
    config = directory / "qgpu.toml"
    config.write_text(f'[metrics]\nlisten = "127.0.0.1:{port}"\ncompat = "{compat}"\n')
    with programs.daemon(directory / "run", "--config", str(config)) as running:
        load = (sys.executable, "-m", "qgpu.load.main", "--duration", "0s")
        grants = (("two", "60", "2GiB"), ("one", "30", "1GiB"))
        pods = [
            running.start("run", "--name", name, "--cores", cores, "--memory", memory, "--", *load)
            for name, cores, memory in grants
        ]
        try:
            while sum(pod["usage"][0]["busy"] for pod in running.json("pod", "list")["pods"]) < len(pods):
                pass
            yield running, port
        finally:
            for pod in pods:
                pod.send_signal(signal.SIGTERM)
                pod.communicate(timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with measured(tmp_path_factory.mktemp("metrics"), "hami") as (_, port):
        yield port


@pytest.fixture(scope="module")
def prometheus(scraped: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Prometheus looking at it every half second, with our rules."""
    program, directory, port = tool("prometheus"), tmp_path_factory.mktemp("prometheus"), free_port()
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(DASHBOARDS / "qgpu.rules.yml")],
        "scrape_configs": [{"job_name": "qgpu", "static_configs": [{"targets": [f"127.0.0.1:{scraped}"]}]}],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))
    options = (
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    )
    process = subprocess.Popen([program, *options], stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def query(port: int, expression: str) -> dict[str, float]:
    """Ask Prometheus; the answer by pod."""
    try:
        status, text = get(port, f"/api/v1/query?query={quote(expression)}")
    except OSError:  # not up yet
        return {}
    answer: dict[str, Any] = json.loads(text) if status == 200 else {"data": {"result": []}}
    return {row["metric"].get("pod", ""): float(row["value"][1]) for row in answer["data"]["result"]}


def test_prometheus_sees_the_shares_that_were_asked_for(prometheus: int) -> None:
    shares: dict[str, float] = {}
    while sum(query(prometheus, "count_over_time(qgpu_uptime_seconds[10s])").values()) < 8:
        pass  # the test's timeout is the bound
    shares = query(prometheus, "rate(qgpu_pod_gpu_seconds_total[4s])")

    assert shares["two"] / shares["one"] == pytest.approx(2.0, rel=0.1)
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.1)
    assert query(prometheus, "qgpu_pod_cores_quota_ratio") == {"two": 0.6, "one": 0.3}
    assert query(prometheus, "qgpu_pod_memory_limit_bytes") == {"two": 2 << 30, "one": 1 << 30}
    assert query(prometheus, "sum(hami_host_gpu_utilization_ratio)")[""] > 90
    assert query(prometheus, "up") == {"": 1.0}


def test_promtool_complains_of_nothing_but_dcgms_spelling(scraped: int) -> None:
    text = "".join(f"{line}\n" for line in get(scraped, "/metrics")[1].splitlines() if "hami_" not in line)
    checked = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )

    assert (checked.stdout + checked.stderr).splitlines() == [
        "qgpu_gpu_info label names should be written in 'snake_case' not 'camelCase'"  # modelName, for joins
    ]


@pytest.mark.parametrize("arguments", [("check", "rules", "qgpu.rules.yml"), ("test", "rules", "qgpu.test.yml")])
def test_the_alerts_are_right_and_fire_when_they_should(arguments: tuple[str, ...]) -> None:
    checked = subprocess.run(
        [tool("promtool"), *arguments], cwd=DASHBOARDS, capture_output=True, text=True, check=False
    )

    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_series_in_dashboard_and_alerts_is_served(scraped: int) -> None:
    served = set(re.findall(r"^# TYPE (\w+)", get(scraped, "/metrics")[1], re.MULTILINE))
    not_on_this_plane = {"qgpu_pod_memory_denied_total", "qgpu_pod_calls_denied_total"}
    not_on_this_plane |= {"qgpu_gpu_unmanaged_processes", "qgpu_device_files_refused_total"}
    panels = [
        target["expr"]
        for panel in json.loads((DASHBOARDS / "qgpu.json").read_text())["panels"]
        for target in panel["targets"]
    ]
    asked = set(re.findall(r"\bqgpu_\w+", " ".join(panels) + (DASHBOARDS / "qgpu.rules.yml").read_text()))

    assert panels
    assert asked - served <= not_on_this_plane
    assert served >= HAMI


def test_hamis_names_are_served_only_when_asked_for(tmp_path: Path) -> None:
    with measured(tmp_path, "none") as (_, port):
        text = get(port, "/metrics")[1]

        assert "qgpu_pod_gpu_seconds_total" in text
        assert "hami_" not in text


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [("/metrics", "localhost", 200), ("/", None, 404), ("/metrics", "evil.example", 421), ("/metrics", "", 421)],
)
def test_only_metrics_are_served_and_only_under_our_own_name(
    scraped: int, path: str, host: str | None, status: int
) -> None:
    assert get(scraped, path, host)[0] == status


def test_who_sits_at_the_address_keeps_no_daemon_from_starting(tmp_path: Path) -> None:
    config = tmp_path / "qgpu.toml"
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        port = squatter.getsockname()[1]
        config.write_text(f'[metrics]\nlisten = "127.0.0.1:{port}"\n')
        with programs.daemon(tmp_path / "run", "--config", str(config)) as daemon:
            assert f"127.0.0.1:{port}: cannot listen there: Address already in use" in daemon.first_line
            assert daemon.ctl("status").returncode == 0
            squatter.close()
            while True:
                try:
                    assert get(port, "/metrics")[0] == 200
                except ConnectionRefusedError:
                    time.sleep(0.05)
                else:
                    return


def test_an_address_that_is_not_this_hosts_is_one_clear_line(tmp_path: Path) -> None:
    config = tmp_path / "qgpu.toml"
    config.write_text('[metrics]\nlisten = "192.0.2.1:9835"\n')
    ended = programs.qgpud("--plane", "sim", "--runtime-dir", str(tmp_path / "run"), "--config", str(config))

    assert ended.returncode == ExitCode.USAGE
    assert ended.stderr.splitlines()[-1] == (
        "qgpud: 192.0.2.1:9835: cannot listen there: Cannot assign requested address; choose another address"
    )


def test_many_silent_clients_keep_nobody_out(scraped: int) -> None:
    silent = [socket.create_connection(("127.0.0.1", scraped)) for _ in range(40)]
    try:
        assert get(scraped, "/metrics")[0] == 200
    finally:
        for each in silent:
            each.close()

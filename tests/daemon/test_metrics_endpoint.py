"""The metrics endpoint, scraped by Debian's Prometheus and read by promtool."""

from __future__ import annotations

import http.client
import importlib.util
import json
import re
import shutil
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
import yaml

from qgpu.daemon import metrics_endpoint
from qgpu.daemon.metrics_endpoint import MetricsEndpoint
from qgpu.errors import ExitCode
from qgpu.ipc import wire
from qgpu.ipc.http_server import Address
from qgpu.metrics import exporter
from qgpu.metrics.tally import PodTally
from qgpu.metrics.view import GpuView, PodOnGpuView, PodView, View
from qgpu.model import Grant
from qgpu.model.container_labels import ContainerLabels
from qgpu.model.plane_api import Pgpu
from tests.cli import programs
from tests.cli.programs import LOAD, TIMEOUT_S, Daemon

DASHBOARDS = Path(__file__).parent.parent.parent / "dashboards"
SERVICE_MONITOR = DASHBOARDS.parent / "deploy/kubernetes/components/monitoring/service.yaml"
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
    """A daemon with two pods at 2:1 and an online one at rest, and the port of its metrics."""
    port = free_port()
    config = directory / "qgpu.toml"
    config.write_text(f'[metrics]\nlisten = "127.0.0.1:{port}"\ncompat = "{compat}"\n')
    pods = {
        "two": ("--cores", "60", "--memory", "2GiB", "--", *LOAD),
        "one": ("--cores", "30", "--memory", "1GiB", "--", *LOAD),
    }
    resting = {"chat": ("--class", "online", "--latency-target", "2ms", "--", "sleep", "infinity")}
    with (
        programs.daemon(directory / "run", "--config", str(config)) as running,
        programs.pods(running, pods),
        programs.pods(running, resting, busy=False),
    ):
        yield running, port


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with measured(tmp_path_factory.mktemp("metrics"), "hami") as (_, port):
        yield port


#: What the containers of Kubernetes are.
NAMED = 'qgpu_pod_busy{namespace=~".+"}'
#: Two containers of one Kubernetes pod, by their pods' names in qgpud.
LABELS = {
    "short": ContainerLabels("shop", "web-1", "model", "claim-a"),
    "rests": ContainerLabels("shop", "web-1", "sidecar", "claim-b"),
}


def all_that_happens() -> View:
    """A host where every series has a value that changes: refusals, a pod below its quota, other policies."""
    count = int(time.monotonic())
    counted = PodTally(count, count, preempted=count, preempting=count)
    grant = Grant(cores=50, memory=1 << 30)
    busy = PodOnGpuView("short", grant, count, counted, below_quota="waits: for others", labels=LABELS["short"])
    rests = PodOnGpuView("rests", grant, 0, counted, labels=LABELS["rests"])
    policy = ("burst-share", "best-effort")[count % 2]
    gpu = GpuView(Pgpu(7, "GPU-7", "card", 1 << 37), policy, "best-effort", 10**8, pods=[busy, rests], unmanaged=1)
    pods = {name: PodView(name, refused_memory=count, refused_calls=count, labels=LABELS[name]) for name in LABELS}
    return View(
        "1", "seccomp", "580", "node", float(count), [gpu], pods, isolated=True, isolation_refused={"mmap": count}
    )


def relabelings() -> list[dict[str, Any]]:
    """What the ServiceMonitor does to labels, as Prometheus' operator writes it into a configuration."""
    (monitor,) = (each for each in yaml.safe_load_all(SERVICE_MONITOR.read_text()) if each["kind"] == "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    return [
        {re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", key): value for key, value in each.items()}
        for each in endpoint["metricRelabelings"]
    ]


@pytest.fixture(scope="module", params=["host", "cluster"])
def prometheus(request: Any, scraped: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Prometheus looking every half second at it, and at a host where more happens; with our rules.

    In a cluster, the ServiceMonitor has it change labels.
    """
    busy_port = free_port()
    busy = exporter.serve(Address("127.0.0.1", busy_port), all_that_happens, with_hami=False)
    program, directory, port = tool("prometheus"), tmp_path_factory.mktemp("prometheus"), free_port()
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(DASHBOARDS / "qgpu.rules.yml")],
        "scrape_configs": [
            {
                "job_name": "qgpu",
                "metric_relabel_configs": relabelings() if request.param == "cluster" else [],
                "static_configs": [{"targets": [f"127.0.0.1:{each}" for each in (scraped, busy_port)]}],
            }
        ],
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
        busy.close()
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
        time.sleep(0.1)  # the test's timeout is the bound
    shares = query(prometheus, "rate(qgpu_pod_gpu_seconds_total[4s])")

    assert shares["two"] / shares["one"] == pytest.approx(2.0, rel=0.1)
    assert 0.5 < sum(shares.values()) < 1.2  # one pGPU; a busy host falls behind
    assert query(prometheus, 'qgpu_pod_cores_quota_ratio{gpu="0"}') == {"two": 0.6, "one": 0.3}
    assert query(prometheus, 'qgpu_pod_memory_limit_bytes{gpu="0"}') == {"two": 2 << 30, "one": 1 << 30}
    assert query(prometheus, "sum(hami_host_gpu_utilization_ratio)")[""] > 90
    assert query(prometheus, "up") == {"": 1.0}


def test_a_cluster_has_kubernetes_names_and_qgpuds_beside(prometheus: int, request: pytest.FixtureRequest) -> None:
    series: list[dict[str, str]] = []
    while len(series) < 2:
        status, text = get(prometheus, f"/api/v1/query?query={quote(NAMED)}")
        series = [row["metric"] for row in json.loads(text)["data"]["result"]] if status == 200 else []
    kept = ("namespace", "pod", "container", "qgpu_pod", "kubernetes_pod")
    found = {tuple(each.get(label, "") for label in kept) for each in series}

    if "cluster" in request.node.callspec.id:
        assert found == {("shop", "web-1", "model", "short", ""), ("shop", "web-1", "sidecar", "rests", "")}
        assert query(prometheus, 'count by (pod) (qgpu_pod_busy{qgpu_pod="two", namespace=""})') == {"two": 1.0}
        assert query(prometheus, 'count by (pod) (hami_vgpu_memory_used_bytes{qgpu_pod!=""})') == {}
    else:
        assert found == {("shop", "short", "model", "", "web-1"), ("shop", "rests", "sidecar", "", "web-1")}


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


#: Series without a value on the simulator: nothing is refused there, and no pod is below its quota.
ABSENT = {
    "qgpu_device_files_refused_total",
    "qgpu_gpu_unmanaged_processes",
    "qgpu_pod_below_quota",
    "qgpu_pod_calls_denied_total",
    "qgpu_pod_memory_denied_total",
}


def questions() -> list[tuple[str, str]]:
    """What the dashboard asks Prometheus, with all variables set to all, and how it names the answers."""
    board = json.loads((DASHBOARDS / "qgpu.json").read_text())
    panels = [each for panel in board["panels"] for each in (panel, *panel.get("panels", ()))]
    asked = [(target["expr"], target["legendFormat"]) for panel in panels for target in panel.get("targets", ())]
    asked += [
        (each["expr"].replace("offset 1m", "offset 1s"), each["titleFormat"]) for each in board["annotations"]["list"]
    ]
    for variable in board["templating"]["list"]:
        if called := re.fullmatch(r"label_values\((.*), (\w+)\)", variable.get("definition", "")):
            asked.append((called[1], f"{{{{{called[2]}}}}}"))
    return [(filled(expression), name) for expression, name in asked]


def filled(expression: str) -> str:
    text = re.sub(r"\$(instance|gpu|namespace|pod)\b", ".*", expression)
    return text.replace("$__rate_interval", "4s")


def test_every_series_in_dashboard_and_alerts_is_served(scraped: int) -> None:
    served = set(re.findall(r"^# TYPE (\w+)", get(scraped, "/metrics")[1], re.MULTILINE))
    asked = set(
        re.findall(
            r"\bqgpu_\w+",
            " ".join(expression for expression, _ in questions()) + (DASHBOARDS / "qgpu.rules.yml").read_text(),
        )
    )

    assert asked - served - {"qgpu_pod"} <= ABSENT  # a label, in clusters
    assert served >= HAMI


@pytest.mark.parametrize(("expression", "name"), questions())
def test_prometheus_answers_every_question_of_the_dashboard(prometheus: int, expression: str, name: str) -> None:
    while sum(query(prometheus, "count_over_time(qgpu_uptime_seconds[10s])").values()) < 8:
        pass  # the test's timeout is the bound
    rows: list[dict[str, Any]] = []
    while not rows:  # changes of a policy are seen now and then
        status, text = get(prometheus, f"/api/v1/query?query={quote(expression)}")
        assert status == 200, text
        rows = json.loads(text)["data"]["result"]

    labels = set(re.findall(r"{{(\w+)}}", name)) - {"container"}  # which pods outside Kubernetes do not have
    assert any(all(row["metric"].get(label) for label in labels) for row in rows), rows
    assert all(row["value"][1] not in ("NaN", "+Inf", "-Inf") for row in rows)


def test_the_dashboard_is_what_its_list_of_panels_makes() -> None:
    before = (DASHBOARDS / "qgpu.json").read_text()
    spec = importlib.util.spec_from_file_location("dashboard", DASHBOARDS / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dashboard"] = module
    spec.loader.exec_module(module)

    assert json.dumps(module.dashboard(), indent=1) + "\n" == before, "run: python dashboards/dashboard.py"
    ids = [panel["id"] for panel in module.dashboard()["panels"]]
    assert len(ids) == len(set(ids))


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


def test_nothing_at_the_address_ends_a_running_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who may write to the directory can have another program's socket there, and then a file."""
    monkeypatch.setattr(metrics_endpoint, "_RETRY_S", 0.0)
    address = Address(path=str(tmp_path / "metrics.sock"))
    other = wire.listen(address.path, 0o600)
    endpoint = MetricsEndpoint(lambda: exporter.serve(address, View, with_hami=False))
    other.close()
    Path(address.path).unlink()
    Path(address.path).write_text("")
    endpoint.refresh()
    Path(address.path).unlink()
    endpoint.refresh()

    assert Path(address.path).is_socket()
    endpoint.close()


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

"""Scenarios: what a file may say, what comes of it, and the examples that are shipped."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from qgpu.errors import ConfigError, NotSupportedError
from qgpu.model import NS_PER_S
from qgpu.simulate import scenario_file
from qgpu.simulate.plot import draw
from qgpu.simulate.report import Report
from qgpu.simulate.scenario import run, simulate

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "scenarios").glob("*.toml"))

TWO_PODS = """
duration = "10s"
[gpu]
policy = "burst-share"
[pods.a]
cores = 60
workload = { kernel_us = 1000, batch = 0 }
[pods.b]
cores = 30
workload = { kernel_us = 1000, batch = 0 }
"""


@pytest.fixture
def written(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "case.toml"
        path.write_text(text)
        return path

    return write


def shares(report: Report) -> dict[str, float]:
    return {pod.name: pod.share for pod in report.pods}


def test_burst_share_divides_by_quota(written) -> None:
    got = shares(simulate(written(TWO_PODS)))

    assert got["a"] / got["b"] == pytest.approx(2, rel=0.02)
    assert sum(got.values()) > 0.99


def test_fixed_share_gives_the_quota_and_no_more(written) -> None:
    got = shares(simulate(written(TWO_PODS.replace("burst", "fixed"))))

    assert got == pytest.approx({"a": 0.6, "b": 0.3}, abs=0.015)


def test_a_pod_counts_from_when_it_comes_to_when_it_goes(written) -> None:
    report = simulate(written(TWO_PODS.replace("cores = 30", 'cores = 30\narrive = "2s"\nleave = "6s"')))
    a, b = report.pods

    assert (a.present_s, b.present_s) == (10, 4)
    assert b.share == pytest.approx(1 / 3, rel=0.02)
    assert a.share == pytest.approx(0.6 + 0.4 * 2 / 3, rel=0.02)


def test_a_change_of_quota_takes_effect_when_it_is_made(written) -> None:
    events = '[[events]]\nat = "5s"\npod = "a"\ncores = 30\n'
    report = simulate(written(TWO_PODS + events))
    a, b = report.pods

    assert (a.cores, b.cores) == (45, 30)
    assert a.share == pytest.approx((2 / 3 + 1 / 2) / 2, rel=0.02)


def test_a_change_of_policy_takes_effect_when_it_is_made(written) -> None:
    got = shares(simulate(written(TWO_PODS + '[[events]]\nat = "5s"\npolicy = "best-effort"\n')))

    assert got["b"] == pytest.approx((1 / 3 + 1 / 2) / 2, rel=0.02)


def test_two_processes_of_a_pod_share_its_part(written) -> None:
    two = "workloads = [{ kernel_us = 1000, batch = 0 }, { kernel_us = 1000, batch = 0 }]"
    text = TWO_PODS.replace("cores = 30\nworkload = { kernel_us = 1000, batch = 0 }", f"cores = 30\n{two}")
    got = shares(simulate(written(text)))

    assert got["a"] / got["b"] == pytest.approx(2, rel=0.02)


def test_an_online_pod_is_compared_with_itself_alone(written) -> None:
    text = 'duration = "20s"\n[pods.on]\nclass = "online"\nworkload = { kernel_us = 100, period_us = 10000 }\n'
    flood = "[pods.off]\nworkload = { kernel_us = 100000, batch = 0 }\n"
    on, off = simulate(written(text + flood)).pods

    assert on.latency_us is not None
    assert on.alone_latency_us is not None
    assert on.alone_latency_us.p99 < on.latency_us.p99 < on.alone_latency_us.p99 + 300
    assert on.vs_alone == pytest.approx(1, rel=0.01)
    assert off.vs_alone > 0.93
    assert off.latency_us is None


def test_the_report_says_where_all_the_time_went(written) -> None:
    report = simulate(written(TWO_PODS))

    assert report.useful + report.switching + report.idle == pytest.approx(1)
    assert report.useful > 0.98


def test_the_report_is_json_with_a_schema(written) -> None:
    data = json.loads(json.dumps(simulate(written(TWO_PODS)).to_json()))

    assert data["schema"] == "qgpu/v1"
    assert data["gpu"]["policy"] == "burst-share"
    assert [pod["name"] for pod in data["pods"]] == ["a", "b"]
    assert data["pods"][0]["class"] == "offline"
    assert data["pods"][0]["latency_us"] is None


def test_the_report_is_a_table_with_a_line_a_pod(written) -> None:
    lines = simulate(written(TWO_PODS)).table().splitlines()

    assert lines[0].split()[0] == "POD"
    assert [line.split()[0] for line in lines[1:3]] == ["a", "b"]


def test_the_same_scenario_gives_the_same_report(written) -> None:
    path = written(TWO_PODS + '[pods.on]\nclass = "online"\nworkload = { kernel_us = 100, gap_us = 5000 }\n')

    assert simulate(path) == simulate(path)


def test_a_report_can_be_drawn(written, tmp_path: Path) -> None:
    picture = tmp_path / "shares.svg"
    draw(simulate(written(TWO_PODS)), picture)

    assert "<svg" in picture.read_text()


def test_a_picture_of_no_known_kind_is_refused(written, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"shares\.txtt"):
        draw(simulate(written(TWO_PODS)), tmp_path / "shares.txtt")


def test_without_matplotlib_a_plot_says_what_to_install(written, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(NotSupportedError, match=r"pip --python .* install matplotlib"):
        draw(simulate(written(TWO_PODS)), tmp_path / "shares.svg")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("duration", "durration", "durration: no such key"),
        ('duration = "10s"', "", "duration: say how long"),
        ('"10s"', "10", "duration: write it as a string"),
        ('"10s"', '"ten"', "duration: 'ten' is not a time"),
        ('"burst-share"', '"fair"', "gpu.policy: policy 'fair'"),
        ('policy = "burst-share"', 'period = "1ms"', "gpu.period: period 1 ms"),
        ("cores = 60", "core = 60", "pods.a.core: no such key"),
        ("cores = 60", "cores = 0", "pods.a.cores: cores 0"),
        ("cores = 60", 'cores = "60"', "pods.a.cores: write it as a whole number"),
        ("cores = 60", "cores = true", "pods.a.cores: write it as a whole number"),
        ("cores = 60", 'class = "urgent"', "pods.a.class: 'urgent': choose one of online, offline"),
        ("cores = 60", 'memory = "much"', "pods.a.memory: 'much' is not a size"),
        ("cores = 60", 'memory = "16"', "pods.a.memory: '16' is 16 B, less than any CUDA context takes"),
        ("cores = 60", 'arrive = "11s"', "pods.a.leave: a pod leaves after it arrives"),
        ("cores = 60", "workloads = [{ batch = 0 }]", "pods.a.workload: give a pod one workload"),
        (
            "[pods.a]\ncores = 60\nworkload = { kernel_us = 1000",
            "[pods.a]\nworkload = { kernel = 1",
            "pods.a.workload: workload: unknown key",
        ),
        ("cores = 60", "cores = 80", "30 % for pod b does not fit"),
        ("[pods.b]", "[[events]]\nat = '1s'\npod = 'c'\n[pods.b]", "events[0].pod: there is no pod 'c'"),
        ("[pods.b]", "[[events]]\nat = '1s'\n[pods.b]", "events[0]: it changes nothing; give at least one of policy"),
        (
            "[pods.b]",
            "[[events]]\nat = '1s'\npod = 'a'\n[pods.b]",
            "events[0]: it changes nothing; give at least one of class",
        ),
        ("kernel_us = 1000, batch = 0", "trace = []", "workload: trace: it is empty"),
        ("[pods.b]", "[[events]]\nat = '10s'\npolicy = '1'\n[pods.b]", "events[0].at: say when"),
        ("[pods.b]", "[[events]]\nat = '1s'\npod = 'a'\npolicy = '1'\n[pods.b]", "events[0].policy: no such key"),
        ("[pods.b]", "[[events]]\nat = '1s'\npod = 'b'\ncores = 50\n[pods.b]", "50 % for pod b does not fit"),
        ("[pods.b]", "[pods.b", "not TOML"),
    ],
)
def test_a_wrong_scenario_gives_one_line_with_file_and_key(written, old: str, new: str, complaint: str) -> None:
    assert old in TWO_PODS
    path = written(TWO_PODS.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        simulate(path)

    assert str(caught.value).startswith(f"{path}: ")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_scenario_that_is_not_there_is_said() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        simulate(Path("nowhere.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs_and_everybody_in_it_gets_something(path: Path) -> None:
    scenario = scenario_file.load(path)
    report = run(replace(scenario, pods=tuple(_cut(pod) for pod in scenario.pods), duration_ns=_cut_ns(scenario)))

    assert all(pod.share > 0.01 for pod in report.pods)
    assert report.idle < 0.1


def _cut_ns(scenario: scenario_file.Scenario) -> int:
    return min(scenario.duration_ns, 60 * NS_PER_S)


def _cut(pod: scenario_file.ScenarioPod) -> scenario_file.ScenarioPod:
    return replace(pod, leave_ns=min(pod.leave_ns, 60 * NS_PER_S))

"""The Helm chart and the kustomization install the same objects, because one is written from the other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.tools import CHART, IMAGE, MANIFESTS, ROOT, helm, kustomize, rendered

sys.path.insert(0, str(ROOT / "deploy"))

import chart  # deploy is a folder of manifests with one script

#: What deploy/overlay sets, as the chart's values.
OVERLAY = {"image": "registry.example/qgpu-k8s:0.1.0", "seccomp": True, "monitoring": True}
#: Helm makes the namespace itself (--create-namespace).
NAMESPACE = ("Namespace", "", "qgpu-system")


@pytest.mark.parametrize(("path", "text"), list(chart.files()), ids=lambda each: getattr(each, "name", ""))
def test_generated_files_are_up_to_date(path: Path, text: str) -> None:
    assert path.read_text() == text, "run: python deploy/chart.py"


def test_chart_has_no_files_but_generated_ones() -> None:
    kept = {path for path in CHART.rglob("*") if path.is_file() and not path.is_symlink()}

    assert kept == {path for path, _ in chart.files() if path.is_relative_to(CHART)} | {
        CHART / ".helmignore",
        CHART / "templates/NOTES.txt",
    }


def test_chart_passes_lint() -> None:
    report = json.loads(helm("helm_lint", paths=[str(CHART)], strict=True))

    assert report["passed"]
    assert [each for each in report["messages"] if each["severity"] != "INFO"] == []


@pytest.mark.parametrize(
    ("folder", "values"),
    [
        pytest.param(MANIFESTS, {}, id="default"),
        pytest.param(ROOT / "deploy/overlay", OVERLAY, id="components"),
        pytest.param(MANIFESTS / "device-plugin", {"mode": "device-plugin"}, id="device-plugin"),
    ],
)
def test_chart_renders_what_kustomize_builds(folder: Path, values: dict[str, object]) -> None:
    built, made = kustomize(folder), rendered(values)

    assert built.keys() - {NAMESPACE} == made.keys()
    assert {key: built[key] for key in made} == made


def test_chart_follows_the_namespace_and_the_kubelets_folder() -> None:
    text = helm(
        "helm_template",
        release_name="other",
        chart=str(CHART),
        namespace="gpus",
        values=IMAGE | {"kubeletDir": "/data/kubelet", "seccomp": True, "monitoring": True},
    )

    assert "system:serviceaccount:gpus:qgpu-k8s" in text
    assert "path: /data/kubelet/plugins_registry\n" in text
    assert "qgpu-system" not in text
    assert re.findall(r"\S*/var/lib/kubelet\S*", text) == ["/var/lib/kubelet/device-plugins"] * 2, (
        "the kubelet's constant"
    )


@pytest.mark.parametrize("values", [{}, {"image": ""}])
def test_chart_without_an_image_says_how_to_get_one(values: dict[str, object]) -> None:
    with pytest.raises(AssertionError, match=r"image: name the driver's image.*build it .*push it or import it"):
        helm("helm_template", release_name="qgpu", chart=str(CHART), namespace="qgpu-system", values=values)


def test_chart_passes_options_on() -> None:
    driver = rendered({"options": ["--reserve=1GiB", "--shares=8"]})["DaemonSet", "qgpu-system", "qgpu-k8s"]

    (container,) = driver["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["dra", "--kubelet-dir=/var/lib/kubelet", "--reserve=1GiB", "--shares=8"]


def test_chart_carries_the_tested_rules_and_dashboard(tmp_path: Path) -> None:
    objects = rendered({"monitoring": True})
    rules = objects["PrometheusRule", "qgpu-system", "qgpu"]["spec"]
    dashboard = objects["ConfigMap", "qgpu-system", "qgpu-dashboard"]["data"]["qgpu.json"]

    assert rules == yaml.safe_load((ROOT / "dashboards/qgpu.rules.yml").read_text())
    assert json.loads(dashboard) == json.loads((ROOT / "dashboards/qgpu.json").read_text())


def test_writing_the_chart_changes_nothing() -> None:
    result = subprocess.run([sys.executable, str(ROOT / "deploy/chart.py")], capture_output=True, text=True, check=True)

    assert result.stdout == ""

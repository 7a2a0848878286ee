"""The manifests are objects that the API servers of the supported versions take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.tools import MANIFESTS, ROOT, kustomize, parse, pod_specs

validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate").validate

#: The versions that docs/kubernetes.md names, and their newer ones; older ones have the device plugin.
VERSIONS, OLDER = ("1.34", "1.35", "1.36", "1.37"), ("1.30", "1.33")
#: API groups that are not Kubernetes' own, so it has no schema of them.
FOREIGN = {"monitoring.coreos.com", "kueue.x-k8s.io", "batch.volcano.sh"}
#: Files for other versions than all.
FOR = {
    "profile": ("1.36", "1.37"),
    "extended-resource": ("1.36", "1.37"),
    "gang-1.36": ("1.36",),
    "gang": ("1.37",),
}
EXAMPLES = sorted((MANIFESTS / "examples").glob("*.yaml"))


def objects(folder: Path = MANIFESTS) -> Iterator[Any]:
    """Yield every object of every file, with the versions that it is for."""
    for path in sorted(folder.rglob("*.yaml")):
        for each in parse(path.read_text()):
            if each.get("kind") not in ("Kustomization", "Component"):
                place = f"{path.stem}-{each['kind']}-{each['metadata']['name']}"
                yield pytest.param(each, FOR.get(path.stem, VERSIONS), id=place)


def group(each: dict[str, Any]) -> str:
    """Return an object's API group; empty for the core."""
    return str(each["apiVersion"]).rpartition("/")[0]


@pytest.mark.parametrize(("each", "versions"), [each for each in objects() if group(each.values[0]) not in FOREIGN])
def test_an_object_fits_the_schema_of_its_api(each: dict[str, Any], versions: tuple[str, ...]) -> None:
    for version in versions:
        validate(each, version, strict=True)


@pytest.mark.parametrize("version", OLDER)
def test_the_device_plugin_needs_no_new_api(version: str) -> None:
    for each in kustomize(MANIFESTS / "device-plugin").values():
        validate(each, version, strict=True)


@pytest.mark.parametrize(("each", "versions"), [each for each in objects() if list(pod_specs(each.values[0]))])
def test_each_pod_fits_the_schema_wherever_it_stands(each: dict[str, Any], versions: tuple[str, ...]) -> None:
    for spec in pod_specs(each):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        validate(pod, versions[-1], strict=True)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_examples_pods_name_claims_that_it_has(path: Path) -> None:
    found = parse(path.read_text())
    kinds = {"resourceClaimTemplateName": "ResourceClaimTemplate", "resourceClaimName": "ResourceClaim"}
    there = {(each["kind"], each["metadata"]["name"]) for each in found}

    for spec in (spec for each in found for spec in pod_specs(each)):
        named = {claim["name"]: claim for claim in spec.get("resourceClaims", [])}
        assert {(kinds[key], claim[key]) for claim in named.values() for key in claim.keys() - {"name"}} <= there
        assert all(name.startswith("qgpu") for name in named), "components/seccomp goes by this"
        for container in spec["containers"]:
            assert {claim["name"] for claim in container["resources"].get("claims", [])} == set(named)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_say_in_their_first_line_what_they_show(path: Path) -> None:
    assert re.match(r"# [A-Z]", path.read_text())
    assert f"{path.name}" in (ROOT / "docs/kubernetes.md").read_text()


def test_the_driver_has_no_rights_that_it_can_do_without() -> None:
    (driver,) = (each for each in parse((MANIFESTS / "driver/driver.yaml").read_text()) if each["kind"] == "DaemonSet")
    (container,) = driver["spec"]["template"]["spec"]["containers"]
    security = container["securityContext"]

    assert not security["allowPrivilegeEscalation"]
    assert security["readOnlyRootFilesystem"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert "privileged" not in security


def test_a_mounted_folder_has_one_name_inside_and_outside() -> None:
    """The kubelet connects to the socket that the driver names."""
    (driver,) = (each for each in parse((MANIFESTS / "driver/driver.yaml").read_text()) if each["kind"] == "DaemonSet")
    spec = driver["spec"]["template"]["spec"]
    outside = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"]}
    inside = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}

    assert inside == outside


def test_alerts_are_those_that_promtool_tests() -> None:
    (rule,) = parse((MANIFESTS / "components/monitoring/rules.yaml").read_text())

    assert rule["spec"] == yaml.safe_load((ROOT / "dashboards/qgpu.rules.yml").read_text())

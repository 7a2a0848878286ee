"""Fixtures: qgpud on simulated pGPUs, a containerd beside it, and the interface by which a kubelet would drive it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.k8s.containerd import engine
from tests.k8s.containerd import node as node_of_tests
from tests.k8s.containerd.node import Node

#: The release that the tests run on.
RELEASE = os.environ.get("QGPU_CONTAINERD", "2.1")


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node; skipped where its packages cannot be had."""
    if why := engine.missing():
        pytest.skip(why)
    try:
        engine.programs(RELEASE)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no package of containerd {RELEASE}: {error}")
    home = tmp_path_factory.mktemp("c")
    with engine.running(RELEASE, home, home / "cdi") as containerd, node_of_tests.running(containerd, home) as running:
        yield running


@pytest.fixture(autouse=True)
def empty(node: Node) -> Iterator[None]:
    """End what a test has started."""
    yield
    node.clear()

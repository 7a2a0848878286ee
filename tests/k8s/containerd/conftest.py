"""Fixtures: qgpud on simulated pGPUs, a containerd beside it, and the interface by which a kubelet would drive it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.k8s.containerd import cri, engine, needs
from tests.k8s.containerd import node as node_of_tests
from tests.k8s.containerd.node import Node


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node, for all tests."""
    needs.check(containerd=lambda: engine.programs(engine.RELEASE), cri=cri.description)
    home = tmp_path_factory.mktemp("c")
    with (
        engine.running(engine.RELEASE, home, home / "cdi") as containerd,
        node_of_tests.running(containerd, home) as running,
    ):
        yield running


@pytest.fixture(autouse=True)
def empty(node: Node) -> Iterator[None]:
    """End what a test has started."""
    yield
    node.clear()

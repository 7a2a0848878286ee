"""Fixtures: a real kubelet with qgpu's device plugin, on containerd 1.7 and a qgpud with two simulated pGPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.k8s.containerd import cri, engine, needs
from tests.k8s.containerd import node as nodes
from tests.k8s.real_kubelet import build
from tests.k8s.real_kubelet.node import KubeletNode
from tests.k8s.real_kubelet.process import Kubelet

#: The last release of containerd with the version of the runtime interface that this kubelet speaks.
_RELEASE = "1.7"


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeletNode]:
    """A node, for all tests."""
    needs.check(containerd=lambda: engine.programs(_RELEASE), cri=cri.description, kubelet=build.kubelet)
    home = tmp_path_factory.mktemp("k")
    with engine.running(_RELEASE, home, home / "cdi") as containerd, nodes.running(containerd, home) as beside:
        running = KubeletNode(beside, Kubelet(home, containerd))
        try:
            yield running
        finally:
            running.end()


@pytest.fixture(autouse=True)
def empty(node: KubeletNode) -> Iterator[None]:
    """End what a test has started."""
    yield
    node.clear()

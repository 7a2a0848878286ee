"""Fixtures of the Kubernetes suite: module, simulated driver, qgpud, qgpu-k8s and containerd on one node.

Run it as ``tests/vm/lane.py tests/vm/kubernetes``; outside the VM nothing here is collected. The kubelet and the API
server are the small ones of ``tests/k8s``; containerd is Debian's, from the cache, for a VM has no network.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "guest"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
collect_ignore_glob = [] if os.environ.get("QGPU_VM_BUILD") and not os.environ.get("QGPU_VM_REAL") else ["test_*.py"]

if not collect_ignore_glob:
    import node as nodes
    import qg


@pytest.fixture(scope="session")
def whole_node() -> Iterator[nodes.Node]:
    with qg.driver():
        qg.insmod("qgpu.ko")
        with nodes.running() as node:
            yield node
        qg.rmmod("qgpu")


@pytest.fixture
def node(whole_node: nodes.Node) -> Iterator[nodes.Node]:
    """The node; what a test has started ends with it."""
    yield whole_node
    whole_node.clear()

"""No order of restarts, of containerd too, loses a grant of its containers, grants one twice or leaves one over."""

from __future__ import annotations

import os

import pytest

from tests.k8s.containerd.orders import ContainerdOrders
from tests.k8s.containerd.world import ContainerdWorld
from tests.k8s.order_nodes import try_orders

ORDERS = int(os.environ.get("QGPU_RESTART_ORDERS", "6"))


@pytest.mark.timeout(1800)
def test_restarts_under_real_containers_keep_every_promise() -> None:
    tally = try_orders(ContainerdOrders, lambda: ContainerdWorld("--resync", "0.2"), ORDERS)

    assert tally.orders >= ORDERS
    assert tally.kills
    assert tally.containers
    assert not tally.violations

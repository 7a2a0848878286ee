"""No order of restarts loses a grant, sells one twice or leaves one over (``bench/kubernetes.py`` tries hundreds)."""

from __future__ import annotations

import os

import pytest

from tests.k8s.order_nodes import NODES, try_orders

ORDERS = int(os.environ.get("QGPU_RESTART_ORDERS", "6"))


@pytest.mark.root
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NODES)
def test_restarts_in_any_order_keep_every_promise(name: str) -> None:
    tally = try_orders(*NODES[name], ORDERS)

    assert tally.orders >= ORDERS
    assert tally.kills
    assert tally.containers
    assert not tally.violations

"""No order of restarts loses a grant, sells one twice or leaves one over (``bench/kubernetes.py`` tries hundreds)."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.k8s.order_nodes import NODES
from tests.k8s.orders import machine
from tests.k8s.tally import Tally

ORDERS = int(os.environ.get("QGPU_RESTART_ORDERS", "6"))


@pytest.mark.root
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NODES)
def test_restarts_in_any_order_keep_every_promise(name: str) -> None:
    kind, make = NODES[name]
    node, tally = make(), Tally()
    try:
        node.start()
        run_state_machine_as_test(
            machine(kind, node, tally),
            settings=settings(
                max_examples=ORDERS,
                stateful_step_count=14,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
            ),
        )
    finally:
        node.close()

    assert tally.orders >= ORDERS
    assert tally.kills
    assert tally.containers
    assert not tally.violations

"""No order of restarts loses a grant, sells one twice or leaves one over (``bench/kubernetes.py`` tries hundreds)."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.k8s.restarts import Tally, machine
from tests.k8s.world import World

ORDERS = int(os.environ.get("QGPU_RESTART_ORDERS", "6"))


@pytest.mark.root
@pytest.mark.timeout(1800)
def test_restarts_in_any_order_keep_every_promise() -> None:
    node, tally = World("--resync", "0.2").start(), Tally()
    try:
        run_state_machine_as_test(
            machine(node, tally),
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
    assert not tally.violations

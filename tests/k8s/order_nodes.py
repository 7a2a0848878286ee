"""The nodes on which restart orders are tried, by what pods hold there and what answers their calls.

Those of a real containerd are ``containerd/orders.py``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.k8s.claim_orders import ClaimOrders
from tests.k8s.group_node import GroupWorld
from tests.k8s.group_orders import GroupOrders
from tests.k8s.guarded import GuardedWorld
from tests.k8s.orders import Orders, machine
from tests.k8s.tally import Tally
from tests.k8s.unit_orders import UnitOrders
from tests.k8s.world import World

NODES: Mapping[str, tuple[type[Orders], Callable[[], World]]] = {
    "claims": (ClaimOrders, lambda: World("--resync", "0.2")),
    "claims behind a guardian": (ClaimOrders, lambda: GuardedWorld("--resync", "0.2")),
    "claims with groups": (GroupOrders, lambda: GroupWorld("--resync", "0.2")),
    "units": (UnitOrders, lambda: World("--patience", "0.5", mode="device-plugin")),
}


def try_orders(kind: type[Orders], make: Callable[[], World], orders: int) -> Tally:
    """Try so many orders on one node; return what happened. Raises AssertionError if a promise was broken."""
    node, tally = make(), Tally()
    try:
        node.start()
        run(machine(kind, node, tally), orders, 14)
    finally:
        node.close()
    return tally


def run(orders: type[Orders], count: int, steps: int, **more: Any) -> None:
    """Have Hypothesis run so many orders of so many steps; ``more`` are settings of Hypothesis."""
    run_state_machine_as_test(
        orders,
        settings=settings(
            max_examples=count,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            **more,
        ),
    )

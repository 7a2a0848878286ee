"""No order of restarts loses a grant, grants one twice or leaves one over (``bench/kubernetes.py`` tries hundreds)."""

from __future__ import annotations

import os

import pytest

from tests.k8s.claim_orders import ClaimOrders
from tests.k8s.order_nodes import NODES, try_orders
from tests.k8s.orders import Choice, machine
from tests.k8s.tally import Tally
from tests.k8s.world import World

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


@pytest.mark.root
def test_a_pod_that_joins_a_claim_starts_once_the_driver_told() -> None:
    """Until then its containers may be refused: that is no grant lost."""
    choice = Choice(0, by_force=False, gpu=0, count=1, shared=True, memory=1, cores=0, perils=(0, 0), pair=False)
    node = World("--resync", "0.2").start()
    orders = machine(ClaimOrders, node, Tally())()
    assert isinstance(orders, ClaimOrders)
    orders.open()
    try:
        orders.hold(choice)
        (each,) = orders.live.values()
        first = min(each.pods)
        while not node.kubelet.prepared(each.uid):
            orders.kubelet_works()
        node.kill_driver()
        while min(each.pods) == first:
            orders.join_claim(choice)
        orders.kubelet_works()
        orders.start_container(choice)
        early = list(each.containers)
        node.start_driver()
        while not orders.settled():
            orders.compare()
        orders.start_container(choice)

        assert (early, len(each.containers)) == ([], 1)
    finally:
        orders.end_containers()
        node.close()

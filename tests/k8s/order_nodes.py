"""The nodes on which restart orders are tried, by what pods hold there and what answers their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.k8s.claim_orders import ClaimOrders
from tests.k8s.group_node import GroupWorld
from tests.k8s.group_orders import GroupOrders
from tests.k8s.guarded import GuardedWorld
from tests.k8s.orders import Orders
from tests.k8s.unit_orders import UnitOrders
from tests.k8s.world import World

NODES: Mapping[str, tuple[type[Orders], Callable[[], World]]] = {
    "claims": (ClaimOrders, lambda: World("--resync", "0.2")),
    "claims behind a guardian": (ClaimOrders, lambda: GuardedWorld("--resync", "0.2")),
    "claims with groups": (GroupOrders, lambda: GroupWorld("--resync", "0.2")),
    "units": (UnitOrders, lambda: World("--patience", "0.5", mode="device-plugin")),
}

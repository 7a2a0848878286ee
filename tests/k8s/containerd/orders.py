"""Restart orders in which a real containerd runs the claims' containers: it fails and comes back as well."""

from __future__ import annotations

import grpc

from tests.k8s.claim_orders import ClaimOrders
from tests.k8s.containerd.world import ContainerdWorld
from tests.k8s.orders import Choice


class ContainerdOrders(ClaimOrders):
    """One order with claims whose containers containerd runs."""

    world: ContainerdWorld

    def start_container(self, choice: Choice) -> None:
        """A container of a prepared claim starts, unless containerd is away."""
        if self.world.runs("containerd"):
            super().start_container(choice)

    def kubelet_works(self, choice: Choice | None = None) -> None:
        """It removes what is left of ended pods, too."""
        if self.world.runs("kubelet"):
            self.world.collect()
        super().kubelet_works(choice)

    def compare(self) -> None:
        """Check that all containers still run, too."""
        super().compare()
        for container in self.world.containers:
            if why := container.lacks():
                self.broken("grants_lost", why)

    def amiss(self) -> dict[str, str]:
        """Say what containerd still has of pods that are gone, too."""
        found = super().amiss()
        try:
            left = [*self.world.strays()[0], *self.world.strays()[1]]
        except grpc.RpcError as error:
            left = [str(error.details())]
        if left:
            found["leaks"] = "; ".join([*([found["leaks"]] if "leaks" in found else []), f"containerd has {left}"])
        return found

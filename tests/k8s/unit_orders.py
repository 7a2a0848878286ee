"""Restart orders in which pods hold units, which the kubelet allocates and the device plugin prepares."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import grpc

from tests.k8s.container import ContainerLike
from tests.k8s.holdings import Holding
from tests.k8s.orders import ACTIONS, Choice, Orders
from tests.k8s.world import GI, card

#: What pods ask for.
RESOURCES = ("qgpu.io/cores", "qgpu.io/online-cores")
MOST = 40


@dataclass
class Live:
    """A pod with units of one card."""

    resource: str
    card: str
    units: int
    #: The CDI names that the plugin gave its container.
    devices: list[str]
    containers: list[ContainerLike] = field(default_factory=list)

    def end_containers(self) -> None:
        """End them."""
        for container in self.containers:
            container.kill()
        self.containers.clear()


class UnitOrders(Orders):
    """One order with units."""

    actions = (*ACTIONS, *("hold", "end_pod", "start_container") * 2)
    under_way = ("hold", "end_pod", "start_container")

    def open(self) -> None:
        """Begin without pods."""
        self.live: dict[str, Live] = {}

    def hold(self, choice: Choice) -> None:
        """The kubelet takes a pod and allocates its units, if the plugin has them; else it refuses the pod."""
        kubelet, resource, count = self.world.kubelet, RESOURCES[choice.shared], 1 + choice.memory % MOST
        plugin = kubelet.device_plugins.get(resource)
        if not self.world.runs("kubelet", "driver", "qgpud") or plugin is None:
            return
        healthy = [name for name, health in dict(kubelet.units.get(resource, {})).items() if health == "Healthy"]
        taken = {name for (*_, of), names in kubelet.held_units.items() if of == resource for name in names}
        on_card = [name for name in healthy if name not in taken and name.startswith(card(choice.gpu))]
        if len(on_card) < count:
            return
        pod = str(uuid.uuid4())
        try:
            given = kubelet.allocate(resource, count, pod, units=on_card[:count])
        except grpc.RpcError:  # the plugin or qgpud went, or sees less than the kubelet knew
            kubelet.release(pod)
            return
        devices = [device.name for device in given.cdi_devices]
        self.live[pod] = Live(resource, card(choice.gpu), count, devices)
        self.tally.claims += 1

    def end_pod(self, choice: Choice) -> None:
        """A pod ends, and its units are free for the kubelet; nobody tells the plugin."""
        if self.live and self.world.runs("kubelet"):
            pod = choice.one_of(list(self.live))
            self.live.pop(pod).end_containers()
            self.world.kubelet.release(pod)

    def start_container(self, choice: Choice) -> None:
        """A pod's container starts, or starts again after its node did."""
        if not self.world.runs("kubelet", "qgpud") or not self.live:
            return
        pod, each = choice.one_of(list(self.live.items()))
        if not each.containers and set(each.devices) <= self.world.files():
            self.run(pod, each.devices, each.containers)

    def kubelet_works(self, _choice: Choice | None = None) -> None:
        """It has nothing to ask of a plugin between allocations."""

    def check(self, grants: dict[str, Any], files: set[str]) -> None:
        """Every pod that holds units has a grant of just so much, by the name that its container was given."""
        held = {device["cdi"]: device for grant in grants.values() for device in grant["devices"]}
        for pod, each in self.live.items():
            found = [held.get(name) for name in each.devices]
            parts = {(device["gpu"], device["cores"]) for device in found if device is not None}
            if parts != {(each.card, each.units)} or not set(each.devices) <= files:
                self.broken("sold_twice" if each.containers else "grants_lost", f"{pod} {each} {found}")

    def end_containers(self) -> None:
        """End all that runs."""
        for each in self.live.values():
            each.end_containers()

    def holdings(self) -> list[Holding]:
        """Return all pods' units: of time, and of memory in proportion."""
        return [
            Holding(
                "",
                {gpu: (each.units * self.world.memory // 100 + GI, each.units)},
                each.containers,
                frozenset(each.devices),
            )
            for each in self.live.values()
            for gpu in range(self.world.cards)
            if card(gpu) == each.card
        ]

    def settled(self) -> bool:
        """Tell whether exactly the pods' units are held, and all others that there is room for can be allocated."""
        kubelet = self.world.kubelet
        of = {gpu: sum(each.units for each in self.live.values() if each.card == card(gpu)) for gpu in (0, 1)}
        granted = len(self.world.grants()) == len(self.live)
        mine = {
            (resource, gpu): sum(
                each.units for each in self.live.values() if (each.card, each.resource) == (card(gpu), resource)
            )
            for resource in RESOURCES
            for gpu in of
        }
        offered = all(
            kubelet.healthy(resource, card(gpu)) == 100 - of[gpu] + mine[resource, gpu] for resource, gpu in mine
        )
        return granted and offered

    def judge(self) -> None:
        """Say what did not settle."""
        healthy = {(r, gpu): self.world.kubelet.healthy(r, card(gpu)) for r in RESOURCES for gpu in (0, 1)}
        self.broken("leaks", f"{self.world.grants()}; {self.live}; healthy {healthy}")

    def close(self) -> None:
        """Take everything away."""
        self.world.kubelet.held_units.clear()
        self.open()

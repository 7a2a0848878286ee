"""Restart orders in which pods hold claims, which the DRA driver prepares."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from tests.k8s.container import ContainerLike
from tests.k8s.holdings import Holding
from tests.k8s.orders import ACTIONS, Choice, Orders
from tests.k8s.world import GI, result

#: How long the kubelet waits for a plugin that may be away.
_PLUGIN_S = 0.05


@dataclass
class Live:
    """A claim that the test made, and what uses it."""

    claim: dict[str, Any]
    cards: dict[int, tuple[int, int]]
    containers: list[ContainerLike] = field(default_factory=list)
    #: Whether the kubelet has begun to end its containers.
    doomed: bool = False

    @property
    def uid(self) -> str:
        return str(self.claim["metadata"]["uid"])

    @property
    def pods(self) -> set[str]:
        return {each["uid"] for each in self.claim["status"]["reservedFor"]}

    def end_containers(self) -> None:
        """End them."""
        for container in self.containers:
            container.kill()
        self.containers.clear()


class ClaimOrders(Orders):
    """One order with claims."""

    actions = (
        *ACTIONS,
        *("hold", "join_claim", "lose_checkpoint", "containers_work"),
        *("delete_claim", "start_container") * 2,
    )
    under_way = ("start_container", "kubelet_works", "delete_claim")

    def open(self) -> None:
        """Begin without claims."""
        self.live: dict[str, Live] = {}
        #: Claims that are gone from the API server while processes of theirs may be left.
        self.gone: dict[str, Live] = {}
        #: Claims whose pods are gone, and which go as soon as the kubelet has given them up.
        self.leaving: dict[str, Live] = {}
        #: Pods that came to a claim later, and that qgpud has not told of yet.
        self.joining: set[str] = set()

    def hold(self, choice: Choice) -> None:
        """The scheduler allocates what is left, as it knows it, and binds a pod."""
        if not self.world.api.running:
            return
        gpu, count, cores = choice.gpu % self.world.cards, choice.count, choice.cores
        memory = 1 + choice.memory % (self.world.memory // GI // 4)
        held = [each.cards.get(gpu, (0, 0)) for each in (*self.live.values(), *self.leaving.values())]
        if (
            sum(of for of, _ in held) + memory * count * GI > self.world.memory
            or sum(of for _, of in held) + cores * count > 100
        ):
            return
        asked = [result(gpu, memory=f"{memory}Gi", cores=str(cores)) for _ in range(count)]
        made = self.world.claim(*asked, shared=choice.shared)
        self.live[made["metadata"]["uid"]] = Live(made, {gpu: (memory * count * GI, cores * count)})
        self.tally.claims += 1

    def join_claim(self, choice: Choice) -> None:
        """Another pod comes to a claim that is not one pod's own."""
        if not self.world.api.running or not self.live:
            return
        each = choice.one_of(list(self.live.values()))
        if "ownerReferences" in each.claim["metadata"]:
            return
        pod = str(uuid.uuid4())
        self.world.pod(pod, each.claim["metadata"]["name"])
        reserved = [*each.claim["status"]["reservedFor"], {"resource": "pods", "name": pod, "uid": pod}]
        content = each.claim | {"status": each.claim["status"] | {"reservedFor": reserved}}
        each.claim = self.world.api.put("resourceclaims", "team", each.claim["metadata"]["name"], content)
        self.joining.add(pod)

    def is_early(self, pod: str, why: str) -> bool:
        """The driver tells qgpud of a pod that comes later, and the kubelet starts its containers again meanwhile."""
        return pod in self.joining and "is not reserved for its Kubernetes pod" in why

    def delete_claim(self, choice: Choice) -> None:
        """A claim goes: when the kubelet has given it up, or by force, while its processes may still run."""
        if not self.world.api.running or not self.live:
            return
        each = choice.one_of(list(self.live.values()))
        if choice.by_force:
            self.world.forget(each.claim)
            self.gone[each.uid] = self.live.pop(each.uid)
        else:
            each.end_containers()
            for pod in each.pods:
                self.world.api.delete("pods", "team", pod)
            self.leaving[each.uid] = self.live.pop(each.uid)

    def start_container(self, choice: Choice) -> None:
        """A container of a prepared claim starts."""
        if not self.world.runs("kubelet", "qgpud") or not self.live:
            return
        each = choice.one_of(list(self.live.values()))
        if len(each.containers) >= self.most_containers(each) or not self.world.kubelet.prepared(each.uid):
            return
        pod = sorted(each.pods & self.world.kubelet.checkpoint[each.uid].pods)[0]
        self.run(pod, self.world.kubelet.names(each.uid), each.containers)

    @staticmethod
    def most_containers(each: Live) -> int:
        """How many containers use a claim at the same time: two divide it, unless a device's quota is too small."""
        results = each.claim["status"]["allocation"]["devices"]["results"]
        return 1 if any(part["consumedCapacity"]["cores"] == "1" for part in results) else 2

    def containers_work(self, _choice: Choice | None = None) -> None:
        """Each container is held to the memory of its claim, whichever guardian answers it."""
        if not self.world.runs("qgpud"):
            return
        for each in self._all():
            ((memory, _),) = each.cards.values()
            for container in each.containers:
                if why := container.exceeds(memory):
                    self.broken("grants_lost", f"{each.uid}: {why}")

    def lose_checkpoint(self, _choice: Choice) -> None:
        """The kubelet loses its record while it is away; it then asks again for what its pods need."""
        if not self.world.kubelet.running:
            self.world.kubelet.checkpoint.clear()

    def kubelet_works(self, _choice: Choice | None = None) -> None:
        """Prepare the claims of pods, and give up those whose pods are gone. Its view of pods is the server's last."""
        kubelet = self.world.kubelet
        if not kubelet.running:
            return
        pods = {pod["metadata"]["uid"] for pod in self.world.api.of("pods")}
        for known in list(kubelet.checkpoint.values()):
            if not known.pods & pods and (known.devices is not None or self.world.api.running):
                kubelet.unprepare(known.uid, _PLUGIN_S)
        for each in self._all():
            if each.doomed:
                each.end_containers()
            each.doomed = not each.pods & pods  # its processes do not end at once
        for each in list(self.live.values()):
            for pod in sorted(each.pods & pods):
                if self.world.api.running:  # it reads a claim itself before it asks the driver
                    kubelet.prepare(each.claim, pod, _PLUGIN_S)
        for uid in [uid for uid in self.leaving if uid not in kubelet.checkpoint]:
            if self.world.api.running:
                self.world.forget(self.leaving[uid].claim)
                self.gone[uid] = self.leaving.pop(uid)

    def check(self, grants: dict[str, Any], files: set[str]) -> None:
        """What the kubelet was told is prepared is prepared; what has processes is held."""
        for grant in grants.values():
            self.joining.difference_update(grant["consumers"])
        for uid in self.live.keys() & self.world.kubelet.checkpoint.keys():
            known = self.world.kubelet.checkpoint[uid]
            if known.devices is not None and known.pods & self.live[uid].pods:
                kept = grants.get(uid)
                names = set(self.world.kubelet.names(uid))
                if kept is None or {device["cdi"] for device in kept["devices"]} != names or not names <= files:
                    self.broken("grants_lost", f"{uid} {known} {kept}")
        for each in self._all():
            if each.containers and each.uid not in grants:
                self.broken("sold_twice", f"{each.uid} has processes, and its memory is free to grant")

    def end_containers(self) -> None:
        """End all that runs."""
        for each in self._all():
            each.end_containers()

    def leave(self) -> None:
        """What was deleted by force ends at last."""
        for each in self.gone.values():
            each.end_containers()

    def holdings(self) -> list[Holding]:
        """Return all claims."""
        return [
            Holding(each.claim["metadata"]["name"], each.cards, each.containers, self.devices(each), self.group(each))
            for each in self._all()
        ]

    def devices(self, each: Live) -> frozenset[str]:
        """The CDI names that containers of a live claim get, once the kubelet has them."""
        there = each.uid in self.live and self.world.kubelet.prepared(each.uid)
        return frozenset(self.world.kubelet.names(each.uid) if there else ())

    def group(self, _each: Live) -> str:
        """The name of a claim's group; empty for none."""
        return ""

    def settled(self) -> bool:
        """Tell whether exactly the live claims are prepared, for all of their pods, and the cards can be allocated."""
        prepared = all(self.world.kubelet.prepared(uid) for uid in self.live)
        slice_there = self.world.api.slice() is not None
        if any(each.pods & self.joining for each in self.live.values()):
            return False
        return prepared and not self.leaving and slice_there and self.world.grants().keys() == self.live.keys()

    def judge(self) -> None:
        """Say what did not settle."""
        grants = self.world.grants().keys()
        if left := grants - self.live.keys():
            self.broken("leaks", f"{left}")
        self.broken("grants_lost", f"{self.live.keys() - grants}, unknown pods: {self.joining}")

    def close(self) -> None:
        """Take everything away."""
        for kind in ("resourceclaims", "pods"):
            for found in self.world.api.of(kind):
                self.world.api.delete(kind, "team", found["metadata"]["name"])
        self.open()
        self.world.kubelet.checkpoint.clear()

    def _all(self) -> list[Live]:
        return [*self.live.values(), *self.gone.values(), *self.leaving.values()]

"""Restart orders: the driver, the kubelet, the API server and qgpud go and come while claims are made and deleted.

A Hypothesis state machine over one node of real processes. After every step nothing that was promised may be missing,
and nothing may be sold twice; at the end of every order, when all parts run again, nothing may be left over.
"""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from qgpu.errors import QgpuError
from tests.k8s.container import Container
from tests.k8s.world import GI, World, card, result

CARDS = 2
MEMORY = 140 * GI
PARTS = ("driver", "kubelet", "api", "qgpud")
#: What may happen, as often as it stands here.
ACTIONS = (
    *("make_claim", "join_claim", "lose_checkpoint", "time_passes", "start_all"),
    *("delete_claim", "start_container", "kill", "start", "kubelet_works") * 2,
)
#: How long the kubelet waits for a plugin that may be away.
_PLUGIN_S = 0.05
_SETTLE_S = 60.0


@dataclass
class Tally:
    """What happened in all orders so far."""

    orders: int = 0
    kills: int = 0
    claims: int = 0
    containers: int = 0
    grants_lost: int = 0
    sold_twice: int = 0
    leaks: int = 0

    @property
    def violations(self) -> int:
        """How often a promise was broken."""
        return self.grants_lost + self.sold_twice + self.leaks


@dataclass
class Live:
    """A claim that the test made, and what uses it."""

    claim: dict[str, Any]
    cards: dict[int, tuple[int, int]]
    containers: list[Container] = field(default_factory=list)
    #: Whether the kubelet has begun to end its containers.
    doomed: bool = False

    @property
    def uid(self) -> str:
        return str(self.claim["metadata"]["uid"])

    @property
    def pods(self) -> set[str]:
        return {each["uid"] for each in self.claim["status"]["reservedFor"]}


@dataclass(frozen=True)
class Choice:
    """All that a step may have to choose. Drawn whatever the step needs, because timing decides what it finds."""

    number: int
    by_force: bool
    gpu: int
    count: int
    shared: bool
    memory: int
    cores: int
    parts: list[str]


CHOICES = st.builds(
    Choice,
    number=st.integers(0, 11),
    by_force=st.booleans(),
    gpu=st.integers(0, CARDS - 1),
    count=st.integers(1, 2),
    shared=st.booleans(),
    memory=st.integers(1, 30),
    cores=st.integers(0, 20),
    parts=st.lists(st.sampled_from(PARTS), min_size=1, max_size=2, unique=True),
)


class RestartOrders(RuleBasedStateMachine):
    """One order; the node outlives it."""

    world: ClassVar[World]
    tally: ClassVar[Tally]

    @initialize(claims=st.lists(CHOICES, min_size=1, max_size=3))
    def begin(self, claims: list[Choice]) -> None:
        """Begin with a claim or more, prepared unless the kubelet could not."""
        self.live: dict[str, Live] = {}
        #: Claims that are gone from the API server while processes of theirs may be left.
        self.gone: dict[str, Live] = {}
        #: Claims whose pods are gone, and which go as soon as the kubelet has given them up.
        self.leaving: dict[str, Live] = {}
        for choice in claims:
            self.make_claim(choice)
        self._kubelet_works()
        self.start_container(claims[0])

    @rule(action=st.sampled_from(ACTIONS), choice=CHOICES)
    def act(self, action: str, choice: Choice) -> None:
        """Do one thing; one rule, so that no order is without one of them."""
        getattr(self, action)(choice)

    # claims

    def make_claim(self, choice: Choice) -> None:
        """The scheduler allocates what is left, as it knows it, and binds a pod."""
        if not self.world.api.running:
            return
        gpu, count, memory, cores = choice.gpu, choice.count, choice.memory, choice.cores
        held = [each.cards.get(gpu, (0, 0)) for each in (*self.live.values(), *self.leaving.values())]
        if sum(of for of, _ in held) + memory * count * GI > MEMORY or sum(of for _, of in held) + cores * count > 100:
            return
        asked = [result(gpu, memory=f"{memory}Gi", cores=str(cores)) for _ in range(count)]
        made = self.world.claim(*asked, shared=choice.shared)
        self.live[made["metadata"]["uid"]] = Live(made, {gpu: (memory * count * GI, cores * count)})
        self.tally.claims += 1

    def join_claim(self, choice: Choice) -> None:
        """Another pod comes to a claim that is not one pod's own."""
        if not self.world.api.running or not self.live:
            return
        each = self._one(choice)
        if "ownerReferences" in each.claim["metadata"]:
            return
        pod = str(uuid.uuid4())
        self.world.pod(pod, each.claim["metadata"]["name"])
        reserved = [*each.claim["status"]["reservedFor"], {"resource": "pods", "name": pod, "uid": pod}]
        content = each.claim | {"status": each.claim["status"] | {"reservedFor": reserved}}
        each.claim = self.world.api.put("resourceclaims", "team", each.claim["metadata"]["name"], content)

    def delete_claim(self, choice: Choice) -> None:
        """A claim goes: when the kubelet has given it up, or by force, while its processes may still run."""
        if not self.world.api.running or not self.live:
            return
        each = self._one(choice)
        if choice.by_force:
            self.world.forget(each.claim)
            self.gone[each.uid] = self.live.pop(each.uid)
        else:
            self._end_containers(each)
            for pod in each.pods:
                self.world.api.delete("pods", "team", pod)
            self.leaving[each.uid] = self.live.pop(each.uid)

    def start_container(self, choice: Choice) -> None:
        """A container of a prepared claim starts."""
        if self._down("kubelet", "qgpud") or not self.live:
            return
        each = self._one(choice)
        if each.containers or not self.world.kubelet.prepared(each.uid):
            return
        pod = sorted(each.pods & self.world.kubelet.checkpoint[each.uid].pods)[0]
        container = Container(self.world, pod, self.world.kubelet.names(each.uid))
        each.containers.append(container)
        container.bind()
        self.tally.containers += 1

    # parts

    def kill(self, choice: Choice) -> None:
        """Kill a part, or two at once."""
        for part in choice.parts:
            if self._down(part):
                continue
            self.tally.kills += 1
            if part == "driver":
                self.world.kill_driver()
            elif part == "kubelet":
                self.world.kubelet.stop()
            elif part == "api":
                self.world.api.stop()
            else:
                self.world.kill_daemon()
                for each in self._all():  # a simulated card ends with its daemon, and so does what runs on it
                    self._end_containers(each)

    def start(self, choice: Choice) -> None:
        """Start one of the parts that are away."""
        if away := [part for part in PARTS if self._down(part)]:
            self._start(away[choice.number % len(away)])

    def start_all(self, _choice: Choice) -> None:
        """Start all that is away."""
        for part in PARTS:
            if self._down(part):
                self._start(part)

    def lose_checkpoint(self, _choice: Choice) -> None:
        """The kubelet loses its record while it is away; it then asks again for what its pods need."""
        if not self.world.kubelet.running:
            self.world.kubelet.checkpoint.clear()

    def kubelet_works(self, _choice: Choice) -> None:
        """The kubelet does once what it can."""
        self._kubelet_works()

    def time_passes(self, _choice: Choice) -> None:
        """The driver compares claims several times meanwhile."""
        time.sleep(0.3)

    # promises

    @invariant()
    def nothing_is_lost_or_sold_twice(self) -> None:
        """Check against qgpud, if it is there."""
        driver = self.world.driver
        assert driver is None or driver.poll() is None, f"driver died: {driver.returncode}: {self.world.log[-3000:]}"
        if not hasattr(self, "live") or self._down("qgpud"):
            return
        grants, files = self.world.grants(), self.world.files()
        for uid in self.live.keys() & self.world.kubelet.checkpoint.keys():
            known = self.world.kubelet.checkpoint[uid]
            if known.devices is not None and known.pods & self.live[uid].pods:
                kept = grants.get(uid)
                names = set(self.world.kubelet.names(uid))
                if kept is None or {device["cdi"] for device in kept["devices"]} != names or not names <= files:
                    self._broken("grants_lost", f"{uid} {known} {kept}")
        for gpu in range(CARDS):
            parts = [each for grant in grants.values() for each in grant["devices"] if each["gpu"] == card(gpu)]
            if sum(each["memory"] for each in parts) > 141 * GI or sum(each["cores"] or 0 for each in parts) > 100:
                self._broken("sold_twice", f"{parts}")
        for each in self._all():
            if each.containers and each.uid not in grants:
                self._broken("sold_twice", f"{each.uid} has processes, and its memory is free to grant")

    def teardown(self) -> None:
        """Start all parts, let them settle, and check that exactly the live claims are prepared."""
        if not hasattr(self, "live"):
            return
        try:
            for part in PARTS:
                if self._down(part):
                    self._start(part)
            for each in self.gone.values():
                self._end_containers(each)
            deadline = time.monotonic() + _SETTLE_S
            while not self._settled():
                self.nothing_is_lost_or_sold_twice()
                if time.monotonic() > deadline:
                    self._judge()
                self._kubelet_works()
                time.sleep(0.02)
            self.nothing_is_lost_or_sold_twice()
        finally:
            self.tally.orders += 1
            self._clean_up()

    def _settled(self) -> bool:
        kubelet = self.world.kubelet
        prepared = all(kubelet.prepared(uid) for uid in self.live)
        slice_there = self.world.api.slice() is not None
        return prepared and not self.leaving and slice_there and self.world.grants().keys() == self.live.keys()

    def _judge(self) -> None:
        """Say what did not settle."""
        grants = self.world.grants().keys()
        if left := grants - self.live.keys():
            self._broken("leaks", f"{left}; driver: {self.world.log[-3000:]}")
        self._broken("grants_lost", f"{self.live.keys() - grants}; driver: {self.world.log[-3000:]}")

    def _broken(self, promise: str, what: str) -> None:
        setattr(self.tally, promise, getattr(self.tally, promise) + 1)
        raise AssertionError(f"{promise}: {what}")

    def _clean_up(self) -> None:
        for each in self._all():
            self._end_containers(each)
        for kind in ("resourceclaims", "pods"):
            for found in self.world.api.of(kind):
                self.world.api.delete(kind, "team", found["metadata"]["name"])
        self.live, self.gone, self.leaving = {}, {}, {}
        self.world.kubelet.checkpoint.clear()
        for uid in self.world.grants():
            with suppress(QgpuError):
                self.world.qgpud.drop(uid)

    # the world

    def _kubelet_works(self) -> None:
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
                self._end_containers(each)
            each.doomed = not each.pods & pods  # its processes do not end at once
        for each in list(self.live.values()):
            for pod in sorted(each.pods & pods):
                if self.world.api.running:  # it reads a claim itself before it asks the driver
                    kubelet.prepare(each.claim, pod, _PLUGIN_S)
        for uid in [uid for uid in self.leaving if uid not in kubelet.checkpoint]:
            if self.world.api.running:
                self.world.forget(self.leaving[uid].claim)
                self.gone[uid] = self.leaving.pop(uid)

    def _start(self, part: str) -> None:
        if part == "driver":
            self.world.start_driver()
        elif part == "kubelet":
            self.world.kubelet.start()
        elif part == "api":
            self.world.api.start()
        else:
            self.world.start_daemon()

    def _down(self, *parts: str) -> bool:
        """Whether any of these parts is away."""
        world = self.world
        runs = {
            "driver": world.driver is not None and world.driver.poll() is None,
            "kubelet": world.kubelet.running,
            "api": world.api.running,
            "qgpud": world.daemon is not None,
        }
        return not all(runs[part] for part in parts)

    def _one(self, choice: Choice) -> Live:
        return list(self.live.values())[choice.number % len(self.live)]

    def _all(self) -> list[Live]:
        return [*self.live.values(), *self.gone.values(), *self.leaving.values()]

    @staticmethod
    def _end_containers(each: Live) -> None:
        for container in each.containers:
            container.kill()
        each.containers.clear()


def machine(node: World, tally: Tally) -> type[RestartOrders]:
    """Return the state machine of a node."""
    return type("RestartOrders", (RestartOrders,), {"world": node, "tally": tally})

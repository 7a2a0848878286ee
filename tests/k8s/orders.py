"""Restart orders: the parts of a node fail and come back in any order, alone and in pairs, while pods come and go.

A Hypothesis state machine over one node of real processes. After every step nothing that was promised may be missing,
and nothing may be sold twice; at the end of every order, when all parts run again, nothing may be left over. What pods
hold, and how they come to it, is a subclass's: claims (``claim_orders.py``) or a device plugin's units
(``unit_orders.py``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from qgpu.errors import QgpuError
from tests.k8s.container import Container
from tests.k8s.world import GI, PATIENCE_S, World, card

#: What may happen to the parts, as often as it stands here.
ACTIONS = ("time_passes", "start_all", *("kill", "beside_failure", "start", "kubelet_works") * 2)
_T = TypeVar("_T")


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
    #: What fails: the numbers of two perils, of which the second counts if they fail as a pair.
    perils: tuple[int, int]
    pair: bool

    def failing(self, perils: Sequence[str]) -> list[str]:
        """Return what fails."""
        chosen = list(dict.fromkeys(perils[number % len(perils)] for number in self.perils))
        return chosen if self.pair else chosen[:1]

    def one_of(self, choices: Sequence[_T]) -> _T:
        """Return one of several."""
        return choices[self.number % len(choices)]


CHOICES = st.builds(
    Choice,
    number=st.integers(0, 11),
    by_force=st.booleans(),
    gpu=st.integers(0, 1),
    count=st.integers(1, 2),
    shared=st.booleans(),
    memory=st.integers(1, 30),
    cores=st.integers(0, 20),
    perils=st.tuples(st.integers(0, 59), st.integers(0, 59)),
    pair=st.booleans(),
)


class Orders(RuleBasedStateMachine):
    """One order; the node outlives it."""

    world: ClassVar[World]
    tally: ClassVar[Tally]
    actions: ClassVar[tuple[str, ...]]
    #: What may be under way when something fails.
    under_way: ClassVar[tuple[str, ...]]
    #: Whether ``begin`` has begun, and whether something fails just now, so that what is under way may fail.
    begun = failing = False

    # a subclass's

    def open(self) -> None:
        """Begin with nothing."""
        raise NotImplementedError

    def hold(self, choice: Choice) -> None:
        """Let a pod come to hold something."""
        raise NotImplementedError

    def start_container(self, choice: Choice) -> None:
        """Start a container of what is held."""
        raise NotImplementedError

    def kubelet_works(self, _choice: Choice | None = None) -> None:
        """Let the kubelet do once what it can."""
        raise NotImplementedError

    def check(self, grants: dict[str, Any], files: set[str]) -> None:
        """Check that qgpud keeps what is held."""
        raise NotImplementedError

    def containers_work(self, _choice: Choice | None = None) -> None:
        """Check that containers are held to what they hold."""

    def end_containers(self) -> None:
        """End all that runs."""
        raise NotImplementedError

    def leave(self) -> None:
        """Let what nobody holds any more end, for the order is over."""

    def settled(self) -> bool:
        """Tell whether what is held is prepared, and nothing else."""
        raise NotImplementedError

    def judge(self) -> None:
        """Say what did not settle."""
        raise NotImplementedError

    def close(self) -> None:
        """Take everything away."""
        raise NotImplementedError

    # everybody's

    @initialize(choices=st.lists(CHOICES, min_size=1, max_size=3))
    def begin(self, choices: list[Choice]) -> None:
        """Begin with a pod or more that hold something, unless the kubelet could not give it."""
        self.open()
        self.begun = True
        for choice in choices:
            self.hold(choice)
        self.kubelet_works()
        self.start_container(choices[0])

    @rule(data=st.data(), choice=CHOICES)
    def act(self, data: st.DataObject, choice: Choice) -> None:
        """Do one thing; one rule, so that no order is without one of them."""
        getattr(self, data.draw(st.sampled_from(self.actions)))(choice)

    def kill(self, choice: Choice) -> None:
        """Let something fail, or two things at once."""
        for peril in choice.failing(self.world.perils):
            if peril in self.world.parts and not self.world.runs(peril):
                continue
            self.tally.kills += 1
            if peril == "node":
                self.end_containers()
            self.world.fail(peril)

    def beside_failure(self, choice: Choice) -> None:
        """Let something fail while a pod comes, starts or ends."""
        perils = [each for each in choice.failing(self.world.perils) if each != "node"]
        perils = [each for each in perils if each not in self.world.parts or self.world.runs(each)]
        self.tally.kills += len(perils)
        self.failing = True
        try:
            with ThreadPoolExecutor(1) as pool:
                failing = pool.submit(lambda: [self.world.fail(each) for each in perils])
                getattr(self, choice.one_of(self.under_way))(choice)
                failing.result()
        finally:
            self.failing = False

    def run(self, pod: str, devices: list[str], containers: list[Container]) -> None:
        """Start a container of a pod, unless there are too many."""
        container = self.world.container(pod, devices)
        if container is None:
            return
        if why := container.bind(may_be_refused=True):
            container.kill()
            if "tried for" not in why:  # else a part stays away, or is longer in coming than a hook waits
                self.broken("grants_lost", why)
            return
        containers.append(container)  # before it is judged: it is ended with the others, whatever comes of it
        self.tally.containers += 1
        if not self.failing and (why := container.lacks()):
            self.broken("grants_lost", why)

    def start(self, choice: Choice) -> None:
        """Start one of the parts that are away."""
        if away := [part for part in self.world.parts if not self.world.runs(part)]:
            self.world.start_part(choice.one_of(away))

    def start_all(self, _choice: Choice | None = None) -> None:
        """Start all that is away."""
        for part in self.world.parts:
            if not self.world.runs(part):
                self.world.start_part(part)

    def time_passes(self, _choice: Choice) -> None:
        """The driver compares several times meanwhile."""
        time.sleep(0.3)

    @invariant()
    def nothing_is_lost_or_sold_twice(self) -> None:
        """Check against qgpud, if it is there."""
        driver = self.world.driver
        assert driver is None or driver.poll() is None, f"driver died: {driver.returncode}: {self.world.log[-3000:]}"
        if not self.begun or not self.world.runs("qgpud"):
            return
        grants = self.world.grants()
        self.check(grants, self.world.files())
        for gpu in range(self.world.cards):
            parts = [each for grant in grants.values() for each in grant["devices"] if each["gpu"] == card(gpu)]
            memory, cores = (sum(each[what] or 0 for each in parts) for what in ("memory", "cores"))
            if memory > self.world.memory + GI or cores > 100:
                self.broken("sold_twice", f"{parts}")

    def teardown(self) -> None:
        """Start all parts, let them settle, and check that exactly what is held is prepared."""
        if not self.begun:
            return
        try:
            self.start_all()
            self.leave()
            deadline = time.monotonic() + PATIENCE_S
            while not self.settled():
                self.nothing_is_lost_or_sold_twice()
                if time.monotonic() > deadline:
                    self.judge()
                self.kubelet_works()
                time.sleep(0.02)
            self.containers_work()
            self.nothing_is_lost_or_sold_twice()
        finally:
            self.tally.orders += 1
            self.end_containers()
            self.close()
            for uid in self.world.grants():
                with suppress(QgpuError):
                    self.world.qgpud.drop(uid)

    def broken(self, promise: str, what: str) -> None:
        """Count a broken promise, and fail."""
        setattr(self.tally, promise, getattr(self.tally, promise) + 1)
        raise AssertionError(f"{promise}: {what}; driver: {self.world.log[-3000:]}")


def machine(kind: type[Orders], node: World, tally: Tally) -> type[Orders]:
    """Return the state machine of a node."""
    return type(kind.__name__, (kind,), {"world": node, "tally": tally})

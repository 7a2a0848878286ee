"""Restart orders: the parts of a node fail and come back in any order, alone and in pairs, while pods come and go.

A Hypothesis state machine over one node of real processes. After every step nothing that was promised may be missing,
and nothing may be granted twice; at the end of every order, when all parts run again, nothing may be left over. What
pods hold, and how they come to it, is a subclass's: claims (``claim_orders.py``) or a device plugin's units
(``unit_orders.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from qgpu.errors import QgpuError
from tests.k8s.container import ContainerLike, UnresolvableDeviceError
from tests.k8s.holdings import Holding, sold_twice, strays
from tests.k8s.tally import Tally
from tests.k8s.world import GI, PATIENCE_S, World, card

#: What may happen to the parts, as often as it stands here.
ACTIONS = ("time_passes", "start_all", *("kill", "beside_failure", "start", "kubelet_works") * 2)
#: The parts without which no container starts.
STARTS = frozenset({"node", "containerd"})
#: How many orders may fail where failures are only counted; no order begins after them.
MOST_FAILED = 5
_T = TypeVar("_T")


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
        """Return what fails. The node comes last, because nothing that is on it can fail after it."""
        chosen = list(dict.fromkeys(perils[number % len(perils)] for number in self.perils))
        return sorted(chosen if self.pair else chosen[:1], key=lambda peril: peril == "node")

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
    #: Makes and starts another node after an order that failed, if failures are only counted.
    another: ClassVar[Callable[[], World] | None] = None
    #: Whether ``begin`` has begun, and whether the order has failed.
    begun = failed = False
    #: The parts that fail now: calls under way may fail with them.
    failing: Sequence[str] = ()

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

    def is_early(self, _pod: str, _why: str) -> bool:
        """Tell whether a pod's container may be refused with these words, because qgpud cannot know the pod yet."""
        return False

    def containers_work(self, _choice: Choice | None = None) -> None:
        """Check that containers are held to what they hold."""

    def end_containers(self) -> None:
        """End all that runs."""
        raise NotImplementedError

    def leave(self) -> None:
        """Let what nobody holds any more end, for the order is over."""

    def holdings(self) -> list[Holding]:
        """Return all that is held, or that processes may still use."""
        raise NotImplementedError

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
        if self.another is not None and self.tally.failed_orders >= MOST_FAILED:
            return
        with self.judged():
            self.open()
            self.begun = True
            for choice in choices:
                self.hold(choice)
            self.kubelet_works()
            self.start_container(choices[0])

    @rule(data=st.data(), choice=CHOICES)
    def act(self, data: st.DataObject, choice: Choice) -> None:
        """Do one thing; one rule, so that no order is without one of them."""
        action = data.draw(st.sampled_from(self.actions))
        if self.begun and not self.failed:
            with self.judged():
                getattr(self, action)(choice)

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Let what is wrong fail the test; where failures are only counted, count it, and do no more of this order."""
        try:
            yield
        except HypothesisException:
            raise
        except Exception as error:
            if self.another is None:
                raise
            self.failed = True
            self.tally.fail_order(f"{type(error).__name__}: {error}")

    def kill(self, choice: Choice) -> None:
        """Let something fail, or two things at once."""
        perils = self.failing_now(choice)
        self.tally.fail(perils, beside=False)
        for peril in perils:
            if peril == "node":
                self.end_containers()
            self.world.fail(peril)

    def beside_failure(self, choice: Choice) -> None:
        """Let something fail while a pod comes, starts or ends. All containers end with the node."""
        perils = self.failing = self.failing_now(choice)
        self.tally.fail(perils, beside=True)
        try:
            with ThreadPoolExecutor(1) as pool:
                failing = pool.submit(lambda: [self.world.fail(each) for each in perils])
                getattr(self, choice.one_of(self.under_way))(choice)
                failing.result()
        finally:
            self.failing = ()
            if "node" in perils:
                self.end_containers()

    def failing_now(self, choice: Choice) -> list[str]:
        """Return what fails of that which is there."""
        perils = choice.failing(self.world.perils)
        return [each for each in perils if each not in self.world.parts or self.world.runs(each)]

    def run(self, pod: str, devices: list[str], containers: list[ContainerLike]) -> None:
        """Start a container of a pod."""
        try:
            container = self.world.container(pod, devices, "side" if containers else "main")
        except UnresolvableDeviceError:
            if "node" in self.failing:  # the file went with it
                return
            raise
        if why := container.bind(may_be_refused=True):
            container.kill()
            # else a part stays away, or is longer in coming than a hook waits
            if "tried for" not in why and not self.is_early(pod, why) and STARTS.isdisjoint(self.failing):
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
        if not self.begun or self.failed:
            return
        with self.judged():
            self.compare()

    def compare(self) -> None:
        """Compare what qgpud says it holds, and what pods may have by it, with what was given."""
        driver = self.world.driver
        assert driver is None or driver.poll() is None, f"driver died: {driver.returncode}: {self.world.log[-3000:]}"
        if not self.world.runs("qgpud"):
            return
        grants = self.world.grants()
        self.check(grants, self.world.files())
        for gpu in range(self.world.cards):
            parts = [each for grant in grants.values() for each in grant["devices"] if each["gpu"] == card(gpu)]
            memory, cores = (sum(each[what] or 0 for each in parts) for what in ("memory", "cores"))
            if memory > self.world.memory + GI or cores > 100:
                self.broken("sold_twice", f"{parts}")
        pods, gpus = self.world.ask("pod.list")["pods"], self.world.ask("gpu.list")["gpus"]
        if why := sold_twice(pods, gpus, self.holdings()):
            self.broken("sold_twice", why)

    def amiss(self) -> dict[str, str]:
        """Say what is left over or missing on disk, among pods and on cards, by the promise that it breaks."""
        holdings = self.holdings()
        devices = set[str]().union(*(holding.devices for holding in holdings))
        kept = self.world.on_disk()
        left, homeless = strays(self.world.ask("pod.list")["pods"], holdings)
        left += [f"{place}: {sorted(there - devices)}" for place, there in kept.items() if there - devices]
        left += [
            f"card {gpu['index']}: {held} outside of claims"
            for gpu in self.world.ask("gpu.list")["gpus"]
            if any((held := gpu["held_outside"]).values())
        ]
        lost = [f"no pod: {homeless}"] if homeless else []
        lost += [f"{place} without {sorted(devices - there)}" for place, there in kept.items() if devices - there]
        found = {"leaks": "; ".join(left), "grants_lost": "; ".join(lost)}
        return {promise: what for promise, what in found.items() if what}

    def teardown(self) -> None:
        """Start all parts, let them settle, and check that exactly what is held is prepared; then nothing, any more."""
        if not self.begun:
            return
        self.tally.orders += 1
        try:
            if not self.failed:
                with self.judged():
                    self.settle()
        finally:
            self.end_containers()
            if not self.failed:
                self.close()
                self.drop_all()
        if not self.failed:
            with self.judged():
                self.empty()
        if self.failed and self.another is not None:
            self.world.close()
            type(self).world = self.another()

    def settle(self) -> None:
        """Wait until exactly what is held is prepared, and check that containers work."""
        self.start_all()
        self.leave()
        deadline = time.monotonic() + PATIENCE_S
        while not self.settled() or self.amiss():
            self.compare()
            if time.monotonic() > deadline:
                for promise, what in self.amiss().items():
                    self.broken(promise, what)
                self.judge()
            self.kubelet_works()
            time.sleep(0.02)
        self.containers_work()
        self.compare()

    def empty(self) -> None:
        """Wait until nothing is left of anything."""
        deadline = time.monotonic() + PATIENCE_S
        while self.world.grants() or self.amiss():
            if time.monotonic() > deadline:
                self.broken("leaks", f"{self.amiss()} {self.world.grants()}")
            self.drop_all()
            time.sleep(0.02)

    def drop_all(self) -> None:
        """Have all grants given up that nobody uses."""
        for uid in self.world.grants():
            with suppress(QgpuError):
                self.world.qgpud.drop(uid)

    def broken(self, promise: str, what: str) -> None:
        """Count a broken promise, and fail."""
        setattr(self.tally, promise, getattr(self.tally, promise) + 1)
        raise AssertionError(f"{promise}: {what}; driver: {self.world.log[-3000:]}")


def machine(kind: type[Orders], node: World, tally: Tally, another: Callable[[], World] | None = None) -> type[Orders]:
    """Return the state machine of a node. With ``another``, failures are counted, and a new node follows each."""
    given = {"another": staticmethod(another)} if another is not None else {}
    return type(kind.__name__, (kind,), {"world": node, "tally": tally, **given})

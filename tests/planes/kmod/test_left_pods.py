"""Which retired pods the module keeps, and what it is told of them, on a stand-in for /dev/qgpu."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from qgpu.errors import RefusedError
from qgpu.model import NS_PER_MS, Plan, PodClass, PodPlan
from qgpu.planes.kmod.backend import KmodBackend
from qgpu.planes.kmod.device import Card, Device
from qgpu.planes.kmod.host import KmodHost
from qgpu.planes.kmod.left_pods import LeftPods
from qgpu.planes.kmod.uapi import ffi

CARDS = [Card(0, "00000000:01:00.0", 1 << 30), Card(1, "00000000:02:00.0", 1 << 30)]
MIB = 1 << 20


@dataclass
class FakePod:
    """A pod of the stand-in."""

    name: str
    cgroup: int = 0
    clients: int = 0
    memory: list[int] = field(default_factory=lambda: [0, 0])
    limits: list[int | None] = field(default_factory=lambda: [None, None])
    joined: list[int] = field(default_factory=list)


class FakeDevice:
    """What the module does with pods; ``plans`` lists the parts of each plan."""

    fd = -1

    def __init__(self) -> None:
        self.pods: dict[int, FakePod] = {}
        self.grants_set = 0
        #: Called before each removal, as another process may make calls then.
        self.meanwhile = lambda: None
        self.unsafe = False
        self.plans: list[list[tuple[int, int, int]]] = []

    def call(self, name: str, /, **fields: Any) -> Any:
        return getattr(self, name.lower())(**fields)

    each = Device.each

    def close(self) -> None:
        """Nothing to close."""

    def _pod(self, ident: int) -> FakePod:
        try:
            return self.pods[ident]
        except KeyError:
            raise FileNotFoundError from None

    def pod_next(self, pod: int) -> Any:
        ident = min((each for each in self.pods if each > pod), default=None)
        if ident is None:
            raise FileNotFoundError
        found = self.pods[ident]
        name = ffi.new("char[64]", found.name.encode())
        return SimpleNamespace(pod=ident, cgroup=found.cgroup, name=name, nr_clients=found.clients)

    def pod_joined_next(self, pod: int, cgroup: int) -> Any:
        found = min((each for each in self._pod(pod).joined if each > cgroup), default=None)
        if found is None:
            raise FileNotFoundError
        return SimpleNamespace(cgroup=found)

    def pod_leave(self, pod: int, cgroup: int) -> None:
        self._pod(pod).joined.remove(cgroup)

    def pod_remove(self, pod: int) -> None:
        self._pod(pod)
        del self.pods[pod]

    def usage(self, pod: int, gpu: int) -> Any:
        size = self._pod(pod).memory[gpu]
        if gpu == 0:
            self.meanwhile()
        return SimpleNamespace(memory=size)

    def grant_get(self, pod: int, gpu: int) -> Any:
        if (limit := self._pod(pod).limits[gpu]) is None:
            raise FileNotFoundError
        return SimpleNamespace(pod_class=0, cores=0, memory=limit, latency_target_ns=0)

    def grant_set(self, pod: int, gpu: int, memory: int) -> None:
        if self.unsafe:
            raise OSError(95, "not supported")
        self.grants_set += 1
        self._pod(pod).limits[gpu] = memory

    def renew(self, gpu: int) -> None:
        """The plan holds on."""

    def plan(self, nr_pods: int, pods: int, **_: int) -> None:
        parts = ffi.cast("struct qgpu_pod_plan *", pods)
        self.plans.append([(parts[n].pod, parts[n].flags, parts[n].nr_windows) for n in range(nr_pods)])


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def left(device: FakeDevice) -> LeftPods:
    return LeftPods(device, CARDS)  # type: ignore[arg-type]


@pytest.fixture
def host(device: FakeDevice, left: LeftPods, monkeypatch: pytest.MonkeyPatch) -> KmodHost:
    """A host of two cards."""
    monkeypatch.setattr("qgpu.linux.cgroup.remove", lambda *_: None)
    made = object.__new__(KmodHost)
    made._device, made._left, made._cards = device, left, CARDS  # type: ignore[assignment]
    made._pgpus = {0: None, 1: None}  # type: ignore[dict-item]
    return made


def names(left: LeftPods) -> list[bytes]:
    return [ffi.string(pod.name) for pod in left.each()]


@pytest.mark.parametrize(("clients", "memory"), [(1, [0, 0]), (0, [0, MIB]), (2, [MIB, 0])])
def test_pod_is_kept_while_clients_or_memory_are_left(
    device: FakeDevice, left: LeftPods, clients: int, memory: list[int]
) -> None:
    device.pods = {4: FakePod("a", clients=clients, memory=memory, joined=[7, 9]), 5: FakePod("b")}
    left.retire(4)
    left.retire(5)

    assert (names(left), sorted(device.pods), device.pods[4].joined) == ([b"a"], [4], [])
    assert [left.memory(card) for card in CARDS] == memory
    device.pods[4].clients, device.pods[4].memory = 0, [0, 0]
    assert (names(left), device.pods, left.idents) == ([], {}, frozenset())


def test_kept_pod_may_allocate_nothing_more(device: FakeDevice, left: LeftPods) -> None:
    device.pods = {1: FakePod("a", clients=1, memory=[3 * MIB, 0], limits=[8 * MIB, None])}
    left.retire(1)
    assert device.pods[1].limits == [3 * MIB, 1]
    device.pods[1].memory[0] = MIB
    names(left)
    assert device.pods[1].limits == [MIB, 1]
    before = device.grants_set
    names(left)
    assert device.grants_set == before  # each wakes every loop


def test_who_allocates_while_a_pod_is_removed_keeps_it(device: FakeDevice, left: LeftPods) -> None:
    device.pods = {1: FakePod("a", limits=[8 * MIB, None])}

    def take() -> None:
        if device.pods[1].limits[0] != 1:
            device.pods[1].memory[0] = MIB

    device.meanwhile = take
    left.retire(1)

    assert [left.memory(card) for card in CARDS] == [MIB, 0]


def test_pod_is_kept_where_no_limit_can_be_enforced(device: FakeDevice, left: LeftPods) -> None:
    device.unsafe = True
    device.pods = {1: FakePod("a", clients=1), 2: FakePod("b")}
    left.retire(1)
    left.retire(2)

    assert (names(left), sorted(device.pods)) == ([b"a"], [1])


def test_host_shows_what_a_kept_pod_holds_and_its_name(device: FakeDevice, host: KmodHost) -> None:
    device.pods = {1: FakePod("a", cgroup=11, clients=1, memory=[0, MIB]), 2: FakePod("b", cgroup=12)}
    host.retire("a")
    host.retire("a")

    assert (list(host.names_in_use()), host.orphaned_memory()) == (["a"], {1: MIB})
    assert [pod.pod for pod in host._each()] == [2]
    with pytest.raises(RefusedError, match="files or memory of an earlier pod of that name"):
        host._make_place("a", 12)


def test_new_pod_in_a_kept_pods_cgroup_replaces_it(device: FakeDevice, host: KmodHost) -> None:
    device.pods = {1: FakePod("a", cgroup=11, clients=1), 2: FakePod("b", cgroup=12, clients=1)}
    for name in ("a", "b"):
        host.retire(name)
    host._make_place("a", 11)

    assert (sorted(device.pods), list(host.names_in_use())) == ([2], ["b"])


def test_plans_close_the_gates_of_kept_pods(
    device: FakeDevice, left: LeftPods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qgpu.planes.kmod.backend.Device", lambda: device)
    backend = KmodBackend(0, CARDS[0], None, left=lambda: left.idents)  # type: ignore[arg-type]
    device.pods = {1: FakePod("a", clients=1), 2: FakePod("b")}
    plan = Plan(0, 100 * NS_PER_MS, tuple(PodPlan(name, PodClass.OFFLINE, 2000) for name in ("a", "b")))
    backend.apply(plan)
    left.retire(1)
    backend.apply(plan)
    backend.apply(plan)  # renewed
    device.pods[1].clients = 0
    names(left)
    backend.apply(plan)

    assert device.plans == [[(1, 0, 0), (2, 0, 0)], [(1, 3, 0), (2, 0, 0)], [(2, 0, 0)]]

"""Memory turns on the simulator: what the daemon does with pods beyond a card's memory, tick by tick."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qgpu.admission import Yielding
from qgpu.config import Config, GpuSettings
from qgpu.daemon.control_requests import ControlRequests
from qgpu.daemon.memory_turns import MemoryTurns
from qgpu.daemon.plane_choice import PlaneChoice
from qgpu.daemon.settings_file import SettingsFile
from qgpu.daemon.suspension_file import SuspensionFile
from qgpu.errors import CheckpointError, RefusedError
from qgpu.ipc import wire
from qgpu.ipc.control_socket import Session
from qgpu.load.workload import Workload
from qgpu.model import NS_PER_S, Grant, PodClass
from qgpu.model.checkpointer import GpuProcess
from qgpu.model.plane_api import PodInfo
from qgpu.model.plane_names import Plane
from qgpu.planes.sim.checkpointer import SimCheckpointer
from qgpu.policies.memory_turns import TURN_NS
from tests.daemon.claim_rig import FakeContainer
from tests.daemon.quick_host import QuickHost
from tests.simulation import MORE

GIB = 1 << 30
TIMEOUT_S = 60.0
CONFIG = Config(defaults=GpuSettings(memory_overcommit=2.0))


class Card:
    """A daemon on one simulated card of 141 GiB, whose memory turns are ticked by hand."""

    def __init__(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, config: Config = CONFIG, gpus: int = 1
    ) -> None:
        self.now_ns = 10**15
        self.host = QuickHost(gpus)
        #: The last load of each pod.
        self.loads: dict[str, int] = {}
        self.session = Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=os.pidfd_open(os.getpid()))
        self._directory, self._config = directory, config
        monkeypatch.setattr(MemoryTurns, "start", lambda _: None)
        self.requests = self._serve()

    def _serve(self) -> ControlRequests:
        chosen, file = PlaneChoice(Plane.SIM, "test"), SuspensionFile(self._directory)
        made = ControlRequests(self.host, chosen, self._config, SettingsFile(self._directory), suspension_file=file)
        made.turns._now_ns = lambda: self.now_ns  # type: ignore[method-assign]
        return made

    def close(self) -> None:
        self.requests.close()
        assert self.session.process is not None
        os.close(self.session.process)

    def restart(self) -> None:
        """Let another daemon take over the host."""
        self.requests.close()
        self.requests = self._serve()

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        return self.requests.handle(self.session, {"op": op, **arguments}, [])

    def start(self, name: str, gib: int, pod_class: str = "offline") -> str:
        """Make a pod with this limit, and return what it waits for."""
        grant = {"class": pod_class, "cores": 20, "memory": gib * GIB}
        found = self.ask("pod.create", name=name, grants={"0": grant})
        assert isinstance(found["waits"], str)
        return found["waits"]

    def fill(self, name: str) -> int:
        """Let a pod use all of its limit."""
        limit = self.requests.pods.named(name).grants[0].memory
        assert limit is not None
        self.loads[name] = self.host.start_load(name, 0, Workload(kernel_us=1000.0, batch=0, memory=limit))
        return self.loads[name]

    def pass_by(self, seconds: float = 1.0) -> None:
        """Let time pass, a tick a second, each until its moves are done."""
        end_ns = self.now_ns + round(seconds * NS_PER_S)
        while self.now_ns < end_ns:
            self.now_ns += NS_PER_S
            self.requests.turns.look()
            self.settle()

    def settle(self) -> None:
        for pod in self.host.pods():
            self.requests.suspensions.wait(pod.name, TIMEOUT_S)

    def pod(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(each for each in self.ask("pod.list")["pods"] if each["name"] == name)
        return found

    def states(self, *names: str) -> list[str]:
        return [str(self.pod(name)["state"]) for name in names]


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    with closing(Card(tmp_path, monkeypatch)) as made:
        monkeypatch.setattr(made.requests.pods, "runs", lambda pod: True)
        yield made


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """A card whose memory is granted once."""
    with closing(Card(tmp_path, monkeypatch, Config())) as made:
        yield made


def full(card: Card) -> None:
    """Two pods of 100 GiB each: one on the card, and one that waits."""
    assert card.start("one", 100) == ""
    card.fill("one")
    assert card.start("two", 100) == "memory of pGPU 0"
    card.pass_by()


def test_pods_that_do_not_fit_together_take_turns(card: Card) -> None:
    full(card)
    assert card.ask("pod.waits", name="two") == {"waits": "memory of pGPU 0"}
    card.pass_by(TURN_NS / NS_PER_S * 20)
    assert card.states("one", "two") == ["suspended", "running"]
    assert card.pod("one")["waits_for"] == "memory of pGPU 0"
    assert card.ask("pod.waits", name="two") == {"waits": ""}
    card.fill("two")
    seen = set()
    for _ in range(120):
        card.pass_by(60)
        states = tuple(card.states("one", "two"))
        assert sorted(states) == ["running", "suspended"]
        seen.add(states)
    assert len(seen) == 2
    told = [event["what"] for event in card.ask("events")["events"]]
    assert {"pod yields its memory", "pod comes back"} <= set(told)


def test_online_gets_room_at_once_and_offline_pods_come_back(card: Card) -> None:
    card.start("one", 60)
    card.fill("one")
    card.start("two", 60)
    card.fill("two")
    card.pass_by()
    assert card.start("web", 40, "online") == "memory of pGPU 0"
    card.settle()
    card.pass_by()
    assert sorted(card.states("one", "two")) == ["running", "suspended"]
    assert card.ask("pod.waits", name="web") == {"waits": ""}
    load = card.fill("web")
    (gpu,) = card.ask("gpu.list")["gpus"]
    assert gpu["memory_yielded"] == 60 * GIB
    card.host.stop_load(load)
    card.host.retire("web")
    card.pass_by(120)
    assert card.states("one", "two") == ["running", "running"]


def test_an_online_pod_that_grows_gets_its_room(card: Card) -> None:
    card.start("web", 20, "online")
    card.start("one", 121)
    card.fill("one")
    (note,) = card.ask("pod.set", name="web", memory=30 * GIB)["notes"]
    assert note == "has to wait for its memory: 10 GiB of pGPU 0 is being made free"
    assert card.requests.counters.view().gpus[0].memory_shortage == 10 * GIB
    card.settle()
    assert card.states("one") == ["suspended"]
    card.pass_by()
    assert card.requests.counters.view().gpus[0].memory_shortage == 0


def test_without_overcommit_nothing_waits_or_is_granted_twice(plain: Card) -> None:
    assert plain.start("one", 100) == ""
    with pytest.raises(RefusedError, match="41 GiB is left to grant"):
        plain.start("two", 100)


def test_memory_is_granted_up_to_the_factor(card: Card) -> None:
    card.start("one", 141)
    card.start("two", 100)
    with pytest.raises(RefusedError, match="42 GiB for pod three does not fit; 41 GiB is left to grant"):
        card.start("three", 42)
    with pytest.raises(RefusedError, match="its memory is overcommitted, and pod free has no limit"):
        card.ask("pod.create", name="free", grants={"0": {}})


def test_a_pod_suspended_by_hand_stays_until_it_is_resumed(card: Card) -> None:
    card.start("one", 60)
    card.fill("one")
    card.ask("pod.suspend", name="one")
    card.pass_by(200)
    assert card.states("one") == ["suspended"]
    card.ask("pod.resume", name="one")
    card.settle()
    assert card.states("one") == ["running"]


def test_a_yielded_pod_suspended_by_hand_stays_suspended(card: Card) -> None:
    card.start("one", 120)
    card.fill("one")
    card.start("web", 60, "online")
    card.settle()
    assert card.pod("one")["yielded"]
    card.ask("pod.suspend", name="one")
    card.host.retire("web")
    card.pass_by(300)
    assert card.states("one") == ["suspended"]
    assert not card.pod("one")["yielded"]


def test_a_pod_that_cannot_be_moved_runs_on_and_is_retried(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    card.start("one", 120)
    card.fill("one")
    tried = []

    def refuse(_self: object, _process: object) -> None:
        tried.append(card.now_ns)
        raise CheckpointError("memory is shared")

    with monkeypatch.context() as patch:
        patch.setattr(SimCheckpointer, "checkpoint", refuse)
        assert card.start("web", 60, "online") != ""
        card.settle()
        card.pass_by(200)
        assert card.states("one") == ["running"]
        assert "memory is shared" in card.ask("gpu.list")["gpus"][0]["memory_stuck"]["one"]
        gaps = [after - before for before, after in pairwise(tried)]
        assert len(tried) >= 4
        assert gaps == sorted(gaps)
        with pytest.raises(RefusedError, match="for pod mail does not fit"):
            card.start("mail", 60, "online")
    card.pass_by(600)
    assert card.states("one") == ["suspended"]
    assert card.ask("pod.waits", name="web") == {"waits": ""}
    assert card.ask("gpu.list")["gpus"][0]["memory_stuck"] == {}


def test_the_next_daemon_brings_back_who_yielded(card: Card) -> None:
    card.start("one", 120)
    card.fill("one")
    card.start("web", 60, "online")
    card.settle()
    card.pass_by()
    card.restart()
    assert card.pod("one")["yielded"]
    card.pass_by(300)
    assert card.states("one") == ["suspended"]
    card.host.retire("web")
    card.pass_by(300)
    assert card.states("one") == ["running"]


@pytest.mark.root
def test_a_container_that_waits_waits_for_the_next_daemon_too(card: Card) -> None:
    card.start("one", 100)
    card.fill("one")
    with ExitStack() as ends:
        for name, size in (("begun", 41), ("waits", 100)):
            container = FakeContainer()
            ends.callback(container.end)
            card.requests.pods.admit(name, {0: Grant(memory=size * GIB)}, container.at)
            card.pass_by()
        for _ in range(2):
            assert card.ask("pod.waits", name="begun") == {"waits": ""}
            assert card.ask("pod.waits", name="waits") == {"waits": "memory of pGPU 0"}
            card.restart()
            card.pass_by()
        card.host.stop_load(card.loads["one"])
        card.host.retire("one")
        card.pass_by()
        for _ in range(2):
            assert card.ask("pod.waits", name="waits") == {"waits": ""}
            card.restart()


def test_a_pod_on_two_cards_comes_back_once_both_have_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qgpu.daemon.pods.Pods.runs", lambda _self, _pod: True)
    with closing(Card(tmp_path, monkeypatch, gpus=2)) as card:
        grant = {"class": "offline", "memory": 100 * GIB}
        card.ask("pod.create", name="wide", grants={"0": grant, "1": grant})
        for index in (0, 1):
            card.host.start_load("wide", index, Workload(kernel_us=1000.0, batch=0, memory=GIB))
        card.ask("pod.suspend", name="wide")
        card.settle()
        assert card.ask("pod.create", name="one", grants={"1": grant})["waits"] == ""
        card.host.start_load("one", 1, Workload(kernel_us=1000.0, batch=0, memory=GIB))
        card.pass_by()
        card.ask("pod.resume", name="wide")
        card.settle()
        assert card.states("wide", "one") == ["suspended", "running"]
        while card.states("wide") != ["running"]:
            card.pass_by(10)
        assert card.states("one") == ["suspended"]


def test_a_pod_moves_only_where_its_limit_fits_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qgpu.daemon.pods.Pods.runs", lambda _self, _pod: True)
    with closing(Card(tmp_path, monkeypatch, gpus=2)) as card:
        card.start("one", 70)
        card.fill("one")
        for name, pod_class in (("web", "online"), ("two", "offline")):
            card.ask("pod.create", name=name, grants={"1": {"class": pod_class, "cores": 20, "memory": 60 * GIB}})
        card.host.start_load("two", 1, Workload(kernel_us=1000.0, batch=0, memory=GIB))
        card.pass_by()
        with pytest.raises(RefusedError, match=r"its 70 GiB do not fit on pGPU 1 beside the limits .* leave 21 GiB"):
            card.ask("pod.move", name="one", gpu=1)
        assert card.states("one", "two") == ["running", "running"]
        card.host.retire("web")
        card.ask("pod.move", name="one", gpu=1)
        card.settle()
        card.pass_by()
        assert (card.states("one", "two"), card.host.free_memory(0)) == (["running", "running"], 141 * GIB)


def test_overcommit_ends_once_all_pods_fit_and_are_back(card: Card) -> None:
    full(card)
    with pytest.raises(RefusedError, match="limits of 200 GiB do not fit into 1 times its 141 GiB"):
        card.ask("gpu.set", gpu=0, memory_overcommit=1.0)
    with suppress(RefusedError):
        card.host.retire("two")
    card.ask("gpu.set", gpu=0, memory_overcommit=1.0)
    card.pass_by(10)
    assert card.states("one") == ["running"]


def test_pods_there_when_overcommit_begins_have_begun(plain: Card) -> None:
    plain.start("one", 100)
    plain.ask("gpu.set", gpu=0, memory_overcommit=2.0)
    assert plain.ask("pod.waits", name="one") == {"waits": ""}
    plain.start("two", 100)
    assert plain.ask("pod.waits", name="two") == {"waits": "memory of pGPU 0"}


@pytest.mark.parametrize("change", [{"policy": "fixed-share"}, {"memory_overcommit": 3.0}])
def test_a_changed_setting_lets_no_waiting_pod_begin(card: Card, change: dict[str, Any]) -> None:
    full(card)
    card.ask("gpu.set", gpu=0, **change)
    assert card.ask("pod.waits", name="two") == {"waits": "memory of pGPU 0"}


def test_a_pod_that_waited_while_overcommit_ended_has_begun(card: Card) -> None:
    full(card)
    card.host.stop_load(card.loads["one"])
    card.host.retire("one")
    for factor in (1.0, 2.0):
        card.ask("gpu.set", gpu=0, memory_overcommit=factor)
        assert card.ask("pod.waits", name="two") == {"waits": ""}


def test_a_pod_that_has_an_ended_pods_name_waits_for_its_own(card: Card) -> None:
    card.start("one", 20)
    card.start("two", 100)
    card.fill("two")
    card.requests.pods.retire(card.requests.pods.named("one"))
    assert card.start("one", 100) == "memory of pGPU 0"


def test_resuming_a_pod_that_runs_does_not_end_its_turn(card: Card) -> None:
    full(card)
    card.pass_by(10)
    card.ask("pod.resume", name="one")
    card.pass_by(TURN_NS / NS_PER_S / 2)
    assert card.states("one") == ["running"]


def test_what_host_memory_cannot_hold_is_not_granted(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card.requests.pods, "yielding", lambda: Yielding(host_room=50 * GIB))
    card.start("one", 141)
    card.start("two", 50)
    with pytest.raises(RefusedError, match="51 GiB of pods would be off the cards, and host memory holds 50 GiB"):
        card.start("three", 1)


def test_who_may_not_wait_begins_at_once_or_not_at_all(card: Card) -> None:
    card.start("one", 100)
    with pytest.raises(RefusedError, match="42 GiB for pod job does not fit; 41 GiB is left"):
        card.ask("pod.create", name="job", grants={"0": {"memory": 42 * GIB}}, may_wait=False)
    found = card.ask("pod.create", name="job", grants={"0": {"memory": 41 * GIB}}, may_wait=False)
    assert found["waits"] == ""


def test_a_pod_that_is_slow_to_look_at_holds_up_nobody(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    looking, seen, gave_up, look = threading.Event(), threading.Event(), [], SimCheckpointer.processes

    def slow(self: SimCheckpointer, pod: PodInfo) -> Sequence[GpuProcess]:
        if pod.name == "one":  # its 65,530 mappings in each of 4,096 processes
            looking.set()
            if not seen.wait(TIMEOUT_S / 6):
                gave_up.append(pod.name)
        return look(self, pod)

    monkeypatch.setattr(SimCheckpointer, "processes", slow)
    for name in ("one", "two"):
        card.start(name, 70)
        card.fill(name)
    card.pass_by()
    assert card.start("web", 100, "online") == "memory of pGPU 0"  # both have to leave
    assert looking.wait(TIMEOUT_S)
    card.ask("gpu.set", gpu=0, memory_overcommit=3.0)  # it waits for a look, under the pods' lock
    card.requests.suspensions.wait("two", TIMEOUT_S)
    card.requests.turns.look()
    assert (card.states("two"), gave_up) == (["suspended"], [])
    seen.set()
    while card.states("one") != ["suspended"]:
        card.settle()
    card.pass_by()
    assert card.ask("pod.waits", name="web") == {"waits": ""}


@settings(max_examples=12 * MORE, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["offline", "offline", "online", "end", "suspend", "resume", "restart", "time"]),
            st.integers(0, 4),
            st.integers(10, 100),
        ),
        max_size=12,
    )
)
def test_who_does_not_wait_always_has_room_for_its_limit(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, story: list[tuple[str, int, int]]
) -> None:
    monkeypatch.setattr("qgpu.daemon.pods.Pods.runs", lambda _self, _pod: True)
    with closing(Card(tmp_path_factory.mktemp("state"), monkeypatch)) as card:
        play(card, story)


def play(card: Card, story: list[tuple[str, int, int]]) -> None:
    """Do these things one after the other; look after each at who runs."""
    loads: dict[str, int] = {}
    off: set[str] = set()
    for what, number, gib in story:
        name = f"pod{number}"
        there = name in {pod.name for pod in card.host.pods()}
        with suppress(RefusedError):
            if what in ("offline", "online") and not there:
                card.start(name, gib, what)
            elif what == "end" and there:
                if name in loads:
                    card.host.stop_load(loads.pop(name))
                card.host.retire(name)
                card.requests.suspensions.forget_ended(pod.name for pod in card.host.pods())
                off.discard(name)
            elif what == "suspend" and there:
                card.ask("pod.suspend", name=name)
                off.add(name)
            elif what == "resume" and there:
                card.ask("pod.resume", name=name)
                off.discard(name)
        if what == "restart":
            for pod in card.host.pods():
                if pod.name not in loads:  # its launcher waits, and ends with the daemon
                    card.host.retire(pod.name)
            card.restart()
        card.pass_by(gib * 10 if what == "time" else 2)
        for pod in card.host.pods():
            shown = card.pod(pod.name)
            if not shown["waits_for"] and pod.name not in loads:
                loads[pod.name] = card.fill(pod.name)  # raises if the card is out of memory
            if pod.name in off:
                assert shown["state"] == "suspended"
            elif pod.grants[0].pod_class is PodClass.ONLINE:
                assert shown["state"] == "running"

"""Claims, pods and daemons that come and go in any order: nothing is lost, granted twice or left over."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qgpu.claim_division import LEAST_MEMORY
from qgpu.daemon.container_notes import devices_of
from qgpu.errors import RefusedError
from qgpu.linux import cgroup
from tests.daemon.claim_rig import CARDS, GIB, MEMORY, FakeContainer, Rig
from tests.simulation import MORE

pytestmark = pytest.mark.root

UIDS = ("a", "a-b", "c")
PODS = ("pod-1", "pod-2")


class KilledError(Exception):
    """The daemon was killed."""


@st.composite
def devices(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw the devices of a claim, some of them too large."""
    sizes = st.none() | st.integers(1, 60).map(lambda n: n * GIB)
    return [
        {
            "card": draw(st.integers(0, CARDS - 1)),
            "share": share,
            "cores": draw(st.none() | st.integers(1, 60)),
            "memory": draw(sizes),
            "class": draw(st.sampled_from(["offline", "offline", "online"])),
        }
        for share in draw(st.lists(st.sampled_from("stu"), min_size=1, max_size=3, unique=True))
    ]


class Lifetimes(RuleBasedStateMachine):
    """One host, and what should be there."""

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.rig = Rig(self.directory)
        self.claims: dict[str, list[dict[str, Any]]] = {}
        self.outsiders: dict[str, dict[str, Any]] = {}
        #: Containers that were bound, by the name of their pod.
        self.running: dict[str, FakeContainer] = {}

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.close()
            shutil.rmtree(self.directory)

    def refused(self, call: Any, *arguments: Any, **named: Any) -> bool:
        """Make a request, and tell whether it was refused."""
        try:
            call(*arguments, **named)
        except RefusedError:
            return True
        return False

    def prepare(self, uid: str, wanted: list[dict[str, Any]], consumers: list[str]) -> bool:
        return self.refused(
            self.rig.prepare, uid, *(self.rig.device(**each) for each in wanted), consumers=tuple(consumers)
        )

    @rule(uid=st.sampled_from(UIDS), wanted=devices(), both=st.booleans())
    def prepares(self, uid: str, wanted: list[dict[str, Any]], both: bool) -> None:
        if not self.prepare(uid, wanted, list(PODS if both else PODS[:1])):
            self.claims[uid] = wanted

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def prepares_again(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.claims)))
        assert not self.prepare(uid, self.claims[uid], list(PODS))

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def drops(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.claims)))
        used = self.rig.listed()[uid]["pods"]
        refused = self.refused(self.rig.ask, "grant.drop", uid=uid)
        alive = any(self.running[name].process.poll() is None for name in used if name in self.running)
        assert refused == alive
        if not refused:
            del self.claims[uid]

    @rule(cores=st.none() | st.integers(1, 60), size=st.none() | st.integers(1, 60), card=st.integers(0, CARDS - 1))
    def launches(self, cores: int | None, size: int | None, card: int) -> None:
        name = f"x{len(self.outsiders)}"
        grant = {"cores": cores, "memory": size and size * GIB}
        if name not in self.rig.pods() and not self.refused(
            self.rig.ask, "pod.create", name=name, grants={str(card): grant}
        ):
            self.outsiders[name] = grant

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), pod=st.sampled_from(PODS), name=st.sampled_from(["model", "sidecar"]))
    def binds(self, data: st.DataObject, pod: str, name: str) -> None:
        there = sorted(self.rig.requests.pods.prepared.by_name)
        names = data.draw(st.lists(st.sampled_from(there), min_size=1, max_size=4, unique=True))
        made = self.rig.container(*names, uid=pod, names=("shop", pod, name))
        try:
            bound = self.rig.bind(made)
        except RefusedError:
            made.end()
            self.rig.containers.remove(made)
            return
        self.running[bound] = made
        assert self.rig.bind(made) == bound

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def is_killed_while_it_binds(self, data: st.DataObject) -> None:
        there = sorted(self.rig.requests.pods.prepared.by_name)
        made = self.rig.container(data.draw(st.sampled_from(there)), names=("shop", "killed", "model"))
        monkeypatch = pytest.MonkeyPatch()

        def killed(*_: Any) -> None:
            raise KilledError

        monkeypatch.setattr(self.rig.host, "admit", killed)
        monkeypatch.setattr("qgpu.daemon.container_notes.remove", lambda _: None)
        with suppress(KilledError, RefusedError):
            self.rig.bind(made)
        monkeypatch.undo()
        self.restarts()
        made.end()
        self.rig.containers.remove(made)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), size=st.integers(1, 40), card=st.integers(0, CARDS - 1))
    def allocates(self, data: st.DataObject, size: int, card: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        if name in self.rig.pods() and card in {each["gpu"] for each in self.rig.pods()[name]["grants"]}:
            self.rig.host.allocate(name, card, size * GIB)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def takes_memory_while_it_is_divided(self, data: st.DataObject) -> None:
        self.rig.host.greedy = data.draw(st.sampled_from(["", *sorted(self.running)]))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), whole=st.booleans())
    def ends(self, data: st.DataObject, whole: bool) -> None:
        made = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        if whole:
            made.end()
        else:
            made.die()

    @rule()
    def restarts(self) -> None:
        self.rig.restart()
        self.outsiders = {}  # their launchers were connected to the last daemon

    @rule()
    def reaps(self) -> None:
        self.rig.requests.reap()

    @invariant()
    def nothing_is_sold_twice(self) -> None:
        if not hasattr(self, "rig"):
            return
        listed = self.rig.listed()
        gpus = self.rig.ask("gpu.list")["gpus"]
        pods = self.rig.host.pods()
        for card in range(CARDS):
            prepared = [
                device
                for grant in listed.values()
                for device in grant["devices"]
                if device["gpu"] == self.rig.uuids[card]
            ]
            outside = gpus[card]["held_outside"]
            assert sum(each["cores"] or 0 for each in prepared) + outside["cores"] <= 100
            limits = sum(each["memory"] or 0 for each in prepared)
            assert limits + sum(pod.grants[card].memory or 0 for pod in pods if self.is_out(pod, card)) <= MEMORY
            granted = [(pod, pod.grants[card]) for pod in pods if card in pod.grants]
            assert sum(grant.cores or 0 for _, grant in granted) <= 100
            most = [max(grant.memory, pod.memory[card]) for pod, grant in granted if grant.memory is not None]
            assert sum(most) <= MEMORY + LEAST_MEMORY

    def is_out(self, pod: Any, card: int) -> bool:
        """Tell whether a pod has a grant of its own; one that has ended is only still to be retired."""
        there = pod.name in self.outsiders or self.rig.requests.pods.runs(pod)
        return card in pod.grants and there and not devices_of(pod)

    @invariant()
    def no_claim_gives_more_than_it_holds(self) -> None:
        if not hasattr(self, "rig"):
            return
        pods = self.rig.host.pods()
        for card in range(CARDS):
            held = {
                device["cdi"].partition("=")[2]: device
                for grant in self.rig.listed().values()
                for device in grant["devices"]
                if device["gpu"] == self.rig.uuids[card]
            }
            using = [pod for pod in pods if card in pod.grants and set(devices_of(pod)) & set(held)]
            groups: list[tuple[set[str], list[Any]]] = []
            for pod in using:
                names, members = set(devices_of(pod)) & set(held), [pod]
                for group in [each for each in groups if each[0] & names]:
                    groups.remove(group)
                    names, members = names | group[0], members + group[1]
                groups.append((names, members))
            for names, members in groups:
                cores = sum(held[name]["cores"] or 0 for name in names)
                assert sum(pod.grants[card].cores or 0 for pod in members) <= cores
                if all(held[name]["memory"] is not None for name in names):
                    most = sum(max(pod.grants[card].memory or 0, pod.memory[card]) for pod in members)
                    # a limit is a byte at least, which no allocation fits in
                    assert most <= sum(held[name]["memory"] for name in names) + len(members)

    @invariant()
    def nothing_is_lost_or_left_over(self) -> None:
        if not hasattr(self, "rig"):
            return
        assert set(self.rig.listed()) == set(self.claims)
        assert self.rig.files() == (set(self.claims), set(self.claims))
        for name, made in self.running.items():
            assert name in self.rig.pods()
            assert made.process.poll() is None
            assert cgroup.of(made.process.pid) == made.at
        left = set(self.rig.pods()) - set(self.running) - set(self.outsiders)
        assert all(not self.rig.requests.pods.runs(self.rig.requests.pods.named(name)) for name in left)


Lifetimes.TestCase.settings = settings(max_examples=15 * MORE, stateful_step_count=30, deadline=None)
test_nothing_is_lost_or_sold_twice_whatever_the_order = pytest.mark.root(Lifetimes.TestCase)

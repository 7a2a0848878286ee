"""Pods that move between simulated cards, with their grants."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from qgpu.config import Config
from qgpu.daemon import pod_moves, suspensions
from qgpu.daemon.control_requests import ControlRequests
from qgpu.daemon.plane_choice import PlaneChoice
from qgpu.daemon.settings_file import SettingsFile
from qgpu.daemon.suspension_file import SuspensionFile
from qgpu.errors import BackendGoneError, CheckpointError, NotSupportedError, RefusedError, UnknownNameError
from qgpu.ipc import wire
from qgpu.ipc.control_socket import Session
from qgpu.load.workload import Workload
from qgpu.model import Grant
from qgpu.model.checkpointer import GpuProcess
from qgpu.model.plane_api import MigInstance, PodInfo
from qgpu.model.plane_names import Plane
from qgpu.model.suspension import Residency, Suspension
from qgpu.planes.sim.checkpointer import SimCheckpointer
from qgpu.planes.sim.host import Clock, SimHost
from tests.daemon.quick_host import QuickHost
from tests.daemon.test_suspensions import Killed, kill, no_thread, no_waiting

GIB = 1 << 30
LOAD = Workload(kernel_us=1000.0, batch=0, memory=GIB // 16)
GRANT = Grant(cores=60, memory=8 * GIB)
TIMEOUT_S = 60.0


@pytest.fixture
def host() -> SimHost:
    return SimHost(2, Clock.REAL)


@pytest.fixture
def requests(host: SimHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlRequests]:
    """The requests of a daemon on two cards, to which pods run as long as they are there."""
    made = ControlRequests(
        host, PlaneChoice(Plane.SIM, "test"), Config(), SettingsFile(None), suspension_file=SuspensionFile(tmp_path)
    )
    monkeypatch.setattr(made.pods, "runs", lambda pod: True)
    yield made
    made.close()


def ask(requests: ControlRequests, op: str, **arguments: Any) -> dict[str, Any]:
    process = os.pidfd_open(os.getpid())
    try:
        me = Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=process)
        return requests.handle(me, {"op": op, **arguments}, [])
    finally:
        os.close(process)


def grants(host: SimHost) -> dict[int, Grant]:
    return dict(host.pods()[0].grants)


def test_a_moved_pod_runs_on_the_other_card_with_its_grant(host: SimHost, requests: ControlRequests) -> None:
    host.admit("one", {0: GRANT})
    load = host.start_load("one", 0, LOAD)
    ask(requests, "pod.move", name="one", gpu=1)
    found = requests.suspensions.wait("one", TIMEOUT_S)

    assert (found.residency, found.error, found.moves) == (Residency.RUNNING, "", {})
    totals = requests.suspensions.totals("one")
    assert (totals.off.count, totals.back.count, totals.between.count) == (0, 0, 1)
    assert grants(host) == {1: GRANT}
    assert host.pods()[0].memory == {1: LOAD.memory}
    before = host.progress(load).gpu_ns
    while host.progress(load).gpu_ns == before:  # it runs there
        time.sleep(0.01)


def test_a_suspended_pod_that_is_moved_runs_there(host: SimHost, requests: ControlRequests) -> None:
    host.admit("one", {0: GRANT})
    host.start_load("one", 0, LOAD)
    ask(requests, "pod.suspend", name="one")
    requests.suspensions.wait("one", TIMEOUT_S)
    ask(requests, "pod.move", name="one", gpu=1)

    assert requests.suspensions.wait("one", TIMEOUT_S).residency is Residency.RUNNING
    assert (grants(host), host.pods()[0].memory) == ({1: GRANT}, {1: LOAD.memory})


def test_driver_that_cannot_move_pods_is_told_first(
    host: SimHost, requests: ControlRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: SimCheckpointer) -> None:
        raise NotSupportedError("driver too old")

    monkeypatch.setattr(SimCheckpointer, "check_moves", refuse)
    monkeypatch.setattr(SimCheckpointer, "lock", lambda *_: pytest.fail("it was touched"))
    host.admit("one", {0: GRANT})
    host.start_load("one", 0, LOAD)
    with pytest.raises(NotSupportedError, match="driver too old"):
        ask(requests, "pod.move", name="one", gpu=1)

    assert (requests.suspensions.state("one").residency, grants(host)) == (Residency.RUNNING, {0: GRANT})


@pytest.mark.parametrize("call", ["checkpoint", "restore"])
def test_a_pod_that_cannot_move_runs_where_it_was(
    host: SimHost, requests: ControlRequests, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    host.admit("one", {0: GRANT})
    host.start_load("one", 0, LOAD)
    real, calls = getattr(SimCheckpointer, call), [0]

    def once(self: SimCheckpointer, process: GpuProcess, *rest: object) -> None:
        calls[0] += 1
        if calls[0] == 1:
            raise CheckpointError("the driver refused")
        real(self, process, *rest)

    monkeypatch.setattr(SimCheckpointer, call, once)
    ask(requests, "pod.move", name="one", gpu=1)
    found = requests.suspensions.wait("one", TIMEOUT_S)

    assert (found.residency, found.error) == (Residency.RUNNING, "process 1: the driver refused")
    assert (grants(host), host.pods()[0].memory) == ({0: GRANT}, {0: LOAD.memory})


def test_a_disk_that_fills_on_the_way_is_told_and_waited_for(
    host: SimHost, requests: ControlRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, full, tried = SuspensionFile.save, [False], threading.Semaphore(0)

    def save(self: SuspensionFile, pods: Mapping[str, Suspension]) -> None:
        if full[0]:
            tried.release()
            raise RefusedError("No space left on device")
        real(self, pods)
        full[0] = True

    monkeypatch.setattr(SuspensionFile, "save", save)
    monkeypatch.setattr(suspensions, "_RETRY_S", 0.01)
    host.admit("one", {0: GRANT})
    host.start_load("one", 0, LOAD)
    with capture_logs() as logs:
        ask(requests, "pod.move", name="one", gpu=1)
        for _ in range(4):
            assert tried.acquire(timeout=TIMEOUT_S)
        monkeypatch.setattr(SuspensionFile, "save", real)
        found = requests.suspensions.wait("one", TIMEOUT_S)

    told = [line["error"] for line in logs if line["event"].startswith("pod is between")]
    assert told == ["No space left on device"]
    assert (found.residency, grants(host)) == (Residency.RUNNING, {0: GRANT})


def test_a_pod_does_not_move_where_its_grant_does_not_fit(host: SimHost, requests: ControlRequests) -> None:
    host.admit("one", {0: GRANT})
    host.admit("two", {1: Grant(cores=50)})
    host.start_load("one", 0, LOAD)
    with pytest.raises(RefusedError, match="pGPU 1: 60 % for pod one does not fit; 50 % is left to grant"):
        ask(requests, "pod.move", name="one", gpu=1)

    assert grants(host) == {0: GRANT}


def test_a_pod_does_not_move_where_its_memory_does_not_fit(host: SimHost, requests: ControlRequests) -> None:
    host.admit("one", {0: GRANT})
    host.admit("two", {1: Grant()})
    host.start_load("one", 0, LOAD)
    host.start_load("two", 1, replace(LOAD, memory=host.free_memory(1)))
    with pytest.raises(RefusedError, match=r"of pGPU 1, which has 0.0 GiB free"):
        ask(requests, "pod.move", name="one", gpu=1)

    assert grants(host) == {0: GRANT}
    assert requests.suspensions.state("one").residency is Residency.RUNNING


def fill(host: SimHost, card: int) -> None:
    """Leave room for one load on a card, but not for two."""
    host.admit("rest", {card: Grant()})
    host.start_load("rest", card, replace(LOAD, memory=host.free_memory(card) - LOAD.memory * 3 // 2))


def places(host: SimHost) -> dict[str, dict[int, int]]:
    """Return which memory the pods have on which card."""
    return {pod.name: dict(pod.memory) for pod in host.pods() if pod.name != "rest"}


@pytest.mark.parametrize("call", ["checkpoint", "restore"])
def test_two_pods_at_once_do_not_move_into_the_same_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    host = SimHost(3, Clock.REAL)
    made = ControlRequests(
        host, PlaneChoice(Plane.SIM, "test"), Config(), SettingsFile(None), suspension_file=SuspensionFile(tmp_path)
    )
    monkeypatch.setattr(made.pods, "runs", lambda pod: True)
    fill(host, 2)
    for card, name in enumerate(("one", "two")):
        host.admit(name, {card: Grant()})
        host.start_load(name, card, LOAD)
    real, said = getattr(SimCheckpointer, call), list[str]()

    def during(self: SimCheckpointer, process: GpuProcess, *rest: object) -> None:
        if not said:
            try:
                ask(made, "pod.move", name="two", gpu=2)
            except RefusedError as error:
                said.append(str(error))
        real(self, process, *rest)

    monkeypatch.setattr(SimCheckpointer, call, during)
    ask(made, "pod.move", name="one", gpu=2)
    errors = [made.suspensions.wait(name, TIMEOUT_S).error for name in ("one", "two")]
    found = places(host)
    made.close()

    assert (errors, found) == (["", ""], {"one": {2: LOAD.memory}, "two": {1: LOAD.memory}})
    assert said == [
        "pod two: it needs 0.1 GiB of pGPU 2, which has 0.0 GiB free; suspend or end another pod there first"
    ]


def test_a_card_that_a_pod_leaves_for_another_has_its_room(
    host: SimHost, requests: ControlRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        host.admit(name, {0: Grant()})
    fill(host, 0)
    host.start_load("two", 0, LOAD)
    ask(requests, "pod.suspend", name="two")
    requests.suspensions.wait("two", TIMEOUT_S)
    host.start_load("one", 0, LOAD)
    real, said = SimCheckpointer.restore, list[str]()

    def restore(self: SimCheckpointer, process: GpuProcess, *rest: Any) -> None:
        if not said:  # pod one is off card 0, and comes to card 1
            said.append("")
            try:
                ask(requests, "pod.resume", name="two")
            except RefusedError as error:
                said.append(str(error))
        real(self, process, *rest)

    monkeypatch.setattr(SimCheckpointer, "restore", restore)
    ask(requests, "pod.move", name="one", gpu=1)

    assert [requests.suspensions.wait(name, TIMEOUT_S).error for name in ("one", "two")] == ["", ""]
    assert (said, places(host)) == ([""], {"one": {1: LOAD.memory}, "two": {0: LOAD.memory}})


@pytest.mark.parametrize("card", [0, 1])
def test_a_change_on_one_card_waits_until_a_pod_has_moved(
    host: SimHost, requests: ControlRequests, monkeypatch: pytest.MonkeyPatch, card: int
) -> None:
    host.admit("one", {0: GRANT})
    host.start_load("one", 0, LOAD)
    real, said = SimCheckpointer.restore, list[str]()

    def restore(self: SimCheckpointer, process: GpuProcess, *rest: Any) -> None:
        try:
            ask(requests, "pod.set", name="one", gpu=card, cores=20)
        except RefusedError as error:
            said.append(str(error))
        ask(requests, "pod.set", name="one", cores=30)
        real(self, process, *rest)

    monkeypatch.setattr(SimCheckpointer, "restore", restore)
    ask(requests, "pod.move", name="one", gpu=1)
    requests.suspensions.wait("one", TIMEOUT_S)

    assert said == ["pod one: it is moving to another card; try again when it is there, or without --gpu"]
    assert grants(host) == {1: replace(GRANT, cores=30)}


@pytest.mark.parametrize("suspended", [False, True])
def test_a_move_whose_grant_is_refused_at_last_is_none(
    host: SimHost, requests: ControlRequests, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, suspended: bool
) -> None:
    host.admit("one", {0: GRANT})
    host.start_load("one", 0, LOAD)
    if suspended:
        ask(requests, "pod.suspend", name="one")
    before = requests.suspensions.wait("one", TIMEOUT_S)

    def refuse(*_: object) -> None:
        raise BackendGoneError("the guardian has died")

    with monkeypatch.context() as patch:
        patch.setattr(SimHost, "amend", refuse)
        with pytest.raises(BackendGoneError):
            ask(requests, "pod.move", name="one", gpu=1)
    assert requests.suspensions.state("one") == before
    assert SuspensionFile(tmp_path).load().keys() == ({"one"} if suspended else set())
    ask(requests, "pod.move", name="one", gpu=1)
    requests.suspensions.wait("one", TIMEOUT_S)
    assert grants(host) == {1: GRANT}


def test_a_move_without_a_free_thread_is_none(
    host: SimHost, requests: ControlRequests, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host.admit("one", {0: GRANT})
    host.start_load("one", 0, LOAD)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RefusedError, match="pod one: no thread is available to move it"):
            ask(requests, "pod.move", name="one", gpu=1)

    assert (grants(host), requests.suspensions.state("one")) == ({0: GRANT}, Suspension())
    assert SuspensionFile(tmp_path).load() == {}


@pytest.mark.parametrize(
    ("held", "arguments", "said"),
    [
        ((0,), {"gpu": 0}, "it has a grant on pGPU 0 already"),
        ((0,), {"gpu": 7}, "pGPU 7: there is none of that number"),
        ((0,), {"gpu": 1, "from": 7}, "pGPU 7: there is none of that number"),
        ((0,), {"gpu": 1, "from": 1}, "it has no grant on pGPU 1"),
        ((0, 1), {"gpu": 1}, "it has grants on several pGPUs; say which it leaves"),
    ],
)
def test_a_move_that_makes_no_sense_is_refused(
    host: SimHost, requests: ControlRequests, held: tuple[int, ...], arguments: dict[str, Any], said: str
) -> None:
    host.admit("one", dict.fromkeys(held, GRANT))
    host.start_load("one", 0, LOAD)
    with pytest.raises((RefusedError, UnknownNameError), match=said):
        ask(requests, "pod.move", name="one", **arguments)

    assert grants(host) == dict.fromkeys(held, GRANT)


def test_containers_and_other_models_are_refused(requests: ControlRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = pod_moves.PodMoves(requests.pods)
    with pytest.raises(RefusedError, match="a container has the device files of its own cards only"):
        moves._source(PodInfo("one", {0: GRANT}, cgroup="/machine/one"), 1, None)
    cards = {0: requests.pods.cards[0], 1: replace(requests.pods.cards[1], name="Other")}
    monkeypatch.setattr(requests.pods, "cards", cards)
    with pytest.raises(RefusedError, match="pGPU 0 is a Simulated H200, pGPU 1 a Other"):
        moves._source(PodInfo("one", {0: GRANT}), 1, None)
    instance = replace(cards[0], mig=MigInstance(1, 1))
    monkeypatch.setattr(requests.pods, "cards", {0: cards[0], 201: instance})
    with pytest.raises(RefusedError, match="pGPU 201 is a MIG instance; pods move between whole cards only"):
        moves._source(PodInfo("one", {0: GRANT}), 201, None)


def test_what_a_pod_left_on_another_card_does_not_leave_with_it(
    host: SimHost, requests: ControlRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.admit("one", {0: GRANT})
    host.start_load("one", 0, LOAD)
    pod = replace(host.pods()[0], memory={0: LOAD.memory, 1: 4 * GIB})
    monkeypatch.setattr(requests.suspensions, "_named", lambda name: pod)
    ask(requests, "pod.suspend", name="one")

    assert requests.suspensions.wait("one", TIMEOUT_S).memory == {0: LOAD.memory}


@pytest.mark.parametrize("runs", [True, False])
def test_a_card_on_which_a_moved_pod_runs_stays_its_own(
    host: SimHost, requests: ControlRequests, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    """A process that begins during a move is not moved. One that has moved may keep a little memory on the card."""
    host.admit("one", {0: GRANT, 1: GRANT})
    cards = requests.pods.cards
    if runs:
        host.start_load("one", 0, LOAD)
    else:
        pod = replace(host.pods()[0], memory={0: GIB, 1: GIB})
        monkeypatch.setattr(requests.pods, "named", lambda _: pod)
    monkeypatch.setattr(pod_moves, "_LEAVES_S", 0.0)
    requests._moves.arrived("one", {cards[0].uuid: cards[1].uuid}, True)

    assert grants(host) == ({0: GRANT, 1: GRANT} if runs else {1: GRANT})


def test_a_pod_that_has_a_moved_pods_name_keeps_its_grant(host: SimHost, requests: ControlRequests) -> None:
    host.admit("one", {0: GRANT})
    cards = requests.pods.cards
    requests._moves.arrived("one", {cards[0].uuid: cards[1].uuid}, True)

    assert grants(host) == {0: GRANT}


@settings(max_examples=30)
@given(processes=st.integers(1, 3), dies_at=st.integers(1, 18), before=st.booleans())
def test_a_daemon_killed_at_any_call_leaves_a_pod_on_one_card(
    tmp_path_factory: pytest.TempPathFactory, processes: int, dies_at: int, before: bool
) -> None:
    host, directory = QuickHost(2), tmp_path_factory.mktemp("state")
    choice = PlaneChoice(Plane.SIM, "test")
    host.admit("one", {0: GRANT})
    for _ in range(processes):
        host.start_load("one", 0, LOAD)
    first = ControlRequests(host, choice, Config(), SettingsFile(None), suspension_file=SuspensionFile(directory))
    with pytest.MonkeyPatch.context() as patch:
        kill(patch, dies_at, before=before, more=[(SimHost, "amend"), (SuspensionFile, "save")])
        with suppress(Killed):
            ask(first, "pod.move", name="one", gpu=1)
    first.close()
    no_waiting(directory)
    second = ControlRequests(host, choice, Config(), SettingsFile(None), suspension_file=SuspensionFile(directory))
    found = second.suspensions.wait("one", TIMEOUT_S)
    second.close()

    assert (found.residency, found.moves) == (Residency.RUNNING, {})
    (index,) = grants(host)
    assert host.pods()[0].memory == {index: processes * LOAD.memory}

"""Temporary policies: in force only among their own pods, and only while their client is there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from qgpu.config import Config, GpuSettings
from qgpu.daemon.control_requests import ControlRequests
from qgpu.daemon.plane_choice import PlaneChoice
from qgpu.daemon.settings_file import SettingsFile
from qgpu.errors import RefusedError
from qgpu.ipc import wire
from qgpu.ipc.control_socket import Session
from qgpu.linux import proc
from qgpu.model import Grant
from qgpu.model.plane_names import Plane
from qgpu.planes.sim.host import Clock, SimHost
from tests.contract.rig import FLOOD


@pytest.fixture
def host() -> SimHost:
    return SimHost(1, Clock.REAL)


@pytest.fixture
def requests(host: SimHost) -> Iterator[ControlRequests]:
    """Two busy pods with quotas under Best Effort, which closes no gate."""
    settings = GpuSettings(policy="best-effort")
    made = ControlRequests(host, PlaneChoice(Plane.SIM, "test"), Config(defaults=settings), SettingsFile(None))
    for name, cores in (("a", 40), ("b", 20)):
        host.admit(name, {0: Grant(cores=cores)})
        host.start_load(name, 0, FLOOD)
    yield made
    made.close()


def client() -> Session:
    return Session(wire.Peer(os.getpid(), 0, 0), may_change=True, process=os.pidfd_open(os.getpid()))


def until_gated(requests: ControlRequests, gated: bool) -> None:
    """Wait until the plan in force moves gates, or does not."""
    loop = requests._loops[0]
    while loop.ledger.plan is None or loop.ledger.plan.gated is not gated:
        time.sleep(0.01)


def begin(requests: ControlRequests, session: Session, *pods: str) -> None:
    asked = {"op": "gpu.set_temporarily", "gpu": 0, "policy": "fixed-share", "pods": list(pods)}
    requests.handle(session, asked, [])


def test_it_ends_with_its_client_and_is_no_setting(requests: ControlRequests) -> None:
    session = client()
    begin(requests, session, "a", "b")
    until_gated(requests, True)
    (gpu,) = requests.handle(session, {"op": "gpu.list"}, [])["gpus"]
    for call in session.at_end:
        call()
    until_gated(requests, False)

    assert (gpu["policy"], gpu["temporary_policy"]) == ("best-effort", "fixed-share")
    assert requests.handle(client(), {"op": "gpu.list"}, [])["gpus"][0]["temporary_policy"] is None


def test_its_begin_and_end_are_events_with_who_and_old_and_new(requests: ControlRequests) -> None:
    session = client()
    begin(requests, session, "a", "b")
    begin(requests, session, "a", "b")  # the same again is no change
    for call in session.at_end:
        call()
    events = requests.handle(client(), {"op": "events", "settings": True}, [])["events"]

    assert [(event["what"], event["gpu"], event["old"], event["new"]) for event in events] == [
        ("temporary policy begins", 0, {"temporary_policy": None}, {"temporary_policy": "fixed-share"}),
        ("temporary policy ends", 0, {"temporary_policy": "fixed-share"}, {"temporary_policy": None}),
    ]
    assert [(event["by"]["pid"], event["by"]["program"]) for event in events] == [
        (os.getpid(), proc.name(os.getpid()))
    ] * 2


def test_it_rests_while_another_pod_is_on_the_pgpu(host: SimHost, requests: ControlRequests) -> None:
    begin(requests, client(), "a", "b")
    until_gated(requests, True)
    host.admit("tenant", {0: Grant()})
    until_gated(requests, False)
    host.retire("tenant")
    until_gated(requests, True)


def test_it_is_refused_where_another_pod_is(requests: ControlRequests) -> None:
    with pytest.raises(RefusedError, match="b is on it"):
        begin(requests, client(), "a")


def test_a_second_client_has_to_wait(requests: ControlRequests) -> None:
    begin(requests, client(), "a", "b")
    with pytest.raises(RefusedError, match="measures policies there"):
        begin(requests, client(), "a", "b")

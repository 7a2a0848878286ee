"""A container's cgroup is its pod: one that is not its own alone is refused, and nobody else loses a pod by it."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from qgpu.errors import RefusedError
from qgpu.linux import cgroup
from qgpu.model import Grant
from tests.daemon.claim_rig import FakeContainer, Rig

pytestmark = pytest.mark.root


def container(rig: Rig, name: str, cores: int) -> FakeContainer:
    """Make a container of card 0 without a claim."""
    asked = {"qgpu.io/name": name, "qgpu.io/cores": str(cores)}
    return rig.container(names=("", "", ""), uid="", env=["QGPU_GPU_0="], annotations=asked)


@contextmanager
def moved(made: FakeContainer, to: str) -> Iterator[FakeContainer]:
    """Let a container be in another cgroup, which exists or is made for it."""
    directory, home = cgroup.mount() / to.lstrip("/"), made.at
    new = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    cgroup.enter("", made.process.pid, to)
    try:
        yield made
    finally:
        cgroup.enter("", made.process.pid, home)
        for each in new:
            each.rmdir()


def test_container_in_the_cgroup_of_a_pod_takes_nothing(rig):
    victim, thief = container(rig, "victim", 60), container(rig, "thief", 1)
    rig.bind(victim)
    with (
        moved(thief, victim.at),
        pytest.raises(RefusedError, match=f"cgroup {victim.at} is not its own, process {victim.process.pid} "),
    ):
        rig.bind(thief)

    assert list(rig.pods()) == ["victim"]
    assert rig.grant("victim") == ("offline", 60, None)


@pytest.mark.parametrize("below", ["", "/inner"])
def test_container_in_the_cgroup_of_a_session_is_refused(rig, below):
    """Otherwise that session would be in a pod, which may ask nothing."""
    web, session = container(rig, "web", 1), f"/session-{uuid.uuid4().hex}"
    with subprocess.Popen(["sleep", "600"]) as bystander, moved(web, session):
        cgroup.create("x", session) if below else None
        cgroup.enter("", bystander.pid, f"{session}/qgpu-x" if below else session)
        try:
            with pytest.raises(RefusedError, match=f"is not its own, process {bystander.pid} "):
                rig.bind(web)
        finally:
            bystander.kill()
            bystander.wait()
            cgroup.remove("x", f"{session}/qgpu-x")
    assert rig.pods() == {}


def test_container_in_a_cgroup_of_a_waiting_pod_is_refused(rig):
    """The keeper of a group has made its cgroup, and no process is there yet."""
    group, web = f"g-{uuid.uuid4().hex}", container(rig, "web", 1)
    rig.requests.pods.launch_group(group, {0: Grant(cores=60)}, rig.session)
    with moved(web, cgroup.path_of(group)), pytest.raises(RefusedError, match=f"is that of pod {group}"):
        rig.bind(web)

    assert list(rig.pods()) == [group]


@pytest.mark.parametrize("outer", ["victim", "web"])
def test_container_in_or_around_the_cgroup_of_a_pod_is_refused(rig, outer):
    victim, web, top = container(rig, "victim", 60), container(rig, "web", 1), f"/top-{uuid.uuid4().hex}"
    places = {"victim": top, "web": f"{top}/inner"} if outer == "victim" else {"victim": f"{top}/inner", "web": top}
    with moved(web, places["web"]), moved(victim, places["victim"]):
        cgroup.enter("", web.process.pid, web.at)
        rig.bind(victim)
        cgroup.enter("", web.process.pid, places["web"])
        if outer == "web":
            cgroup.enter("", victim.process.pid, victim.at)
        with pytest.raises(RefusedError, match=f"overlaps {places['victim']} of pod victim"):
            rig.bind(web)


@pytest.mark.parametrize("own", ["GUARDIANS", "LOCK"])
@pytest.mark.parametrize("below", ["", "/inner"])
def test_container_in_a_cgroup_of_qgpus_own_is_refused(rig, monkeypatch, own, below):
    at = f"/own-{uuid.uuid4().hex}"
    monkeypatch.setattr(cgroup, own, at)
    with moved(container(rig, "web", 1), at + below) as web, pytest.raises(RefusedError, match="is qgpu's own"):
        rig.bind(web)

    assert rig.pods() == {}


def test_annotation_that_chooses_the_cgroup_is_refused(rig):
    web = container(rig, "web", 1)
    web.annotations["run.oci.delegate-cgroup"] = "inner"
    with pytest.raises(RefusedError, match=r"annotation run\.oci\.delegate-cgroup "):
        rig.bind(web)


def test_container_that_starts_again_in_its_cgroup_is_a_pod(rig):
    first, second = container(rig, "web", 60), container(rig, "web", 60)
    rig.bind(first)
    first.die()
    with moved(second, first.at):
        assert rig.bind(second) == "web"
        assert rig.bind(second) == "web"
        assert rig.pods()["web"]["pids"] == (second.process.pid,)

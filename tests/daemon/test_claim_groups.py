"""Which claims have a share group, whose pod it is, and what is refused; what keeps groups is tests/groups' subject."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qgpu.daemon import claim_groups, pods
from qgpu.daemon.claim_groups import ClaimGroups
from qgpu.errors import BackendGoneError, InvalidValueError, NotSupportedError, PermissionDeniedError, RefusedError
from qgpu.groups.group_files import GroupFiles
from qgpu.ipc import wire
from qgpu.ipc.control_socket import Session
from qgpu.model import Grant
from qgpu.model.member_limits import MemberLimits
from qgpu.model.plane_names import Plane
from qgpu.model.prepared_grant import PreparedDevice, PreparedGrant
from tests.daemon.claim_rig import GIB, Rig

pytestmark = pytest.mark.root


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setenv("QGPU_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(claim_groups, "_WAIT_S", 0.2)  # what is awaited here never comes
    made = Rig(tmp_path)
    yield made
    made.close()


@pytest.fixture
def files(tmp_path: Path) -> GroupFiles:
    """The files of a group whose keeper is this process, and which takes members."""
    made = GroupFiles(tmp_path / "run", "claim-u")
    made.claim(os.getpid(), 0)
    made.has_begun()
    return made


def prepare(rig: Rig, consumers: tuple[str, ...] = ("pod-1",), *, wait: bool = True, **limits: Any) -> str:
    """Prepare a claim with a group; return the name of its device."""
    about = {"uid": "u", "namespace": "shop", "name": "llm", "part": {"sm": None, "memory": None}, "wait": wait}
    device = rig.device(cores=40, memory=GIB) | limits
    answer = rig.ask("grant.prepare", consumers=list(consumers), devices=[device], **about)
    return str(answer["devices"][0]["cdi"].partition("=")[2])


def launch(rig: Rig, **grants: Any) -> None:
    """Ask for the group's pod, as its keeper does."""
    rig.ask("pod.create", name="claim-u", grants=grants, may_wait=False)


def kept(rig: Rig) -> str:
    """Prepare the claim and have its pod made; return the name of its device."""
    with pytest.raises(RefusedError, match="its group has not begun"):
        prepare(rig)
    launch(rig)
    return prepare(rig)


def test_pods_join_a_claim_whose_group_has_not_begun(rig: Rig) -> None:
    """Its driver changes one claim after the other, and must not wait for each."""
    with pytest.raises(RefusedError, match="its group has not begun"):
        prepare(rig)
    prepare(rig, ("pod-1", "pod-2"), wait=False)

    assert rig.listed()["u"]["consumers"] == ["pod-1", "pod-2"]


def grant(uid: str = "u") -> PreparedGrant:
    device = PreparedDevice("gpu", "", "GPU-0", Grant(), "u-gpu")
    return PreparedGrant(uid, "shop", "llm", ("pod-1",), (device,), MemberLimits())


def test_pod_gets_what_the_claim_holds_whatever_is_asked(rig: Rig, files: GroupFiles) -> None:
    with pytest.raises(RefusedError):
        prepare(rig)
    launch(rig, **{"0": {"cores": 100, "memory": None, "class": "online"}})

    assert rig.grant("claim-u") == ("offline", 40, GIB)
    assert rig.outside() == {"cores": 0, "memory": 0}


def test_member_of_a_claim_that_is_given_up_does_not_start(rig: Rig, files: GroupFiles) -> None:
    device = kept(rig)
    web, late = rig.container(device), rig.container(device)
    assert rig.bind(web) == "claim-u"
    with pytest.raises(RefusedError, match="still run; it stays prepared"):
        rig.ask("grant.drop", uid="u")
    web.end()
    with pytest.raises(RefusedError, match="has not ended, and it stays prepared"):
        rig.ask("grant.drop", uid="u")

    assert rig.listed()["u"]["ending"]
    with pytest.raises(BackendGoneError, match="its group is being ended"):
        rig.bind(late)


def test_container_with_another_device_is_no_member(rig: Rig, files: GroupFiles) -> None:
    device = kept(rig)
    (other,) = rig.prepare("v", rig.device(request="other", memory=GIB))
    with pytest.raises(RefusedError, match="has that device alone"):
        rig.bind(rig.container(device, other))


def test_groups_own_device_does_not_lead_into_a_claims_group(rig: Rig, files: GroupFiles) -> None:
    kept(rig)
    forger = rig.container()
    message = forger.message() | {"prepared": ["qgpu.io/group=claim-u"]}
    with pytest.raises(RefusedError, match="is a claim's; name the claim in its pod"):
        rig.requests.handle(rig.session, message, [])


def test_only_root_keeps_a_claims_group(rig: Rig) -> None:
    with pytest.raises(RefusedError):
        prepare(rig)
    user = Session(wire.Peer(os.getpid(), 1000, 1000), may_change=True, process=rig.session.process)
    with pytest.raises(PermissionDeniedError, match="which root keeps"):
        rig.requests.handle(user, {"op": "pod.create", "name": "claim-u", "grants": {}}, [])


def test_second_keeper_is_refused(rig: Rig, files: GroupFiles) -> None:
    kept(rig)
    with pytest.raises(RefusedError, match="another keeper holds it"):
        launch(rig)


def test_pod_of_that_name_with_other_limits_is_not_the_group(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older version may have left one."""
    monkeypatch.setattr(pods, "_OF_CLAIMS", re.compile("none"))
    rig.ask("pod.create", name="claim-u", grants={"0": {"cores": 90}})
    with pytest.raises(RefusedError, match="there is a pod claim-u with other limits"):
        prepare(rig, cores=5)

    assert not rig.listed()


def test_group_is_refused_where_mps_is_not_installed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotSupportedError, match="nvidia-cuda-mps-control is not installed"):
        ClaimGroups(rig.requests.pods, Plane.SECCOMP, lambda name: GroupFiles(Path("/"), name)).check(grant())


def test_claim_whose_groups_name_is_too_long_is_refused(rig: Rig) -> None:
    with pytest.raises(InvalidValueError, match="use up to 63"):
        ClaimGroups(rig.requests.pods, Plane.SIM, lambda name: GroupFiles(Path("/"), name)).check(grant("u" * 60))


def test_nobody_else_makes_a_pod_with_a_claims_name(rig: Rig) -> None:
    """Its processes would be in the claim's group, or its limits would keep the group from beginning."""
    asked = {"op": "pod.create", "grants": {"0": {"cores": 1}}}
    with pytest.raises(RefusedError, match="claims' groups"):
        rig.requests.handle(rig.session, asked | {"name": "claim-u"}, [])
    rig.requests.handle(rig.session, asked | {"name": "claim-u.web.main"}, [])  # a container in namespace claim-u

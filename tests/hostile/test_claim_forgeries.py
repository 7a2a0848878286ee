"""No pod gets more than its claim holds, whatever its author writes: it gets that, or does not start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qgpu.errors import RefusedError
from tests.daemon.claim_rig import GIB, Rig
from tests.hostile.claim_forgeries import FORGERIES, OTHER_CARD, OTHERS, SIBLING, Forgery

pytestmark = pytest.mark.root

#: What the forger's claim holds, and the names of its devices and of those it would like.
GRANT = ("offline", 30, 4 * GIB)
NAMES = {SIBLING: "mine-t", OTHERS: "others-s", OTHER_CARD: "others-t"}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A claim with a device for each of two containers, and another pod's claim on both cards."""
    made = Rig(tmp_path)
    mine = {"cores": 30, "memory": 4 * GIB}
    made.prepare("mine", made.device(share="s", **mine), made.device(share="t", **mine))
    more = {"cores": 40, "memory": 8 * GIB, "class": "online"}
    made.prepare("others", made.device(share="s", **more), made.device(1, share="t", **more), consumers=("pod-2",))
    yield made
    made.close()


def filled(text: str) -> str:
    for mark, name in NAMES.items():
        text = text.replace(mark, name)
    return text


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.name)
def test_forged_limits_give_what_the_claim_holds_or_nothing(rig: Rig, forgery: Forgery) -> None:
    forger = rig.container("mine-s", *map(filled, forgery.injected))
    forger.annotations = {key: filled(value) for key, value in forgery.annotations.items()}
    forger.env += map(filled, forgery.env)
    forger.nodes += forgery.nodes
    if forgery.refused:
        with pytest.raises(RefusedError, match=forgery.refused):
            rig.bind(forger)
        assert rig.pods() == {}
        return
    name = rig.bind(forger)
    (pod,) = rig.pods().values()

    assert name == "shop.web.model"
    assert [each["gpu"] for each in pod["grants"]] == [0]
    assert rig.grant(name) == GRANT
    assert pod["grants"][0]["latency_target_ns"] is None
    assert (pod["namespace"], pod["claim"]) == ("shop", "claim-mine")


@pytest.mark.parametrize("key", ["io.kubernetes.pod.uid", "io.kubernetes.cri.sandbox-uid"])
def test_a_pod_is_known_by_its_runtimes_annotation(rig: Rig, key: str) -> None:
    container = rig.container("mine-s", uid="")
    container.annotations = {key: "pod-1"}

    assert rig.bind(container)


def test_forged_names_do_not_take_another_pods_place(rig: Rig) -> None:
    there = rig.container("mine-s")
    rig.bind(there)
    forger = rig.container("others-s", uid="pod-2", names=there.names, id=there.id)
    name = rig.bind(forger)

    assert rig.grant("shop.web.model") == GRANT
    assert rig.pods()["shop.web.model"]["cgroup"] == there.at
    assert name == there.id[:12]


def test_without_a_claim_a_marker_starts_no_container(rig: Rig) -> None:
    container = rig.container()
    container.env += ["QGPU_GPU_0=x", "QGPU_CLAIM_x=mine-s"]
    with pytest.raises(RefusedError, match="which it was not given"):
        rig.bind(container)
    container.env.pop()

    assert rig.bind(container)

"""Containers with claims under containerd, cgroup v2 and the module: each gets what its claim holds, no more."""

from __future__ import annotations

import time

import nv
import pytest
import qg

SETTLE_S, MEASURE_S = 6, 20
#: How often a ratio is measured before a busy host is believed to be a defect.
TRIES = 3
LEAST, MOST = 1.94, 2.06


def ratio(node):
    """How often the GPU time of pod ``one`` goes into that of pod ``two``, over a while."""
    before = node.used_ns()
    time.sleep(MEASURE_S)
    after = node.used_ns()
    return (after["two"] - before["two"]) / (after["one"] - before["one"])


@pytest.mark.quiet
def test_containers_share_the_card_as_their_claims_do(node):
    node.pod("two", cores="60")
    node.pod("one", cores="30")
    qg.until(lambda: node.busy("two", "one"), 120)
    time.sleep(SETTLE_S)
    found = []
    while len(found) < TRIES and not (found and LEAST <= found[-1] <= MOST):
        found.append(ratio(node))
    print("ratios", found)
    qg.note("containerd_ratio_2_1_vm", round(found[-1], 3))

    assert LEAST <= found[-1] <= MOST, found


def test_container_is_held_to_the_memory_of_its_claim(node):
    container = node.pod("web", memory="256Mi", cores="10")

    assert node.memory(container, 512) == nv.NO_MEMORY
    assert node.memory(container, 128) == 0
    (grant,) = node.pods()["web"]["grants"]
    assert (grant["cores"], grant["memory"]) == (10, 256 << 20)


def test_killed_daemon_leaves_containers_to_their_claims(node):
    container = node.pod("web", memory="256Mi", cores="60")
    node.world.kill_daemon()

    assert node.memory(container, 512) == nv.NO_MEMORY
    node.world.start_daemon()
    found = node.pods()
    assert set(found) == {"web"}
    assert [grant["cores"] for grant in found["web"]["grants"]] == [60]
    claim = node.world.claim({**node.claims[0]["status"]["allocation"]["devices"]["results"][0], "shareID": "other"})
    assert "does not fit" in node.world.kubelet.prepare(claim, claim["status"]["reservedFor"][0]["uid"])

"""Grants that fit are let in; the first thing that does not fit is named in one line."""

from __future__ import annotations

import pytest

from qgpu import admission
from qgpu.admission import Occupancy
from qgpu.config import GpuSettings
from qgpu.errors import InvalidValueError, RefusedError, UnknownNameError
from qgpu.model import Grant, PodClass
from qgpu.model.plane_api import MigInstance, Pgpu, PodInfo

GIB = 1 << 30
CARDS = (Pgpu(0, "GPU-0", "card", 80 * GIB), Pgpu(1, "GPU-1", "card", 80 * GIB))
PODS = (PodInfo("a", {0: Grant(cores=60, memory=50 * GIB)}), PodInfo("b", {0: Grant(), 1: Grant(cores=100)}))
BURST = {0: GpuSettings(), 1: GpuSettings()}
FIXED = {0: GpuSettings("fixed-share"), 1: GpuSettings()}


@pytest.mark.parametrize(
    "grants",
    [
        {0: Grant()},
        {0: Grant(cores=40, memory=30 * GIB)},
        {0: Grant(PodClass.ONLINE, cores=40), 1: Grant(memory=80 * GIB)},
    ],
)
def test_a_pod_that_fits_is_let_in(grants: dict[int, Grant]) -> None:
    admission.check_new("c", grants, Occupancy(PODS, CARDS, BURST))


@pytest.mark.parametrize(
    ("name", "grants", "settings", "error", "complaint"),
    [
        ("c", {0: Grant(cores=41)}, BURST, RefusedError, "41 % for pod c does not fit; 40 % is left"),
        ("c", {0: Grant(PodClass.ONLINE, cores=41)}, BURST, RefusedError, "does not fit"),
        ("c", {1: Grant(cores=1)}, BURST, RefusedError, "pGPU 1: 1 % for pod c does not fit; 0 % is left"),
        ("c", {0: Grant(memory=31 * GIB)}, BURST, RefusedError, "31 GiB for pod c does not fit; 30 GiB is left"),
        ("c", {0: Grant()}, FIXED, RefusedError, "fixed-share gives nothing to a pod without a quota"),
        ("a", {0: Grant()}, BURST, RefusedError, "there is one of that name already"),
        ("c", {7: Grant()}, BURST, UnknownNameError, "pGPU 7: there is none of that number; there are: 0, 1"),
        ("c", {}, BURST, InvalidValueError, "at least one pGPU"),
        ("../c", {0: Grant()}, BURST, InvalidValueError, "pod name '../c'"),
    ],
)
def test_what_does_not_fit_is_named(
    name: str, grants: dict[int, Grant], settings: dict[int, GpuSettings], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        admission.check_new(name, grants, Occupancy(PODS, CARDS, settings))


def test_a_pod_has_one_mig_instance_of_a_card() -> None:
    instances = [MigInstance(0, 1), MigInstance(0, 2), MigInstance(1, 1)]
    cards = [Pgpu(each.index, "", "instance", GIB, mig=each) for each in instances]
    beside = Occupancy((), cards, {card.index: GpuSettings() for card in cards})

    with pytest.raises(RefusedError, match="pod c: pGPUs 101 and 102 are MIG instances of one card"):
        admission.check_new("c", {101: Grant(), 102: Grant()}, beside)
    admission.check_new("c", {101: Grant(), 201: Grant()}, beside)


def test_online_pod_needs_no_quota_if_only_offline_is_fixed() -> None:
    admission.check_new("c", {0: Grant(PodClass.ONLINE)}, Occupancy(PODS, CARDS, FIXED))


def test_a_pods_own_old_grant_does_not_stand_in_its_way() -> None:
    admission.check_amended("a", {0: Grant(cores=100, memory=80 * GIB)}, Occupancy(PODS, CARDS, BURST))


def test_amending_beyond_the_card_is_refused() -> None:
    crowded = (*PODS, PodInfo("c", {0: Grant(cores=30)}))

    with pytest.raises(RefusedError, match="71 % for pod a does not fit; 70 % is left"):
        admission.check_amended("a", {0: Grant(cores=71)}, Occupancy(crowded, CARDS, BURST))


def test_amending_a_pod_there_is_not_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="pod z"):
        admission.check_amended("z", {0: Grant()}, Occupancy(PODS, CARDS, BURST))


def test_a_policy_that_would_starve_a_pod_that_runs_is_refused() -> None:
    with pytest.raises(RefusedError, match="offline pod b has none"):
        admission.check_settings(0, PODS, FIXED[0])


def test_a_policy_that_starves_nobody_is_taken() -> None:
    admission.check_settings(1, PODS, FIXED[0])


def test_offline_floor_and_online_quotas_must_fit_together() -> None:
    floor = GpuSettings(offline_floor=30)
    online = PodInfo("on", {0: Grant(PodClass.ONLINE, cores=70)})
    admission.check_settings(0, [online], floor)

    with pytest.raises(RefusedError, match="71 % for online pods and an offline floor of 30 % do not fit"):
        admission.check_new("c", {0: Grant(PodClass.ONLINE, cores=1)}, Occupancy([online], CARDS, {0: floor, 1: floor}))
    with pytest.raises(RefusedError, match="pGPU 0: 70 % for online pods and an offline floor of 31 %"):
        admission.check_settings(0, [online], GpuSettings(offline_floor=31))


TWICE = {0: GpuSettings(memory_overcommit=2.0), 1: GpuSettings()}
HALVES = (PodInfo("a", {0: Grant(memory=50 * GIB)}), PodInfo("b", {0: Grant(PodClass.ONLINE, memory=40 * GIB)}))


@pytest.mark.parametrize(
    ("grant", "complaint"),
    [
        (Grant(memory=70 * GIB), None),
        (Grant(memory=71 * GIB), "71 GiB for pod c does not fit; 70 GiB is left to grant"),
        (Grant(PodClass.ONLINE, memory=40 * GIB), None),
        (Grant(PodClass.ONLINE, memory=41 * GIB), "41 GiB for pod c does not fit; 40 GiB is left to grant"),
        (Grant(), "its memory is overcommitted, and pod c has no limit"),
    ],
)
def test_offline_limits_may_go_beyond_the_card(grant: Grant, complaint: str | None) -> None:
    if complaint is None:
        admission.check_new("c", {0: grant}, Occupancy(HALVES, CARDS, TWICE))
    else:
        with pytest.raises(RefusedError, match=complaint):
            admission.check_new("c", {0: grant}, Occupancy(HALVES, CARDS, TWICE))


def test_no_limit_is_larger_than_the_card() -> None:
    with pytest.raises(RefusedError, match="81 GiB for pod c does not fit; 80 GiB is left to grant"):
        admission.check_new("c", {0: Grant(memory=81 * GIB)}, Occupancy((), CARDS, TWICE))


def test_pods_that_cannot_yield_count_like_online_ones() -> None:
    stuck = admission.Yielding({"a"})
    admission.check_new("c", {0: Grant(PodClass.ONLINE, memory=40 * GIB)}, Occupancy(HALVES[:1], CARDS, TWICE))
    with pytest.raises(RefusedError, match="40 GiB for pod c does not fit; 30 GiB is left to grant"):
        admission.check_new(
            "c", {0: Grant(PodClass.ONLINE, memory=40 * GIB)}, Occupancy(HALVES[:1], CARDS, TWICE, yielding=stuck)
        )
    both = {index: Grant(memory=41 * GIB) for index in (0, 1)}
    with pytest.raises(RefusedError, match="pGPU 0: 41 GiB for pod c does not fit; 40 GiB is left to grant"):
        admission.check_new("c", both, Occupancy(HALVES, CARDS, TWICE))


def test_what_is_beyond_the_cards_fits_into_host_memory() -> None:
    room = admission.Yielding(host_room=20 * GIB)
    admission.check_new("c", {0: Grant(memory=10 * GIB)}, Occupancy(HALVES, CARDS, TWICE, yielding=room))
    with pytest.raises(RefusedError, match="21 GiB of pods would be off the cards, and host memory holds 20 GiB"):
        admission.check_new("c", {0: Grant(memory=11 * GIB)}, Occupancy(HALVES, CARDS, TWICE, yielding=room))


def test_overcommit_begins_only_where_all_pods_have_limits() -> None:
    with pytest.raises(RefusedError, match="pod b has no limit"):
        admission.check_overcommit(CARDS[0], PODS, TWICE[0], BURST[0])
    admission.check_overcommit(CARDS[0], HALVES, TWICE[0], BURST[0])


def test_overcommit_falls_no_lower_than_what_is_granted() -> None:
    three = GpuSettings(memory_overcommit=3.0)
    with pytest.raises(RefusedError, match="limits of 90 GiB do not fit into 1 times its 80 GiB"):
        admission.check_overcommit(CARDS[0], HALVES, BURST[0], three)
    admission.check_overcommit(CARDS[0], HALVES, TWICE[0], three)

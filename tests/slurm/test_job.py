"""What Slurm gave a step, and the grants that follow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.errors import InvalidValueError, RefusedError, UnknownNameError
from qgpu.model import Grant, PodClass
from qgpu.model.plane_api import Pgpu
from qgpu.slurm import job
from qgpu.slurm.job import Step

GIB = 1 << 30
CARDS = {index: Pgpu(index, f"GPU-{index}", "card", 100 * GIB) for index in range(2)}


def test_shards_bring_cores_and_memory_in_proportion() -> None:
    assert Step(7, (1,), 30).grants(CARDS) == {1: Grant(PodClass.OFFLINE, 30, 30 * GIB)}
    assert Step(7, (0,), 2, shards_of_a_card=8).grants(CARDS) == {0: Grant(PodClass.OFFLINE, 25, 25 * GIB)}


def test_whole_cards_have_no_memory_limit() -> None:
    whole = Grant(PodClass.OFFLINE, 100, None)

    assert Step(7, (0, 1)).grants(CARDS) == {0: whole, 1: whole}
    assert Step(7, (0, 1), 200).grants(CARDS) == {0: whole, 1: whole}


def test_shards_spread_over_cards_are_refused() -> None:
    with pytest.raises(RefusedError, match="30 shards on 2 GPUs"):
        Step(7, (0, 1), 30).grants(CARDS)


def test_less_than_a_percent_is_refused() -> None:
    with pytest.raises(RefusedError, match="less than 1 %"):
        Step(7, (0,), 1, shards_of_a_card=101).grants(CARDS)


def test_a_card_that_qgpu_does_not_share_is_refused() -> None:
    with pytest.raises(UnknownNameError):
        Step(7, (2,), 30).grants(CARDS)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 100), st.integers(1, 200 * GIB))
def test_jobs_that_fit_a_card_fit_it_in_qgpu(shards: list[int], more: int, memory: int) -> None:
    whole = sum(shards) + more
    steps = [Step(at + 1, (0,), each, whole, memory=memory) for at, each in enumerate(shards) if each * 100 >= whole]
    grants = [step.grants(CARDS)[0] for step in steps]

    assert sum(grant.cores or 0 for grant in grants) <= 100
    assert sum(grant.memory or 0 for grant in grants) <= CARDS[0].memory
    assert all(grant.memory is not None and grant.memory <= memory for grant in grants)


@given(st.integers(1, 100), st.one_of(st.none(), st.integers(1, 200 * GIB)), st.integers(1, 200 * GIB))
def test_a_memory_option_never_raises_a_limit(shards: int, first: int | None, second: int) -> None:
    limits = [limit for limit in (first, second) if limit is not None]
    plain = Step(7, (0,), shards).grants(CARDS)[0]
    lowered = Step(7, (0,), shards, memory=min(limits)).grants(CARDS)[0]

    assert lowered.cores == plain.cores
    assert lowered.memory is not None
    assert lowered.memory <= min([*limits, plain.memory or CARDS[0].memory * 2])


def test_the_lower_of_two_memory_limits_counts() -> None:
    said = {"job": 7, "gpus": "0", "shards": "30", "memory": "8GiB", "max_memory": "4GiB", "per_card": "200"}

    assert job.described(said) == Step(7, (0,), 30, 200, PodClass.OFFLINE, 4 * GIB)
    assert job.described({"job": 7, "gpus": "1,0", "class": "online"}) == Step(7, (1, 0), pod_class=PodClass.ONLINE)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"job": True, "gpus": "0"},
        {"job": 0, "gpus": "0"},
        {"job": 7},
        {"job": 7, "gpus": "0,,1"},
        {"job": 7, "gpus": "GPU-0"},
        {"job": 7, "gpus": ["0"]},
        {"job": 7, "gpus": "0", "shards": "-1"},
        {"job": 7, "gpus": "0", "shards": "9" * 30},
        {"job": 7, "gpus": "0", "per_card": "0"},
        {"job": 7, "gpus": "0", "class": "best"},
        {"job": 7, "gpus": "0", "memory": "much"},
        {"job": 7, "gpus": "0", "uid": "root"},
        {"job": 7, "gpus": "0", "uid": -1},
    ],
)
def test_a_step_described_badly_is_refused(said: dict[str, object]) -> None:
    with pytest.raises(InvalidValueError):
        job.described(said)


def test_the_larger_grant_has_the_larger_limits() -> None:
    one, other = Grant(PodClass.OFFLINE, 30, 8 * GIB), Grant(PodClass.ONLINE, 20, 9 * GIB)

    assert job.larger(one, other) == Grant(PodClass.ONLINE, 30, 9 * GIB)
    assert job.larger(one, Grant(PodClass.OFFLINE, 100, None)) == Grant(PodClass.OFFLINE, 100, None)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/system.slice/slurmstepd.scope/job_7/step_0/user/task_0", "/system.slice/slurmstepd.scope/job_7"),
        ("/system.slice/n1_slurmstepd.scope/job_7/step_batch/slurm", "/system.slice/n1_slurmstepd.scope/job_7"),
        ("/job_7/step_0/user/job_7/step_0/x", "/job_7"),
        ("/a/n1_slurmstepd.scope/sEKNKTV3WPV500/step_0/user/task_0", "/a/n1_slurmstepd.scope/sEKNKTV3WPV500"),
        ("/sEKNKTV3WPV500/step_0/user/job_7/step_0/x", "/sEKNKTV3WPV500"),
        ("/job_7/step_0/user/sEKNKTV3WPV500/step_0/x", "/job_7"),
        ("/a/sEKNKTV3WPV50/step_0/user", ""),
        ("/system.slice/slurmstepd.scope/job_77/step_0/user", ""),
        ("/system.slice/slurmstepd.scope/job_7", ""),
        ("/system.slice/slurmd.service", ""),
        ("/", ""),
    ],
)
def test_the_cgroup_of_a_job_is_found_in_a_path(path: str, found: str) -> None:
    assert job.cgroup_of(7, path) == found


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/a/job_7/step_0/user/task_0", "/a/job_7/step_0"),
        ("/a/job_7/step_batch/slurm", "/a/job_7/step_batch"),
        ("/a/job_7/step_0", "/a/job_7/step_0"),
        ("/a/job_7/other/step_0", ""),
        ("/b/a/job_7/step_0/x", ""),
    ],
)
def test_the_cgroup_of_a_step_is_found_in_a_path(path: str, found: str) -> None:
    assert job.step_of("/a/job_7", path) == found


@pytest.mark.parametrize("name", ["job_7", "sEKNKTV3WPV500"])
def test_only_slurms_own_leaf_is_slurmstepds(name: str) -> None:
    pod = f"/system.slice/slurmstepd.scope/{name}"

    assert job.is_slurmstepd(f"{pod}/step_0/slurm", pod)
    assert job.is_slurmstepd(f"{pod}/step_extern/slurm", pod)
    assert not job.is_slurmstepd(f"{pod}/step_0/user/slurm", pod)
    assert not job.is_slurmstepd(f"{pod}/step_0/user/task_0", pod)
    assert not job.is_slurmstepd(f"{pod}/step_0/slurm/below", pod)


def test_a_container_cannot_pass_for_slurmstepd() -> None:
    pod = "/machine.slice/one.scope"

    assert not job.is_slurmstepd(f"{pod}/step_0/slurm", pod)
    assert not job.is_slurmstepd(f"{pod}/job_7/step_0/slurm", pod)

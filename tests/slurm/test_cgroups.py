"""With Slurm's plugin for cgroup version 2 a job's own cgroup is its pod, and cards are kept to steps that have them.

The plugin refuses a host that has version 1 too. ``make -C tests/vm vmtest-slurm`` runs this where version 2 is alone.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.slurm.cluster import UNIFIED, Cluster
from tests.slurm.test_cluster import SLEEP

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.root,
    pytest.mark.skipif(not UNIFIED, reason="needs a host with cgroup v2 alone: make -C tests/vm vmtest-slurm"),
]

DENIED, OPENED = "Operation not permitted", "No such device or address"


def the_pod(cluster: Cluster) -> dict[str, Any]:
    """Wait for the pod of a job; Slurm's own process is in it, too."""
    cluster.wait(lambda: any(pod["pids"] for pod in cluster.pods().values()), "a pod with a process")
    (pod,) = cluster.pods().values()
    return dict(pod)


def test_slurms_cgroup_of_a_job_is_its_pod(cluster: Cluster) -> None:
    cluster.popen("srun", "--gres=shard:30", *SLEEP)
    pod = the_pod(cluster)

    job = pod["name"].removeprefix("slurm-")
    assert re.search(rf"/n1_slurmstepd\.scope/(job_{job}|s[0-9A-Z]{{13}})$", pod["cgroup"])


def test_a_step_without_gpus_opens_no_card(cluster: Cluster) -> None:
    said = cluster.run("srun", "cat", "/dev/card0").stderr

    assert DENIED in said


def test_a_step_opens_the_cards_that_it_has_and_no_others(cluster: Cluster) -> None:
    said = cluster.run("srun", "--gres=shard:30", "cat", "/dev/card0", "/dev/card1").stderr

    assert f"/dev/card0: {OPENED}" in said
    assert f"/dev/card1: {DENIED}" in said


def test_a_job_that_ends_leaves_no_pod_and_no_cgroup(cluster: Cluster) -> None:
    asked = cluster.popen("srun", "--gres=shard:30", *SLEEP)
    pod = the_pod(cluster)
    cluster.run("scancel", pod["name"].removeprefix("slurm-"), user="root")
    asked.wait()

    cluster.wait(lambda: not cluster.pods(), "no pod")
    cluster.wait(lambda: not cluster.cgroup(pod["cgroup"]).exists(), "no cgroup")

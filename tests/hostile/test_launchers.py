"""A pod that ``qgpuctl run`` starts stays under what its launcher is under: limits, and the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile import emulated
from tests.hostile.emulated_host import EmulatedHost

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

JOB = f"/host-{os.getpid()}.slice/job"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedHost]:
    made = EmulatedHost(tmp_path_factory.mktemp("host"), pods=1)
    if not made.there:
        pytest.skip("no cgroup2 tree can be mounted here")
    yield made
    made.close()


@pytest.fixture
def job(host: EmulatedHost) -> Iterator[Path]:
    """A job's cgroup, as a workload manager makes it."""
    made = host.cgroup(JOB)
    made.mkdir(parents=True)
    yield made
    made.rmdir()  # nothing of ours is left in it
    made.parent.rmdir()


def of(pod: dict) -> str:
    return Path(f"/proc/{pod['pids'][0]}/cgroup").read_text().partition("0::")[2].split("\n")[0]


def test_a_pod_ends_with_its_launchers_cgroup_and_is_forgotten(host, job):
    host.start_pod(emulated.CLIENTS[1], JOB)
    name, process = host.pods.popitem()
    (pod,) = (each for each in host.listed() if each["name"] == name)
    assert pod["cgroup"] == f"{JOB}/qgpu-{name}"
    assert of(pod) == pod["cgroup"]
    (job / "cgroup.kill").write_text("1")
    process.wait()
    host.until(lambda: name not in {each["name"] for each in host.listed()}, "it is forgotten")

    assert not host.cgroup(pod["cgroup"]).exists()


def test_pod_in_user_owned_cgroup_moves_to_root_owned_parent(host, job):
    for each in (job, job / "cgroup.procs"):
        os.chown(each, 1000, 1000)
    host.start_pod(emulated.CLIENTS[2], JOB)
    name, process = host.pods.popitem()
    (pod,) = (each for each in host.listed() if each["name"] == name)
    (job.parent / "cgroup.kill").write_text("1")
    process.wait()
    host.until(lambda: name not in {each["name"] for each in host.listed()}, "it is forgotten")

    assert pod["cgroup"] == f"{Path(JOB).parent}/qgpu-{name}"


def test_where_no_cgroup_can_be_made_no_pod_is(host, job):
    (job / "cgroup.max.descendants").write_text("0")
    with pytest.raises(AssertionError, match="no cgroup can be made in"):
        host.start_pod(emulated.CLIENTS[3], JOB)
    host.pods.popitem()
    (job / "cgroup.max.descendants").write_text("max")

"""Containers on the module: podman with runc and crun under cgroup v2, nothing of qgpu's inside them."""

from __future__ import annotations

import os
import signal
import time

import engine
import nv
import pytest
import qg

SETTLE_S, MEASURE_S = 4, 12


def started(done):
    assert done.returncode == 0, done.stdout


def used(daemon):
    return {name: pod["usage"][0]["used_ns"] for name, pod in daemon.pods().items()}


def memory(podman, name, mib):
    """Ask for card memory by an exec into a container; RM's status."""
    done = podman("exec", name, *engine.LOAD, "memory", str(mib))
    assert done.returncode == 0, done.stdout
    return int(done.stdout, 16)


def test_two_containers_share_the_card_at_two_to_one(daemon, podman):
    started(podman.run("two", "--annotation", "qgpu.io/cores=60"))
    started(podman.run("one", "--env", "QGPU_CORES=30"))
    qg.until(lambda: all(pod["usage"][0]["busy"] for pod in daemon.pods().values()), 60)
    time.sleep(SETTLE_S)
    before = used(daemon)
    time.sleep(MEASURE_S)
    after = used(daemon)
    ratio = (after["two"] - before["two"]) / (after["one"] - before["one"])
    qg.note(f"containers_ratio_{podman.runtime}", round(ratio, 3))

    assert ratio == pytest.approx(2, rel=0.15)


def test_exec_into_a_container_stays_under_its_grant(daemon, podman):
    started(podman.run("web", "--annotation", "qgpu.io/memory=256MiB"))
    podman("exec", "-d", "web", *engine.LOAD)
    qg.until(lambda: len(daemon.pods()["web"]["pids"]) == 2, 60)

    assert memory(podman, "web", 512) == nv.NO_MEMORY
    assert memory(podman, "web", 128) == 0
    assert "memory refused once" in daemon.pods()["web"]["problem"]


@pytest.mark.parametrize(
    ("annotation", "says"),
    [
        ("qgpu.io/cores=101", "a quota is 1 to 100"),
        ("qgpu.io/memory=1TiB", "does not fit"),
        ("qgpu.io/cpu=4", "there is no such limit"),
    ],
)
def test_container_with_unenforceable_limit_does_not_start(daemon, podman, annotation, says):
    done = podman.run("web", "--annotation", annotation)

    assert done.returncode != 0
    assert says in done.stdout
    assert daemon.pods() == {}
    assert podman.pid("web") == 0


def test_killed_daemon_leaves_containers_limited_and_findable(daemon, podman):
    started(podman.run("web", "--annotation", "qgpu.io/memory=256MiB", "--annotation", "qgpu.io/class=online"))
    grants = daemon.pods()["web"]["grants"]
    daemon.stop(signal.SIGKILL)

    os.kill(podman.pid("web"), 0)
    assert memory(podman, "web", 512) == nv.NO_MEMORY
    late = podman.run("late")
    assert late.returncode != 0
    assert "qgpud does not answer" in late.stdout
    daemon.start()
    found = daemon.pods()
    assert set(found) == {"web"}
    assert found["web"]["grants"] == grants
    assert podman.pid("web") in found["web"]["pids"]


def test_a_container_that_is_removed_gives_its_grant_back(daemon, podman):
    started(podman.run("web", "--annotation", "qgpu.io/cores=100"))
    podman("rm", "-f", "-t", "0", "web")
    qg.until(lambda: not daemon.pods(), 60)

    started(podman.run("next", "--annotation", "qgpu.io/cores=100"))


def test_a_container_that_is_started_again_has_its_grant_again(daemon, podman):
    started(podman.run("web", "--annotation", "qgpu.io/cores=70"))
    started(podman("restart", "-t", "0", "web"))
    found = daemon.pods()["web"]

    assert podman.pid("web") in found["pids"]
    assert found["grants"][0]["cores"] == 70


def test_two_requests_beyond_capacity_start_one_container(daemon, podman):
    started(podman.run("first", "--annotation", "qgpu.io/cores=70"))
    done = podman.run("second", "--annotation", "nvidia.com/gpucores=40")

    assert done.returncode != 0
    assert "30 % is left to grant" in done.stdout
    assert set(daemon.pods()) == {"first"}

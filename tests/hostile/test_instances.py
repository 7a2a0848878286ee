"""Pods on two MIG instances of one card, with a real daemon and guardian; the driver alone is emulated."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.hostile import emulated
from tests.hostile.emulated_host import EmulatedHost

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedHost]:
    made = EmulatedHost(tmp_path_factory.mktemp("host"), pods=0, divided=True)
    if not made.there:
        pytest.skip("no cgroup2 tree can be mounted here")
    for client, instance in zip(emulated.CLIENTS, emulated.INSTANCES, strict=False):
        made.start_pod(client, pgpu=instance.index)
    yield made
    made.close()


def held(host: EmulatedHost) -> dict[int, int]:
    """Return what pods hold of each pGPU by the daemon's account, in bytes."""
    return {gpu["index"]: gpu["memory_used"] for gpu in host.told("gpu", "list")["gpus"]}


def test_instances_are_shown_as_pgpus_of_their_card(host):
    shown = {gpu["index"]: (gpu["uuid"], gpu["mig"]) for gpu in host.told("gpu", "list")["gpus"]}

    assert shown == {
        101: ("MIG-101", {"card": 0, "gpu_instance": 1, "compute_instance": 0}),
        102: ("MIG-102", {"card": 0, "gpu_instance": 2, "compute_instance": 0}),
    }
    assert host.told("status")["excluded_cards"] == []


def test_memory_of_each_pod_counts_to_its_instance(host):
    host.until(lambda: all(size > 0 for size in held(host).values()), "both instances hold memory")

    for pod in host.listed():
        (usage,) = pod["usage"]
        assert [grant["gpu"] for grant in pod["grants"]] == [usage["gpu"]]


def test_pods_go_on_when_their_guardian_is_killed(host):
    os.kill(host.guardian(), signal.SIGKILL)
    host.go_on()
    host.until(lambda: all(size > 0 for size in held(host).values()), "both instances hold memory")


def test_what_changed_is_told_and_pods_go_on(host):
    host.instances.write_text("2 3")
    host.daemon.kill()
    host.restart()
    host.go_on()

    assert [gpu["index"] for gpu in host.told("gpu", "list")["gpus"]] == [102]
    assert sorted([grant["gpu"] for grant in pod["grants"]] for pod in host.listed()) == [[], [102]]
    (new,) = host.told("status")["excluded_cards"]
    assert (new["gpu"], new["why"]) == (0, "MIG instance 103: the guardian does not serve it; its log says why")

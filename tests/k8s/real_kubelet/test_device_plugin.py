"""A pod that asks a real kubelet for a part of a card is a pod of the daemon with that part, through every restart."""

from __future__ import annotations

import os
import signal

import pytest

from tests.k8s.containerd.node import until
from tests.k8s.real_kubelet.node import ALIASES, RESOURCES


def cores(held):
    return {card: part[0] for card, part in held.items()}


def test_pod_with_per_cent_of_a_card_has_that_part(node):
    per_cent, memory, pod_class = node.run("web", 40)[0]
    total = node.node.call("gpu.list")["gpus"][0]["memory"]

    assert (per_cent, pod_class) == (40, "offline")
    assert 0.3 * total < memory <= 0.4 * total


def test_pod_of_the_online_resource_has_class_online(node):
    assert node.run("web", 40, RESOURCES[1])[0][2] == "online"


def test_pod_without_the_resource_is_no_pod_of_the_daemon(node):
    node.kubelet.run("plain")
    node.run("web", 40)

    assert not node.pids("plain")


def test_pods_that_fill_cards_lie_on_one_card_each(node):
    held = [cores(node.run(name, 70)) for name in ("one", "two")]

    assert sorted(held, key=min) == [{0: 70}, {1: 70}]


def test_what_fits_on_no_card_gets_none(node):
    for name in ("one", "two"):
        node.run(name, 70)
    node.kubelet.run("three", {RESOURCES[0]: 40})
    node.run("four", 20)

    assert not node.pids("three")


def test_deleted_pod_gives_its_part_back(node):
    for name in ("one", "two"):
        node.run(name, 100)
    node.kubelet.drop("one")
    until(lambda: not node.pids("one") and len(node.node.call("grant.list")["grants"]) == 1)

    assert list(cores(node.run("three", 100)).values()) == [100]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_restarted_kubelet_finds_its_pods_and_starts_more(node, how):
    node.run("web", 40)
    before = node.pids("web")
    node.restart_kubelet(how)

    assert cores(node.run("next", 30)) == {0: 30}
    assert node.pids("web") == before
    assert cores(node.held("web")) == {0: 40}


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_restarted_plugin_serves_old_pods_and_new_ones(node, how):
    node.run("web", 40)
    node.stop_plugin(how)
    node.start_plugin()

    assert cores(node.run("next", 30)) == {0: 30}
    assert cores(node.held("web")) == {0: 40}


def test_pod_that_ends_while_the_plugin_is_away_is_given_back(node):
    node.run("web", 100)
    node.stop_plugin()
    node.kubelet.drop("web")
    until(lambda: not node.pods())
    node.start_plugin()

    until(lambda: not node.node.call("grant.list")["grants"])


def test_restarted_daemon_holds_what_runs_and_takes_more(node):
    node.run("web", 70)
    node.node.restart(signal.SIGKILL)  # a simulated plane forgets its pods, and claims stay

    assert cores(node.run("next", 40)) == {1: 40}


def test_container_that_crashes_holds_its_part_once(node):
    node.run("web", 60)
    before = node.pids("web")
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    until(lambda: node.pids("web") - before and not node.pids("web") & before)

    assert cores(node.held("web")) == {0: 60}


@pytest.mark.parametrize("said", [{"QGPU_CORES": "50"}, {"QGPU_MEMORY": "100GiB"}, {"QGPU_CLASS": "online"}], ids=str)
def test_environment_of_a_pod_adds_nothing_to_its_part(node, said):
    held = node.run("web", 20, env=[{"name": name, "value": value} for name, value in said.items()])

    assert cores(held) == {0: 20}
    assert held[0][2] == "offline"


@pytest.mark.parametrize("alias", ALIASES)
def test_pod_with_names_of_another_system_has_what_it_asks_for(node, alias):
    time, memory, unit = ALIASES[alias]
    node.kubelet.run("web", {time: 30, memory: (8 << 30) // unit})
    until(lambda: node.pids("web"))

    assert list(node.held("web").values()) == [(30, 8 << 30, "offline")]


def test_pods_of_another_system_at_once_get_their_own(node):
    time, memory, unit = ALIASES["qgpu"]
    limits = {
        "time": {time: 10},
        "memory": {memory: (2 << 30) // unit},
        "both": {time: 20, memory: (4 << 30) // unit},
        "more": {memory: (3 << 30) // unit, time: 15},
    }
    for name, asked in limits.items():
        node.kubelet.run(name, asked)
    until(lambda: all(node.pids(name) for name in limits))

    ((cores, proportion, _),) = node.held("time").values()
    assert cores == 10
    assert proportion > 4 << 30
    assert list(node.held("memory").values()) == [(0, 2 << 30, "offline")]
    assert list(node.held("both").values()) == [(20, 4 << 30, "offline")]
    assert list(node.held("more").values()) == [(15, 3 << 30, "offline")]

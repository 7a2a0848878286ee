"""A simulated host finds its containers again, and only those that run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qgpu.model import Grant, PodClass
from qgpu.planes.sim.host import SimHost
from qgpu.planes.sim.pods_file import PodsFile
from tests.daemon.claim_rig import FakeContainer

GIB = 1 << 30


@pytest.fixture
def container() -> Iterator[FakeContainer]:
    made = FakeContainer()
    yield made
    made.end()


@pytest.fixture
def host(tmp_path: Path) -> Callable[[], SimHost]:
    """Make the next host, with one card."""
    return lambda: SimHost(1, pods_file=PodsFile(tmp_path / "kept"))


@pytest.mark.root
def test_containers_are_pods_of_the_next_host(host, container):
    first = host()
    first.admit("run", {0: Grant()})
    first.admit("web", {0: Grant(PodClass.ONLINE, 20)}, container.at)
    first.amend("web", {0: Grant(PodClass.ONLINE, 30, GIB)})
    (web,) = host().pods()

    assert (web.name, web.cgroup, web.pids) == ("web", container.at, (container.process.pid,))
    assert web.grants == {0: Grant(PodClass.ONLINE, 30, GIB)}


@pytest.mark.root
def test_a_container_that_has_ended_meanwhile_is_forgotten(host, container):
    host().admit("web", {0: Grant()}, container.at)
    container.die()

    assert host().pods() == []


@pytest.mark.root
def test_a_retired_container_is_forgotten(host, container):
    first = host()
    first.admit("web", {0: Grant()}, container.at)
    first.retire("web")

    assert host().pods() == []


@pytest.mark.parametrize("content", ["", "{", "[{}]", "[7]", '[{"name": "a", "grants": {"x": {}}, "cgroup": "/"}]'])
def test_a_file_that_is_none_of_ours_holds_no_pods(host, tmp_path, content):
    (tmp_path / "kept").write_text(content)

    assert host().pods() == []

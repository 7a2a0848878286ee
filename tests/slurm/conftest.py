"""A cluster of each version of Slurm; QGPU_SLURM names versions to try, such as 22.05,26.05."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import RELEASES, Cluster

#: Each version in a process of its own, where there are several (pytest -n 2 --dist loadgroup).
VERSIONS = [
    pytest.param(version, marks=pytest.mark.xdist_group(version))
    for version in os.environ.get("QGPU_SLURM", ",".join(RELEASES)).split(",")
]


@pytest.fixture(scope="session", params=VERSIONS)
def running(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster for all tests of a version."""
    cluster = Cluster(request.param)
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    """The cluster without jobs, and as it was configured at first."""
    yield running
    running.clear()
    running.plugstack()

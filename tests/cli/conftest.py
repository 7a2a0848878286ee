"""One daemon on the simulator for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli import programs
from tests.cli.programs import Daemon


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with two simulated pGPUs."""
    with programs.daemon(tmp_path_factory.mktemp("qgpu") / "run", "--sim-gpus", "2") as running:
        yield running

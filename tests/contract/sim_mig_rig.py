"""One of two MIG instances of a simulated card under the contract suite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.contract.sim_rig import SimRig


@contextmanager
def open_rig(_directory: Path) -> Iterator[SimRig]:
    """Give a simulator of its own to a test."""
    rig = SimRig(mig=2)
    yield rig
    rig.host.close()

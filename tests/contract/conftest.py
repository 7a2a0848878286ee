"""The planes that the contract suite runs on: the simulator always, the others where they can be."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.rig import Rig

PLANES = [
    "sim",
    "sim_mig",
    pytest.param("seccomp", marks=pytest.mark.gpu),
    pytest.param("kmod_gpu", marks=pytest.mark.gpu),
    pytest.param("kmod", marks=[pytest.mark.vm, pytest.mark.quiet]),
]


@pytest.fixture(params=PLANES)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """One plane with a pGPU to itself."""
    name = f"tests.contract.{request.param}_rig"
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"plane {request.param} brings no {name}")
    module = importlib.import_module(name)
    with module.open_rig(tmp_path) as opened:
        yield opened

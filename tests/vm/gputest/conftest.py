"""The rehearsal of ``make gputest-kmod``: runs where its folder is named, in the module's VM; elsewhere nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "guest"))
collect_ignore_glob = [] if os.environ.get("QGPU_VM_BUILD") else ["test_*.py"]

if not collect_ignore_glob:
    import qg


@pytest.fixture
def driver() -> Iterator[None]:
    """Load the simulated driver."""
    with qg.driver():
        yield

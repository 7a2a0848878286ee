"""What the tests of claims share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.claim_rig import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Return a daemon's requests with claims, and their host."""
    made = Rig(tmp_path)
    yield made
    made.close()

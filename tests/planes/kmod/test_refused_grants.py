"""The kernel module lets no pod profile or draw: a grant that allows it is refused with one line."""

from __future__ import annotations

import pytest

from qgpu.errors import RefusedError
from qgpu.model import Grant
from qgpu.planes.kmod.host import KmodHost


@pytest.mark.parametrize("grant", [Grant(profiling=True), Grant(graphics=True)], ids=["profiling", "graphics"])
def test_grant_that_the_module_cannot_hold_is_refused_unasked(grant: Grant) -> None:
    host = object.__new__(KmodHost)  # it has no device: to ask one would fail otherwise

    with pytest.raises(RefusedError, match="run qgpud with --plane seccomp"):
        host._grant(1, {0: grant})

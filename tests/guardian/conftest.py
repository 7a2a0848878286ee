"""Pods behind a real filter, for the tests of what the guardian makes of their calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qgpu.guardian.accounting import object_table
from tests.guardian.pod import Pod, make_device, make_subdevice


@pytest.fixture
def pod() -> Iterator[Pod]:
    """A pod with a limit that has made nothing yet."""
    made = Pod({})
    yield made
    made.end()


@pytest.fixture
def on_card(pod: Pod) -> Pod:
    """A pod that has made a device, and a subdevice."""
    make_device(pod)
    make_subdevice(pod)
    return pod


@pytest.fixture(autouse=True)
def free_spaces(monkeypatch):
    """Let devices and address spaces take nothing of a card, where that is not what is asked about."""
    monkeypatch.setattr(object_table, "SPACE_BYTES", 0)

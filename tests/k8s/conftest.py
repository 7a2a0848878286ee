"""Tests on a real containerd run only when asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

_REAL = {"containerd", "real_kubelet"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.parent == Path(__file__).parent and item.path.parent.name in _REAL:
            item.add_marker(pytest.mark.node)

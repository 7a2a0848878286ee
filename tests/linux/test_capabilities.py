"""A thread's capabilities: dropped for good, or at hand for one call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qgpu.linux import capabilities

PERFMON, DAC = 1 << capabilities.CAP_PERFMON, 1 << capabilities.CAP_DAC_READ_SEARCH


def sets() -> tuple[int, int]:
    """Read this thread's effective and permitted capabilities."""
    lines = dict(line.split(":\t") for line in Path("/proc/thread-self/status").read_text().splitlines())
    return int(lines["CapEff"], 16), int(lines["CapPrm"], 16)


def in_thread(act: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(act).result()


def test_what_is_at_hand_has_effect_only_while_it_is_asked_for() -> None:
    had = sets()[1]
    if not had & PERFMON:
        pytest.skip("this process may not profile")

    def act() -> None:
        capabilities.keep_only(capabilities.CAP_DAC_READ_SEARCH, at_hand=capabilities.CAP_PERFMON)
        rest = had & DAC
        assert sets() == (rest, rest | PERFMON)
        with capabilities.with_one(capabilities.CAP_PERFMON):
            assert sets() == (rest | PERFMON, rest | PERFMON)
        assert sets() == (rest, rest | PERFMON)

    in_thread(act)


def test_what_was_dropped_does_not_come_back() -> None:
    def act() -> None:
        capabilities.keep_only()
        with capabilities.with_one(capabilities.CAP_PERFMON):
            assert sets() == (0, 0)

    in_thread(act)

"""A short run of every fuzzing target; the long one is ``python -m tests.fuzz``."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, end_daemon

_INPUTS = {"decode": 1000, "register": 300, "judge": 100, "wire": 100, "requests": 20}


@pytest.fixture(autouse=True)
def daemon_ends() -> Iterator[None]:
    yield
    end_daemon()


@pytest.mark.parametrize("target", _INPUTS)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1))
def test_recorded_input_gone_wrong_is_answered_or_refused(target, seed):
    attempt = TARGETS[target](Random(seed))
    for _ in range(_INPUTS[target]):
        attempt()

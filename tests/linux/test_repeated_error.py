"""Errors of operations that are retried."""

from __future__ import annotations

import pytest
from structlog.testing import CapturingLogger

from qgpu.linux.repeated_error import RepeatedError


def attempt(operation: RepeatedError, error: Exception | None) -> None:
    with operation.logged(ValueError, pgpu=1):
        if error is not None:
            raise error


def test_an_error_is_logged_once_until_it_changes_or_ends() -> None:
    log = CapturingLogger()
    operation = RepeatedError(log, "not done, trying again")
    for error in (ValueError("a"), ValueError("a"), ValueError("b"), None, ValueError("b")):
        attempt(operation, error)
    assert [(call.args, call.kwargs) for call in log.calls] == [
        (("not done, trying again",), {"error": text, "pgpu": 1}) for text in ("a", "b", "b")
    ]
    assert operation.text == "b"


def test_a_success_leaves_no_error() -> None:
    operation = RepeatedError(CapturingLogger(), "not done")
    attempt(operation, ValueError("a"))
    attempt(operation, None)
    assert operation.text == ""


def test_an_error_of_another_kind_goes_on() -> None:
    log = CapturingLogger()
    with pytest.raises(OSError, match="x"):
        attempt(RepeatedError(log, "not done"), OSError("x"))
    assert log.calls == []

"""The result of a check: its name, the verdict, what it found and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The verdict of a check: ``warn`` is good to know, ``fail`` keeps qgpu from working."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check; ``remedy`` says what to do, or is empty."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def failed(checks: Sequence[Check]) -> bool:
    """Tell whether any check failed."""
    return any(check.verdict is Verdict.FAIL for check in checks)

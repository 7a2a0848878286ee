"""What a check says: a name, how it went, what was found and how to mend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a check went: ``warn`` is something to know, ``fail`` keeps qgpu from working."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check; ``mend`` is empty when there is nothing to mend."""

    name: str
    verdict: Verdict
    found: str
    mend: str = ""


def failed(checks: Sequence[Check]) -> bool:
    """Tell whether any check failed."""
    return any(check.verdict is Verdict.FAIL for check in checks)

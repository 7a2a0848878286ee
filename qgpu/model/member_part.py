"""The default part of each member of a share group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemberPart:
    """A member's limits by default: ``sm`` in per cent of the SMs, ``memory`` in bytes; None: no limit."""

    sm: int | None = None
    memory: int | None = None

"""The limits of each member of a share group, unless the member asks for others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemberLimits:
    """A member's default limits: ``sm`` in per cent of the SMs, ``memory`` in bytes; None: no limit."""

    sm: int | None = None
    memory: int | None = None

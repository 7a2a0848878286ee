"""What a member of a share group gets that does not ask for another part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemberPart:
    """Per cent of the SMs, and bytes; None: no limit."""

    sm: int | None = None
    memory: int | None = None

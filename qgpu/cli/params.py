"""Types of options: quantities as people write them, ``none`` where something can be taken away."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

from qgpu import units
from qgpu.errors import InvalidValueError

#: Takes a quota or a limit away; distinct from an option that was not given.
NONE = "none"


class Written(click.ParamType[int]):
    """A quantity as people write it; the value is what ``read`` makes of it, or was given as a number already."""

    def __init__(self, name: str, read: Callable[[str], int]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read it."""
        if isinstance(value, int):
            return value
        try:
            return self._read(value)
        except InvalidValueError as error:
            self.fail(str(error), param, ctx)


#: A size such as 16GiB, in bytes; a time such as 100ms, in nanoseconds; a whole number of per cent such as 10%.
MEMORY = Written("size", units.parse_memory)
DURATION = Written("time", units.parse_duration)
PERCENT = Written("per cent", units.parse_percent)


class Seconds(click.FloatRange):
    """Seconds, of which there are finitely many: not "nan", which lies within all bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read it."""
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number", param, ctx)
        return seconds


class OrNone(click.ParamType[Any]):
    """Another type, or the word none."""

    def __init__(self, inner: click.ParamType[Any]) -> None:
        self._inner = inner
        self.name = f"{inner.name}|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read it."""
        return value if value == NONE else self._inner.convert(value, param, ctx)

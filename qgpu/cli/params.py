"""Option types: quantities as people write them, and ``none`` for limits that can be removed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

from qgpu import units
from qgpu.errors import InvalidValueError

#: Removes a quota or a limit; distinct from an option that was not given.
NONE = "none"


class Written(click.ParamType[int]):
    """A quantity as people write it. ``read`` converts it; a number is taken as it is."""

    def __init__(self, name: str, read: Callable[[str], int]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert a value; fail with a usage error."""
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
    """Seconds within bounds. Rejects "nan", which click's own range accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert a value; fail with a usage error."""
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
        """Convert a value; fail with a usage error."""
        return value if value == NONE else self._inner.convert(value, param, ctx)

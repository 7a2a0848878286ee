"""Types of options: quantities as people write them, ``none`` where something can be taken away."""

from __future__ import annotations

import math
from typing import Any

import click

from qgpu import units
from qgpu.errors import InvalidValueError

#: Takes a quota or a limit away; distinct from an option that was not given.
NONE = "none"


class Memory(click.ParamType[int]):
    """A size such as 16GiB, in bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read it."""
        if isinstance(value, int):
            return value
        try:
            return units.parse_memory(value)
        except InvalidValueError as error:
            self.fail(str(error), param, ctx)


class Duration(click.ParamType[int]):
    """A time such as 100ms, in nanoseconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read it."""
        if isinstance(value, int):
            return value
        try:
            return units.parse_duration(value)
        except InvalidValueError as error:
            self.fail(str(error), param, ctx)


class Percent(click.ParamType[int]):
    """A whole number of per cent such as 10%."""

    name = "per cent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read it."""
        if isinstance(value, int):
            return value
        try:
            return units.parse_percent(value)
        except InvalidValueError as error:
            self.fail(str(error), param, ctx)


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

"""Option types: quantities as people write them, and ``none`` for limits that can be removed."""

from __future__ import annotations

from typing import Any

import click

from qgpu import units
from qgpu.entry_point import Quantity
from qgpu.errors import UnknownNameError

#: Removes a quota or a limit; distinct from an option that was not given.
NONE = "none"

#: A size such as 16GiB, in bytes; a time such as 100ms, in nanoseconds; a whole number of per cent such as 10%.
MEMORY = Quantity("size", units.parse_memory_limit)
DURATION = Quantity("time", units.parse_duration)
PERCENT = Quantity("per cent", units.parse_percent)
#: How UUIDs of cards and of MIG instances begin.
UUID_KINDS = ("GPU-", "MIG-")
#: A factor such as 2.0.
FACTOR = Quantity("factor", units.parse_factor)


class Pgpu(click.ParamType[int]):
    """A pGPU by its number, or by its UUID or the beginning of it, which the daemon knows."""

    name = "gpu"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert a value; fail with a usage error. Raises UnknownNameError."""
        if isinstance(value, int) or (value.isascii() and value.removeprefix("-").isdecimal()):
            return int(value)
        if ctx is None or not value.upper().startswith(UUID_KINDS):
            self.fail(
                f"'{value}' is not a number such as 0, or a UUID such as GPU-5f2b1c5e or MIG-5f2b1c5e", param, ctx
            )
        gpus = ctx.find_root().obj.ask("gpu.list")["gpus"]
        found = [gpu["index"] for gpu in gpus if gpu["uuid"].upper().startswith(value.upper())]
        if len(found) > 1:
            self.fail(f"'{value}' begins the UUIDs of several pGPUs; write more of it", param, ctx)
        if not found:
            raise UnknownNameError(
                f"pGPU {value}: there is none of that UUID; there are: {', '.join(gpu['uuid'] for gpu in gpus)}"
            )
        return int(found[0])


#: A pGPU.
PGPU = Pgpu()
#: What help says of an option that names none; see ``context.first_gpu``.
FIRST_PGPU = "0, else the first"


class OrNone(click.ParamType[Any]):
    """Another type, or the word none."""

    def __init__(self, inner: click.ParamType[Any]) -> None:
        self._inner = inner
        self.name = f"{inner.name}|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert a value; fail with a usage error."""
        return value if value == NONE else self._inner.convert(value, param, ctx)

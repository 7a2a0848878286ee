"""Converts sizes, times and choices between what people write and bytes, nanoseconds and enumerations."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TypeVar

from qgpu.errors import InvalidValueError

_E = TypeVar("_E", bound=StrEnum)

_NUMBER = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-zµ]*)")
_BYTES = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": 1024**power for power, prefix in enumerate("KMGTPE", 1) for suffix in ("", "i", "iB", "B")
}
#: Units of bits, such as Gb.
_BITS = re.compile(r"[KMGTPE]i?b\s*$")
_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}

GIB = 1 << 30
#: The least memory limit, in bytes; less than any CUDA context takes. A compute TSG alone is charged half of it.
LEAST_LIMIT = 32 << 20


def parse_memory(text: str) -> int:
    """Read a size such as ``512MiB``, ``16G`` or ``1073741824`` (units are powers of 1024). Returns bytes.

    Raises InvalidValueError, as all functions here that read text do.
    """
    if _BITS.search(text):
        raise InvalidValueError(f"{text!r} is in bits; write bytes, such as {text.strip()[:-1]}B")
    return _parse(text, {unit.upper(): factor for unit, factor in _BYTES.items()}, "a size such as 16GiB")


def parse_memory_limit(text: str) -> int:
    """Read a memory limit in bytes like ``parse_memory``. Refuses less than CUDA needs: its unit was forgotten."""
    if (size := parse_memory(text)) < LEAST_LIMIT:
        raise InvalidValueError(
            f"{text!r} is {format_memory(size)}, {_TOO_LITTLE}; write a size with its unit, such as {_with_unit(text)}"
        )
    return size


def check_memory_limit(size: int) -> int:
    """Return a memory limit in bytes. Raises InvalidValueError if no CUDA context fits into a positive limit."""
    if 0 < size < LEAST_LIMIT:
        raise InvalidValueError(f"memory limit {format_memory(size)}: {_TOO_LITTLE}; give more")
    return size


def parse_duration(text: str) -> int:
    """Read a time such as ``100ms`` or ``1s``. Returns nanoseconds."""
    return _parse(text, {unit.upper(): factor for unit, factor in _NS.items()}, "a time such as 100ms")


def parse_percent(text: str) -> int:
    """Read a whole number of per cent such as ``10%`` or ``10``."""
    match = re.fullmatch(r"([0-9]{1,9})\s*%?", text.strip())
    if match is None:
        raise InvalidValueError(f"{text!r} is not a whole number of per cent such as 10%")
    return int(match[1])


def parse_factor(text: str) -> float:
    """Read a factor such as ``2.0``."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2]:
        raise InvalidValueError(f"{text!r} is not a factor such as 2.0")
    return float(match[1])


def parse_choice(kind: type[_E], text: str) -> _E:
    """Read one word of an enumeration. Raises InvalidValueError."""
    try:
        return kind(text)
    except ValueError:
        raise InvalidValueError(f"{text!r}: choose one of {', '.join(kind)}") from None


def format_memory(size: int) -> str:
    """Write bytes with the largest unit that leaves at least 1, such as ``140.4 GiB``."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def format_duration(duration_ns: int) -> str:
    """Write nanoseconds with the largest unit that leaves at least 1, such as ``100 ms``."""
    unit = next((unit for unit in ("s", "ms", "µs") if abs(duration_ns) >= _NS[unit]), "ns")
    return f"{duration_ns / _NS[unit]:.4g} {unit}"


def format_percent(value: int) -> str:
    """Write a whole number of per cent, such as ``30 %``."""
    return f"{value} %"


def format_factor(value: float) -> str:
    """Write a factor, such as ``1.5 times``; a factor of 1 changes nothing."""
    return "none" if value == 1 else f"{value:g} times"


def format_count(count: int) -> str:
    """Write how often something happened, such as ``once`` or ``3 times``."""
    return "once" if count == 1 else f"{count} times"


_TOO_LITTLE = f"less than any CUDA context takes (the least limit is {format_memory(LEAST_LIMIT)})"


def _with_unit(text: str) -> str:
    """Return the size that a bare number was probably meant to be."""
    number = text.strip()
    return f"{number}GiB" if number.isdecimal() and 1 <= len(number) <= 3 and int(number) else "16GiB"


def _parse(text: str, units: dict[str, int], wanted: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].upper() not in units:
        raise InvalidValueError(f"{text!r} is not {wanted}")
    return round(float(match[1]) * units[match[2].upper()])

"""Bytes, numbers and JSON made slightly wrong. Everything comes from the ``Random`` handed in, so a seed is a case."""

from __future__ import annotations

import struct
from random import Random
from typing import Any

_WORDS = (0, 1, 2, 0x7F, 0xFF, 0x1000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x40, 0x80, 0x2080, 0xA06C, 0xC86F, 0x41)
_LONGS = (0, 1, 0xFFF, 1 << 31, 1 << 32, 1 << 47, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 50, 101, 1 << 31, 1 << 64, -(1 << 63), 1.5, float("inf"), float("nan")),
    *("", "x", "web", "/", "..", "\x00", "é" * 70, "1" * 5000, "burst-share", "online"),
    *([], {}, [[]], {"0": {}}, {"0": None}, {"-1": {}}, {"٣": {}}, {"0": {"class": "online", "cores": 50}}),
)


def data(random: Random, original: bytes) -> bytes:
    """Return ``original`` with one to four changes: words, longs, bits, or another length."""
    out = bytearray(original)
    for _ in range(random.randint(1, 4)):
        kind = random.randrange(5)
        if kind == 0 and len(out) >= 4:
            struct.pack_into("<I", out, random.randrange(0, len(out) - 3, 4), random.choice(_WORDS))
        elif kind == 1 and len(out) >= 8:
            struct.pack_into("<Q", out, random.randrange(0, len(out) - 7, 4), random.choice(_LONGS))
        elif kind == 2 and out:
            out[random.randrange(len(out))] ^= 1 << random.randrange(8)
        elif kind == 3 and len(out) >= 8:
            at, to = random.randrange(0, len(out) - 3, 4), random.randrange(0, len(out) - 3, 4)
            out[to : to + 4] = out[at : at + 4]
        elif random.randrange(4) == 0:
            del out[random.randrange(len(out) + 1) :]
    return bytes(out)


def value(random: Random, depth: int = 3) -> Any:
    """Return some JSON value."""
    if depth and random.randrange(4) == 0:
        if random.randrange(2):
            return [value(random, depth - 1) for _ in range(random.randrange(4))]
        return {str(value(random, 0)): value(random, depth - 1) for _ in range(random.randrange(4))}
    return random.choice(_VALUES)


def message(random: Random, original: dict[str, Any]) -> dict[str, Any]:
    """Return a request with one to three of its values, at any depth, changed, gone or new."""
    out = dict(original)
    for _ in range(random.randint(1, 3)):
        name = random.choice([*out, "name", "gpu", "extra"])
        inner = out.get(name)
        if isinstance(inner, dict) and inner and random.randrange(2):
            out[name] = message(random, inner)
        elif random.randrange(5) == 0:
            out.pop(name, None)
        else:
            out[name] = value(random)
    return out

"""What every process may ask of RM, by driver: numbers, names and places of handles and pointers (tests/data/rm).

From NVIDIA's open kernel modules of that version: generated/g_*_nvoc.c (methods with NON_PRIVILEGED and without
INTERNAL), rmapi/resource_list.h (classes without a privilege), SDK/ctrl and SDK/class. A line is a number, the
bytes of its parameters, a name, and fields of the parameters: ``name@offset``, ``+many*stride`` for an array, ``*``
before a pointer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "data" / "rm"
_FIELD = re.compile(r"(\*?)(\w+)@(\d+)(?:\+(\d+)\*(\d+))?")

DRIVERS = sorted(path.stem.partition("-")[2] for path in _FOLDER.glob("controls-*.txt"))


@dataclass(frozen=True, slots=True)
class Recorded:
    """A control or class of one driver; places are (offset, many, stride)."""

    number: int
    size: int
    name: str
    clients: frozenset[tuple[int, int, int]]
    handles: frozenset[tuple[int, int, int]]
    pointers: frozenset[int]


def controls(driver: str) -> list[Recorded]:
    """Read the controls of a driver."""
    return _read(f"controls-{driver}.txt")


def classes(driver: str) -> list[Recorded]:
    """Read the classes of a driver."""
    return _read(f"classes-{driver}.txt")


def _read(name: str) -> list[Recorded]:
    return [_recorded(line) for line in (_FOLDER / name).read_text().splitlines()]


def _recorded(line: str) -> Recorded:
    number, size, name, *fields = line.split()
    clients, handles, pointers = set(), set(), set()
    for field in fields:
        star, what, at, many, stride = _FIELD.fullmatch(field).groups(default="")
        if star:
            pointers.add(int(at))
        else:
            (clients if "Client" in what else handles).add((int(at), int(many or 1), int(stride or 4)))
    return Recorded(int(number, 16), int(size), name, frozenset(clients), frozenset(handles), frozenset(pointers))

"""The units that the device plugin advertises: their names, and the name of the grant that a set of them stands for.

A unit is called ``<card's UUID>::<number>``, as GPU monitors expect. A grant's name lists its units, such as
``cores-0-39``, so that they are known after a restart.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from qgpu.errors import InvalidValueError, RefusedError

_UID_PREFIX = "dp-"
_NAME_MAX = 253
_DIGEST = 32


def unit_name(card: str, number: int) -> str:
    """Return the name of a unit."""
    return f"{card}::{number}"


def read_units(names: Iterable[str]) -> tuple[str, tuple[int, ...]]:
    """Return the card and numbers of units. Raises InvalidValueError; RefusedError if they are of several cards."""
    by_card: dict[str, set[int]] = {}
    for name in names:
        card, colons, number = name.partition("::")
        if not colons or not number.isdecimal():
            raise InvalidValueError(f"unit {name!r}: there is no such unit")
        by_card.setdefault(card, set()).add(int(number))
    if len(by_card) != 1:
        raise RefusedError(
            f"units of {len(by_card)} cards: a container's share lies on one card; ask for less, or wait until one "
            "card has room"
        )
    card, numbers = by_card.popitem()
    return card, tuple(sorted(numbers))


def claim_uid(resource: str, card: str, numbers: Iterable[int]) -> str:
    """Return the UID of the grant that stands for units of a resource."""
    text = f"{resource} {card} {ranges(numbers)}"
    return _UID_PREFIX + hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]


def is_device_plugins(uid: str) -> bool:
    """Tell whether a grant was prepared by the device plugin."""
    return uid.startswith(_UID_PREFIX)


def grant_name(kind: str, numbers: Iterable[int]) -> str:
    """Return the name of a grant for units of a kind; ``named_units`` reads it back. Raises RefusedError."""
    name = f"{kind}-{ranges(numbers)}"
    if len(name) > _NAME_MAX:
        raise RefusedError(
            "units: the kubelet chose them too scattered; delete a pod of this card, or ask for another amount"
        )
    return name


def named_units(name: str) -> frozenset[int]:
    """Return the numbers of the units in a grant's name; none if it names none."""
    numbers: set[int] = set()
    for stretch in name.partition("-")[2].split("."):
        if (bounds := re.fullmatch(r"(\d+)(?:-(\d+))?", stretch)) is None:
            return frozenset()
        first = int(bounds[1])
        numbers.update(range(first, int(bounds[2] or first) + 1))
    return frozenset(numbers)


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges, such as ``0-19.25``."""
    ordered = sorted(set(numbers))
    starts = [number for at, number in enumerate(ordered) if not at or ordered[at - 1] != number - 1]
    ends = [one for one, other in pairwise(ordered) if other != one + 1] + ordered[-1:]
    pairs = zip(starts, ends, strict=True)
    return ".".join(f"{first}" if first == last else f"{first}-{last}" for first, last in pairs)


def preferred(available: Iterable[str], must: Sequence[str], size: int, first_card: str = "") -> list[str]:
    """Choose units of one card: the fullest card with room for all, and there the shortest free range that holds them.

    ``first_card`` is preferred if it has room. If no card has room, any units are returned.
    """
    free: dict[str, list[int]] = {}
    names = list(available)
    for name in names:
        card, _, number = name.partition("::")
        free.setdefault(card, []).append(int(number))
    needed = {name.partition("::")[0] for name in must}
    fits = [card for card, numbers in free.items() if len(numbers) >= size and needed <= {card}]
    if not fits:
        kept = set(must)
        return [*must, *(name for name in names if name not in kept)][:size]
    card = first_card if first_card in fits else min(fits, key=lambda each: (len(free[each]), each))
    taken = {int(name.partition("::")[2]) for name in must}
    rest = _stretches([number for number in free[card] if number not in taken], size - len(taken))
    return [unit_name(card, number) for number in [*sorted(taken), *rest]]


def _stretches(numbers: Sequence[int], size: int) -> list[int]:
    """Take ``size`` numbers from the shortest range that holds them, else from the longest ranges."""
    stretches: list[list[int]] = []
    for number in sorted(numbers):
        if stretches and stretches[-1][-1] == number - 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    enough = [stretch for stretch in stretches if len(stretch) >= size]
    if enough:
        return min(enough, key=len)[:size]
    return [number for stretch in sorted(stretches, key=len, reverse=True) for number in stretch][:size]

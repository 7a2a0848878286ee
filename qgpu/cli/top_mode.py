"""How ``qgpuctl top`` shows pods at the moment, and the effect of keys on that. Pure: no terminal, no daemon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_SORTS = ("pod", "share", "quota", "memory")
_CLASSES = ("all", "online", "offline")

#: The keys, and what they do.
HELP = (
    ("q", "end"),
    ("up, down, PgUp, PgDn", "choose a pod; also Home and End"),
    ("space", "pause, go on"),
    ("s, r", "sort by pod, share, quota, memory; the other way round"),
    ("c", "all pods, online ones, offline ones"),
    ("tab, g", "choose the next pGPU (marked >); show its pods only"),
    ("?", "this, or not"),
)


@dataclass(frozen=True, slots=True)
class Mode:
    """What the user chose."""

    sort: str = "pod"
    reverse: bool = False
    only: str = "all"
    paused: bool = False
    help: bool = False
    #: The pGPU whose policy a digit sets, and whether only its pods are shown.
    gpu: int = 0
    only_gpu: bool = False
    #: The pod under the cursor, by pGPU and name; None before the cursor is first moved.
    cursor: tuple[int, str] | None = None
    #: The first row shown.
    first: int = 0
    #: The policy that waits for a yes.
    asking: str = ""
    message: str = ""
    ended: bool = False

    def saying(self, message: str) -> Mode:
        """Return the same mode with a message below the table."""
        return replace(self, message=message)


def settled(mode: Mode, now: Mapping[str, Any]) -> Mode:
    """Return the same mode with a pGPU that is there: the first one, if the chosen one is not."""
    numbers = [gpu["index"] for gpu in now["gpus"]]
    if mode.gpu in numbers or not numbers:
        return mode
    if mode.asking:
        mode = replace(mode, asking="").saying(f"unchanged: pGPU {mode.gpu} is gone")
    return replace(mode, gpu=numbers[0])


def pressed(
    mode: Mode, key: str, now: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], height: int
) -> tuple[Mode, str | None]:
    """Return the mode after a key, and the policy to set if the key confirmed one.

    ``rows`` are those shown, in order, and ``height`` is how many of them fit.
    """
    if mode.asking:
        asked = replace(mode, asking="", message="" if key == "y" else "unchanged")
        return asked, mode.asking if key == "y" else None
    if key == "resize":
        return mode, None
    mode = mode.saying("")
    if key in ("q", "Q", "\x03", "\x04"):
        return replace(mode, ended=True), None
    moves = {
        "up": -1,
        "k": -1,
        "down": 1,
        "j": 1,
        "pgup": -height,
        "pgdn": height,
        "home": -len(rows),
        "end": len(rows),
    }
    if key in moves:
        return _moved(mode, rows, moves[key], height), None
    if key in (" ", "p"):
        return replace(mode, paused=not mode.paused), None
    if key == "s":
        return replace(mode, sort=_after(_SORTS, mode.sort)), None
    if key == "r":
        return replace(mode, reverse=not mode.reverse), None
    if key == "c":
        return replace(mode, only=_after(_CLASSES, mode.only)), None
    if key == "g":
        return replace(mode, only_gpu=not mode.only_gpu, first=0), None
    if key == "\t":
        return _next_gpu(mode, [gpu["index"] for gpu in now["gpus"]]), None
    if key in ("?", "h"):
        return replace(mode, help=not mode.help), None
    return _asked(mode, key, now), None


def chosen(mode: Mode, shares: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows to show, in order."""
    keys = {
        "share": lambda row: -row["share"],
        "quota": lambda row: -(row["cores"] or 0),
        "memory": lambda row: -row["held"],
    }
    rows = [row for row in shares if mode.only in ("all", row["class"])]
    rows = [row for row in rows if row["gpu"] == mode.gpu] if mode.only_gpu else rows
    if mode.sort in keys:  # otherwise they stay sorted by pGPU, online pods first, then name
        rows.sort(key=keys[mode.sort])
    return rows[::-1] if mode.reverse else rows


def first_row(mode: Mode, rows: Sequence[Mapping[str, Any]], height: int) -> int:
    """Return the first row to show, so that the cursor's is shown and no line stays empty."""
    at = _at(mode, rows)
    first = mode.first if at is None else min(max(mode.first, at - height + 1), at)
    return max(0, min(first, len(rows) - height))


def _next_gpu(mode: Mode, numbers: Sequence[int]) -> Mode:
    if len(numbers) < 2:
        return mode.saying(f"there is no other pGPU than {mode.gpu}")
    return replace(mode, gpu=_after(numbers, mode.gpu))


def _asked(mode: Mode, key: str, now: Mapping[str, Any]) -> Mode:
    """Have the page ask before a digit sets a policy: digits are pressed by mistake."""
    policy = {str(number): name for name, number in now["policies"].items()}.get(key)
    gpu = next((gpu for gpu in now["gpus"] if gpu["index"] == mode.gpu), None)
    if policy is None:
        return mode.saying(f"no policy has number {key}; ? lists them") if key.isdecimal() else mode
    if gpu is None:
        return mode.saying(f"pGPU {mode.gpu} is gone; choose another with tab")
    if gpu["policy"] == policy:
        return mode.saying(f"pGPU {mode.gpu} is shared by {policy} already")
    return replace(mode, asking=policy)


def _moved(mode: Mode, rows: Sequence[Mapping[str, Any]], by: int, height: int) -> Mode:
    if not rows:
        return mode.saying("there is no pod to choose")
    at = _at(mode, rows)
    to = (0 if by > 0 else len(rows) - 1) if at is None and abs(by) == 1 else (at or 0) + by
    row = rows[max(0, min(len(rows) - 1, to))]
    moved = replace(mode, cursor=(row["gpu"], row["pod"]))
    return replace(moved, first=first_row(moved, rows, height))


def _at(mode: Mode, rows: Sequence[Mapping[str, Any]]) -> int | None:
    return next((at for at, row in enumerate(rows) if (row["gpu"], row["pod"]) == mode.cursor), None)


def _after(values: Sequence[Any], value: Any) -> Any:
    return values[(values.index(value) + 1) % len(values)] if value in values else values[0]

"""The page of ``qgpuctl top`` and the effect of keys on it. Pure: no terminal, no daemon."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from qgpu import units
from qgpu.cli.output import cores, memory, table

_HEADER = ("GPU", "POD", "CLASS", "QUOTA", "SHARE", "", "HELD", "LIMIT", "BUSY")
_BAR = 20
_SORTS = ("pod", "share", "quota", "memory")
_CLASSES = ("all", "online", "offline")
_KEYS = "q end   space pause   s sort   r reverse   c class   tab pGPU   digit policy   ? help"
_HELP = (
    "q      end",
    "space  pause, go on",
    "s      sort by pod, share, quota, memory",
    "r      the other way round",
    "c      all pods, online ones, offline ones",
    "tab    choose the next pGPU (marked >)",
    "?      this, or not",
)


@dataclass(frozen=True, slots=True)
class Mode:
    """How the page shows pods at the moment."""

    sort: str = "pod"
    reverse: bool = False
    only: str = "all"
    paused: bool = False
    help: bool = False
    #: The pGPU whose policy a digit sets.
    gpu: int = 0
    message: str = ""
    ended: bool = False

    def saying(self, message: str) -> Mode:
        """Return the same mode with a message below the table."""
        return replace(self, message=message)


def pressed(mode: Mode, key: str, now: dict[str, Any]) -> tuple[Mode, str | None]:
    """Return the mode after a key, and the policy to set if the key chose one."""
    mode = mode.saying("")
    if key in ("q", "Q", "\x03", "\x04"):
        return replace(mode, ended=True), None
    if key in (" ", "p"):
        return replace(mode, paused=not mode.paused), None
    if key == "s":
        return replace(mode, sort=_after(_SORTS, mode.sort)), None
    if key == "r":
        return replace(mode, reverse=not mode.reverse), None
    if key == "c":
        return replace(mode, only=_after(_CLASSES, mode.only)), None
    if key == "\t":
        return replace(mode, gpu=_after([gpu["index"] for gpu in now["gpus"]], mode.gpu)), None
    if key in ("?", "h"):
        return replace(mode, help=not mode.help), None
    return mode, {str(number): name for name, number in now["policies"].items()}.get(key)


def page(
    mode: Mode, now: dict[str, Any], shares: list[dict[str, Any]], *, width: int = 0, interactive: bool = False
) -> list[str]:
    """Return the lines of the page, cut to ``width`` if given."""
    state = "  (paused)" if mode.paused else ""
    lines = [f"qgpu {now['version']} on {now['plane']}{state}"]
    lines += [_gpu_line(gpu, shares, chosen=interactive and gpu["index"] == mode.gpu) for gpu in now["gpus"]]
    lines += ["", *table(_HEADER, [_row(share) for share in _chosen(mode, shares)])]
    if interactive:
        order = f"sorted by {mode.sort}{', reversed' if mode.reverse else ''}; {mode.only} pods"
        policies = (f"{number}      share it by {name}" for name, number in now["policies"].items())
        lines += ["", mode.message or order, *((*_HELP, *policies) if mode.help else (_KEYS,))]
    return [line[:width] for line in lines] if width else lines


def _chosen(mode: Mode, shares: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = {
        "share": lambda row: -row["share"],
        "quota": lambda row: -(row["cores"] or 0),
        "memory": lambda row: -row["held"],
    }
    rows = [row for row in shares if mode.only in ("all", row["class"])]
    if mode.sort in keys:  # otherwise they stay sorted by pGPU, online pods first, then name
        rows.sort(key=keys[mode.sort])
    return rows[::-1] if mode.reverse else rows


def _gpu_line(gpu: dict[str, Any], shares: list[dict[str, Any]], *, chosen: bool) -> str:
    used = sum(share["share"] for share in shares if share["gpu"] == gpu["index"])
    mark = "> " if chosen else "  "
    line = (
        f"{mark}pGPU {gpu['index']} {gpu['name']}: {gpu['policy']}, online {gpu['online_policy']}, "
        f"period {units.format_duration(gpu['period_ns'])}, {used:.1%} in use"
    )
    return f"{line}, {gpu['trouble']}" if gpu["trouble"] else line


def _row(share: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(share["gpu"]),
        share["pod"],
        share["class"],
        cores(share["cores"]),
        f"{share['share']:6.1%}",
        _bar(share["share"], share["cores"]),
        memory(share["held"]),
        memory(share["memory"]),
        "yes" if share["busy"] else "no",
    )


def _bar(share: float, quota: int | None) -> str:
    """Draw a share as a bar, with a stroke at the quota."""
    bar = ("#" * round(share * _BAR)).ljust(_BAR, ".")
    if quota is None:
        return bar
    at = min(_BAR - 1, round(quota / 100 * _BAR))
    return f"{bar[:at]}|{bar[at + 1 :]}"


def _after(values: Any, value: Any) -> Any:
    return values[(list(values).index(value) + 1) % len(values)] if value in values else values[0]

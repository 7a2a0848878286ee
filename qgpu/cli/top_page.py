"""The page of ``qgpuctl top``: what is shown, and where, in a terminal of any size. Pure: no terminal, no daemon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qgpu import units
from qgpu.cli.output import memory
from qgpu.cli.styled_text import Line, Style, cut, line, plain
from qgpu.cli.top_mode import HELP, Mode, chosen, first_row
from qgpu.cli.top_table import Shares, layout, waits

#: The lines around the table: title, header, details and keys.
_AROUND = 4
#: The most of the screen that lines of pGPUs may take.
_GPU_PART = 3


@dataclass(frozen=True, slots=True)
class View:
    """What a page shows: the daemon's last answer, the shares since the one before, and shares before that."""

    now: Mapping[str, Any]
    shares: Sequence[Mapping[str, Any]]
    history: Mapping[tuple[int, str], Shares] = field(default_factory=dict)
    #: Why the daemon does not answer; empty while it does.
    lost: str = ""


def table(view: View, width: int) -> str:
    """Return all pods as plain text in lines of at most ``width`` characters; 0 is any, for files and programs."""
    head = [_gpu(gpu, view.shares, width, chosen=False) for gpu in view.now["gpus"]]
    columns = layout(view.shares, width, history=False)
    rows = [columns.header(), *(columns.row(row, view.history, chosen=False) for row in chosen(Mode(), view.shares))]
    lines = [line(f"qgpu {view.now['version']} on {view.now['plane']}"), *head, line(""), *rows]
    return "\n".join(plain(cut(each, width) if width else each).rstrip() for each in lines)


def room(view: View, height: int) -> int:
    """Return how many rows of pods fit on a page of ``height`` lines."""
    return max(1, height - _AROUND - len(_gpu_window(Mode(), view, height)))


def page(mode: Mode, view: View, width: int, height: int) -> list[Line]:
    """Return the lines of a page: at most ``height``, each at most ``width`` characters."""
    rows, fit = chosen(mode, view.shares), room(view, height)
    first = first_row(mode, rows, fit)
    shown = rows[first : first + fit]
    columns = layout(rows, width)
    if mode.help:
        body = _help(view)[: fit + 1]
    else:
        body = [columns.header()]
        for row in shown:
            body.append(columns.row(row, view.history, chosen=(row["gpu"], row["pod"]) == mode.cursor))
        if not rows:
            body.append(line("No pods. Start one: qgpuctl run --cores 50 -- COMMAND", Style.QUIET))
    body += [line("")] * (fit + 1 - len(body))
    lines = [
        _title(mode, view, width, (first, len(shown), len(rows))),
        *(_gpu(gpu, view.shares, width, chosen=gpu["index"] == mode.gpu) for gpu in _gpu_window(mode, view, height)),
        *body,
        _details(mode, view, rows),
        _keys(width),
    ]
    return [cut(each, width) for each in lines[: height - 2] + lines[-2:]][-height:]


def _title(mode: Mode, view: View, width: int, rows: tuple[int, int, int]) -> Line:
    first, shown, total = rows
    name = f"qgpu {view.now['version']} on {view.now['plane']}"
    if view.lost:
        return ((name, Style.HEADING), (f"  no answer, trying again: {view.lost}", Style.BAD))
    order = f"by {mode.sort}{', reversed' if mode.reverse else ''}"
    only = "" if mode.only == "all" else f", {mode.only}"
    only += f", pGPU {mode.gpu} only" if mode.only_gpu else ""
    where = f"pods {first + 1} to {first + shown} of {total}" if shown < total else _pods(total)
    right = f"{where} {order}{only}{'  (paused)' if mode.paused else ''}"
    if len(name) + 2 + len(right) > width:
        return line(right, Style.HEADING)
    return ((name, Style.HEADING), (right.rjust(width - len(name)), Style.QUIET))


def _gpu_window(mode: Mode, view: View, height: int) -> Sequence[Mapping[str, Any]]:
    """Return the pGPUs to show: all, or those around the chosen one if they would fill the screen."""
    gpus = view.now["gpus"]
    most = max(1, min(height // _GPU_PART, height - _AROUND - 1))
    at = next((at for at, gpu in enumerate(gpus) if gpu["index"] == mode.gpu), 0)
    first = max(0, min(at - most // 2, len(gpus) - most))
    return list(gpus[first : first + most])


def _gpu(gpu: Mapping[str, Any], shares: Sequence[Mapping[str, Any]], width: int, *, chosen: bool) -> Line:
    """Return a pGPU's line; where it is too long, what matters least is left out."""
    there = [row for row in shares if row["gpu"] == gpu["index"]]
    short = sum(waits(row) for row in there)
    used = min(1.0, sum(row["share"] for row in there))
    busy = gpu["utilization"]
    style = Style.HEADING if chosen else Style.PLAIN
    parts = [
        (0, f"{'> ' if chosen else '  '}pGPU {gpu['index']}", style),
        (2, f" {gpu['name']}", style),
        (0, f": {gpu['policy']}", style),
        (0, f", {used:.0%} used", Style.PLAIN),
        (3, "" if busy is None else f", {busy:.0%} utilization", Style.PLAIN),
        (4, f", {memory(sum(row['held'] for row in there))} of {memory(gpu['memory'])}", Style.PLAIN),
        (5, f", {_pods(len(there))}", Style.PLAIN),
        (1, f", {short} below quota" if short else "", Style.BAD),
        (7, f", online {gpu['online_policy']}", Style.QUIET),
        (6, f", period {units.format_duration(gpu['period_ns'])}", Style.QUIET),
    ]
    if gpu["problem"]:
        parts = [*parts[:3], (0, f": {gpu['problem']}", Style.BAD)]
    for least in range(7, 0, -1):
        if not width or sum(len(text) for _, text, _ in parts) <= width:
            break
        parts = [part for part in parts if part[0] != least]
    return tuple((text, kind) for _, text, kind in parts if text)


def _pods(count: int) -> str:
    return "1 pod" if count == 1 else f"{count} pods"


def place(row: Mapping[str, Any]) -> str:
    """Say where a pod is that is not on its card, and how much of its memory; empty for a pod that runs."""
    state, size = row["state"], row["suspended_memory"]
    if state == "running":
        return ""
    away = "in host memory" if state in ("suspended", "waiting") else "on the way"
    return f"{state}, {memory(size)} {away}" if size else str(state)


def _details(mode: Mode, view: View, rows: Sequence[Mapping[str, Any]]) -> Line:
    """Return the line below the table: a question, a message, or all that is known of the pod under the cursor."""
    if mode.asking:
        policy = next(gpu["policy"] for gpu in view.now["gpus"] if gpu["index"] == mode.gpu)
        return line(f" pGPU {mode.gpu}: {policy} -> {mode.asking}? y: yes, any other key: no ", Style.QUESTION)
    if mode.message:
        return line(mode.message, Style.NOTED)
    row = next((row for row in rows if (row["gpu"], row["pod"]) == mode.cursor), None)
    if row is None:
        below = sum(waits(each) for each in rows)
        return line(f"{below} below quota; choose one with the arrow keys to see why" if below else "", Style.QUIET)
    facts = [place(row)] if place(row) else []
    if row["below_quota"]:
        facts.append(f"below its quota: {row['below_quota_reason']}")
    if row["problem"]:
        facts.append(row["problem"])
    if (gated := row["gated"]) is not None:
        facts.append(f"gate closed {gated:.0%}")
    if (wait_ns := row["expected_wait_p99_ns"]) is not None:
        facts.append(f"p99 + {units.format_duration(wait_ns)}")
    facts.append(f"{memory(row['held'])} of {memory(row['memory'])}")
    return ((f"{row['pod']}: ", Style.HEADING), ("; ".join(facts), Style.BAD if waits(row) else Style.PLAIN))


def _keys(width: int) -> Line:
    keys = (
        "q end",
        "? help",
        "up/down pod",
        "space pause",
        "s sort",
        "c class",
        "tab pGPU",
        "digit policy",
        "r reverse",
    )
    text = ""
    for key in keys:
        text = more if len(more := f"{text}   {key}" if text else key) <= width else text
    return line(text, Style.QUIET)


def _help(view: View) -> list[Line]:
    policies = (
        (str(number), f"share the pGPU by {name}, after a yes") for name, number in view.now["policies"].items()
    )
    marks = (("!", "a pod that waits for part of its quota"), ("~", "one that asks for less, or is guaranteed none"))
    listed = (*HELP, *policies, *marks)
    wide = max(len(key) for key, _ in listed)
    return [((f"{key.ljust(wide)}  ", Style.HEADING), (text, Style.PLAIN)) for key, text in listed]

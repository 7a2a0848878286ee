"""What to say of a refused call that a debugger, a profiler or a graphics program makes: whose it is, why, what helps.

The rows of controls and classes say what is refused. A call that is allowed, such as those of torch.profiler and nsys,
is none of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from qgpu.guardian.rules import classes, controls
from qgpu.guardian.rules.rows import Why


class Tool(NamedTuple):
    """A kind of tool: how it is called, the classes that only it uses, and what its user can do."""

    name: str
    classes: frozenset[int]
    remedy: str


_OUTSIDE = "run the program outside of pods, on a card without any"
_DEBUGGER = Tool("debugger (cuda-gdb)", frozenset({classes.DEBUGGER, 0x00DB}), f"use compute-sanitizer, or {_OUTSIDE}")
_CHECKER = Tool(
    "memory checker (compute-sanitizer)", frozenset(), f"run the pod with qgpuctl run --allow-profiling, or {_OUTSIDE}"
)
_PROFILER = Tool(
    "profiler of hardware counters (ncu)",
    frozenset({0x90CC, 0xB0CC, 0xB1CC, 0xB2CC}),
    "run the pod with qgpuctl run --allow-profiling, or use a profiler without counters, such as torch.profiler",
)
_GRAPHICS = Tool(
    "graphics program (OpenGL, Vulkan)",
    frozenset(row.number for row in classes.ROWS if row.why is Why.GRAPHICS),
    "run the pod with qgpuctl run --allow-graphics, which lets a long draw hold up other pods",
)
TOOLS = (_DEBUGGER, _CHECKER, _PROFILER, _GRAPHICS)
#: The refusal of a client to a process that a debugger traces.
DEBUGGED = "client of a process under a debugger"
#: The refusal of a control file for events.
LINKED = "control file registered with a control file"


class RefusedTool(NamedTuple):
    """A tool's call that is refused, and the reason."""

    tool: Tool
    reason: str


def _calls() -> Iterator[tuple[str, RefusedTool]]:
    tool_of = {number: tool for tool in TOOLS for number in tool.classes}
    yield DEBUGGED, RefusedTool(_DEBUGGER, "nothing can stop threads that a debugger traces while RM makes a client")
    yield LINKED, RefusedTool(_CHECKER, Why.PROFILING.value)
    for control in controls.ROWS:
        tool = _PROFILER if control.why is Why.PROFILING else tool_of.get(control.number >> 16)
        if tool is not None and not control.why.allowed:
            yield controls.name(control.number), RefusedTool(tool, control.why.value)
    for row in classes.ROWS:
        if row.number in tool_of and not row.why.allowed:
            yield row.name, RefusedTool(tool_of[row.number], row.why.value)


#: By the name under which the refusal is counted.
_CALLS = dict(_calls())


def refused(what: str) -> RefusedTool | None:
    """Return whose call a refusal was, by the name under which it is counted; None if it was no tool's."""
    return _CALLS.get(what)


def advice(refusals: Iterable[str]) -> list[str]:
    """Return a line for each kind of tool that was refused: with the reason of the first call, and the remedy."""
    first: dict[str, RefusedTool] = {}
    for what in refusals:
        if (found := refused(what)) is not None:
            first.setdefault(found.tool.name, found)
    return [f"a {tool.name} is refused in pods, because {reason}: {tool.remedy}" for tool, reason in first.values()]

"""A debugger or profiler that is refused is told apart from other refusals, with the reason and the remedy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.guardian.rules import classes, controls, tools
from qgpu.guardian.rules.rows import Why


@pytest.mark.parametrize(
    ("call", "tool", "reason"),
    [
        ("NV83DE_CTRL_CMD_DEBUG_READ_MEMORY", "cuda-gdb", "reaches memory"),
        ("NV83DE_CTRL_CMD_DEBUG_SUSPEND_CONTEXT", "cuda-gdb", "it schedules"),
        (tools.DEBUGGED, "cuda-gdb", "that a debugger traces"),
        ("MAXWELL_PROFILER_DEVICE", "ncu", "only pods with --allow-profiling"),
        ("NV2080_CTRL_CMD_FB_FLUSH_GPU_CACHE", "ncu", "only pods with --allow-profiling"),
        ("NVB0CC_CTRL_CMD_RESERVE_HES", "ncu", "it changes something"),
        ("HOPPER_A", "OpenGL", "only pods with --allow-graphics"),
    ],
)
def test_refused_tool_is_named_with_reason_and_remedy(call, tool, reason):
    (line,) = tools.advice({call: 3})

    remedy = {
        "cuda-gdb": "use compute-sanitizer",
        "ncu": "run the pod with qgpuctl run --allow-profiling",
        "OpenGL": "run the pod with qgpuctl run --allow-graphics",
    }[tool]
    assert (tool in line, reason in line, remedy in line) == (True, True, True)


def test_refused_calls_of_tools_are_known_and_no_allowed_ones():
    of = {number: tool for tool in tools.TOOLS for number in tool.classes}
    for row in controls.ROWS:
        found = tools.refused(controls.name(row.number))
        of_a_tool = row.number >> 16 in of or row.why is Why.PROFILING
        assert (found is not None) == (of_a_tool and not row.why.allowed)
    for row in classes.ROWS:
        assert (tools.refused(row.name) is not None) == (row.number in of and not row.why.allowed)


@given(st.lists(st.sampled_from([controls.name(row.number) for row in controls.ROWS]), unique=True))
def test_each_kind_of_tool_has_one_line(refusals):
    kinds = {found.tool for what in refusals if (found := tools.refused(what)) is not None}

    assert len(tools.advice(refusals)) == len(kinds)

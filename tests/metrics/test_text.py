"""The exposition format: what is written is what a reader of the format finds."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from qgpu.metrics.text import Family, Kind, render

_SERIES = re.compile(r'^name\{(\w+)="((?:[^"\\\n]|\\.)*)"\} (\S+)$')
_ESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@given(st.text(st.characters(codec="utf-8")), st.one_of(st.integers(0, 2**60), st.floats(allow_nan=False)))
def test_any_label_and_number_can_be_read_back(label: str, number: float) -> None:
    family = Family("name", Kind.GAUGE, "what it is")
    family.add(number, pod=label)
    help_line, type_line, line = render([family]).decode().removesuffix("\n").split("\n")
    match = _SERIES.match(line)

    assert (help_line, type_line) == ("# HELP name what it is", "# TYPE name gauge")
    assert match is not None
    assert re.sub(r"\\.", lambda found: _ESCAPED[found[0]], match[2]) == label
    assert float(match[3]) == float(number)


def test_a_family_without_series_is_not_mentioned() -> None:
    assert render([Family("name", Kind.COUNTER, "what it is")]) == b"\n"

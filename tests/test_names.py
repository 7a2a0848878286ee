"""Names of tests: each says condition and outcome, short enough to read in a list of failures."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent

#: The longest name of a test function, with its ``test_``.
MAX_LENGTH = 60


def names() -> Iterator[str]:
    """Yield ``path::name`` of every test function."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path.relative_to(TESTS)}::{node.name}"


def test_names_of_tests_have_at_most_60_characters() -> None:
    assert [name for name in names() if len(name.split("::")[1]) > MAX_LENGTH] == []


def test_names_of_tests_are_unique_in_their_file() -> None:
    """Otherwise the second definition replaces the first, which never runs."""
    assert [name for name, count in Counter(names()).items() if count > 1] == []

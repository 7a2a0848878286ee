"""The first blocks that a new user pastes, pasted whole into a shell: nothing comes too early, and the end is short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import documents, pasting
from tests.cli.programs import environment
from tests.pasting import Terminal

ROOT = Path(__file__).parent.parent.parent
#: The end that the README names: the kill of its three jobs.
_END = re.search(r"`(kill %3 %2 %1)`", (ROOT / "README.md").read_text())


def block(document: str, first: str) -> tuple[str, ...]:
    """Return the commands of a document's block whose first line begins so."""
    (found,) = (
        each.commands
        for each in documents.blocks(ROOT)
        if each.document == document and each.commands and each.commands[0].startswith(first)
    )
    return found


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A shell in a folder that looks like the repository's root after ``make demo``."""
    pasting.programs(tmp_path / ".venv/bin")
    opened = Terminal(tmp_path, environment({"PYTHONPATH": str(ROOT), "QGPU_RUNTIME_DIR": str(tmp_path / "run")}))
    yield opened
    opened.close()


def test_the_readmes_first_block_can_be_pasted_whole(terminal: Terminal) -> None:
    assert _END is not None
    said = pasting.readme(terminal, block("README.md", "export PATH="), _END[1])

    assert "; start it: " not in terminal.shown  # on a slow machine it says that it waits, which is no error
    assert "hung up" not in terminal.shown
    assert said < 2000, "a reader wants an end, not the loads' windows"


def test_the_wheels_block_can_be_pasted_whole(terminal: Terminal) -> None:
    install, *rest = block("docs/install.md", "python3 -m venv /opt/qgpu")
    assert "pip install dist/qgpu-*.whl" in install

    pasting.status(terminal, [line.replace("/opt/qgpu/bin", "$PWD/.venv/bin") for line in rest])

    assert "; start it: " not in terminal.shown

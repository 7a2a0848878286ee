"""docs/troubleshooting.md against the code: no message is explained that is not there, and none stays unexplained."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs/troubleshooting.md"
#: Refused values say their bounds; what ends a programmer's own mistake is for its traceback.
EXEMPT_KINDS = {"InvalidValueError", "UnknownNameError", "ConfigError", "OSError", "WireError", "RmError"}
#: Rooms whose messages are for those who simulate or measure, in a terminal.
EXEMPT_ROOMS = {"demo", "load", "sim"}
_WHAT_TO_DO = re.compile(r"[;?]|choose one of|pip install")


def template(node: ast.expr) -> str | None:
    """Return a message as the document writes it, with … for what varies; None for what is no literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def messages() -> Iterator[tuple[str, str, str]]:
    """Yield place, kind and template of every error raised and every warning logged."""
    for path in sorted((ROOT / "qgpu").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            kind, arguments = None, []
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                kind, arguments = node.exc.func.id, node.exc.args
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                of = node.func.value
                if isinstance(of, ast.Name) and of.id == "_log" and node.func.attr in ("warning", "error", "exception"):
                    kind, arguments = "log", node.args[:1]
            text = template(arguments[-1]) if kind and arguments else None
            if kind is not None and text is not None:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", kind, text


def explained() -> list[str]:
    """Return the messages that the document explains."""
    text = DOCUMENT.read_text().replace("\n", " ")
    return re.findall(r"\*\*(?:TROUBLE: )?`([^`]+)`", text)


ALL = list(messages())
CODE = "".join(path.read_text() for path in (ROOT / "qgpu").rglob("*.py"))


@pytest.mark.parametrize("message", explained())
def test_a_message_that_is_explained_is_in_the_code(message: str) -> None:
    pieces = [piece for piece in message.split("…") if piece.strip()]

    known = message in {text for _, _, text in ALL}
    assert known or all(piece in CODE for piece in pieces), "the program does not print it (any more)"


@pytest.mark.parametrize(("place", "kind", "message"), ALL, ids=[place for place, _, _ in ALL])
def test_every_message_says_what_to_do_or_is_explained(place: str, kind: str, message: str) -> None:
    room = place.split("/")[1].removesuffix(".py").partition(":")[0]
    if kind in EXEMPT_KINDS or room in EXEMPT_ROOMS or (kind != "log" and _WHAT_TO_DO.search(message)):
        return

    assert message in explained(), (
        f"{place}: say in it what to do (after a semicolon), or explain it in {DOCUMENT.name}"
    )

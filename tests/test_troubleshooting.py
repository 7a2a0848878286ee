"""docs/troubleshooting.md against the code: no message is explained that is not there, and none stays unexplained."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs/troubleshooting.md"
#: Refused values say their bounds; what Python itself calls an error is for our own code to handle.
EXEMPT_KINDS = {"InvalidValueError", "UnknownNameError", "ConfigError", "WireError", "RmError", *dir(builtins)}
#: Rooms whose messages are for those who simulate or measure, in a terminal.
EXEMPT_ROOMS = {"demo", "load", "sim"}
#: Between two parts of one C string.
_ADJACENT = re.compile(r'"\s*\n\s*"')
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
    return re.findall(r"\*\*(?:PROBLEM: )?`([^`]+)`", text)


def clear(place: str, kind: str, message: str) -> bool:
    """Tell whether a message needs no explanation."""
    room = place.split("/")[1].removesuffix(".py").partition(":")[0]
    return kind in EXEMPT_KINDS or room in EXEMPT_ROOMS or (kind != "log" and bool(_WHAT_TO_DO.search(message)))


def test_every_message_that_is_explained_is_in_the_code() -> None:
    printed = {text for _, _, text in messages()}
    code = "".join(path.read_text() for path in (ROOT / "qgpu").rglob("*.py"))
    # the module's lines in the kernel's log; the kernel puts the module's name in front
    module = "".join(_ADJACENT.sub("", path.read_text()) for path in (ROOT / "kmod").glob("*.c"))

    def known(message: str) -> bool:
        if message.startswith("qgpu: "):
            return all(piece in module for piece in message.removeprefix("qgpu: ").split("…") if piece.strip())
        return message in printed or all(piece in code for piece in message.split("…") if piece.strip())

    assert [message for message in explained() if not known(message)] == []


def test_every_message_says_what_to_do_or_is_explained() -> None:
    there = set(explained())
    puzzling = [
        f"{place}: {text}" for place, kind, text in messages() if not clear(place, kind, text) and text not in there
    ]

    assert puzzling == [], f"say in each what to do (after a semicolon), or explain it in {DOCUMENT.name}"

"""Lines of text with styles by meaning; the terminal decides how a style looks."""

from __future__ import annotations

from enum import Enum, auto


class Style(Enum):
    """What a piece of text means to its reader."""

    PLAIN = auto()
    HEADING = auto()
    QUIET = auto()
    ONLINE = auto()
    GOOD = auto()
    NOTED = auto()
    BAD = auto()
    #: Where the cursor is.
    CHOSEN = auto()
    #: A question that waits for its answer.
    QUESTION = auto()


#: Pieces of one line, from the left.
Line = tuple[tuple[str, Style], ...]


def line(text: str, style: Style = Style.PLAIN) -> Line:
    """Return a line of one style."""
    return ((text, style),)


def plain(pieces: Line) -> str:
    """Return a line's text."""
    return "".join(text for text, _ in pieces)


def cut(pieces: Line, width: int) -> Line:
    """Return the part of a line that fits into ``width`` characters."""
    kept, left = [], width
    for text, style in pieces:
        if left > 0:
            kept.append((text[:left], style))
        left -= len(text)
    return tuple(kept)


def shortened(name: str, width: int) -> str:
    """Return a name that fits into ``width`` characters: the middle goes, because names differ at either end."""
    if len(name) <= width:
        return name
    if width < 3:
        return name[:width]
    head = width // 2
    return f"{name[:head]}…{name[len(name) - (width - head - 1) :]}"

"""Finds the user to whom a user id is subordinate: in user namespaces, a user has processes with thousands of ids.

The host's table /etc/subuid lists them (subuid(5)). Ids from other sources, such as a directory service, count as
users of their own.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

TABLE = Path("/etc/subuid")


def owner(uid: int) -> str:
    """Return the table's name of the user to whom an id is subordinate; the id itself if there is none."""
    try:
        found = os.stat(TABLE)
    except OSError:
        return str(uid)
    for first, end, name in _ranges(TABLE, found.st_ino, found.st_mtime_ns, found.st_size):
        if first <= uid < end:
            return name
    return str(uid)


@lru_cache(maxsize=1)
def _ranges(table: Path, *_version: int) -> list[tuple[int, int, str]]:
    """Read a version of the table: for each range its first id, the id after its last one, and its user."""
    ranges = []
    with suppress(OSError):
        for line in table.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                name, first, count = line.split(":")
                ranges.append((int(first), int(first) + int(count), name))
    return ranges

"""Names the user of the host behind a user id: by user namespaces, one user can have processes of thousands of ids.

The host's table says which (subuid(5)). Ids that come from elsewhere, such as a directory service, count as users.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

TABLE = Path("/etc/subuid")


def owner(uid: int) -> str:
    """Return the name, in the table, of the user to whom an id is subordinate; the id itself if it is to nobody."""
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
    """Read a version of the table: the first id of each range, the one behind it, and whose it is."""
    ranges = []
    with suppress(OSError):
        for line in table.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                name, first, count = line.split(":")
                ranges.append((int(first), int(first) + int(count), name))
    return ranges

"""A lock that only processes of its owner can take: on a file that nobody else may open.

Anyone who can open a file or a directory can also lock it (flock(2)). A user who waits for the lock gets it when its
holder restarts.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_MODE = 0o600


def lock(path: Path) -> int:
    """Lock a file, which is made if need be, for as long as the returned descriptor is open.

    Raises BlockingIOError if it is locked already, OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
    try:
        os.fchmod(fd, _MODE)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd

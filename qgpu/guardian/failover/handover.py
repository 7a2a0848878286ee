"""The descriptors in which a guardian leaves what the next one needs: its journal, and its sets of open files."""

from __future__ import annotations

import os
from typing import NamedTuple


class StateFds(NamedTuple):
    """Whoever has copies of these can let another guardian go on. Mode: memfd, epoll."""

    journal: int
    files: int

    @classmethod
    def new(cls) -> StateFds:
        """Make a state with nothing in it."""
        from qgpu.guardian.failover.journal import Journal
        from qgpu.linux.open_file_set import FileSets

        return cls(Journal().fd, FileSets().fd)

    def copy(self) -> StateFds:
        """Return descriptors of our own for the same state."""
        return StateFds(*map(os.dup, self))

    def is_same(self, other: StateFds) -> bool:
        """Tell whether two are of one journal."""
        return os.path.sameopenfile(self.journal, other.journal)

    def close(self) -> None:
        """Let go of both."""
        for fd in self:
            os.close(fd)

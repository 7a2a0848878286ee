"""The descriptors that a guardian leaves to its successor: its journal, and its sets of open files."""

from __future__ import annotations

import os
from typing import NamedTuple


class StateFds(NamedTuple):
    """Copies of these let another guardian continue. Types: memfd, epoll."""

    journal: int
    files: int

    @classmethod
    def new(cls) -> StateFds:
        """Make an empty state."""
        from qgpu.guardian.failover.journal import Journal
        from qgpu.linux.open_file_set import FileSets

        return cls(Journal().fd, FileSets().fd)

    def copy(self) -> StateFds:
        """Return descriptors of our own for the same state."""
        return StateFds(*map(os.dup, self))

    def is_same(self, other: StateFds) -> bool:
        """Tell whether both are of the same journal."""
        return os.path.sameopenfile(self.journal, other.journal)

    def close(self) -> None:
        """Close both."""
        for fd in self:
            os.close(fd)

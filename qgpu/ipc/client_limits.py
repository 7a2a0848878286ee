"""Limits how many clients there may be at a time, for each kind of client."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping


class ClientLimits:
    """Counts the clients of each kind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    def acquire(self, kinds: Mapping[str, int]) -> str | None:
        """Count a client of these kinds, each with its limit. If a kind is full, count nothing and return that kind."""
        with self._lock:
            for kind, most in kinds.items():
                if self._taken[kind] >= most:
                    return kind
            self._taken.update(dict.fromkeys(kinds, 1))
            return None

    def fair_part(self, kind: str, of: str, most: int) -> int:
        """Return half of the places that the other kinds leave of the ``most`` places of kind ``of``."""
        with self._lock:
            return (most - self._taken[of] + self._taken[kind]) // 2

    def release(self, kinds: Mapping[str, int]) -> None:
        """Stop counting a client of these kinds."""
        with self._lock:
            self._taken.subtract(dict.fromkeys(kinds, 1))
            for kind in kinds:
                if not self._taken[kind]:
                    del self._taken[kind]

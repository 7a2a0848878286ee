"""How many clients there may be at a time, by what they have in common: each takes a seat of every kind it is of."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping


class ClientLimits:
    """Counts who is here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    def take(self, kinds: Mapping[str, int]) -> str | None:
        """Take a seat of every kind, of which there are so many; where one is full, take none and name it."""
        with self._lock:
            for kind, most in kinds.items():
                if self._taken[kind] >= most:
                    return kind
            self._taken.update(dict.fromkeys(kinds, 1))
            return None

    def leave(self, kinds: Mapping[str, int]) -> None:
        """Leave the seats."""
        with self._lock:
            self._taken.subtract(dict.fromkeys(kinds, 1))
            for kind in kinds:
                if not self._taken[kind]:
                    del self._taken[kind]

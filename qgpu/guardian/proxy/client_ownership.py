"""Client handles in a pod's calls: a call that names another pod's client does not reach RM.

RM checks a call's own client against the file that the call is made on. A client that parameters name it accepts
unchecked, or hands to firmware, which accepts any.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from qgpu.guardian.rules.rows import At, handles


class Owners(Protocol):
    """Knows the owners of clients (``Supervisor``)."""

    def owns(self, pod: str, client: int) -> bool:
        """Tell whether a client belongs to a pod."""


def names_any(owners: Owners, pod: str, own: int, places: Iterable[At], params: bytes | bytearray) -> bool:
    """Tell whether parameters name a client that is neither the call's own nor the pod's; 0 names none."""
    return any(client not in (0, own) and not owners.owns(pod, client) for client in handles(places, params))


def name(asked: str) -> str:
    """Return the name under which such a call is counted."""
    return f"{asked} on another pod's client"

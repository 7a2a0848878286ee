"""Handles of clients in what a pod asks: a call that names somebody else's client is not for RM.

RM looks a call's own client up among those of the file that it is made on. A client that parameters name it takes as it
is, or hands to firmware, which takes any.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from qgpu.guardian.rules.rows import At, handles


class Owners(Protocol):
    """Who knows whose clients are (``Supervisor``)."""

    def owns(self, pod: str, client: int) -> bool:
        """Tell whether a client is one of a pod's."""


def names_any(owners: Owners, pod: str, own: int, places: Iterable[At], params: bytes | bytearray) -> bool:
    """Tell whether parameters name a client that is neither the call's own nor the pod's; 0 names none."""
    return any(client not in (0, own) and not owners.owns(pod, client) for client in handles(places, params))


def name(asked: str) -> str:
    """Return by what name such a call is counted."""
    return f"{asked} on somebody's client"

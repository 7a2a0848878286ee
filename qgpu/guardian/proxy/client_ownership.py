"""Client handles in a pod's calls: a call that names another pod's client does not reach RM.

RM checks a call's own client against the file of the call. It does not check a client that the parameters name, or
hands it to firmware, which accepts any client.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from qgpu.guardian.rules.rows import Handle, handles

#: The refusal of clients of another process: made by it, or to be made on a file on which it makes them.
OTHER_PROCESS = "client on another process's file"


class Owners(Protocol):
    """Knows the owners of clients (``ClientRegistry``)."""

    def owns(self, pod: str, client: int) -> bool:
        """Tell whether a client belongs to a pod."""


def names_any(owners: Owners, pod: str, own: int, places: Iterable[Handle], params: bytes | bytearray) -> bool:
    """Tell whether parameters name a client that is neither the call's own nor the pod's; 0 names none."""
    return any(client not in (0, own) and not owners.owns(pod, client) for client in handles(places, params))


def name(asked: str) -> str:
    """Return the name under which such a call is counted."""
    return f"{asked} on another pod's client"

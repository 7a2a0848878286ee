"""The requests that Kubernetes components make to qgpud, each on a connection of its own.

qgpud may restart at any time: a call fails with DaemonUnreachableError, and the kubelet or a loop of ours tries again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qgpu.ipc.codec import prepared_to_json
from qgpu.ipc.control_socket import Client
from qgpu.model.prepared_grant import PreparedGrant

_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Card:
    """A pGPU as qgpud describes it, with what Kubernetes may not allocate."""

    index: int
    uuid: str
    name: str
    #: Bytes.
    memory: int
    policy: str
    online_policy: str
    #: Its problem; "" if there is none.
    problem: str
    #: What pods without a prepared grant hold: per cent of the time, and bytes.
    held_cores: int
    held_memory: int


@dataclass(frozen=True, slots=True)
class Node:
    """The daemon's plane and driver, and its cards."""

    plane: str
    driver: str
    cards: tuple[Card, ...]


class Qgpud:
    """The daemon behind one control socket. Every call raises a QgpuError if it fails."""

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir

    def node(self) -> Node:
        """Return the cards that the daemon shares, without MIG instances (docs/decisions/0041-mig.md)."""
        answer = self._call("status")
        cards = tuple(_card(each) for each in answer["gpus"] if not each.get("mig"))
        return Node(answer["plane"], answer["driver"] or "", cards)

    def prepare(self, grant: PreparedGrant) -> Mapping[tuple[str, str, str], str]:
        """Prepare a grant; return the CDI name of each device, by request, card and share."""
        answer = self._call("grant.prepare", **prepared_to_json(grant))
        return {(each["request"], each["gpu"], each["share"]): each["cdi"] for each in answer["devices"]}

    def update(self, grant: PreparedGrant) -> None:
        """Change who may use a prepared grant, without waiting for its group."""
        self._call("grant.prepare", **prepared_to_json(grant), wait=False)

    def grants(self) -> Sequence[Mapping[str, Any]]:
        """Return the prepared grants, as the daemon describes them."""
        grants: list[dict[str, Any]] = self._call("grant.list")["grants"]
        return grants

    def drop(self, uid: str) -> None:
        """Give up a grant. Raises RefusedError while a process of a pod that uses it still runs."""
        self._call("grant.drop", uid=uid)

    def _call(self, op: str, **arguments: Any) -> dict[str, Any]:
        with Client(self._runtime_dir, _TIMEOUT_S) as client:
            return client.call(op, **arguments)


def _card(given: Mapping[str, Any]) -> Card:
    held = given["held_outside"]
    return Card(
        given["index"],
        given["uuid"],
        given["name"],
        given["memory"],
        given["policy"],
        given["online_policy"],
        given["problem"],
        held["cores"],
        held["memory"],
    )

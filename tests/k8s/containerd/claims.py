"""Claims as a driver prepares them with the daemon, for tests and measurements on a real containerd."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.k8s.containerd.node import Node

#: The fields of a pod's grant that are compared.
GRANTED = "cores", "memory", "class", "latency_target_ns"


@dataclass
class Claim:
    """A resource claim: a part of one card, or of several."""

    consumers: list[str]
    devices: list[dict[str, Any]]
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))

    def prepare(self, node: Node) -> list[str]:
        """Have it prepared; return the CDI names of its devices. Raises a QgpuError."""
        answer = node.call(
            "grant.prepare",
            uid=self.uid,
            namespace="shop",
            name=f"claim-{self.uid[:4]}",
            consumers=self.consumers,
            devices=self.devices,
        )
        return [device["cdi"] for device in answer["devices"]]

    def drop(self, node: Node) -> None:
        """Have it dropped. Raises a QgpuError."""
        node.call("grant.drop", uid=self.uid)


def device(node: Node, gpu: int = 0, request: str = "gpu", **limits: Any) -> dict[str, Any]:
    """Return one device of a claim: the part ``limits`` of a card."""
    found = next(each for each in node.call("gpu.list")["gpus"] if each["index"] == gpu)
    return {
        "request": request,
        "gpu": found["uuid"],
        "share": "",
        "class": "offline",
        "cores": None,
        "memory": None,
        "latency_target_ns": None,
    } | limits


def claim(node: Node, consumers: Sequence[str], gpu: int = 0, **limits: Any) -> Claim:
    """Return a claim with one device."""
    return Claim(list(consumers), [device(node, gpu, **limits)])


def granted(pod: Mapping[str, Any]) -> dict[int, tuple[Any, ...]]:
    """Return what a pod holds on each card: cores, memory, class and latency target."""
    return {grant["gpu"]: tuple(grant[what] for what in GRANTED) for grant in pod["grants"]}

"""Compares qgpud's pods and files with what the test knows to be held on a node.

Neither qgpud's grants nor the kubelet's record count here: a pod's limits are compared with what the test itself gave.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qgpu.daemon.prepared_grants import FOLDER
from tests.k8s.container import ContainerLike


@dataclass(frozen=True)
class Holding:
    """A claim, or a pod's units, and the containers that use it."""

    #: The claim's name in qgpud's list of pods; empty if not known.
    claim: str
    #: Memory in bytes and cores in per cent, by the card's number.
    cards: Mapping[int, tuple[int, int]]
    containers: Sequence[ContainerLike]
    #: The CDI names that its containers get, if it is to be kept.
    devices: frozenset[str] = frozenset()
    #: The name of its group's pod; empty for none.
    group: str = ""

    def has(self, pod: Mapping[str, Any]) -> bool:
        """Tell whether a pod of qgpud's is of it."""
        ours = {container.cgroup for container in self.containers}
        named = (pod["claim"] == self.claim and self.claim) or (pod["name"] == self.group and self.group)
        return bool(named) or not ours.isdisjoint([pod["cgroup"], *pod["joined"]])


def sold_twice(
    pods: Sequence[Mapping[str, Any]], gpus: Iterable[Mapping[str, Any]], holdings: Iterable[Holding]
) -> str:
    """Say which card or claim gives pods more than there is of it; "" if none does."""
    for gpu in gpus:
        most = int(gpu["memory"] * gpu["memory_overcommit"]), 100
        if beyond(pods, gpu["index"], most):
            return f"card {gpu['index']} has {most}: {pods}"
    for holding in holdings:
        there = [pod for pod in pods if holding.has(pod)]
        for gpu in {grant["gpu"] for pod in there for grant in pod["grants"]}:
            if beyond(there, gpu, holding.cards.get(gpu, (0, 0))):
                return f"{holding} gives more of card {gpu}: {there}"
    return ""


def beyond(pods: Sequence[Mapping[str, Any]], gpu: int, most: tuple[int, int]) -> bool:
    """Tell whether pods have more of a card than this memory, and these cores, together."""
    limits, used = (
        {pod["name"]: each for pod in pods for each in pod[what] if each["gpu"] == gpu} for what in ("grants", "usage")
    )
    memory = sum(max(limit["memory"] or 0, used[name]["memory"]) for name, limit in limits.items())
    # a limit is a byte at least, which no allocation fits in
    return memory > most[0] + len(limits) or sum(limit["cores"] or 0 for limit in limits.values()) > most[1]


def strays(pods: Iterable[Mapping[str, Any]], holdings: Sequence[Holding]) -> tuple[list[str], list[str]]:
    """Return the pods, and the cgroups that count to them, that nothing has; and the containers that are no pod's."""
    running = {container.cgroup for holding in holdings for container in holding.containers}
    groups = {holding.group for holding in holdings if holding.group}
    left, counted = [], set()
    for pod in pods:
        own = set() if pod["name"] in groups else {pod["cgroup"]}
        there = own | set(pod["joined"])
        left += [f"{pod['name']}: {at}" for at in sorted(there - running)]
        counted |= there
    return left, sorted(running - counted)


def on_disk(cdi: Path, state: Path) -> dict[str, set[str]]:
    """Return the prepared devices by the place where qgpud keeps them; what cannot be read goes by its file's name."""
    return {
        "CDI files": _devices(path for path in _files(cdi) if "claim" in path.name),
        "kept claims": _devices(_files(state / FOLDER)),
    }


def _files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _devices(paths: Iterable[Path]) -> set[str]:
    found: set[str] = set()
    for path in paths:
        with suppress(FileNotFoundError):  # it has just been removed
            try:
                content = json.loads(path.read_text())
                found |= {each.get("cdi") or f"{content['kind']}={each['name']}" for each in content["devices"]}
            except (ValueError, KeyError, TypeError):
                found.add(path.name)
            if path.name.startswith("."):  # a daemon that was killed left it
                found.add(path.name)
    return found

"""The file of the simulator's containers, for the next daemon. Elsewhere the kernel module or the guardian keeps them.

Other pods end with their daemon, because their launchers are its clients. So does all work on a simulated card.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from qgpu.errors import InvalidValueError
from qgpu.ipc.codec import grants_from_json, grants_to_json
from qgpu.linux import atomic_file, cgroup
from qgpu.model.plane_api import PodInfo

#: The file in the daemon's runtime directory.
FILE = "simulated-containers.json"


class PodsFile:
    """A JSON file with the pods that have cgroups; ``path`` is in the daemon's runtime directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[PodInfo]:
        """Return the pods that still have a process; none if the file is not one of ours."""
        try:
            rows = json.loads(self._path.read_text())
            pods = [_pod(row) for row in rows]
        except (OSError, ValueError, TypeError, KeyError, AttributeError, InvalidValueError):
            return []
        return [pod for pod in pods if cgroup.members(*pod.cgroups).alive]

    def write(self, pods: Iterable[PodInfo]) -> None:
        """Keep these pods. If that fails, the next daemon does not know them, and no real card loses its limits."""
        rows = [
            {"name": each.name, "grants": grants_to_json(each.grants), "cgroup": each.cgroup, "joined": each.joined}
            for each in pods
        ]
        with suppress(OSError):
            atomic_file.replace(self._path, json.dumps([row for row in rows if row["cgroup"]]), 0o600)


def _pod(row: Mapping[str, Any]) -> PodInfo:
    """Read a pod. Raises TypeError, KeyError, ValueError, InvalidValueError."""
    joined = tuple(row["joined"])
    return PodInfo(row["name"], grants_from_json(row["grants"]), cgroup=row["cgroup"], joined=joined)

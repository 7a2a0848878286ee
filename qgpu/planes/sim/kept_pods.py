"""The simulator's containers, for the next daemon: on other planes the kernel module or the guardian remembers them.

Other pods end with their daemon, for their launchers are its clients; so does whatever runs on a simulated card.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from qgpu.errors import InvalidValueError
from qgpu.ipc.codec import grants_from_json, grants_to_json
from qgpu.linux import atomic_file, cgroup
from qgpu.model.plane_api import PodInfo

#: The file in the daemon's runtime directory.
FILE = "simulated-containers.json"


class KeptPods:
    """A file with the pods that have cgroups."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[PodInfo]:
        """Return the pods that still have a process; none if the file is not one of ours."""
        try:
            rows = json.loads(self._path.read_text())
            pods = [PodInfo(row["name"], grants_from_json(row["grants"]), cgroup=row["cgroup"]) for row in rows]
        except (OSError, ValueError, TypeError, KeyError, InvalidValueError):
            return []
        return [pod for pod in pods if cgroup.members(pod.cgroup).alive]

    def write(self, pods: Iterable[PodInfo]) -> None:
        """Keep these pods. Where that fails, the next daemon does not know them, and nothing real is out of bounds."""
        rows = [{"name": each.name, "grants": grants_to_json(each.grants), "cgroup": each.cgroup} for each in pods]
        with suppress(OSError):
            atomic_file.replace(self._path, json.dumps([row for row in rows if row["cgroup"]]), 0o600)

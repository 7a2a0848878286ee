"""What the next daemon must know of suspended pods: a small versioned file, replaced atomically before each step.

It lies with the settings made at run time, or in the runtime directory. Entries of an earlier boot are dropped: their
processes are gone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from qgpu.errors import QgpuError, RefusedError, full
from qgpu.linux import atomic_file
from qgpu.model.checkpointer import GpuProcess
from qgpu.model.suspension import Residency, Suspension

_log = structlog.get_logger("suspensions")

VERSION = 1
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class SuspensionFile:
    """The file of one directory; without a directory nothing is kept."""

    def __init__(self, directory: Path | None) -> None:
        self._path = directory / "suspensions.json" if directory else None
        self._boot = _BOOT.read_text().strip()

    def load(self) -> dict[str, Suspension]:
        """Return what an earlier daemon wrote since this boot."""
        if self._path is None or not self._path.exists():
            return {}
        try:
            content = json.loads(self._path.read_text())
            if content["version"] != VERSION or content["boot"] != self._boot:
                return {}
            return {str(name): _read(entry) for name, entry in content["pods"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.error("file of suspended pods unusable", file=str(self._path), reason=repr(error))
            return {}

    def save(self, pods: Mapping[str, Suspension]) -> None:
        """Write all entries. Raises RefusedError; QgpuError if the disk is full."""
        if self._path is None:
            return
        entries = {name: _written(each) for name, each in pods.items() if each.residency is not Residency.RUNNING}
        content = {"version": VERSION, "boot": self._boot, "pods": entries}
        try:
            self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            atomic_file.replace(self._path, json.dumps(content, indent=2) + "\n", 0o644)
        except OSError as error:
            kind = QgpuError if full(error) else RefusedError
            raise kind(f"{self._path}: {error.strerror}; nothing is suspended or resumed without it") from error


def _read(entry: Any) -> Suspension:
    return Suspension(
        Residency(entry["residency"]),
        float(entry["since_s"]),
        tuple(GpuProcess(int(pid), str(started)) for pid, started in entry["processes"]),
        {int(index): int(size) for index, size in entry["memory"].items()},
        moves={str(before): str(after) for before, after in entry["moves"].items()},
        yielded=bool(entry["yielded"]),
        late_s=float(entry["late_s"]),
    )


def _written(each: Suspension) -> dict[str, Any]:
    return {
        "residency": each.residency.value,
        "since_s": each.since_s,
        "processes": [[process.pid, process.started] for process in each.processes],
        "memory": {str(index): size for index, size in each.memory.items()},
        "moves": dict(each.moves),
        "yielded": each.yielded,
        "late_s": each.late_s,
    }

"""The CDI specification: how a container runtime gives a pGPU to a container, with our hook.

Its version is 0.5.0, the lowest with all that qgpu needs, because older runtimes refuse newer versions. The daemon
replaces the file by rename, so a runtime never reads half of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from qgpu.errors import unusable
from qgpu.linux import atomic_file
from qgpu.model.plane_api import Pgpu
from qgpu.runtime import driver_files, oci_hook
from qgpu.runtime.oci_container import GPU_VARIABLE

KIND = "qgpu.io/gpu"
VERSION = "0.5.0"
#: Where runtimes look for CDI files that do not survive a reboot; /var/run is the same directory.
DIRECTORY = Path("/run/cdi")
FILE = "qgpu.json"
_MOUNT = ["ro", "nosuid", "nodev", "bind"]


def specification(pgpus: Sequence[Pgpu], control_socket: Path) -> dict[str, Any]:
    """Return the CDI specification of this host: a device for each pGPU by number and by UUID, and one for all.

    It leaves out MIG instances that are gone. Raises NotSupportedError if the driver's libraries cannot be found.
    """
    there = driver_files.nodes_by_pgpu(pgpus)
    pgpus = [pgpu for pgpu in pgpus if pgpu.index in there]
    named = {str(pgpu.index): [pgpu] for pgpu in pgpus} | {pgpu.uuid: [pgpu] for pgpu in pgpus} | {"all": pgpus}
    return {
        "cdiVersion": VERSION,
        "kind": KIND,
        "devices": [{"name": name, "containerEdits": card_edits(cards)} for name, cards in named.items()],
        "containerEdits": common_edits(pgpus) | {"hooks": [hook_entry(control_socket)]},
    }


def common_edits(pgpus: Iterable[Pgpu]) -> dict[str, Any]:
    """Return what every container with a card needs, whichever it is. Raises NotSupportedError."""
    real = any(pgpu.minor is not None for pgpu in pgpus)
    return {
        # Keeps the NVIDIA runtime, if it is also installed, from adding devices of its own.
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "deviceNodes": [{"path": node} for node in (driver_files.shared_nodes() if real else ())],
        "mounts": [
            {"hostPath": mount.host, "containerPath": mount.container, "options": _MOUNT}
            for mount in (driver_files.mounts() if real else ())
        ],
    }


def hook_entry(control_socket: Path, *arguments: str) -> dict[str, Any]:
    """Return our hook in the form of CDI and the OCI runtime specification."""
    program = [sys.executable, "-I", "-S", str(Path(oci_hook.__file__).resolve()), str(control_socket.absolute())]
    return {"hookName": "createRuntime", "path": program[0], "args": [*program, *arguments]}


def write(specification: dict[str, Any], directory: Path, file: str = FILE) -> Path:
    """Write a specification and return its file. Raises QgpuError, as ``unusable`` chooses it."""
    path = directory / file
    text = json.dumps(specification, indent=2) + "\n"
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != text.encode():
            atomic_file.replace(path, text, 0o644)
    except OSError as error:
        raise unusable(path, "choose another directory", error) from error
    return path


def card_edits(pgpus: Iterable[Pgpu]) -> dict[str, Any]:
    """Return the CDI edits for these cards. Raises NotSupportedError if one is a MIG instance that is gone."""
    pgpus = list(pgpus)
    paths = list(dict.fromkeys(path for pgpu in pgpus for path in driver_files.nodes(pgpu).values()))
    return {"env": [f"{GPU_VARIABLE}{pgpu.index}={pgpu.uuid}" for pgpu in pgpus]} | (
        {"deviceNodes": [{"path": path} for path in paths]} if paths else {}
    )


class CdiFileWriter:
    """Keeps this host's CDI file current when driver or device nodes change, or when the file is removed."""

    def __init__(self, pgpus: Sequence[Pgpu], control_socket: Path, directory: Path) -> None:
        self._pgpus = pgpus
        self._control_socket = control_socket
        self.directory = directory
        self._seen: object = None

    def refresh(self) -> bool:
        """Write the file if it is out of date; return whether it was. The check costs a few stat() calls.

        Raises QgpuError.
        """
        seen = self._look()
        if seen == self._seen:
            return False
        write(specification(self._pgpus, self._control_socket), self.directory)
        self._seen = self._look()
        return True

    def _look(self) -> tuple[object, ...]:
        return driver_stamp(), stamp(self.directory / FILE)


def driver_stamp() -> tuple[object, ...]:
    """Return a value that changes when the driver's libraries or device nodes change."""
    return driver_files.shared_nodes(), stamp(Path("/etc/ld.so.cache"))


def stamp(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when a file is replaced or written; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns

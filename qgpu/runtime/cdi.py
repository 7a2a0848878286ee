"""The CDI specification: how a container runtime gives a pGPU to a container, hook included.

Written in version 0.5.0 of the format, the lowest that has what is needed, because older runtimes refuse newer ones.
The file is replaced by rename, so that a runtime never reads half of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qgpu.errors import PermissionDeniedError
from qgpu.linux import atomic_file
from qgpu.model.plane_api import Pgpu
from qgpu.runtime import driver_files, hook
from qgpu.runtime.oci_container import GPU_VARIABLE

KIND = "qgpu.io/gpu"
VERSION = "0.5.0"
#: Where runtimes look for files that last as long as the host is up; /var/run is the same folder.
DIRECTORY = Path("/run/cdi")
FILE = "qgpu.json"
_MOUNT = ["ro", "nosuid", "nodev", "bind"]


def specification(pgpus: Sequence[Pgpu], control_socket: Path) -> dict[str, Any]:
    """Describe the pGPUs of this host: a device for each by number and by UUID, and one for all.

    Raises NotSupportedError where the driver's libraries cannot be found.
    """
    each = {str(pgpu.index): _edits([pgpu]) for pgpu in pgpus} | {pgpu.uuid: _edits([pgpu]) for pgpu in pgpus}
    real = any(pgpu.minor is not None for pgpu in pgpus)
    return {
        "cdiVersion": VERSION,
        "kind": KIND,
        "devices": [{"name": name, "containerEdits": edits} for name, edits in (each | {"all": _edits(pgpus)}).items()],
        "containerEdits": {
            # The NVIDIA runtime, where it is installed too, is to add nothing of its own.
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [{"path": node} for node in (driver_files.shared_nodes() if real else ())],
            "mounts": [
                {"hostPath": mount.host, "containerPath": mount.container, "options": _MOUNT}
                for mount in (driver_files.mounts() if real else ())
            ],
            "hooks": [hook_entry(control_socket)],
        },
    }


def hook_entry(control_socket: Path) -> dict[str, Any]:
    """Describe our hook, as CDI and the OCI runtime specification do."""
    program = [sys.executable, "-I", "-S", str(Path(hook.__file__).resolve()), str(control_socket.absolute())]
    return {"hookName": "createRuntime", "path": program[0], "args": program}


def write(specification: dict[str, Any], directory: Path) -> Path:
    """Put the specification in force; return its file. Raises PermissionDeniedError."""
    path = directory / FILE
    text = json.dumps(specification, indent=2) + "\n"
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != text.encode():
            atomic_file.replace(path, text, 0o644)
    except OSError as error:
        raise PermissionDeniedError(f"{path}: {error.strerror}; choose another directory") from error
    return path


def _edits(pgpus: Sequence[Pgpu]) -> dict[str, Any]:
    nodes = [{"path": driver_files.card_node(pgpu.minor)} for pgpu in pgpus if pgpu.minor is not None]
    return {"env": [f"{GPU_VARIABLE}{pgpu.index}={pgpu.uuid}" for pgpu in pgpus]} | (
        {"deviceNodes": nodes} if nodes else {}
    )


class CdiFileWriter:
    """Keeps the file of this host current: as driver and nodes come and go, and should somebody remove it."""

    def __init__(self, pgpus: Sequence[Pgpu], control_socket: Path, directory: Path) -> None:
        self._pgpus = pgpus
        self._control_socket = control_socket
        self.directory = directory
        self._seen: object = None

    def refresh(self) -> bool:
        """Write the file if it is due; True if so. Costs a few look-ups of files when not.

        Raises PermissionDeniedError, NotSupportedError.
        """
        seen = self._look()
        if seen == self._seen:
            return False
        write(specification(self._pgpus, self._control_socket), self.directory)
        self._seen = self._look()
        return True

    def _look(self) -> tuple[object, ...]:
        return (
            driver_files.shared_nodes(),
            *(_stamp(path) for path in (self.directory / FILE, Path("/etc/ld.so.cache"))),
        )


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns

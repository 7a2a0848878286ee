"""What the daemon does for container runtimes: it keeps the CDI file current and receives seccomp listeners.

Containers themselves are ordinary pods; the hook announces them at the control socket.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import structlog

from qgpu.config import Config
from qgpu.errors import QgpuError
from qgpu.groups import group_cdi
from qgpu.ipc.systemd import FdStore
from qgpu.linux.repeated_error import RepeatedError
from qgpu.model.plane_api import Pgpu
from qgpu.model.plane_names import Plane
from qgpu.paths import root_socket_path
from qgpu.runtime import cdi, seccomp_profile
from qgpu.runtime.agent import Agent, Attach, PodOf
from qgpu.runtime.claim_cdi import ClaimCdiFiles

_log = structlog.get_logger("containers")

#: How long to wait before the next try after the CDI file could not be written. Each try reads the loader's cache.
_RETRY_S = 10.0


class ContainerRuntimes:
    """The CDI file and, on the seccomp plane, the agent."""

    def __init__(
        self,
        plane: Plane,
        pgpus: Sequence[Pgpu],
        runtime_dir: Path,
        config: Config,
        store: FdStore,
        take: Attach,
        pod_of: PodOf,
    ) -> None:
        directory = cdi_directory(plane, config)
        self._cdi_file = cdi.CdiFileWriter(pgpus, root_socket_path(runtime_dir), directory) if directory else None
        self._failure = RepeatedError(_log, "no CDI file: containers cannot ask for a pGPU")
        self._retry_at_s = 0.0
        listener = agent_socket(plane, runtime_dir)
        self._agent = Agent(listener, take, store, pod_of) if listener else None
        self.refresh()

    def refresh(self) -> None:
        """Rewrite the CDI file if it is out of date. A failure is logged once and retried later."""
        if self._failure.text and time.monotonic() < self._retry_at_s:
            return
        with self._failure.logged(QgpuError):
            if self._cdi_file is not None and self._cdi_file.refresh():
                _log.info("CDI file written", directory=str(self._cdi_file.directory))
        self._retry_at_s = time.monotonic() + _RETRY_S

    def restore(self) -> None:
        """Listen for runtimes again if somebody removed the socket. Raises OSError."""
        if self._agent is not None:
            self._agent.restore()

    def close(self) -> None:
        """Accept no more listeners. The CDI file stays; its hook refuses containers that start without a daemon."""
        if self._agent is not None:
            self._agent.close()


def agent_socket(plane: Plane, runtime_dir: Path) -> Path | None:
    """Return the socket where runtimes hand over listeners; None on planes without listeners."""
    return seccomp_profile.listener(runtime_dir.absolute()) if plane is Plane.SECCOMP else None


def claim_files(plane: Plane, pgpus: Sequence[Pgpu], runtime_dir: Path, config: Config) -> ClaimCdiFiles | None:
    """Return what keeps the CDI files of prepared grants; None for no files."""
    directory = cdi_directory(plane, config)
    more = partial(group_cdi.member_edits, runtime_dir)
    return ClaimCdiFiles(pgpus, root_socket_path(runtime_dir), directory, more) if directory else None


def cdi_directory(plane: Plane, config: Config) -> Path | None:
    """Return the directory of the CDI file; None for no file, which is the simulator's default."""
    if config.cdi == "auto":
        return None if plane is Plane.SIM else cdi.DIRECTORY
    return None if config.cdi == "off" else Path(config.cdi)

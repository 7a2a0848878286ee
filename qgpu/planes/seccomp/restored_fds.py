"""What a service manager stored for an earlier daemon on this plane, and the guardian that starts with it.

If daemon and guardians were killed together, pods' calls wait in the kernel for a new guardian. It loads in parallel
with the daemon (docs/decisions/0015), so this file does not import what takes long to load.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from qgpu.errors import BackendGoneError
from qgpu.guardian.failover.state_fds import StateFds
from qgpu.ipc import wire
from qgpu.ipc.systemd import FdStore
from qgpu.linux.open_file_set import reserve_fds
from qgpu.planes.seccomp.standby_link import StandbyLink


class RestoredFds:
    """The state that guardians left, the pods' listeners, and the standby or guardian that continues with them."""

    def __init__(self, store: FdStore, runtime_dir: Path) -> None:
        """Take over what is stored, and start a standby with it; if that fails, the plane tries again."""
        self.store = store
        self.runtime_dir = runtime_dir
        self.socket = runtime_dir / "guardian.sock"
        reserve_fds()
        journal, files = (store.take(name).get("") for name in ("journal", "files"))
        #: The state that guardians left, if it was stored.
        self.state = StateFds(journal, files) if journal is not None and files is not None else None
        named = {tuple(name.split(".", 1)): fd for name, fd in store.take("listener.").items()}
        #: The listeners by number, with their pods.
        self.listeners: dict[int, tuple[str, int]] = {int(number): (pod, fd) for (number, pod), fd in named.items()}
        #: The process that continues with the journal.
        self.standby: StandbyLink | None = None
        if self.state is not None:
            with suppress(BackendGoneError):
                self.standby = StandbyLink(runtime_dir, self.state, self.listeners)
        if self.standby is not None and _deserted(self.socket):
            self.standby.begin(killed=True)

    def close(self) -> None:
        """Close everything, on a plane that has no use for it; the guardian that has begun serves waiting pods."""
        if self.standby is not None:
            self.standby.end()
        if self.state is not None:
            self.state.close()
        for _, fd in self.listeners.values():
            os.close(fd)


def _deserted(path: Path) -> bool:
    """Tell whether no process listens at a socket."""
    try:
        wire.connect(str(path), 0).close()
    except BlockingIOError:  # the queue is full, so a process listens
        return False
    except OSError:
        return True
    return False

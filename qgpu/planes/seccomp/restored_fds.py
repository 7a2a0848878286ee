"""What a service manager has kept of a former daemon on this plane, and the guardian that is started with it.

Where daemon and guardians were killed together, pods' calls wait in the kernel until there is a guardian again: it
is loaded beside the daemon, not after it (docs/decisions/0015). So what takes time to load is not imported here.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from qgpu.errors import BackendGoneError
from qgpu.guardian.failover.handover import StateFds
from qgpu.ipc import wire
from qgpu.ipc.systemd import FdStore
from qgpu.linux.open_file_set import occupy
from qgpu.planes.seccomp.standby import Standby


class RestoredFds:
    """What guardians left, the pods' listeners, and what follows them, in reserve or as the guardian."""

    def __init__(self, store: FdStore, runtime_dir: Path) -> None:
        """Take over what is kept, and start what follows it; where that fails, the plane tries again."""
        self.store = store
        self.runtime_dir = runtime_dir
        self.socket = runtime_dir / "guardian.sock"
        occupy()
        journal, files = (store.take(name).get("") for name in ("journal", "files"))
        #: What guardians left, if it was kept.
        self.state = StateFds(journal, files) if journal is not None and files is not None else None
        named = {tuple(name.split(".", 1)): fd for name, fd in store.take("listener.").items()}
        #: The listeners by their numbers, with their pods.
        self.listeners: dict[int, tuple[str, int]] = {int(number): (pod, fd) for (number, pod), fd in named.items()}
        #: What follows the journal.
        self.reserve: Standby | None = None
        if self.state is not None:
            with suppress(BackendGoneError):
                self.reserve = Standby(runtime_dir, self.state, self.listeners)
        if self.reserve is not None and _deserted(self.socket):
            self.reserve.begin(killed=True)

    def leave(self) -> None:
        """Close everything, on a plane that has no use for it; pods that wait have the guardian that has begun."""
        if self.reserve is not None:
            self.reserve.end()
        if self.state is not None:
            self.state.close()
        for _, fd in self.listeners.values():
            os.close(fd)


def _deserted(path: Path) -> bool:
    """Tell whether nobody listens at a socket."""
    try:
        wire.connect(str(path), 0).close()
    except BlockingIOError:  # as many wait for an answer as may: somebody is there
        return False
    except OSError:
        return True
    return False

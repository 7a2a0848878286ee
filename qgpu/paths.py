"""Default paths of qgpu's files."""

from __future__ import annotations

import os
from pathlib import Path

#: The runtime directory of the service.
SERVICE = Path("/run/qgpu")


def default_runtime_dir() -> Path:
    """Return the default directory of a daemon's control socket: QGPU_RUNTIME_DIR, else root's or this user's."""
    if chosen := os.environ.get("QGPU_RUNTIME_DIR"):
        return Path(chosen)
    if os.geteuid() == 0:
        return SERVICE
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "qgpu"
    return shared_runtime_dir()


def shared_runtime_dir() -> Path:
    """Return this user's directory where every user may make it: the daemon refuses another's, and so do clients."""
    return Path(f"/tmp/qgpu-{os.getuid()}")  # noqa: S108


def client_runtime_dir() -> Path:
    """Return the default directory for a client: the daemon's, or the service's if this user runs no daemon."""
    own = default_runtime_dir()
    if os.environ.get("QGPU_RUNTIME_DIR") or (_is_ours(own) and socket_path(own).exists()):
        return own
    return SERVICE if socket_path(SERVICE).exists() else own


def _is_ours(directory: Path) -> bool:
    try:
        return directory != shared_runtime_dir() or directory.lstat().st_uid == os.getuid()
    except OSError:
        return False


def socket_path(runtime_dir: Path) -> Path:
    """Return the path of the control socket."""
    return runtime_dir / "qgpud.sock"


def root_socket_path(runtime_dir: Path) -> Path:
    """Return the path of the control socket that only root and the daemon's own user can open."""
    return runtime_dir / "root.sock"


def default_state_dir(runtime_dir: Path) -> Path | None:
    """Return the state directory of root's daemon in /run/qgpu; None for any other daemon, which may run beside it."""
    return Path("/var/lib/qgpu") if os.geteuid() == 0 and runtime_dir == SERVICE else None

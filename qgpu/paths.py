"""Where qgpu's files lie unless it is told otherwise."""

from __future__ import annotations

import os
from pathlib import Path


def default_runtime_dir() -> Path:
    """Return where the control socket is looked for: QGPU_RUNTIME_DIR, or the place of root or of this user."""
    if chosen := os.environ.get("QGPU_RUNTIME_DIR"):
        return Path(chosen)
    if os.geteuid() == 0:
        return Path("/run/qgpu")
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "qgpu"
    return Path(f"/tmp/qgpu-{os.getuid()}")  # noqa: S108 - the daemon refuses a directory that is another's


def socket_path(runtime_dir: Path) -> Path:
    """Return where the control socket lies."""
    return runtime_dir / "qgpud.sock"


def default_state_dir(runtime_dir: Path) -> Path | None:
    """Return where the daemon of this host keeps its state; nowhere for one that runs elsewhere, beside it maybe."""
    return Path("/var/lib/qgpu") if os.geteuid() == 0 and runtime_dir == Path("/run/qgpu") else None

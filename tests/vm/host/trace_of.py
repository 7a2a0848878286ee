"""What an installation leaves on a machine: everything there is, listed before and after, and the difference."""

from __future__ import annotations

import hashlib
import os
import subprocess
from contextlib import suppress
from pathlib import Path

#: What package managers keep about every package that ever was, by any name; ours to list, theirs to have.
BOOKS = (
    "/var/lib/dpkg/",
    "/var/lib/apt/",
    "/var/cache/",
    "/var/log/",
    "/var/lib/systemd/",
    "/usr/share/mime",
    "/run/systemd/",
    "/run/udev/",
    "/run/log/",
    "/run/credentials/",
    "/run/podman",
    "/run/libpod",
    "/var/lib/containers",
    "/steps",
    "/run/share",
    "/root/",
    "/tmp/",
    "/var/tmp/",
)
#: Files of others that an installation changes and a removal writes anew.
REWRITTEN = ("/etc/mtab", "/etc/ld.so.cache", "/etc/group-", "/etc/gshadow-")
#: Whoever serves our files has a descriptor for each that we know of, and not any number.
_BREATH = 5000
_SKIP = ("/proc", "/sys", "/dev/pts", "/dev/shm", "/run/share")


def snapshot() -> dict[str, str]:
    """List files (with what is in those of /etc), accounts, units, modules and cgroups."""
    found: dict[str, str] = {}
    walked = 0
    for folder, folders, files in os.walk("/"):
        walked += len(folders) + len(files)
        if walked > _BREATH:
            walked = 0
            with suppress(OSError):  # a container's, which its host keeps from it
                Path("/proc/sys/vm/drop_caches").write_text("2")
        folders[:] = [name for name in folders if os.path.join(folder, name) not in _SKIP]
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            if not path.startswith(BOOKS) and path not in REWRITTEN:
                found[f"file {path}"] = _content(path) if path.startswith("/etc/") else ""
    for database in ("passwd", "group"):
        found |= {f"{database} {line}": "" for line in Path("/etc", database).read_text().splitlines()}
    with suppress(FileNotFoundError):  # a kernel without modules
        found |= {f"module {line.split()[0]}": "" for line in Path("/proc/modules").read_text().splitlines()}
    found |= {f"cgroup {path}": "" for path in map(str, Path("/sys/fs/cgroup").rglob("*/")) if "qgpu" in path}
    units = subprocess.run(
        ["systemctl", "list-units", "--all", "--plain", "--no-legend"], capture_output=True, text=True, check=True
    ).stdout
    found |= {f"unit {line.split()[0]}": "" for line in units.splitlines() if "qgpu" in line}
    return found


def difference(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Say what is there now that was not, what is gone, and what is not as it was."""
    return [
        *(f"left: {name}" for name in sorted(after.keys() - before.keys())),
        *(f"gone: {name}" for name in sorted(before.keys() - after.keys())),
        *(f"changed: {name}" for name in sorted(before.keys() & after.keys()) if before[name] != after[name]),
    ]


def _content(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""

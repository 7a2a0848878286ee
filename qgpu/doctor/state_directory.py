"""Check of the directory in which the daemon keeps settings, events and claims. It writes nothing."""

from __future__ import annotations

import os
from pathlib import Path

from qgpu import units
from qgpu.doctor.report import Check, Verdict

_NAME = "state directory"
_OTHER = "start qgpud with --state-dir on a disk"
_MOUNTS = Path("/proc/self/mountinfo")
#: File systems that a reboot empties.
_VOLATILE = ("tmpfs", "ramfs")
#: Free bytes that suffice: the files are smaller, and each new version is written beside the old one.
_LEAST_FREE = 1 << 20


def check_state_directory(directory: Path | None, mounts: Path = _MOUNTS) -> Check:
    """Check that the daemon can write its state, and that it survives a reboot; None: the daemon keeps no state."""
    if directory is None:
        return Check(_NAME, Verdict.WARN, "none: settings and events end with qgpud", _OTHER)
    try:
        there, room = directory.stat(), os.statvfs(directory)
        kind = _file_system(there.st_dev, mounts)
    except PermissionError:
        return Check(_NAME, Verdict.WARN, f"{directory}: only root can see it", "ask as root")
    except OSError as error:
        return Check(_NAME, Verdict.FAIL, f"{directory}: {error.strerror}; no setting can be kept", "restart qgpud")
    judges = os.geteuid() in (0, there.st_uid)
    if room.f_flag & os.ST_RDONLY or (judges and not os.access(directory, os.W_OK)):
        found = f"{directory}: cannot be written, so settings cannot change"
        return Check(_NAME, Verdict.FAIL, found, f"make it writable, or {_OTHER}")
    free = room.f_bavail * room.f_frsize
    if free < _LEAST_FREE or (room.f_files and not room.f_favail):
        left = "no file can be made" if free >= _LEAST_FREE else f"only {units.format_memory(free)} free"
        found = f"{directory}: {left}, so settings cannot change"
        return Check(_NAME, Verdict.FAIL, found, f"free some space there, or {_OTHER}")
    if kind in _VOLATILE:
        return Check(_NAME, Verdict.WARN, f"{directory}: a {kind}, which a reboot empties", _OTHER)
    return Check(_NAME, Verdict.OK, f"{directory}, {units.format_memory(free)} free")


def _file_system(device: int, mounts: Path) -> str:
    """Return the type of a mounted file system; empty if it is not among the mounts."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in os.fsdecode(mounts.read_bytes()).splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            return after.split()[0]
    return ""

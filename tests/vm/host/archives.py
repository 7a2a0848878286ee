"""The distributions that the packages are for: where each one's archive is, and whose keys it is checked with."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))

from debian import CACHE, KEYRING, MIRROR, SECURITY, Suite, alone, unpack

_UBUNTU = os.environ.get("QGPU_UBUNTU_MIRROR", "http://archive.ubuntu.com/ubuntu")


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution: its suite's name, and the lines of its sources.list."""

    suite: str
    lines: tuple[str, ...]
    ubuntu: bool = False

    def keyring(self) -> Path:
        """Return the file of the archive's keys; Ubuntu's come from Debian, checked with Debian's."""
        if not self.ubuntu:
            return Path(KEYRING)
        place = CACHE / "keyrings"
        found = place / "usr/share/keyrings/ubuntu-archive-keyring.gpg"
        if not found.exists():
            with alone(CACHE):
                unpack("ubuntu-keyring", Suite(MIRROR, "trixie"), CACHE, place)
        return found


def _debian(suite: str) -> Distribution:
    lines = (f"deb {MIRROR} {suite} main", f"deb {SECURITY} {suite}-security main")
    return Distribution(suite, lines)


def _ubuntu(suite: str) -> Distribution:
    pockets = (suite, f"{suite}-updates", f"{suite}-security")
    return Distribution(suite, tuple(f"deb {_UBUNTU} {pocket} main universe" for pocket in pockets), ubuntu=True)


DISTRIBUTIONS = {
    "debian-12": _debian("bookworm"),
    "debian-13": _debian("trixie"),
    "ubuntu-22.04": _ubuntu("jammy"),
    "ubuntu-24.04": _ubuntu("noble"),
    "ubuntu-26.04": _ubuntu("resolute"),
}

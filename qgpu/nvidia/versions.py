"""The driver branches qgpu knows, one row each, and which driver runs here.

A new branch is one row, written after comparing the structures of ``abi.py`` with that branch's headers, and recording
what it lets anybody ask (``tests/record_rm.py``); what is new of that needs a row in ``guardian/rules``.
An unknown branch is refused: enforcing on a guess would be worse than saying no.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from qgpu.errors import NoGpuError, NotSupportedError

VERSION_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Branch:
    """What qgpu has to know of one driver branch."""

    major: int
    #: Whether a channel can be asked for the context id that context-switch records carry (ctrla06fgpfifo.h).
    context_ids: bool


BRANCHES = (
    Branch(535, context_ids=False),
    Branch(545, context_ids=False),
    Branch(550, context_ids=False),
    Branch(555, context_ids=False),
    Branch(560, context_ids=False),
    Branch(565, context_ids=False),
    Branch(570, context_ids=True),
    Branch(575, context_ids=True),
    Branch(580, context_ids=True),
    Branch(590, context_ids=True),
    Branch(595, context_ids=True),
)


def find(version: str) -> Branch:
    """Return the row of a driver version such as "580.159.04". Raises NotSupportedError."""
    major = version.partition(".")[0]
    for branch in BRANCHES:
        if major == str(branch.major):
            return branch
    known = ", ".join(str(branch.major) for branch in BRANCHES)
    raise NotSupportedError(
        f"NVIDIA driver {version}: branch not known to qgpu (known: {known}); "
        "install a known branch or a newer qgpu; nothing is enforced meanwhile"
    )


def parse(text: str) -> str:
    """Find the driver version in the text of /proc/driver/nvidia/version. Raises NotSupportedError."""
    match = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text, re.MULTILINE)
    if match is None:
        raise NotSupportedError(f"{VERSION_FILE}: no driver version in it; is this NVIDIA's driver?")
    return match.group(1)


def installed() -> str:
    """Return the version of the running driver. Raises NoGpuError when none is loaded."""
    try:
        return parse(VERSION_FILE.read_text())
    except OSError as error:
        raise NoGpuError(
            f"{VERSION_FILE}: {error.strerror}; the NVIDIA driver is not loaded on this machine"
        ) from error

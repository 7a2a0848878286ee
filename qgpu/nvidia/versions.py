"""The driver branches that qgpu knows, one row each, and the version of the running driver.

To add a branch, compare the structures of ``abi.py`` with its headers, and record what it lets any process ask of RM
(``tests/record_rm.py``). New controls and classes need rows in ``guardian/rules``; the branch needs a row here. qgpu
refuses an unknown branch, because enforcement based on a guess is worse than none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from qgpu.errors import NoGpuError, NotSupportedError

VERSION_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Branch:
    """What qgpu must know about one driver branch."""

    major: int
    #: Whether RM returns a channel's context id, which context-switch records carry (ctrla06fgpfifo.h).
    context_ids: bool
    #: Whether a multicast object keeps memory that is attached to it and freed (mem_multicast_fabric.c: hDupedPhysMem).
    multicast_keeps: bool


BRANCHES = (
    Branch(535, context_ids=False, multicast_keeps=True),
    Branch(545, context_ids=False, multicast_keeps=True),
    Branch(550, context_ids=False, multicast_keeps=True),
    Branch(555, context_ids=False, multicast_keeps=True),
    Branch(560, context_ids=False, multicast_keeps=True),
    Branch(565, context_ids=False, multicast_keeps=True),
    Branch(570, context_ids=True, multicast_keeps=False),
    Branch(575, context_ids=True, multicast_keeps=False),
    Branch(580, context_ids=True, multicast_keeps=False),
    Branch(590, context_ids=True, multicast_keeps=False),
    Branch(595, context_ids=True, multicast_keeps=False),
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
    """Return the version of the running driver. Raises NoGpuError if none is loaded."""
    try:
        return parse(VERSION_FILE.read_text())
    except OSError as error:
        raise NoGpuError(
            f"{VERSION_FILE}: {error.strerror}; the NVIDIA driver is not loaded on this machine"
        ) from error

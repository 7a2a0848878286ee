"""A daemon's part that moves one pod, on processes of the fake libcuda; the tests kill it.

    python -m tests.checkpoint.moving DIRECTORY PID…

It takes lines "suspend" and "resume", and answers each line, also an empty one, with the pod's place when it is known.
"""

from __future__ import annotations

import sys
from pathlib import Path

import structlog

from qgpu.checkpoint.process_checkpointer import ProcessCheckpointer
from qgpu.daemon import suspensions
from qgpu.daemon.suspension_file import SuspensionFile
from qgpu.daemon.suspensions import Suspensions
from qgpu.model.plane_api import Pgpu, PodInfo

TIMEOUT_S = 120.0
#: How long a call of the fake may take after its caller died: here, none takes longer.
suspensions._LATE_S = 0.5  # type: ignore[misc]


class Host:
    """A host whose cards are used by the given processes."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids

    def pgpus(self) -> tuple[()]:
        """Return no card: these pods hold no memory of one."""
        return ()

    def checkpointer(self) -> ProcessCheckpointer:
        """Open real helpers, without NVML."""
        cards = [Pgpu(0, "GPU-a", "card", 1 << 40)]
        return ProcessCheckpointer(cards, "580.159.04", lambda _: self._pids, lambda _: (), lambda _: 1 << 40)


def made(directory: Path, pids: list[int]) -> Suspensions:
    """Make the part of a daemon, with pod one."""
    pod = PodInfo("one", pids=tuple(pids), unrestorable=())
    return Suspensions(Host(pids), lambda _: pod, SuspensionFile(directory))  # type: ignore[arg-type]


def main() -> None:
    """Do what is asked for."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # the answers go to stdout
    moves = made(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]])
    for line in sys.stdin:
        if line == "suspend\n":
            moves.suspend("one", 0.3)
        elif line == "resume\n":
            moves.resume("one")
        print(moves.wait("one", TIMEOUT_S).residency.value, flush=True)


if __name__ == "__main__":
    main()

"""Starts a standby guardian: ``python -m qgpu.guardian RUNTIME_DIR JOURNAL_FD FILES_FD DAEMON_FD``.

The daemon runs this. The process waits (``failover/standby.py``) until it has to become the guardian.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import TextIO, cast

import structlog

from qgpu.errors import QgpuError
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.failover.standby import Standby
from qgpu.guardian.server import Guardian
from qgpu.ipc import wire
from qgpu.linux import cgroup
from qgpu.linux.log_file import LogFile
from qgpu.linux.log_rate_limit import LogRateLimit
from qgpu.linux.open_file_set import FileSets, reserve_fds
from qgpu.nvidia import abi

_PR_SET_NAME, _PR_SET_TIMERSLACK = 15, 29
#: How long a message to the daemon may take.
_PATIENCE_S = 0.1
#: Pods cause log lines, and the log may lie in memory.
_MOST_LOG_BYTES = 64 << 20
#: A search for garbage among all objects stops every thread, for a tenth of a second where a pod has many. There is
#: none until so many smaller searches have passed; ``daemon_requests.py`` asks for one when the last pod is gone.
_SEARCHES = 10**9


def leave_service() -> None:
    """Move into a cgroup of our own, so that a service manager that stops the daemon does not stop this process."""
    home = cgroup.mount() / cgroup.GUARDIANS.lstrip("/")
    home.mkdir(exist_ok=True)
    (home / "cgroup.procs").write_text(str(os.getpid()))


def main() -> int:
    """Wait until a guardian is needed, then run it; tell the daemon that it runs, or why it cannot."""
    runtime_dir, (journal_fd, files_fd, daemon_fd) = Path(sys.argv[1]), map(int, sys.argv[2:])
    # Neither a terminal nor a service manager may stop it while pods depend on it; even SIGKILL is survived.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    reserve_fds()
    for fd in (journal_fd, files_fd, daemon_fd):
        os.set_inheritable(fd, False)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, b"qgpu-standby", 0, 0, 0)
    # It needs a pidfd per process and a listener per process tree.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(OSError, QgpuError):
        leave_service()
    structlog.configure(
        processors=[
            LogRateLimit(),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", LogFile(sys.stderr, _MOST_LOG_BYTES))),
    )
    abi.parse_types()
    connection = socket.socket(fileno=daemon_fd)
    connection.settimeout(_PATIENCE_S)
    journal = Journal(journal_fd)
    standby = Standby(journal, wire.Connection(connection))
    try:
        if not standby.wait():
            return 0
        libc.prctl(_PR_SET_NAME, b"qgpu-guardian", 0, 0, 0)
        libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        with contextlib.suppress(OSError):
            os.nice(-10)
        guardian = Guardian(runtime_dir, journal, FileSets(files_fd), standby.table, standby.listeners)
    except QgpuError as error:
        standby.say({"ready": False, "code": int(error.code), "error": str(error)})
        return int(error.code)
    except OSError as error:
        standby.say({"ready": False, "code": 1, "error": f"guardian: {error}"})
        return 1
    standby.say({"ready": True})
    connection.close()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _SEARCHES)
    guardian.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

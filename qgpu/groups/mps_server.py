"""NVIDIA's MPS control daemon of one group: its directories, its clients' environment, and how it is ended.

The control daemon starts an MPS server when the first client connects. Both run in the group's pod, like the clients.
Source: NVIDIA, Multi-Process Service, appendix A (environment variables) and ``nvidia-cuda-mps-control(1)``.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qgpu.errors import InvalidValueError, NotSupportedError
from qgpu.linux import mounts, proc

CONTROL = "nvidia-cuda-mps-control"
#: The planes on which a group has MPS.
WITH_MPS = frozenset({"seccomp", "kmod"})
#: Where MPS's server and clients share memory, and its size: the usual size of a container's /dev/shm.
SHARED_MEMORY, _SHARED_BYTES = Path("/dev/shm"), 64 << 20  # noqa: S108
#: The name of both the control daemon and the server in /proc/PID/comm, which has at most 15 characters.
_COMM = "nvidia-cuda-mps"
_SERVER = b"nvidia-cuda-mps-server"
#: The indexes of the parent and of cminflt in /proc/PID/stat, counted from the field after the name.
_PARENT, _CHILDREN_FAULTS = 1, 8
#: The most bytes in one of MPS's logs. A client that connects again and again makes a log grow fast.
_LOG_BYTES, _BLOCK = 16 << 20, 512
_QUIT_S, _ANSWER_S, _POLL_S = 10, 1.0, 0.05
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MpsServer:
    """The MPS control daemon of the group whose files are in ``directory``."""

    directory: Path

    @property
    def command(self) -> tuple[str, ...]:
        """The command that runs the control daemon in the foreground."""
        return CONTROL, "-f"

    @property
    def answers(self) -> bool:
        """Tell whether the control daemon takes clients. Without one, CUDA programs run without MPS."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.settimeout(_ANSWER_S)  # a control daemon that hangs takes no more connections at some time
            refused = client.connect_ex(str(self.pipe / "control"))
        return refused in {0, errno.EPROTOTYPE}  # EPROTOTYPE: a socket of another type listens there

    @property
    def pipe(self) -> Path:
        """The directory of MPS's sockets. It is never replaced while the group exists: containers have it mounted."""
        return self.directory / "pipe"

    @property
    def memory(self) -> Path:
        """The directory that members in containers have at ``SHARED_MEMORY``, in place of the host's."""
        return self.directory / "shm"

    def share_memory(self) -> None:
        """Make ``memory`` a file system of bounded size. Raises NotSupportedError."""
        try:
            mounts.tmpfs(self.memory, _SHARED_BYTES)
        except OSError as error:
            raise NotSupportedError(
                f"{self.memory}: no tmpfs can be mounted: {error.strerror}; run qgpu-groups.service as the host's root"
            ) from error

    def prepare(self) -> None:
        """Make the directories; remove a killed control daemon's sockets, which would keep the next one from starting.

        Raises NotSupportedError if MPS is not installed.
        """
        check_installed()
        self.close()
        for name in ("pipe", "log"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Remove the sockets of a control daemon that has ended."""
        with suppress(OSError):
            for each in list(self.pipe.iterdir()):
                if each.is_dir() and not each.is_symlink():
                    shutil.rmtree(each, ignore_errors=True)
                else:
                    each.unlink(missing_ok=True)

    def bound_logs(self) -> None:
        """Empty logs that have become too long: they take memory of the host, and a member can make them grow."""
        with suppress(OSError):
            for each in (self.directory / "log").iterdir():
                with suppress(OSError), open(each, "r+b", opener=_no_link) as log:
                    if os.fstat(log.fileno()).st_blocks * _BLOCK > _LOG_BYTES:
                        log.truncate(0)

    def environment(self, sm_percent: int | None = None, memory: int | None = None) -> dict[str, str]:
        """Return the variables of a client, with its part of the SMs in per cent and its memory limit in bytes.

        MPS itself enforces both; it counts devices from 0 and memory in MiB. Raises InvalidValueError.
        """
        variables = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.directory / "log"),
        }
        if sm_percent is not None:
            if not 1 <= sm_percent <= 100:
                raise InvalidValueError(f"--sm {sm_percent}: a part of the SMs is 1 to 100 per cent")
            variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(sm_percent)
        if memory is not None:
            variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={memory // _MIB}M"
        return variables

    def wait(self, timeout_s: float) -> bool:
        """Wait until the control daemon takes clients; False if it does not within this time."""
        until = time.monotonic() + timeout_s
        while not self.answers:
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        return True

    def quit(self) -> None:
        """Ask the control daemon to end with its server. Returns within seconds, even if the daemon hangs."""
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                [CONTROL],
                input="quit -t 2\n",
                text=True,
                env=os.environ | self.environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_QUIT_S,
                check=False,
            )


def _no_link(path: str, flags: int) -> int:
    """Open a file, but no symbolic link, and without waiting for the reader of a FIFO."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def check_installed() -> None:
    """Raise NotSupportedError if MPS is not installed."""
    if shutil.which(CONTROL) is None:
        raise NotSupportedError(f"{CONTROL} is not installed; it comes with NVIDIA's driver")


def is_mps(pid: int) -> bool:
    """Tell whether a process is an MPS control daemon or server, by its name."""
    return proc.name(pid) == _COMM


def is_mps_server(pid: int) -> bool:
    """Tell whether a process is an MPS server, by its command line: its name is also the control daemon's."""
    return is_mps(pid) and any(word.endswith(_SERVER) for word in proc.cmdline(pid)[:2])


def child_of(parent: int, pids: Iterable[int]) -> int:
    """Return the first of ``pids`` whose parent is ``parent``; 0 if there is none."""
    return next((pid for pid in pids if proc.stat(pid)[_PARENT : _PARENT + 1] == [str(parent)]), 0)


def ended_children(pid: int) -> int:
    """Return what rises with each child that has ended and was waited for, however short it lived; 0 for no process.

    It is the number of their page faults (proc_pid_stat(5)): no process does without.
    """
    fields = proc.stat(pid)
    return int(fields[_CHILDREN_FAULTS]) if fields else 0


def members(pids: Iterable[int]) -> list[int]:
    """Return the processes of a group's pod without those of MPS."""
    return [pid for pid in pids if not is_mps(pid)]


def has_members(pids: Iterable[int]) -> bool:
    """Tell whether a group's pod has a process that is not MPS's; it does not look at more than it needs to."""
    return not all(map(is_mps, pids))

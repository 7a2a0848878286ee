"""The parent's side of the helper process: starts it, asks it, and kills it if it hangs.

The kernel cannot kill a process in an uninterruptible call of the driver. The daemon does not wait for such a helper,
and starts no other for the same pod. So a pod costs at most one stuck helper.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from contextlib import suppress
from itertools import accumulate
from typing import Any

from qgpu import errors
from qgpu.errors import CheckpointError, NotSupportedError
from qgpu.linux import cgroup
from qgpu.linux.interpreter import python

#: How long a killed helper may take to end.
_DEATH_S = 5.0
#: Killed helpers that have not ended, by the pod's cgroup (``_pod_of``) in their last call.
_stuck: dict[str, subprocess.Popen[bytes]] = {}


class HelperLostError(CheckpointError):
    """The helper hung or died in a call; the call may still take effect."""


class Helper:
    """One helper process, started by the first call. One thread uses it; ``close`` may come from another."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        #: The pod's cgroup in its last call.
        self._about = ""
        self._closed = False

    @property
    def pid(self) -> int:
        """The helper's pid; 0 if none runs."""
        return 0 if self._process is None else self._process.pid

    def call(self, name: str, limit_s: float, pid: int, **arguments: Any) -> dict[str, Any]:
        """Make one call about a process and return its answer.

        Raises the driver's error, or HelperLostError after ``limit_s``.
        """
        if self._closed:
            raise HelperLostError(f"{name}: the helper was told to end")
        self._about = _pod_of(pid)
        if (stuck := _stuck.get(self._about)) is not None and stuck.poll() is None:
            raise HelperLostError(
                f"{name}: helper process {stuck.pid} hangs in the kernel, in an earlier call about this pod; end the "
                "pod, or restart the host"
            )
        _stuck.pop(self._about, None)
        process = self._process = self._process or _started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"call": name, "pid": pid, **arguments}).encode() + b"\n")
            process.stdin.flush()
            line = self._line(process, time.monotonic() + limit_s)
        except OSError as error:
            line, why = b"", error.strerror
        else:
            why = "it died" if process.poll() is not None else f"no answer within {limit_s:.0f} s"
        if not line.endswith(b"\n"):
            self._end()
            raise HelperLostError(f"{name}: the helper process was lost: {why}")
        answer: dict[str, Any] = json.loads(line)
        if not answer["ok"]:
            raise errors.from_code(answer["code"], answer["error"])
        return answer

    def close(self) -> None:
        """End the helper."""
        self._closed = True
        self._end()

    @staticmethod
    def _line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
        assert process.stdout is not None
        line, poller = b"", select.poll()
        poller.register(process.stdout, select.POLLIN)
        while not line.endswith(b"\n") and poller.poll(max(0, deadline - time.monotonic()) * 1000):
            if not (more := os.read(process.stdout.fileno(), 1 << 16)):
                _await_end(process)
                break
            line += more
        return line

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            if not _await_end(process):
                _stuck[self._about] = process
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()


def _await_end(process: subprocess.Popen[bytes]) -> bool:
    """Wait until a killed helper ends; return False if it does not."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_DEATH_S)
    return process.poll() is not None


def _pod_of(pid: int) -> str:
    """Return the uppermost cgroup with a note of qgpu's around a process: its pod's. Without one, return its own.

    A pod may have cgroups of its own below, and move its processes between them.
    """
    try:
        own = cgroup.of(pid)
    except OSError:  # it has ended
        return ""
    with suppress(OSError, NotSupportedError):
        for at in accumulate(own.split("/"), "{}/{}".format):
            if at and cgroup.keeps_times(at):
                return at
    return own


def _started() -> subprocess.Popen[bytes]:
    """Start a helper in a session of its own, so that a signal to ours does not end it. Raises CheckpointError."""
    try:
        return subprocess.Popen(
            python("-m", "qgpu.checkpoint"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
        )
    except OSError as error:  # no memory or processes are available
        raise CheckpointError(
            f"the helper process cannot be started: {error.strerror}; see the host's limits"
        ) from error

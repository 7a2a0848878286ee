"""Keeps the groups that Kubernetes claims ask for: it starts their keepers, and ends them when the claims are given up.

It runs beside qgpud, outside its confinement, because NVIDIA's MPS server is its grandchild. It has no state: qgpud's
claims and the groups' files say what is to be done, and keepers outlive it. It ends no group whose claim qgpud does not
know while that has members.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from qgpu.errors import AlreadyRunningError, PermissionDeniedError, QgpuError
from qgpu.groups import keeper_process
from qgpu.groups.group_files import GroupFiles
from qgpu.groups.keeper import Keeper
from qgpu.groups.mps_server import has_members
from qgpu.ipc.control_socket import Client
from qgpu.linux import lock_file
from qgpu.linux.shutdown import Shutdown
from qgpu.model.member_limits import MemberLimits
from qgpu.model.prepared_grant import GROUP_PREFIX

_log = structlog.get_logger("groups")

_TIMEOUT_S = 10
#: How often claims and keepers are compared.
_POLL_S = 0.2
#: The pause after a keeper that could not begin.
_RETRY_S = 2.0


class Supervisor:
    """The keepers of claims' groups in one runtime directory."""

    def __init__(self, runtime_dir: Path, program: tuple[str, ...] = keeper_process.PROGRAM) -> None:
        """``program`` is the command that runs a keeper."""
        self._runtime_dir, self._program = runtime_dir, program
        #: Work in progress by group, each in a thread of its own, because it may take seconds.
        self._busy: dict[str, threading.Thread] = {}
        #: Keepers that this process has started; it reaps them when they end.
        self._children: list[subprocess.Popen[bytes]] = []
        self._told: dict[str, str] = {}
        #: When a group may be tried again, on CLOCK_MONOTONIC.
        self._retry_at_s: dict[str, float] = {}

    def run(self, stop: Shutdown) -> None:
        """Compare repeatedly until ``stop``; keepers go on. Raises AlreadyRunningError, PermissionDeniedError."""
        with self._lock():
            while not stop.wait(_POLL_S):
                with suppress(QgpuError):  # the daemon is being replaced
                    self.compare()
            for thread in self._busy.values():
                thread.join()

    def compare(self) -> None:
        """Begin missing groups, and end groups without a claim. Raises QgpuError if qgpud does not answer."""
        with Client(self._runtime_dir, _TIMEOUT_S) as client:
            grants = {each["group"]: each for each in client.call("grant.list")["grants"] if each.get("group")}
            pods = {pod["name"]: pod["pids"] for pod in client.call("pod.list")["pods"]}
        self._busy = {name: thread for name, thread in self._busy.items() if thread.is_alive()}
        self._children = [child for child in self._children if child.poll() is None]
        self._told = {name: told for name, told in self._told.items() if name in grants}
        self._retry_at_s = {name: at_s for name, at_s in self._retry_at_s.items() if name in grants}
        for name in sorted((self._kept() | grants.keys()) - self._busy.keys()):
            files, grant = GroupFiles(self._runtime_dir, name), grants.get(name)
            kept = files.keeper()
            if grant is not None and not grant["ending"]:
                if kept is None and time.monotonic() >= self._retry_at_s.get(name, 0.0):
                    self._meanwhile(name, partial(self._begin, name, grant))
            elif grant is None and has_members(pods.get(name, ())):
                continue  # qgpud has lost the claim: the members go on with their limits
            elif kept is not None:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(kept, signal.SIGTERM)
            elif files.directory.is_dir() or name in pods:
                self._meanwhile(name, partial(self._clear_away, name))

    def _begin(self, name: str, grant: Mapping[str, Any]) -> None:
        files = GroupFiles(self._runtime_dir, name)
        try:
            part = MemberLimits(grant["part"]["sm"], grant["part"]["memory"])
            child = keeper_process.start(self._runtime_dir, name, {}, part, of_claim=True, program=self._program)
        except QgpuError as error:
            self._retry_at_s[name] = time.monotonic() + _RETRY_S
            files.problem = str(error)
            if self._told.get(name) != str(error):
                self._told[name] = str(error)
                _log.error("a claim's group cannot begin, trying again", group=name, reason=str(error))
        else:
            self._children.append(child)
            self._told.pop(name, None)
            _log.info("group of a claim begun", group=name, namespace=grant["namespace"], claim=grant["name"])

    def _clear_away(self, name: str) -> None:
        """Remove what a killed keeper has left of a group; if that fails, the next comparison tries again."""
        with suppress(QgpuError, OSError):
            Keeper(self._runtime_dir, name, {}, of_claim=True).clear_away(force=True)

    def _kept(self) -> set[str]:
        """Return the claims' groups that have files."""
        directory = self._runtime_dir / "groups"
        return {each.name for each in directory.glob(f"{GROUP_PREFIX}*")} if directory.is_dir() else set()

    def _meanwhile(self, name: str, what: Callable[[], None]) -> None:
        self._busy[name] = thread = threading.Thread(target=what, name=name, daemon=True)
        thread.start()

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock of the runtime directory's supervisor. Raises AlreadyRunningError, PermissionDeniedError."""
        path = self._runtime_dir / "groups.lock"
        try:
            self._runtime_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
            fd = lock_file.lock(path)
        except BlockingIOError:
            raise AlreadyRunningError(f"{path}: claims' groups are served there already; stop that first") from None
        except OSError as error:
            raise PermissionDeniedError(f"{path}: {error.strerror}; run it as qgpud's user") from error
        try:
            yield
        finally:
            os.close(fd)

"""The process that keeps a group: ``python -m qgpu.groups.keeper NAME READY_FD``, with JSON on standard input.

It makes the group's pod and runs the MPS control daemon in it. It starts the control daemon again when that dies, and
ends it on SIGTERM. While a process runs in the pod, the pod outlives the keeper and qgpud. On a plane without a GPU
there is no MPS: the keeper then only holds the pod.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import structlog

from qgpu.errors import (
    ExitCode,
    NotSupportedError,
    PermissionDeniedError,
    QgpuError,
    RefusedError,
    UnknownNameError,
    no_pod,
)
from qgpu.groups import group_cdi
from qgpu.groups.group_files import GroupFiles
from qgpu.groups.mps_server import SHARED_MEMORY, WITH_MPS, child_of, ended_children, is_mps, is_mps_server, members
from qgpu.ipc.control_socket import Client
from qgpu.linux import cgroup, mounts, proc
from qgpu.linux.interpreter import python
from qgpu.linux.parent_death import terminated_with_parent
from qgpu.linux.proc import start_time
from qgpu.linux.shutdown import Shutdown
from qgpu.model.member_limits import MemberLimits
from qgpu.model.prepared_grant import GROUP_PREFIX
from qgpu.nvidia import abi
from qgpu.paths import default_runtime_dir

_log = structlog.get_logger("group")

_TIMEOUT_S = 10
#: How long MPS's control daemon may take to answer: a busy host starts it slowly. The keeper sees at once if it ends.
_START_S = 60.0
#: The first and the longest pause before the control daemon is started again; it doubles while the daemon dies at once.
_PAUSES_S = 0.2, 5.0
#: A control daemon that ran this long did not die at once.
_STEADY_S = 5.0
_POLL_S = 0.1
#: How often the pod's processes are listed.
_POD_POLL_S = 0.5
#: How long clients of an MPS server that has ended have after SIGTERM; then SIGKILL follows.
_GRACE_S = 1.0
#: Keeps other users from putting a socket in place of MPS's, whatever the umask of the group's creator.
_UMASK = 0o022
#: Only root can open the directory of a claim's group.
_CLAIMS_MODE = 0o700


class Keeper:
    """Keeps one group alive."""

    def __init__(
        self,
        runtime_dir: Path,
        name: str,
        grants: dict[str, Any],
        part: MemberLimits | None = None,
        with_mps: Set[str] = WITH_MPS,
        card_major: int = abi.NV_MAJOR,
        *,
        of_claim: bool = False,
    ) -> None:
        """``of_claim``: the group is a claim's, so its grants are the claim's and its members are in containers."""
        self._runtime_dir, self._name, self._grants = runtime_dir, name, grants
        self._part = part or MemberLimits()
        self._files = GroupFiles(runtime_dir, name)
        self._with_mps, self._card_major, self._of_claim = with_mps, card_major, of_claim
        self._client: Client | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._has_mps = False
        self._cdi_file: Path | None = None
        #: The pod's MPS servers and all its processes as last listed, each with its start time.
        self._mps_servers: dict[int, str] = {}
        self._processes: dict[int, str] = {}
        #: The pid of the control daemon once it was found in the pod, and its ``ended_children`` when last read.
        self._control = self._ended = 0
        #: Whether an MPS server has ended and its clients have not been ended yet.
        self._orphaned = False
        self._next_poll_s = 0.0
        self._cgroups: list[str] = []

    def begin(self) -> None:
        """Make the pod and start its MPS control daemon. If it raises QgpuError, it leaves nothing behind."""
        if self._name.startswith(GROUP_PREFIX) and not self._of_claim:  # the supervisor would end it
            raise RefusedError(f"group {self._name}: claims' groups have such names; choose another")
        self._client = client = Client(self._runtime_dir, _TIMEOUT_S)
        plane = client.call("status")["plane"]
        client.call("pod.create", name=self._name, grants=self._grants, may_wait=False)
        try:
            self._files.claim(os.getpid(), _ident(self._pod(client)))
            self._files.part = self._part
            self._has_mps = plane in self._with_mps
            if self._of_claim:
                self._take_over(client)
            else:
                self._offer(client)
            if self._has_mps:
                self._start()
            self._files.has_begun()
        except BaseException:
            self.end()
            raise

    def keep(self, stop: Shutdown) -> None:
        """Start the control daemon again whenever it ends, until told to stop; then end it and remove the pod."""
        pause_s, began, problem, failure = _PAUSES_S[0], time.monotonic(), "", ""
        while not stop.wait(_POLL_S):
            try:
                if not self._has_mps or (self._server is not None and self._server.poll() is None):
                    self._look_after_pod(stop)
                    continue
                pause_s = _PAUSES_S[0] if time.monotonic() - began > _STEADY_S else min(2 * pause_s, _PAUSES_S[1])
                self._files.server.close()
                if not problem:
                    _log.warning(
                        "the MPS control daemon has ended, starting it again", group=self._name, pause_s=pause_s
                    )
                self._end_servers()
                self._end_clients(stop)
                self._mps_servers = {}
                if stop.wait(pause_s):
                    break
                began = time.monotonic()
                self._ensure_pod()
                self._start()
                problem = ""
            except OSError as error:  # no descriptor is free, perhaps on the whole host
                if str(error.strerror) != failure:
                    failure = str(error.strerror)
                    _log.info("cannot look after the group, trying again", group=self._name, reason=failure)
            except QgpuError as error:
                if str(error) != problem:
                    problem = str(error)
                    _log.error("the group's MPS control daemon cannot be started", group=self._name, reason=problem)
        self.end()

    def log_to_file(self) -> None:
        """Write this process's log into the group's directory: nobody reads its output."""
        path = self._files.directory / "log" / "group.log"
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            for fd in (1, 2):
                os.dup2(file.fileno(), fd)

    def _look_after_pod(self, stop: Shutdown) -> None:
        """End the clients of an MPS server that has ended, and make the pod again if it has gone with its daemon."""
        if not self._orphaned and self._server_ended():
            _log.warning("an MPS server has ended; its clients are ended, too", group=self._name)
            self._orphaned, self._mps_servers = True, {}
        if self._orphaned:
            self._end_clients(stop)
            self._ended = ended_children(self._control)
            self._orphaned = False
        if time.monotonic() < self._next_poll_s:
            return
        self._next_poll_s = time.monotonic() + _POD_POLL_S
        try:
            with Client(self._runtime_dir, _TIMEOUT_S) as client:
                self._list(client)
            self._find_control()
            self._mps_servers = {pid: since for pid, since in self._processes.items() if is_mps_server(pid)}
        except UnknownNameError:
            self._mps_servers = {}
            if self._server is not None:  # the control daemon ends, and starts again in the new pod
                self._server.terminate()
            else:
                with suppress(QgpuError):
                    self._ensure_pod()
        except QgpuError:  # the daemon is being replaced
            pass
        self._files.server.bound_logs()

    def _server_ended(self) -> bool:
        """Tell whether an MPS server has ended, also one that ended before the keeper saw it."""
        before, self._ended = self._ended, ended_children(self._control)
        if self._mps_servers:
            return any(start_time(pid) != since for pid, since in self._mps_servers.items())
        return self._ended > before

    def _find_control(self) -> None:
        """Find the control daemon, the child of its launcher, among the pod's processes."""
        if self._server is not None and not self._control:
            self._control = child_of(self._server.pid, self._processes)
            self._ended = ended_children(self._control)

    def _take_over(self, client: Client) -> None:
        """End the processes that a killed keeper has left in the pod, and make the members' shared memory.

        Members have the directories mounted. Other users of the host can neither use MPS nor fill the shared memory.
        """
        self._files.directory.chmod(_CLAIMS_MODE)
        self._list(client)
        self._end_servers()
        self._end_clients()
        if self._has_mps:
            self._files.server.share_memory()
        else:
            self._files.server.memory.mkdir(exist_ok=True)

    def _offer(self, client: Client) -> None:
        """Write the CDI file, so that containers can be members. If that fails, the group works without containers."""
        try:
            self._cdi_file = group_cdi.place(client, self._files)
            group_cdi.offer(client, self._files)
        except QgpuError as error:
            _log.error("no CDI file: containers cannot be members", group=self._name, reason=str(error))

    def _ensure_pod(self) -> None:
        """Make the pod again if it has ended together with the control daemon. Raises a QgpuError."""
        with ExitStack() as closing:
            client = closing.enter_context(Client(self._runtime_dir, _TIMEOUT_S))
            try:
                self._pod(client)
            except UnknownNameError:
                client.call("pod.create", name=self._name, grants=self._grants, may_wait=False)
                if self._client is not None:
                    self._client.close()
                self._client = client  # the pod exists while this connection is open
                closing.pop_all()
                self._files.claim(os.getpid(), _ident(self._pod(client)))

    def _pod(self, client: Client) -> dict[str, Any]:
        for pod in client.call("pod.list")["pods"]:
            if pod["name"] == self._name:
                return dict(pod)
        raise no_pod(self._name)

    def _start(self) -> None:
        """Start the control daemon as a process of the pod. Raises a QgpuError."""
        server, self._control = self._files.server, 0
        server.prepare()
        inside = mounts.seen_at(server.memory, SHARED_MEMORY) if self._of_claim else []
        with (self._files.directory / "log" / "keeper.log").open("ab") as log:
            self._server = subprocess.Popen(
                [
                    *terminated_with_parent(),
                    *inside,
                    *python("-c", "from qgpu.cli.main import main; main()"),
                    *("--runtime-dir", str(self._runtime_dir), "run", "--group", self._name, "--", *server.command),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + _START_S
        while not server.wait(_POLL_S):
            if self._server.poll() is not None or time.monotonic() > until:
                said = self._files.last_words() or "it says nothing"
                raise NotSupportedError(f"group {self._name}: {server.command[0]} does not start: {said}")
        self._pids()
        self._find_control()

    def _end_servers(self) -> None:
        """Kill MPS's remaining processes in the pod: without its control daemon, a server takes no more clients."""
        self._kill(signal.SIGKILL, is_mps)

    def _end_clients(self, stop: Shutdown | None = None) -> None:
        """End the pod's processes that use the card, unless told to stop meanwhile.

        NVIDIA requires that clients end when their server has ended. Not all of them notice it: RM keeps a shared TSG
        while a client has a handle of it.
        """
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._kill(number, self._is_client)
            until = time.monotonic() + _GRACE_S
            while any(map(self._is_client, self._pids())) and time.monotonic() < until:
                if stop is None:
                    time.sleep(_POLL_S)
                elif stop.wait(_POLL_S):
                    return

    def _is_client(self, pid: int) -> bool:
        has_card = any(os.major(number) == self._card_major for _, number in proc.devices(pid))
        return not is_mps(pid) and (has_card or proc.is_headless(pid))  # the latter shows no files

    def _kill(self, number: signal.Signals, chosen: Callable[[int], bool]) -> None:
        """Send a signal to those processes of the pod for which ``chosen`` returns true.

        A member can make ``chosen`` slow. So the keeper first opens the process's pidfd: a new process with the same
        pid gets no signal.
        """
        for pid in self._pids():
            with suppress(OSError), pidfd_of(pid) as process:
                if self._is_inside(pid) and chosen(pid):
                    signal.pidfd_send_signal(process, number)

    def _is_inside(self, pid: int) -> bool:
        """Tell whether a process is in the pod's cgroups; on the simulator, whether it still is the listed one."""
        if self._cgroups:
            return any(cgroup.within(cgroup.of(pid), at) for at in self._cgroups)
        return bool(since := self._processes.get(pid)) and start_time(pid) == since

    def _list(self, client: Client) -> None:
        """List the pod's processes; store its cgroups and its current grants. Raises QgpuError."""
        pod = self._pod(client)
        self._processes = {pid: start_time(pid) for pid in pod["pids"]}
        self._grants = {str(grant["gpu"]): grant for grant in pod["grants"]}
        self._cgroups = [at for at in (pod["cgroup"], *pod["joined"]) if at]

    def _pids(self) -> list[int]:
        """List the pod's processes; if qgpud does not answer, those of the last list that still run."""
        with suppress(QgpuError), Client(self._runtime_dir, _TIMEOUT_S) as client:
            self._list(client)
        return [pid for pid, since in self._processes.items() if since and start_time(pid) == since]

    def clear_away(self, force: bool) -> None:
        """Remove what a killed keeper has left of the group. Raises QgpuError."""
        directory = self._files.directory
        if directory.is_dir() and not os.access(directory, os.W_OK):
            raise PermissionDeniedError(f"group {self._name}: another user made it; ask that user or root to remove it")
        with Client(self._runtime_dir, _TIMEOUT_S) as client:
            self._cdi_file = group_cdi.place(client, self._files)
            with suppress(UnknownNameError):
                pod = self._pod(client)
                if self._of_claim or _ident(pod) == self._files.pod_ident:  # not a new pod of the same name
                    if (left := members(pod["pids"])) and not force:
                        raise members_left(self._name, len(left))
                    self._end_servers()
                    self.end()
        self._remove_files()

    def end(self) -> None:
        """End the control daemon and the clients, and remove the pod, unless a member still runs in it."""
        if self._server is not None:
            self._files.server.quit()
            try:
                self._server.wait(_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
            self._end_servers()
        self._end_clients()
        self._remove_files()
        with suppress(QgpuError), Client(self._runtime_dir, _TIMEOUT_S) as client:
            client.call("pod.remove", name=self._name)
        if self._client is not None:
            self._client.close()

    def _remove_files(self) -> None:
        if self._cdi_file is not None:
            self._cdi_file.unlink(missing_ok=True)
        self._files.remove()


@contextmanager
def pidfd_of(pid: int) -> Iterator[int]:
    """Yield a pidfd of a process, which cannot mean a later process. Raises OSError if it has ended."""
    process = os.pidfd_open(pid)
    try:
        yield process
    finally:
        os.close(process)


def members_left(name: str, count: int) -> RefusedError:
    """Return the error that a group cannot be removed because members still run."""
    running = "1 process of a member still runs" if count == 1 else f"{count} processes of members still run"
    return RefusedError(f"group {name}: {running}; end members first, or use --force")


def _ident(pod: Mapping[str, Any]) -> int:
    """Return the id of a pod's cgroup; 0 for a pod without one, as on the simulator."""
    return cgroup.id_of(pod["cgroup"]) if pod["cgroup"] else 0


def main(with_mps: Set[str] = WITH_MPS, card_major: int = abi.NV_MAJOR) -> None:
    """Keep a group; standard input gives its ``grants``, the members' default ``part``, and ``of_claim``.

    Write the result of the start to READY_FD: an empty line, or the exit code and the error.
    """
    name, ready = sys.argv[1], int(sys.argv[2])
    stop = Shutdown(signal.SIGTERM, signal.SIGINT)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.umask(_UMASK)
    wanted = json.load(sys.stdin)
    part = MemberLimits(**wanted["part"])
    of_claim = bool(wanted["of_claim"])
    keeper = Keeper(default_runtime_dir(), name, wanted["grants"], part, with_mps, card_major, of_claim=of_claim)
    failed: QgpuError | None = None
    try:
        keeper.begin()
    except QgpuError as error:
        failed = error
    try:
        with os.fdopen(ready, "w") as told:
            told.write(f"{failed.code} {failed}\n" if failed else "\n")
    except BrokenPipeError:  # whoever wanted the group was interrupted
        if failed is None:
            keeper.end()
            sys.exit(ExitCode.FAILED)
    if failed is not None:
        sys.exit(failed.code)
    keeper.log_to_file()
    keeper.keep(stop)


if __name__ == "__main__":
    main()

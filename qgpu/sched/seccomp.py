"""The seccomp plane as the daemon sees it: a guardian process, spoken to over a socket.

The host starts the guardian, or finds the one an earlier daemon left with its pods. It holds copies of the
journal and of every listener, so that a guardian that dies is replaced within a fraction of a second, with
its register, while the pods' calls wait in the kernel.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pynvml
import structlog

from qgpu import cgroup, errors, wire
from qgpu.errors import (
    AlreadyRunningError,
    BackendGoneError,
    ExitCode,
    NoGpuError,
    NotSupportedError,
    PermissionDeniedError,
    QgpuError,
)
from qgpu.guardian.journal import Journal
from qgpu.guardian.messages import PROTOCOL, plan_to, sample_from
from qgpu.guardian.register import grant_from, grant_to
from qgpu.model import NS_PER_MS, Grant, Plan, Sample
from qgpu.sched.backend import Pgpu, PodInfo
from qgpu.systemd import Store, to_journal

_log = structlog.get_logger("seccomp")

#: A guardian that does not answer for this long is replaced,
_ANSWER_S = 2.0
#: and after this long already if it was stopped: one that is only slow could still answer, that one can't.
_STOPPED_MS = 150
#: The daemon renews its plan at least this often, well within the guardian's lease.
_RENEW_NS = 250 * NS_PER_MS
#: How the guardian counts what did not fit.
_OVER_LIMIT = "over the limit"

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_NOBODY_MAY_TRACE = "3"


class GuardianHangsError(BackendGoneError):
    """A guardian is there and does not answer."""


class Link:
    """A connection to the guardian: requests with answers, and events that come by themselves."""

    def __init__(self, path: Path, *, watch: bool) -> None:
        try:
            self._connection = wire.connect(str(path), _ANSWER_S)
        except OSError as error:
            raise BackendGoneError(f"guardian at {path}: {error.strerror or error}") from error
        self._lock = threading.Lock()
        self._over = False
        self.events: list[dict[str, Any]] = []
        try:
            self.hello, fds = self.call("hello", watch=watch)
        except BackendGoneError as error:
            pid = self._connection.peer().pid
            self._connection.close()
            raise GuardianHangsError(f"guardian (process {pid}): {error}") from error
        self.journal_fd = fds[0]
        #: Names the guardian's process for as long as this link lives, whatever becomes of its number.
        self.pidfd = _pidfd(int(self.hello["pid"]))
        if self.hello.get("protocol") != PROTOCOL:
            self.close()
            raise NotSupportedError(
                f"guardian (process {self.hello['pid']}): left by another version of qgpu; "
                "end its pods, or go back to that version"
            )

    def call(self, op: str, fds: Sequence[int] = (), **arguments: Any) -> tuple[dict[str, Any], list[int]]:
        """Ask and return the answer with its descriptors. Raises BackendGoneError or what the guardian says."""
        with self._lock:
            if self._over:
                raise BackendGoneError("guardian: the connection is over")
            try:
                self._connection.send({"op": op, **arguments}, fds)
                self._look_whether_stopped()
                while (message := self._connection.receive()) is not None:
                    if "event" not in message[0]:
                        break
                    self.events.append(message[0])
            except (OSError, wire.WireError) as error:
                self._over = True  # an answer that comes after all would be taken for the next one's
                raise BackendGoneError(f"guardian: {error}") from error
            if message is None:
                self._over = True
                raise BackendGoneError("guardian: it has died")
        answer, received = message
        if not answer["ok"]:
            raise errors.from_code(answer["code"], answer["error"])
        return answer, received

    def _look_whether_stopped(self) -> None:
        """Raise TimeoutError where nothing comes because somebody stopped the process (SIGSTOP, a debugger)."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(_STOPPED_MS) and _is_stopped(self._connection.peer().pid):
            raise TimeoutError("its process is stopped")

    def wait(self, timeout_ns: int) -> None:
        """Return when an event is there or time is up."""
        if not self.events:
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            if poll.poll(timeout_ns / 1e6):
                with self._lock:
                    self._over |= not self._connection.fill()
                    while (message := self._connection.next_buffered()) is not None:
                        self.events.append(message[0])

    def close(self) -> None:
        """Hang up: a plan that was applied here is over. Safe to call twice."""
        fds, self.journal_fd, self.pidfd = (self.journal_fd, self.pidfd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)
        self._over = True
        self._connection.close()


class SeccompBackend:
    """Time on one pGPU, kept by the guardian."""

    def __init__(self, host: SeccompHost, pgpu: int) -> None:
        self.detailed = False
        self.lost = 0
        self._host = host
        self._pgpu = pgpu
        self._link: Link | None = Link(host.socket, watch=True)
        self._applied: Plan | None = None

    def sample(self) -> Sample:
        """Report what happened since the last call."""
        answer = self._call("sample", pgpu=self._pgpu, detailed=self.detailed)
        self.lost = answer.get("lost", 0)
        return sample_from(answer)

    def apply(self, plan: Plan) -> None:
        """Put a plan in force; one that is in force already is only renewed."""
        if plan == self._applied and self._call("renew", pgpu=self._pgpu)["held"]:
            return
        self._call("apply", plan=plan_to(plan))
        self._applied = plan

    def wait(self, timeout_ns: int) -> None:
        """Wait for a change among the pods, but not past the next renewal."""
        if self._link is not None:
            self._link.wait(min(timeout_ns, _RENEW_NS))
            self._link.events.clear()

    def close(self) -> None:
        """Hang up; the guardian opens every gate."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _call(self, op: str, **arguments: Any) -> dict[str, Any]:
        if self._link is None:
            raise BackendGoneError(f"pGPU {self._pgpu}: backend is closed")
        try:
            return self._link.call(op, **arguments)[0]
        except BackendGoneError:
            self._link.close()
            self._applied = None
            self._host.revive()
            self._link = Link(self._host.socket, watch=True)
            return self._link.call(op, **arguments)[0]


class SeccompHost:
    """The pGPUs and pods of this machine, with no kernel module."""

    plane = "seccomp"

    def __init__(self, runtime_dir: Path, store: Store) -> None:
        self._runtime_dir = runtime_dir
        self._store = store
        self.socket = runtime_dir / "guardian.sock"
        self._lock = threading.RLock()
        self._listeners = _stored_listeners(store)
        journals = store.take("journal")
        check_kernel()
        check_cards()
        self._host_lock = _lock_host()
        try:
            self._link = Link(self.socket, watch=True)
            _log.info("guardian found", pid=self._link.hello["pid"])
            for number in [n for n in self._listeners if str(n) not in self._link.hello["listeners"]]:
                self._let_go(number)
        except GuardianHangsError:
            raise  # only it has its pods' listeners: another one beside it would strand them
        except BackendGoneError:
            # in the store if the last guardian and daemon died together: then there are pods that wait
            self._link = self._start(journals[""] if journals else Journal().fd)
            self._hand_over(self._link)
        self._journal_fd = os.dup(self._link.journal_fd)
        store.put("journal", self._journal_fd)
        for number, pod in self._link.hello["listeners"].items():
            _, fds = self._link.call("listener", listener=int(number))
            self._hold(int(number), pod, fds[0])
        self._pgpus = _describe(self._link.hello["cards"])

    @property
    def driver(self) -> str:
        """The version of the NVIDIA driver."""
        return str(self._link.hello["version"])

    @property
    def guardian_pid(self) -> int:
        """The guardian's process."""
        return int(self._link.hello["pid"])

    def pgpus(self) -> Sequence[Pgpu]:
        """List the cards of this machine in PCI order."""
        return self._pgpus

    def backend(self, pgpu: int) -> SeccompBackend:
        """Open the backend of one pGPU."""
        return SeccompBackend(self, pgpu)

    def pods(self) -> Sequence[PodInfo]:
        """List the pods the guardian knows."""
        return [
            PodInfo(
                pod["name"],
                {int(i): grant_from(grant) for i, grant in pod["grants"].items()},
                cgroup.pids(pod["cgroup"]),
                {int(i): held for i, held in pod["memory"].items()},
                "; ".join(f"{what} refused {n} times" for what, n in pod["refused"].items()),
                pod["cgroup"],
                sum(n for what, n in pod["refused"].items() if what.endswith(_OVER_LIMIT)),
                sum(n for what, n in pod["refused"].items() if not what.endswith(_OVER_LIMIT)),
            )
            for pod in self._call("pods")["pods"]
        ]

    def admit(self, name: str, grants: Mapping[int, Grant], at: str = "") -> None:
        """Make a pod of a cgroup, or with one of its own."""
        cgroup.check_name(name)
        self._call("admit", name=name, grants=_grants(grants), cgroup=at)

    def amend(self, name: str, grants: Mapping[int, Grant]) -> None:
        """Change a pod's grants."""
        self._call("amend", name=name, grants=_grants(grants))

    def attach(self, name: str, pid: int, fds: Sequence[int]) -> None:
        """Bring a process and its listener into a pod; a copy of the listener stays here."""
        if len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise QgpuError(f"pod {name}: its launcher sent no seccomp listener")
        try:
            answer = self._call("attach", fds, name=name, pid=pid)
        except BaseException:
            os.close(fds[0])
            raise
        self._hold(answer["listener"], name, fds[0])

    def retire(self, name: str) -> None:
        """Forget a pod and remove its cgroup."""
        self._call("retire", name=name)

    def close(self) -> None:
        """Let go; the guardian stays for as long as there are pods."""
        with self._lock:
            self._link.close()
            for _, fd in self._listeners.values():
                os.close(fd)
            self._listeners.clear()
            os.close(self._journal_fd)
            os.close(self._host_lock)

    def revive(self) -> None:
        """Connect anew, to another guardian if this one died or hangs. Raises what hinders its start."""
        with self._lock:
            try:
                link = Link(self.socket, watch=True)
            except BackendGoneError:
                _log.warning("guardian lost: starting another", pid=self.guardian_pid)
                _kill(self._link.pidfd)
                link = self._start(self._journal_fd)
            self._link.close()
            self._link = link
            self._hand_over(link)

    def _hand_over(self, link: Link) -> None:
        """Give a guardian the listeners that it lacks."""
        missing = {n: held for n, held in self._listeners.items() if str(n) not in link.hello["listeners"]}
        for number, (pod, fd) in missing.items():
            link.call("adopt", [fd], listener=number, pod=pod)
        link.call("adopted")

    def _hold(self, number: int, pod: str, fd: int) -> None:
        """Keep a copy of a listener, here and in the store."""
        if number in self._listeners:
            os.close(self._listeners[number][1])
        self._listeners[number] = (pod, fd)
        self._store.put(f"listener.{number}.{pod}", fd)

    def _let_go(self, number: int) -> None:
        """Close a listener behind which nobody is left."""
        pod, fd = self._listeners.pop(number)
        self._store.drop(f"listener.{number}.{pod}")
        os.close(fd)

    def _call(self, op: str, fds: Sequence[int] = (), **arguments: Any) -> dict[str, Any]:
        with self._lock:
            try:
                answer = self._link.call(op, fds, **arguments)[0]
            except BackendGoneError:
                self.revive()
                answer = self._link.call(op, fds, **arguments)[0]
            for event in self._link.events:
                if event["event"] == "listener-gone" and event["listener"] in self._listeners:
                    self._let_go(event["listener"])
            self._link.events.clear()
            return answer

    def _start(self, journal_fd: int) -> Link:
        """Start a guardian in a session of its own, so that nobody who stops the daemon stops it too."""
        process = subprocess.Popen(
            [sys.executable, "-m", "qgpu.guardian", str(self._runtime_dir), str(journal_fd)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if to_journal() else (self._runtime_dir / "guardian.log").open("a"),
            pass_fds=[journal_fd],
            start_new_session=True,
            cwd="/",
        )
        assert process.stdout is not None
        line = process.stdout.readline().decode().strip()
        process.stdout.close()
        if line != "ready":
            code, _, why = line.partition(" ")
            process.wait()
            raise errors.from_code(int(code or ExitCode.FAILED), why or "guardian: died at start; its log says why")
        threading.Thread(target=process.wait, daemon=True, name="guardian-reaper").start()
        return Link(self.socket, watch=True)


def check_kernel(yama: Path = _YAMA) -> None:
    """Make sure that pods' processes can be reached into at all. Raises NotSupportedError."""
    if yama.exists() and yama.read_text().strip() == _NOBODY_MAY_TRACE:
        raise NotSupportedError(
            f"{yama} is 3: nobody may reach into processes, so no limit of a pod could be enforced; "
            "boot with it at 2 or less, or load qgpu.ko"
        )


def check_cards() -> None:
    """Make sure that no card is in MIG mode, which divides it in another way. Raises NotSupportedError."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoGpuError(f"NVML: {error}; is the NVIDIA driver's user-space part installed?") from error
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                current, _ = pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByIndex(index))
            except pynvml.NVMLError:  # a card without MIG, or one that cannot be asked: the guardian leaves that out
                continue
            if current == pynvml.NVML_DEVICE_MIG_ENABLE:
                raise NotSupportedError(
                    f"GPU {index}: MIG mode is on, and qgpu shares whole cards; switch it off with "
                    f"`nvidia-smi -i {index} -mig 0`, or leave that card to MIG on another host"
                )
    finally:
        pynvml.nvmlShutdown()


def _stored_listeners(store: Store) -> dict[int, tuple[str, int]]:
    """Return the listeners that a former daemon had kept, by number, with their pods."""
    named = {tuple(name.split(".", 1)): fd for name, fd in store.take("listener.").items()}
    return {int(number): (pod, fd) for (number, pod), fd in named.items()}


def _grants(grants: Mapping[int, Grant]) -> dict[str, Any]:
    return {str(pgpu): grant_to(grant) for pgpu, grant in grants.items()}


def _lock_host() -> int:
    """Claim this machine's cards: two daemons would each hand out all of them. Raises AlreadyRunningError."""
    directory = cgroup.mount() / "qgpu"
    try:
        directory.mkdir(exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PermissionDeniedError(f"{directory}: {error.strerror}; run as root") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise AlreadyRunningError("another qgpud shares this machine's GPUs already; stop it first") from error
    return fd


def _is_stopped(pid: int) -> bool:
    """Tell by /proc/PID/stat, whose state is the word after the name in brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:  # died this moment; the next call will tell
        return -1


def _kill(pidfd: int) -> None:
    """Make sure a guardian that hangs does not come back beside its successor."""
    with suppress(OSError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(_ANSWER_S * 1000)


def _describe(cards: Sequence[Mapping[str, Any]]) -> list[Pgpu]:
    """Ask NVML for names and sizes; cards are matched by PCI address."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoGpuError(f"NVML: {error}; is the NVIDIA driver's user-space part installed?") from error
    try:
        found = []
        for card in cards:
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(card["pci"].encode())
            found.append(
                Pgpu(
                    card["index"],
                    _text(pynvml.nvmlDeviceGetUUID(handle)),
                    _text(pynvml.nvmlDeviceGetName(handle)),
                    int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    card["minor"],
                )
            )
        return found
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

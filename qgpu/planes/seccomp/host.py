"""The seccomp plane as the daemon sees it: a guardian process behind a socket.

The host starts the guardian, or finds the one that an earlier daemon left with its pods. It holds copies of the journal
and of every listener. So a guardian that dies is replaced within a fraction of a second, with its object table, while
the pods' calls wait in the kernel.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import structlog

from qgpu import errors
from qgpu.checkpoint.process_checkpointer import ProcessCheckpointer
from qgpu.errors import AlreadyRunningError, BackendGoneError, NoGpuError, QgpuError, UnknownNameError
from qgpu.guardian.failover import emergency_open
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.failover.state_fds import StateFds
from qgpu.guardian.rules import tools
from qgpu.ipc.codec import grants_from_json, grants_to_json
from qgpu.linux import cgroup, proc
from qgpu.linux.seccomp_notify import is_listener
from qgpu.model import Grant
from qgpu.model.plane_api import ExcludedCard, Host, Pgpu, PodInfo
from qgpu.nvidia import mig
from qgpu.nvidia.nvml import MigCards, Utilization, describe, mig_cards
from qgpu.planes.seccomp.backend import SeccompBackend
from qgpu.planes.seccomp.guardian_link import GuardianHangsError, GuardianLink, pidfd_of
from qgpu.planes.seccomp.hang_detector import waits_for_pages
from qgpu.planes.seccomp.preflight import check_kernel, lock_host
from qgpu.planes.seccomp.restored_fds import RestoredFds
from qgpu.planes.seccomp.standby_link import StandbyLink
from qgpu.units import format_count

_log = structlog.get_logger("seccomp")
_T = TypeVar("_T")

#: The events of the guardian that matter here: they are read whenever something is asked.
_GONE = "listener-gone"
#: The end of the names under which the guardian counts memory that did not fit.
_OVER_LIMIT = "over the limit"
#: We kill a guardian with so many threads that wait for memory of ended pods, because nothing else ends these waits.
_MOST_STUCK = 8
#: We do so only if the standby is this old: it is loaded then, and pods wait for a successor once a minute at most.
_SETTLED_S = 60.0
#: How long it may take until exactly one guardian runs, when two are starting or one has not quite ended.
_DEATH_S = 2.0
#: A standby that has ended by itself is replaced if it began this long ago.
_RESTART_STANDBY_S = 10.0
#: A loaded standby has taken over within this time.
_LOADED_S = 0.05
#: How often the socket is tried meanwhile.
_LOOK_S = 0.02


class SeccompHost(Host):
    """The pGPUs and pods of this machine, without a kernel module."""

    plane = "seccomp"

    def __init__(self, kept: RestoredFds, divided: Collection[int | str] = ()) -> None:
        """Take ``divided``: the cards in MIG mode whose instances are shared, by number or UUID."""
        self._runtime_dir = kept.runtime_dir
        self._store = kept.store
        self.socket = kept.socket
        self._lock = threading.RLock()
        #: The standby, which becomes the guardian when this one is lost.
        self._standby = kept.standby
        self._listeners = kept.listeners
        check_kernel()
        divided_cards = mig_cards(divided)
        self._excluded = list(divided_cards.excluded)
        self._host_lock = lock_host()
        mig.keep_shared(self._runtime_dir, divided_cards.pci)
        self._link = self._find(kept.state)
        # a guardian whose daemon died at once has no listeners yet
        self._hand_over(self._link)
        assert self._link.state is not None
        self._state = self._link.state.copy()
        for name, fd in self._state._asdict().items():
            self._store.put(name, fd)
        if self._standby is not None and (kept.state is None or not kept.state.is_same(self._state)):
            self._standby.end()
            self._standby = None
        for number, pod in self._link.hello["listeners"].items():
            _, fds = self._link.call("listener", listener=int(number))
            self._hold(int(number), pod, fds[0])
        self._standby = self._standby or StandbyLink(self._runtime_dir, self._state, self._listeners)
        excluded = {card.index for card in self._excluded}
        cards = [(card["index"], card["pci"]) for card in self._link.hello["cards"] if not card["divided"]]
        self._pgpus = {pgpu.index: pgpu for pgpu in describe(card for card in cards if card[0] not in excluded)}
        self._add_instances(divided_cards)
        if not self._pgpus:
            raise NoGpuError("no NVIDIA card here that qgpu can share; its log says why")

    def _add_instances(self, divided: MigCards) -> None:
        """Add the MIG instances that the guardian serves; an earlier daemon's may know others."""
        served = {card["index"] for card in self._link.hello["cards"]}
        for each in divided.instances:
            if each.index in served:
                self._pgpus[each.index] = each
            elif each.mig is not None:
                why = f"MIG instance {each.index}: the guardian does not serve it; its log says why"
                self._excluded.append(ExcludedCard(each.mig.card, divided.pci[each.mig.card], why))

    @property
    def driver(self) -> str:
        """The NVIDIA driver's version."""
        return str(self._link.hello["version"])

    @property
    def guardian_pid(self) -> int:
        """The guardian's pid."""
        return int(self._link.hello["pid"])

    def pgpus(self) -> Sequence[Pgpu]:
        """List the cards of this machine in PCI order."""
        return list(self._pgpus.values())

    def excluded_cards(self) -> Sequence[ExcludedCard]:
        """List the cards in MIG mode that are left alone. The guardian's log names those that it cannot measure."""
        return self._excluded

    def backend(self, pgpu: int) -> SeccompBackend:
        """Open the backend of one pGPU."""
        made = partial(SeccompBackend, self.socket, self.revive, pgpu, Utilization(self._pgpus[pgpu].uuid))
        try:
            return made()
        except BackendGoneError:
            self.revive()
            return made()

    def pods(self) -> Sequence[PodInfo]:
        """List the guardian's pods."""
        answer = self._call("pods")
        self._end_stuck_guardian(answer["stuck"])
        return [
            PodInfo(
                pod["name"],
                self._known(grants_from_json(pod["grants"])),
                inside.pids,
                self._known({int(i): held for i, held in pod["memory"].items()}),
                "; ".join(_problems(pod["refused"])),
                pod["cgroup"],
                sum(n for what, n in pod["refused"].items() if what.endswith(_OVER_LIMIT)),
                sum(n for what, n in pod["refused"].items() if not what.endswith(_OVER_LIMIT)),
                pod["alive"] or inside.alive,
                tuple(pod["joined"]),
                tuple(pod["unrestorable"]),
            )
            for pod in answer["pods"]
            for inside in (cgroup.members(pod["cgroup"], *pod["joined"]),)
        ]

    def orphaned_memory(self) -> Mapping[int, int]:
        """Return memory by pGPU that is still in use although its pod was retired."""
        return self._known({int(index): size for index, size in self._call("pods")["left"].items()})

    def names_in_use(self) -> Collection[str]:
        """Return the names of retired pods of which clients of RM, or memory, are left."""
        return list(self._call("pods")["names_in_use"])

    def admit(self, name: str, grants: Mapping[int, Grant], at: str = "") -> None:
        """Make a pod in an existing cgroup, or in a new one."""
        cgroup.check_name(name)
        self._call("admit", name=name, grants=grants_to_json(grants), cgroup=at)

    def amend(self, name: str, grants: Mapping[int, Grant]) -> None:
        """Change a pod's grants."""
        self._call("amend", name=name, grants=grants_to_json(grants))

    def join(self, name: str, cgroups: Sequence[str]) -> None:
        """Let exactly these containers' cgroups count to a pod besides its own."""
        self._call("join", name=name, cgroups=list(cgroups))

    def attach(self, name: str, pid: int, fds: Sequence[int]) -> None:
        """Bring a process and its listener into a pod, and keep a copy; again it changes nothing. Raises QgpuError."""
        if len(fds) != 1 or not is_listener(fds[0]):
            for fd in fds:
                os.close(fd)
            raise QgpuError(f"pod {name}: its launcher sent no seccomp listener")
        with self._lock:  # a guardian that started in between would have no copy of it
            try:
                answer = self._call("attach", fds, name=name, pid=pid)
            except BaseException:
                os.close(fds[0])
                raise
            self._hold(answer["listener"], name, fds[0])

    def retire(self, name: str) -> None:
        """Forget a pod and remove its cgroup. A guardian that forgot it and died before its answer did that too."""
        with suppress(UnknownNameError):
            self._call("retire", name=name)

    def checkpointer(self) -> ProcessCheckpointer:
        """Open NVIDIA's checkpoints of processes. Raises NotSupportedError."""
        return ProcessCheckpointer(list(self._pgpus.values()), self.driver)

    def close(self) -> None:
        """Close everything; the guardian stays while there are pods."""
        with self._lock:
            if self._standby is not None:
                self._standby.end()
            self._link.close()
            for _, fd in self._listeners.values():
                os.close(fd)
            self._listeners.clear()
            self._state.close()
            os.close(self._host_lock)

    def revive(self, lost: GuardianLink | None = None) -> None:
        """Connect again, to a new guardian if this one died or hangs. Raises the error that prevents it."""
        failure = lost.failure if lost is not None else None
        if lost is not None and isinstance(failure, TimeoutError):
            _kill(lost.pidfd)  # first: a thread that holds the lock may wait for this guardian too
        with self._lock:
            try:
                link = GuardianLink(self.socket, watch=_GONE)
            except BackendGoneError:
                _log.warning("guardian lost: starting another", pid=self.guardian_pid, reason=str(failure or ""))
                _kill(self._link.pidfd)
                link = self._start(self._state, killed=True)
            self._link.close()
            self._link = link
            self._hand_over(link)
            self._ensure_standby()

    def _known(self, by_pgpu: Mapping[int, _T]) -> dict[int, _T]:
        """Leave out pGPUs that are not shared any more: MIG instances that are gone, or left alone from now on."""
        return {index: each for index, each in by_pgpu.items() if index in self._pgpus}

    def _hand_over(self, link: GuardianLink) -> None:
        """Give a guardian the listeners that it lacks."""
        missing = {n: held for n, held in self._listeners.items() if str(n) not in link.hello["listeners"]}
        for number, (pod, fd) in missing.items():
            link.call("adopt", [fd], listener=number, pod=pod)
        link.call("adopted")

    def _hold(self, number: int, pod: str, fd: int) -> None:
        """Keep a copy of a listener, here and in the store."""
        if number in self._listeners:
            os.close(self._listeners[number][1])
        elif self._standby is not None:
            self._standby.hold(number, pod, fd)
        self._listeners[number] = (pod, fd)
        self._store.put(f"listener.{number}.{pod}", fd)

    def _drop_listener(self, number: int) -> None:
        pod, fd = self._listeners.pop(number)
        if self._standby is not None:
            self._standby.drop_listener(number)
        self._store.drop(f"listener.{number}.{pod}")
        os.close(fd)

    def _call(self, op: str, fds: Sequence[int] = (), **arguments: Any) -> dict[str, Any]:
        with self._lock:
            try:
                answer = self._link.call(op, fds, **arguments)[0]
            except BackendGoneError:
                self.revive(self._link)
                answer = self._link.call(op, fds, **arguments)[0]
            for event in self._link.events:
                if event["event"] == _GONE and event["listener"] in self._listeners:
                    self._drop_listener(event["listener"])
            self._link.events.clear()
            self._ensure_standby()
            return answer

    def _end_stuck_guardian(self, stuck: int) -> None:
        """Kill a guardian with too many ``stuck`` threads, if a standby takes over and SIGKILL frees all of them."""
        with self._lock:
            last = self._standby
            ready = last is not None and last.lives and time.monotonic() - last.began_s >= _SETTLED_S
            if stuck >= _MOST_STUCK and ready and waits_for_pages(self.guardian_pid):
                _log.warning("guardian ended: its threads wait for memory of pods that have ended", threads=stuck)
                _kill(self._link.pidfd)

    def _find(self, state: StateFds | None) -> GuardianLink:
        """Connect to the guardian that is there, or start one; ``state`` is what was stored."""
        try:
            link = GuardianLink(self.socket, watch=_GONE)
        except GuardianHangsError as error:
            if state is None or Journal(state.journal).listeners() - self._listeners.keys():
                raise  # only it has its pods' listeners: another one beside it would strand them
            _log.warning("guardian hangs: starting another", reason=str(error))
            _kill_process(error.pid)
            killed = True
        except BackendGoneError:
            killed = False
            if state is None and (coming := self._await_successor()) is not None:
                return coming
        else:
            _log.info("guardian found", pid=link.hello["pid"])
            if self._standby is not None and self._standby.begun:
                self._standby.kill_if_superseded(link.hello["pid"])
                self._standby = None
            return link
        return self._start(state or StateFds.new(), killed=killed)

    def _await_successor(self) -> GuardianLink | None:
        """Wait for an earlier daemon's standby to become the guardian; None if there is none.

        Without the journal we cannot tell. A guardian that we started now would begin with an empty table beside it.
        """
        deadline, directory = time.monotonic() + _DEATH_S, os.fsencode(self._runtime_dir)
        while time.monotonic() < deadline and any(
            directory in proc.cmdline(pid) for pid in cgroup.members(cgroup.GUARDIANS).pids
        ):
            time.sleep(_LOOK_S)
            with suppress(BackendGoneError):
                return GuardianLink(self.socket, watch=_GONE)
        return None

    def _start(self, state: StateFds, *, killed: bool) -> GuardianLink:
        """Start a guardian, from the standby if there is one; the last guardian was ``killed`` or is gone.

        An earlier daemon's standby may become the guardian first. A guardian that is still ending is waited for.
        """
        deadline = time.monotonic() + _DEATH_S
        standby, self._standby = self._standby, None
        if standby is not None:
            with suppress(BackendGoneError, AlreadyRunningError):  # it was killed meanwhile, or came too late
                return self._begin(standby, state, killed=killed)
        while True:
            try:
                standby = StandbyLink(self._runtime_dir, state, self._listeners)
                return self._begin(standby, state, killed=killed)
            except AlreadyRunningError as error:
                if time.monotonic() > deadline:
                    raise BackendGoneError(f"{error}, and does not answer") from error

    def _begin(self, process: StandbyLink, state: StateFds, *, killed: bool) -> GuardianLink:
        """Promote a process to guardian, and connect to it or to another that was first. Raises its error."""
        process.begin(killed=killed)
        if (said := process.wait_for_report(_LOADED_S)) is None:
            emergency_open.open_gates(state.journal)
        while said is None and (said := process.wait_for_report(_LOOK_S)) is None:
            try:
                link = GuardianLink(self.socket, watch=_GONE)
            except GuardianHangsError as error:  # another was first and hangs; we have all of its state
                _kill_process(error.pid)
            except BackendGoneError:
                continue
            else:
                process.kill_if_superseded(link.hello["pid"])
                return link
        if not said["ready"]:
            raise errors.from_code(said["code"], said["error"])
        return GuardianLink(self.socket, watch=_GONE)

    def _ensure_standby(self) -> None:
        """Start a standby, unless the last one started recently: the host may lack what it needs."""
        last = self._standby
        if last is not None and (last.lives or time.monotonic() - last.began_s < _RESTART_STANDBY_S):
            return
        try:
            self._standby = StandbyLink(self._runtime_dir, self._state, self._listeners)
        except BackendGoneError as error:  # a new guardian then takes longer to start
            _log.warning("no standby guardian", error=str(error))


def _problems(refused: Mapping[str, int]) -> list[str]:
    """Return what was refused, and what users of tools can do about it."""
    return [*(f"{what} refused {format_count(n)}" for what, n in refused.items()), *tools.advice(refused)]


def _kill(pidfd: int) -> None:
    """Kill a guardian that hangs, so that it cannot come back beside its successor."""
    with suppress(OSError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _kill_process(pid: int) -> None:
    """Kill a guardian that hangs, of which we have no pidfd."""
    if (pidfd := pidfd_of(pid)) >= 0:
        _kill(pidfd)
        os.close(pidfd)

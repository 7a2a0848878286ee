"""The guardian's main loop: the daemon's messages, deaths, and the edges of windows; and a thread for each pod's calls.

A pod's memory may be as slow as the pod likes, so its calls are served by a thread of their own (``judge.py``), which
holds the one lock only to look things up. Everything that moves gates or timeslices is done by the main loop.
"""

from __future__ import annotations

import os
import select
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from qgpu import cgroup, wire
from qgpu.errors import ExitCode, NoGpuError, QgpuError, RmError, UnknownNameError
from qgpu.guardian import powers
from qgpu.guardian.card import Card
from qgpu.guardian.hands import Hands
from qgpu.guardian.journal import Journal
from qgpu.guardian.judge import Judge
from qgpu.guardian.messages import PROTOCOL, plan_from
from qgpu.guardian.register import Key, Register
from qgpu.guardian.supervisor import Allowance, Supervisor
from qgpu.guardian.timer import Timer
from qgpu.guardian.uvmfiles import UvmFile
from qgpu.model import NS_PER_S
from qgpu.rm import uvm
from qgpu.rm.client import RmClient
from qgpu.rm.device import open_devices
from qgpu.rm.switches import SwitchLog
from qgpu.rm.versions import find, installed

_log = structlog.get_logger("guardian")

#: How long one thread may keep the others from running Python when it does not wait for anything itself.
_SWITCH_S = 0.0005
#: How long a pod's thread waits for the main loop to move a gate before it goes on without.
_GATE_PATIENCE_S = 1.0
#: How long a message to a daemon may take; past it the session is over.
_PATIENCE_S = 0.1
#: With no daemon and no pod left for this long, the guardian ends.
_LINGER_NS = 5 * NS_PER_S


@dataclass(slots=True)
class _Session:
    """One connection of a daemon; ``cards`` are those whose plan hangs on it."""

    connection: wire.Connection
    cards: set[int] = field(default_factory=set)
    watching: bool = False


class Guardian:
    """Everything the guardian process holds."""

    def __init__(self, runtime_dir: Path, journal: Journal) -> None:
        self.version = installed()
        branch = find(self.version)
        client = RmClient()
        self.register = Register()
        self.journal = journal
        devices = open_devices(client)
        self.hands = Hands(self.register, branch, client, devices)
        self.cards: dict[int, Card] = {}
        self.supervisor = Supervisor(
            self.register,
            journal,
            self.hands,
            self._leave,
            self._stayed,
            self._watch,
            time.monotonic_ns,
            self._allowance,
            self._wake,
            uvm_major=uvm.major(),
            uvm_layouts=uvm.layouts(self.version),
            uuids={device.uuid(): device.instance for device in devices},
        )
        for index, device in enumerate(devices):
            try:
                log = SwitchLog(device)
            except RmError as error:  # a card without such records: what it does could not be measured
                _log.error("card left out: no context-switch records", pci=device.pci, reason=str(error))
                continue
            self.cards[index] = Card(index, device, self.register, self.hands, log, self.supervisor.doubt)
        if not self.cards:
            raise NoGpuError("no NVIDIA card here that qgpu can share; its log says why")
        self.lock = self.supervisor.lock
        self._allowances: dict[str, Allowance] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._judges: dict[str, Judge] = {}
        self._looked_ns = 0
        #: What pods' threads leave to the main loop, and what rouses it.
        self._left: deque[Callable[[], None]] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.PollSelector()
        self._timer = Timer()
        self._selector.register(self._timer.fd, selectors.EVENT_READ, self._timer.clear)
        self._selector.register(self._bell, selectors.EVENT_READ, self._answer_bell)
        self._sessions: dict[int, _Session] = {}
        self._listening = wire.listen(str(runtime_dir / "guardian.sock"), 0o600)
        self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        self._alone_since_ns: int | None = time.monotonic_ns()
        sys.setswitchinterval(_SWITCH_S)
        for fact in journal.replay():
            self.register.note(fact)
        self.supervisor.resume()
        self._settle_all()

    def run(self) -> None:
        """Serve until there is nobody left to serve."""
        while not self._nobody_left():
            try:
                self._serve()
            except Exception:  # noqa: BLE001 - pods depend on this process: report, let go of them, go on
                _log.exception("guardian: unexpected; gates open, timeslices the driver's")
                for card in self.cards.values():
                    card.let_go(time.monotonic_ns())
                time.sleep(_PATIENCE_S / 10)  # and should it go on, not at the price of a whole CPU

    def _serve(self) -> None:
        """Wait for the next thing, do it, and what else has come due."""
        with self.lock:
            self._timer.set(self._until_due())
        ready = self._selector.select()
        with self.lock:
            for key, _ in ready:
                key.data()
            self._turn()

    def _wake(self) -> None:
        """Make the main loop look again at what is due; from any thread."""
        os.eventfd_write(self._bell, 1)

    def _soon(self, do: Callable[[], None]) -> None:
        """Have something done by the main loop; from any thread."""
        self._left.append(do)
        self._wake()

    def _answer_bell(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while self._left:
            self._left.popleft()()

    # -- time -------------------------------------------------------------------------------------------------

    def _until_due(self) -> int:
        """Return the ns to the next thing that is due whatever arrives."""
        now = time.monotonic_ns()
        due = [now + NS_PER_S]
        if (confirm := self.supervisor.due_ns()) is not None:
            due.append(confirm)
        for card in self.cards.values():
            if (wait := card.enforcer.step(now)) is not None:
                due.append(now + wait)
            if card.lease_until_ns is not None:
                due.append(card.lease_until_ns)
            if self.register.processes:
                due.append(card.drain_due_ns())
        return min(due) - time.monotonic_ns()

    def _turn(self) -> None:
        """Do what time or the last messages made due."""
        now = time.monotonic_ns()
        if self.supervisor.settle(now):
            self._changed()
        if now - self._looked_ns >= NS_PER_S:
            self._release_closed(now)
        for card in self.cards.values():
            if card.lease_until_ns is not None and card.lease_until_ns <= now:
                _log.warning("lease lapsed: gates open, timeslices the driver's", pgpu=card.index)
                card.release(now)
            moving = card.enforcer.plan is not None and card.enforcer.plan.gated
            if self.register.processes and (moving or card.drain_due_ns() <= now):
                card.drain(now)

    def _settle_all(self) -> None:
        """Put every pod back to the driver's own state: what a new guardian does first."""
        now = time.monotonic_ns()
        for card in self.cards.values():
            channels = [
                channel.key
                for tsg in self.register.compute_tsgs(card.device.instance)
                for channel in self.register.channels(tsg)
            ]
            self.hands.gate(card.device, channels, closed=False)
            card.enforcer.distrust()
            card.release(now)

    def _nobody_left(self) -> bool:
        now = time.monotonic_ns()
        if self._sessions or self.register.processes or self.supervisor.listeners:
            self._alone_since_ns = None
        elif self._alone_since_ns is None:
            self._alone_since_ns = now
        return self._alone_since_ns is not None and now - self._alone_since_ns > _LINGER_NS

    def _changed(self) -> None:
        """Bring gates and timeslices in line with the register and wake the daemon."""
        now = time.monotonic_ns()
        for card in self.cards.values():
            card.enforcer.refresh(now)
        self._tell({"event": "changed"})

    def _tell(self, event: dict[str, Any]) -> None:
        for number, session in list(self._sessions.items()):
            if session.watching:
                try:
                    session.connection.send(event)
                except OSError:
                    self._hang_up(number)

    # -- pods -------------------------------------------------------------------------------------------------

    def _allowance(self, pod: str) -> Allowance:
        found = self._allowances.get(pod)
        if found is None:
            grants = self.register.pods[pod].grants if pod in self.register.pods else {}
            granted = [(self.cards[index].device, grant) for index, grant in grants.items() if index in self.cards]
            found = self._allowances[pod] = Allowance(
                {device.instance: device.minor for device, _ in granted},
                {device.instance: grant.memory for device, grant in granted if grant.memory is not None},
            )
        return found

    def _leave(self, channels: list[Key]) -> None:
        """Open the gate over channels about to be freed, and return when it is open."""
        opened = threading.Event()

        def leave() -> None:
            for card in self.cards.values():
                card.enforcer.leave(channels)
            opened.set()

        self._soon(leave)
        opened.wait(_GATE_PATIENCE_S)

    def _stayed(self, channels: list[Key]) -> None:
        for card in self.cards.values():
            card.enforcer.stayed(channels)

    def _watch(self, pid: int, pidfd: int) -> None:
        def exited() -> None:
            self._selector.unregister(pidfd)
            if files := self.supervisor.uvm_files.take(pid):
                self._release(files, gone)
            else:
                gone()

        def gone() -> None:
            self.supervisor.exited(pid)
            self._changed()

        self._soon(lambda: self._selector.register(pidfd, selectors.EVENT_READ, exited) and None)

    def _release(self, files: list[UvmFile], then: Callable[[], None]) -> None:
        """Empty files of UVM's by a thread, for it takes as long as freeing memory does."""

        def release() -> None:
            self.supervisor.uvm_files.release(files)
            self._soon(then)

        threading.Thread(target=release, name="qgpu-release", daemon=True).start()

    def _release_closed(self, now_ns: int) -> None:
        """Empty the files of UVM's that processes have closed: held here, their memory would stay."""
        self._looked_ns = now_ns
        for pid, files in self.supervisor.uvm_files.take_closed().items():
            self._release(files, partial(self.supervisor.emptied, pid))

    def _serve_pod(self, number: int) -> None:
        """Serve a listener until nobody is left behind it: the body of a pod's thread.

        poll and not epoll, nor a receive that waits: only through poll does a stopped thread wake us on its own CPU
        (SYNC_WAKE_UP), and that hand-over is most of what a call costs the pod.
        """
        powers.keep_only(powers.CAP_SYS_PTRACE, powers.CAP_DAC_READ_SEARCH)
        pod, listener = self.supervisor.listeners[number]
        judge = self._judges[pod]
        if (left := self.supervisor.left_in_hand(number)) is not None:
            judge.serve(listener, left)
        poll = select.poll()
        poll.register(listener.fd, select.POLLIN)
        while True:
            waiting = poll.poll()[0][1]
            if waiting & select.POLLIN:
                if (call := listener.receive()) is not None:
                    judge.serve(listener, call)
            elif waiting & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                break
        self._soon(lambda: self._hung_up(number, listener.fd))

    def _hung_up(self, number: int, fd: int) -> None:
        """Forget a listener when every process behind it is gone."""
        self._threads.pop(number).join()
        self.supervisor.hung_up(number)
        os.close(fd)
        self._tell({"event": "listener-gone", "listener": number})

    def _start_thread(self, number: int) -> None:
        pod, _ = self.supervisor.listeners[number]
        self._judges.setdefault(pod, Judge(self.supervisor, pod))
        name = f"qgpu-pod-{number}"
        thread = threading.Thread(target=self._serve_pod, args=(number,), name=name, daemon=True)
        self._threads[number] = thread
        thread.start()

    # -- the daemon -------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        sock, _ = self._listening.accept()
        sock.settimeout(_PATIENCE_S)  # a daemon that is stopped must not stop us: it loses its session instead
        session = _Session(wire.Connection(sock))
        if self._is_a_pods(session.connection.peer().pid):
            _log.warning("a pod's process is not heard", pid=session.connection.peer().pid)
            session.connection.close()
            return
        number = sock.fileno()
        self._sessions[number] = session
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._hear(number))

    def _is_a_pods(self, pid: int) -> bool:
        """Tell whether a peer is in a pod, where being root makes no difference; one that is gone could have been."""
        try:
            path = cgroup.of(pid)
        except OSError:
            return True
        within = any(cgroup.within(path, pod.cgroup) for pod in self.register.pods.values())
        return within or pid in self.register.processes

    def _hear(self, number: int) -> None:
        session = self._sessions.get(number)
        if session is None:  # hung up on while others were heard
            return
        try:
            alive = session.connection.fill()
            while (message := session.connection.next_buffered()) is not None:
                reply, fds = self._reply(session, *message)
                session.connection.send(reply, fds)
        except (OSError, wire.WireError) as error:
            _log.warning("session broken", reason=str(error))
            alive = False
        if not alive and number in self._sessions:
            self._hang_up(number)

    def _hang_up(self, number: int) -> None:
        """End a session; a plan that hung on it is over."""
        session = self._sessions.pop(number)
        self._selector.unregister(session.connection.sock)
        session.connection.close()
        for index in session.cards:
            _log.info("daemon gone: gates open, timeslices the driver's", pgpu=index)
            self.cards[index].release(time.monotonic_ns())

    def _reply(self, session: _Session, message: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        try:
            operation: Callable[..., tuple[dict[str, Any], list[int]]] = getattr(self, f"_op_{message['op']}")
            answer, out = operation(session, message, fds)
        except QgpuError as error:
            _close(fds)
            return {"ok": False, "error": str(error), "code": int(error.code)}, []
        except Exception as error:  # noqa: BLE001 - whatever a request runs into is its sender's to hear
            _log.exception("bad request")
            _close(fds)
            return {"ok": False, "error": f"bad request: {error!r}", "code": int(ExitCode.FAILED)}, []
        return {"ok": True, **answer}, out

    def _op_hello(self, session: _Session, message: dict[str, Any], _: list[int]) -> Any:
        session.watching = bool(message.get("watch"))
        answer = {
            "protocol": PROTOCOL,
            "version": self.version,
            "pid": os.getpid(),
            "cards": [{"index": c.index, "minor": c.device.minor, "pci": c.device.pci} for c in self.cards.values()],
            "listeners": {str(number): pod for number, (pod, _) in self.supervisor.listeners.items()},
        }
        return answer, [self.journal.fd]

    def _op_listener(self, _: _Session, message: dict[str, Any], __: list[int]) -> Any:
        return {}, [self.supervisor.listeners[message["listener"]][1].fd]

    def _op_adopt(self, _: _Session, message: dict[str, Any], fds: list[int]) -> Any:
        """Take over a dead guardian's listener; none is served before all are here and the call in hand answered."""
        self.supervisor.listen(message["pod"], fds[0], message["listener"])
        return {}, []

    def _op_adopted(self, _: _Session, __: dict[str, Any], ___: list[int]) -> Any:
        for number in self.supervisor.listeners:
            if number not in self._threads:
                self._start_thread(number)
        return {}, []

    def _op_attach(self, _: _Session, message: dict[str, Any], fds: list[int]) -> Any:
        name, pid = message["name"], message["pid"]
        self._known(name)
        cgroup.bring(name, pid, self.register.pods[name].cgroup)
        number = self.supervisor.listen(name, fds[0])
        self._start_thread(number)
        return {"listener": number}, []

    def _op_pods(self, _: _Session, __: dict[str, Any], ___: list[int]) -> Any:
        instances = {card.device.instance: card.index for card in self.cards.values()}
        pods = []
        for fact in self.register.facts():
            if fact["fact"] != "pod":
                continue
            name = fact["name"]
            held = {index: self.supervisor.used(name, i) for i, index in instances.items()}
            refused = {what: n for (pod, what), n in self.supervisor.refusals.items() if pod == name}
            pods.append({key: fact[key] for key in ("name", "cgroup", "grants")} | {"memory": held, "refused": refused})
        return {"pods": pods}, []

    def _op_admit(self, _: _Session, message: dict[str, Any], __: list[int]) -> Any:
        if not message["cgroup"]:
            cgroup.create(message["name"])
        self._set_grants(message)
        return {}, []

    def _op_amend(self, _: _Session, message: dict[str, Any], __: list[int]) -> Any:
        self._known(message["name"])
        self._set_grants(message)
        return {}, []

    def _op_retire(self, _: _Session, message: dict[str, Any], __: list[int]) -> Any:
        self._known(message["name"])
        self.supervisor.note({"fact": "unpod", "name": message["name"]})
        self.supervisor.retired(message["name"])
        self._judges.pop(message["name"], None)
        self._allowances.pop(message["name"], None)
        cgroup.remove(message["name"])
        self._changed()
        return {}, []

    def _op_sample(self, _: _Session, message: dict[str, Any], __: list[int]) -> Any:
        return self.cards[message["pgpu"]].sample(time.monotonic_ns(), detailed=bool(message.get("detailed"))), []

    def _op_apply(self, session: _Session, message: dict[str, Any], _: list[int]) -> Any:
        plan = plan_from(message["plan"])
        session.cards.add(plan.pgpu)
        self.cards[plan.pgpu].apply(plan, time.monotonic_ns())
        return {}, []

    def _op_renew(self, _: _Session, message: dict[str, Any], __: list[int]) -> Any:
        card = self.cards[message["pgpu"]]
        held = card.lease_until_ns is not None
        if held:
            card.renew(time.monotonic_ns())
        return {"held": held}, []

    def _op_release(self, session: _Session, message: dict[str, Any], _: list[int]) -> Any:
        session.cards.discard(message["pgpu"])
        self.cards[message["pgpu"]].release(time.monotonic_ns())
        return {}, []

    def _set_grants(self, message: dict[str, Any]) -> None:
        self.supervisor.note(
            {"fact": "pod"} | {key: message[key] for key in ("name", "cgroup", "grants") if key in message}
        )
        self._allowances.pop(message["name"], None)
        self._changed()

    def _known(self, name: str) -> None:
        if name not in self.register.pods:
            raise UnknownNameError(f"pod {name}: no such pod; see `qgpuctl pod list`")


def _close(fds: list[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)

"""The guardian's one loop: pods' calls, the daemon's messages, deaths, and the edges of windows.

Single-threaded on purpose: a plan, a dying process and a new channel are never handled at the same time, so
none of them needs a lock. The longest thing done in one go is a gate, under a millisecond.
"""

from __future__ import annotations

import os
import select
import selectors
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from qgpu import cgroup, wire
from qgpu.errors import ExitCode, NoGpuError, QgpuError, RmError, UnknownNameError
from qgpu.guardian.card import Card
from qgpu.guardian.hands import Hands
from qgpu.guardian.journal import Journal
from qgpu.guardian.messages import PROTOCOL, plan_from
from qgpu.guardian.register import Key, Register
from qgpu.guardian.supervisor import Supervisor
from qgpu.guardian.timer import Timer
from qgpu.model import NS_PER_MS, NS_PER_S
from qgpu.rm.client import RmClient
from qgpu.rm.device import open_devices
from qgpu.rm.switches import SwitchLog
from qgpu.rm.versions import find, installed

_log = structlog.get_logger("guardian")

#: How long pods' calls alone may keep everything else waiting; windows, leases and messages never wait.
_CALLS_NS = 10 * NS_PER_MS
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
        self.register = Register()
        self.journal = journal
        self.hands = Hands(self.register, branch)
        self.supervisor = Supervisor(
            self.register, journal, self.hands, self._leave, self._stayed, self._watch, time.monotonic_ns, self._limit
        )
        self.cards: dict[int, Card] = {}
        for index, device in enumerate(open_devices(RmClient())):
            try:
                log = SwitchLog(device)
            except RmError as error:  # MIG mode, or a card without such records: what it does could not be measured
                _log.error("card left out: no context-switch records", pci=device.pci, reason=str(error))
                continue
            self.cards[index] = Card(index, device, self.register, self.hands, log, self.supervisor.doubt)
        if not self.cards:
            raise NoGpuError("no NVIDIA card here that qgpu can share; its log says why")
        # poll and not epoll: only through poll does a stopped thread wake us on its own CPU (SYNC_WAKE_UP), and
        # that hand-over is most of what a call costs the pod.
        self._selector = selectors.PollSelector()
        self._call_fds: set[int] = set()
        self._due_ns = 0
        self._timer = Timer()
        self._selector.register(self._timer.fd, selectors.EVENT_READ, lambda: self._timer.clear())
        self._sessions: dict[int, _Session] = {}
        self._listening = wire.listen(str(runtime_dir / "guardian.sock"), 0o600)
        self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        self._alone_since_ns: int | None = time.monotonic_ns()
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
        self._arm(self._until_due())
        while True:
            ready = self._selector.select()
            for key, _ in ready:
                key.data()
            if any(key.fd not in self._call_fds for key, _ in ready) or time.monotonic_ns() >= self._due_ns:
                break
            # Only pods' calls, and a starting program makes hundreds: answer them without looking at everything
            # else each time. What they made due can wait that long.
            self._arm(min(_CALLS_NS, self._due_ns - time.monotonic_ns()))
        self._turn()

    # -- time -------------------------------------------------------------------------------------------------

    def _arm(self, after_ns: int) -> None:
        due_ns = time.monotonic_ns() + after_ns
        if not time.monotonic_ns() < self._due_ns <= due_ns:
            self._due_ns = due_ns
            self._timer.set(after_ns)

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

    def _limit(self, pod: str, instance: int) -> int | None:
        grants = self.register.pods[pod].grants if pod in self.register.pods else {}
        index = next((card.index for card in self.cards.values() if card.device.instance == instance), None)
        grant = grants.get(index) if index is not None else None
        return grant.memory if grant is not None else None

    def _leave(self, channels: list[Key]) -> None:
        for card in self.cards.values():
            card.enforcer.leave(channels)

    def _stayed(self, channels: list[Key]) -> None:
        for card in self.cards.values():
            card.enforcer.stayed(channels)

    def _watch(self, pid: int, pidfd: int) -> None:
        def exited() -> None:
            self._selector.unregister(pidfd)
            self.supervisor.exited(pid)
            self._changed()

        self._selector.register(pidfd, selectors.EVENT_READ, exited)

    def _listen(self, pod: str, fd: int) -> int:
        number = self.supervisor.listen(pod, fd)
        self._hear_calls(number, fd)
        return number

    def _hear_calls(self, number: int, fd: int) -> None:
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._notified(number, fd))
        self._call_fds.add(fd)

    def _notified(self, number: int, fd: int) -> None:
        """Serve one call; when every process behind the listener is gone, forget it.

        Receiving without anything to receive would block on older kernels, so it is looked first.
        """
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        waiting = next((event for _, event in poll.poll(0)), 0)
        if waiting & select.POLLIN:
            self.supervisor.serve(number)
        elif waiting & select.POLLHUP:
            self._selector.unregister(fd)
            self._call_fds.discard(fd)
            self.supervisor.listeners.pop(number)
            os.close(fd)
            self._tell({"event": "listener-gone", "listener": number})

    # -- the daemon -------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        sock, _ = self._listening.accept()
        sock.settimeout(_PATIENCE_S)  # a daemon that is stopped must not stop us: it loses its session instead
        session = _Session(wire.Connection(sock))
        number = sock.fileno()
        self._sessions[number] = session
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._hear(number))

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
        self.supervisor.answer_orphan()
        for number, (_pod, listener) in self.supervisor.listeners.items():
            if listener.fd not in self._call_fds:
                self._hear_calls(number, listener.fd)
        return {}, []

    def _op_attach(self, _: _Session, message: dict[str, Any], fds: list[int]) -> Any:
        name, pid = message["name"], message["pid"]
        self._known(name)
        cgroup.bring(name, pid, self.register.pods[name].cgroup)
        return {"listener": self._listen(name, fds[0])}, []

    def _op_pods(self, _: _Session, __: dict[str, Any], ___: list[int]) -> Any:
        instances = {card.device.instance: card.index for card in self.cards.values()}
        pods = []
        for fact in self.register.facts():
            if fact["fact"] != "pod":
                continue
            name = fact["name"]
            held = {instances[i]: held for i, held in self.register.memory(name).items() if i in instances}
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
        self._changed()

    def _known(self, name: str) -> None:
        if name not in self.register.pods:
            raise UnknownNameError(f"pod {name}: no such pod; see `qgpuctl pod list`")


def _close(fds: list[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)

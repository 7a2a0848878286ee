"""What the guardian does to pods through RM: gates, timeslices, and asking whether an object is real.

Gates go through our own client; a timeslice only its owner may set, so it goes through the owner's own
descriptor, borrowed for the call. Every verb copes with objects that die meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import structlog

from qgpu.errors import RmError
from qgpu.guardian.register import Key, Register, RmObject
from qgpu.rm import abi
from qgpu.rm.abi import ffi
from qgpu.rm.client import borrowed, control, handle_info
from qgpu.rm.device import RmDevice
from qgpu.rm.versions import Branch

#: How often a gate is tried again when channels die while it is being moved.
_GATE_TRIES = 3

_log = structlog.get_logger("guardian")


class Hands:
    """Acts on the objects of a register."""

    def __init__(self, register: Register, branch: Branch) -> None:
        self._register = register
        self._branch = branch
        self._pidfds: dict[int, int] = {}

    def watch(self, pid: int) -> int:
        """Open a pidfd of a process, to act through it and to learn of its end. Raises OSError."""
        self._pidfds[pid] = os.pidfd_open(pid)
        return self._pidfds[pid]

    def unwatch(self, pid: int) -> None:
        """Close the pidfd of a process that has ended."""
        if (pidfd := self._pidfds.pop(pid, None)) is not None:
            os.close(pidfd)

    def gate(self, device: RmDevice, channels: Sequence[Key], *, closed: bool, preempt: bool = True) -> set[Key]:
        """Close or open the gate over channels; return those RM knows no longer (they need no gate).

        One stale handle makes RM refuse a whole call, and a dying process leaves some: the living are then
        told from the dead by asking, which takes no lock of the card's.
        """
        alive = list(channels)
        for _ in range(_GATE_TRIES):
            if not alive:
                break
            try:
                device.set_channels(alive, disabled=closed, preempt=preempt)
                break
            except RmError as error:
                _log.info("gate refused", channels=len(alive), reason=str(error))
                alive = [key for key in alive if self._lives(key)]
        return set(channels) - set(alive)

    def _lives(self, key: Key) -> bool:
        return any(handle_info(fd, *key) is not None for fd in self._files(key[0]))

    def timeslice(self, tsg: RmObject, timeslice_us: int) -> bool:
        """Set a TSG's timeslice; False when its owner is gone."""
        params = ffi.new("NVA06C_CTRL_TIMESLICE_PARAMS *", {"timesliceUs": timeslice_us})
        for fd in self._files(tsg.client):
            try:
                control(fd, tsg.client, tsg.handle, abi.NVA06C_SET_TIMESLICE, params)
            except RmError as error:
                _log.info("timeslice refused", client=hex(tsg.client), tsg=hex(tsg.handle), reason=str(error))
                continue
            return True
        return False

    def real(self, claims: Sequence[RmObject]) -> dict[Key, tuple[int, int] | None]:
        """Ask RM for (class, parent) of objects of one client; None for what does not exist."""
        for fd in self._files(claims[0].client):
            answers = {rm.key: handle_info(fd, rm.client, rm.handle) for rm in claims}
            if any(answer is not None for answer in answers.values()):
                return answers
        return {rm.key: None for rm in claims}

    def context(self, channel: RmObject) -> int:
        """Ask RM for the id that context-switch records carry for a channel; 0 where the branch can't say."""
        if not self._branch.context_ids:
            return 0
        params = ffi.new("NVA06F_CTRL_GET_CONTEXT_ID_PARAMS *")
        for fd in self._files(channel.client):
            try:
                control(fd, channel.client, channel.handle, abi.NVA06F_GET_CONTEXT_ID, params)
            except RmError:
                continue
            return int(params.contextId)
        return 0

    def _files(self, client: int) -> Iterator[int]:
        entry = self._register.clients.get(client)
        for pid, fd in list(entry.users) if entry else []:
            if (pidfd := self._pidfds.get(pid)) is None:
                continue
            with _tolerated(), borrowed(pidfd, fd) as file:
                yield file


@contextmanager
def _tolerated() -> Iterator[None]:
    """Let a process end, or close its descriptor, while we reach for it."""
    try:
        yield
    except OSError as error:
        _log.info("owner out of reach", reason=str(error))

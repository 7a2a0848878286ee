"""What the guardian does to pods through RM: gates, timeslices, and asking whether an object is real.

Gates go through our own client; a timeslice only its owner may set, so it goes through the owner's own
descriptor, borrowed for the call. Every verb copes with objects that die meanwhile.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import TypeVar

import structlog

from qgpu.errors import RmError
from qgpu.guardian.accounting.object_table import Key, ObjectTable, RmObject
from qgpu.guardian.gpu.enforcer import Moved
from qgpu.linux import fd_budget, kcmp, proc
from qgpu.linux.fd_closer import FdCloser
from qgpu.nvidia import abi
from qgpu.nvidia.abi import ffi
from qgpu.nvidia.rm_client import (
    RmClient,
    control,
    duplicate,
    export,
    free,
    handle_info,
    is_exported,
    memory_bytes,
    take,
)
from qgpu.nvidia.rm_device import RmDevice
from qgpu.nvidia.versions import Branch

#: How often a gate is tried again when channels die while it is being moved.
_GATE_TRIES = 3

#: What RM says to a gate over a channel that is not there.
_STALE = abi.UNKNOWN_TO_RM | {abi.NV_ERR_INVALID_CHANNEL}

_CONTROL_DEVICE = os.makedev(abi.NV_MAJOR, abi.NV_CONTROL_MINOR)
_T = TypeVar("_T")

_log = structlog.get_logger("guardian")


class GpuOps:
    """Acts on the objects of a register."""

    def __init__(self, table: ObjectTable, branch: Branch, client: RmClient, devices: Sequence[RmDevice]) -> None:
        self._table = table
        self._branch = branch
        self._client = client
        self._devices = {device.instance: device for device in devices}
        self._pidfds: dict[int, int] = {}
        self.closer = FdCloser()
        #: Told of a client that RM has and that no known descriptor leads to.
        self.unreached: Callable[[int], None] = lambda _client: None
        #: Clients of which no descriptor leads to what RM has: their TSGs' timeslices cannot be set.
        self.lost: set[int] = set()

    def watch(self, pid: int) -> int:
        """Open a pidfd of a process, to act through it and to learn of its end. Raises OSError."""
        self._pidfds[pid] = fd_budget.long_held(os.pidfd_open(pid))
        return self._pidfds[pid]

    def unwatch(self, pid: int) -> None:
        """Close the pidfd of a process that has ended."""
        if (pidfd := self._pidfds.pop(pid, None)) is not None:
            os.close(pidfd)

    def pidfd(self, pid: int) -> int:
        """Return the pidfd of a process that is watched. Raises ProcessLookupError."""
        try:
            return self._pidfds[pid]
        except KeyError:
            raise ProcessLookupError(errno.ESRCH, "process is gone") from None

    def gate(self, device: RmDevice, channels: Sequence[Key], *, closed: bool, preempt: bool = True) -> Moved:
        """Close or open the gate over channels; tell which RM knows no longer (they need none) or would not move.

        One stale handle makes RM refuse a call, and a dying process leaves some: the living are then told from the dead
        by asking, which takes no lock of the card's. What came before the stale one in the call is closed by then, and
        RM counts how often (docs/decisions/0028-counted.md): it is opened before it is closed again, or opening it once
        would not be enough ever after. What can't be opened counts as closed, so that it is opened when its time comes.
        """
        alive = list(channels)
        for _ in range(_GATE_TRIES):
            try:
                if alive:
                    device.set_channels(alive, disabled=closed, preempt=preempt)
                return Moved(gone=frozenset(channels) - frozenset(alive))
            except (RmError, OSError) as error:
                _log.info("gate refused", closed=closed, channels=len(alive), reason=str(error))
                alive = [key for key in alive if self.exists(key)]
                if closed and len(opened := self._opened(device, alive)) < len(alive):
                    return Moved(frozenset(channels) - frozenset(alive), opened)
        return Moved(frozenset(channels) - frozenset(alive), frozenset(alive))

    def _opened(self, device: RmDevice, channels: Sequence[Key]) -> frozenset[Key]:
        """Open channels, one by one if one is in the way of the others; return which are sure to be open."""
        opened: set[Key] = set()
        for part in (channels, *([key] for key in channels)):
            try:
                device.set_channels(part, disabled=False)
                opened |= set(part)
            except (RmError, OSError) as error:
                if not isinstance(error, RmError) or error.status not in _STALE:
                    break  # it is not about one of them: a card that does not answer would take seconds each time
                if len(part) == 1:
                    opened |= set(part)  # RM has no gate there to close
            if len(opened) == len(channels):
                break
        return frozenset(opened)

    def open_gates(self, device: RmDevice) -> None:
        """Open every pod's gate on a card, whoever may have closed it."""
        tsgs = [*self._table.compute_tsgs(device.instance), *self._table.copy_tsgs(device.instance)]
        channels = [channel.key for tsg in tsgs for channel in self._table.channels(tsg)]
        self.gate(device, channels, closed=False)

    def exists(self, key: Key) -> bool:
        """Ask RM whether an object exists, through our own client: wherever the pod's own files may be."""
        try:
            return self._client.knows(*key)
        except OSError:
            return True

    def about(self, file: int, client: int, handle: int) -> tuple[int, int] | None:
        """Ask RM for (class, parent) of an object through a file at hand; None when it is none of this file's."""
        try:
            return handle_info(file, client, handle)
        except OSError:
            return None

    def timeslice(self, tsg: RmObject, timeslice_us: int) -> bool:
        """Set a TSG's timeslice; False when its owner is gone."""
        params = ffi.new("NVA06C_CTRL_TIMESLICE_PARAMS *", {"timesliceUs": timeslice_us})

        def put(file: int) -> bool:
            control(file, tsg.client, tsg.handle, abi.NVA06C_SET_TIMESLICE, params)
            return True

        return self._through(tsg.client, put) is not None

    def bytes_of(self, file: int, client: int, memory: int) -> int:
        """Ask RM through a file at hand how large memory is, in bytes; 0 when it does not exist."""
        return memory_bytes(file, client, memory) or 0

    def free(self, file: int, client: int, handle: int) -> None:
        """Free what RM made for a pod and what cannot stay."""
        try:
            if not free(file, client, handle):
                _log.warning("not freed", client=client, handle=handle)
        except OSError as error:
            _log.warning("not freed", client=client, handle=handle, reason=str(error))

    def free_anywhere(self, key: Key) -> bool:
        """Free an object through whatever file of its client's there is; False when there is none."""
        return self._through(key[0], lambda file: free(file, *key) or None) is not None

    def duplicate(self, file: int, rm: RmObject, handle: int) -> bool:
        """Give an object a second handle in its own client."""
        try:
            return duplicate(file, rm.client, rm.parent, handle, rm.handle)
        except OSError:
            return False

    def is_same(self, file: int, key: Key, parent: int, other: Key) -> bool:
        """Ask RM whether memory of the client of a file at hand is what ``other`` names in any client of a pod's."""
        carrier = self._through(other[0], lambda fd: export(fd, *other))
        if carrier is None:
            return False
        try:
            return is_exported(file, key[0], parent, key[1], carrier)
        except (OSError, RmError) as error:
            _log.info("RM does not say whether memory is the same", reason=str(error))
            return False
        finally:
            os.close(carrier)

    def private_bytes(self, instance: int, pid: int) -> int | None:
        """Ask RM how much memory of a process on a card nobody else refers to; None where the branch can't say."""
        device = self._devices.get(instance)
        try:
            return device.private_bytes(pid) if device is not None else None
        except (RmError, OSError):
            return None

    def instance_of(self, file: int, client: int, subdevice: int) -> int | None:
        """Ask RM through a file at hand which card a subdevice is on; None for one that is none of ours.

        Where there is one card, nothing has to be asked.
        """
        if len(self._devices) == 1 and len(self._client.cards()) == 1:
            return next(iter(self._devices))
        params = ffi.new("NV2080_CTRL_GPU_GET_ID_PARAMS *")
        try:
            control(file, client, subdevice, abi.NV2080_GPU_GET_ID, params)
        except (OSError, RmError) as error:
            _log.warning("RM does not say which card a device is on", reason=str(error))
            return None
        return next((i for i, device in self._devices.items() if device.gpu_id == params.gpuId), None)

    def gpu_ids(self, instances: Iterable[int]) -> set[int]:
        """Return RM's numbers of cards."""
        return {self._devices[instance].gpu_id for instance in instances if instance in self._devices}

    def make_preemptible(self, file: int, client: int, subdevice: int, tsg: int) -> bool:
        """Let the compute of a TSG be preempted at any instruction, as libcuda asks for it; False where RM won't."""
        mode = {"flags": abi.PREEMPTION_MODE_FLAGS_CILP, "cilpPreemptMode": abi.PREEMPTION_MODE_COMPUTE_CILP}
        params = ffi.new("NV2080_CTRL_GR_SET_CTXSW_PREEMPTION_MODE_PARAMS *", mode | {"hChannel": tsg})
        try:
            control(file, client, subdevice, abi.NV2080_GR_SET_CTXSW_PREEMPTION_MODE, params)
        except (OSError, RmError) as error:
            _log.warning("compute that may not be preempted", reason=str(error))
            return False
        return True

    def register_p2p(self, file: int, client: int, handle: int) -> None:
        """Let peer devices find an object by its client's process: RM noted the one that made the call, us."""
        params = ffi.new("NV503C_CTRL_REGISTER_PID_PARAMS *", {"hClient": client})
        try:
            control(file, client, handle, abi.NV503C_REGISTER_PID, params)
        except (OSError, RmError) as error:
            _log.info("peer devices will not find a process", reason=str(error))

    def real(self, rm: RmObject) -> tuple[int, int] | None:
        """Ask RM for (class, parent) of an object; None for what does not exist."""
        return self._through(rm.client, lambda file: handle_info(file, rm.client, rm.handle))

    def size(self, rm: RmObject) -> int | None:
        """Ask RM for the true size of memory, in bytes."""
        return self._through(rm.client, lambda file: memory_bytes(file, rm.client, rm.handle))

    def context(self, channel: RmObject) -> int:
        """Ask RM for the id that context-switch records carry for a channel; 0 where the branch can't say."""
        params = ffi.new("NVA06F_CTRL_GET_CONTEXT_ID_PARAMS *")

        def ask(file: int) -> int:
            control(file, channel.client, channel.handle, abi.NVA06F_GET_CONTEXT_ID, params)
            return int(params.contextId)

        return (self._through(channel.client, ask) or 0) if self._branch.context_ids else 0

    def is_reached(self, client: int, pod: str, file: int) -> bool:
        """Tell whether a process of a pod has the file of an RM client, which is at hand, where it was seen to."""
        entry = self._table.clients.get(client)
        users = list(entry.users) if entry is not None else []
        mine = [(pid, fd) for pid, fd in users if self._table.processes.get(pid) == pod]
        return any(kcmp.same_file(os.getpid(), file, pid, fd) for pid, fd in mine)

    def reaches(self, pid: int, fd: int, clients: Set[int]) -> Set[int]:
        """Name those of a pod's RM clients that a descriptor of a process, which need not be watched, leads to.

        Raises OSError where we could not look, for want of descriptors.
        """
        entry = next((found for client in clients if (found := self._table.clients.get(client)) is not None), None)
        if entry is None or proc.device(pid, fd) != _CONTROL_DEVICE:
            return frozenset()
        try:
            pidfd = os.pidfd_open(pid)
            try:
                with self._borrowed(entry.pod, pidfd, pid, fd) as file:
                    return {client for client in clients if self.about(file, client, client) is not None}
            finally:
                os.close(pidfd)
        except OSError as error:
            if error.errno in fd_budget.NONE_LEFT:
                raise
            return frozenset()

    def _through(self, client: int, act: Callable[[int], _T | None]) -> _T | None:
        """Act through the file on which a pod made an RM client; None when it does not work out.

        Only descriptors through which the client was used are tried. A process may end, or put another file in the
        place, while we reach for it. It may also move the file: where RM still has the client, somebody is told.
        """
        entry, looked = self._table.clients.get(client), True
        if entry is None:
            return None
        for pid, fd in list(entry.users):
            if (pidfd := self._pidfds.get(pid)) is None:
                continue
            try:
                with self._borrowed(entry.pod, pidfd, pid, fd) as file:
                    if (result := act(file)) is not None:
                        return result
            except (OSError, RmError) as error:
                looked = looked and not (isinstance(error, OSError) and error.errno in fd_budget.NONE_LEFT)
                _log.debug("not through this file", pid=pid, fd=fd, reason=str(error))
        if looked and self.exists((client, client)):
            self.unreached(client)
        return None

    @contextmanager
    def _borrowed(self, pod: str, pidfd: int, pid: int, fd: int) -> Iterator[int]:
        """Take a control file of a pod's process for the time of the block. Raises OSError for any other file.

        Another can come to its place at the last moment. What was taken is closed by a thread of the pod's.
        """
        if proc.device(pid, fd) != _CONTROL_DEVICE or self.closer.is_stuck(pod):
            raise OSError(errno.EBADF, "no control file is to be had there")
        if self.closer.is_full(pod):
            raise OSError(errno.EMFILE, "many files of the pod wait to be closed")
        taken = take(pidfd, fd)
        try:
            if proc.device_of(taken) != _CONTROL_DEVICE:
                raise OSError(errno.EBADF, "another file is in the descriptor's place")
            yield taken
        finally:
            self.closer.close(pod, taken)

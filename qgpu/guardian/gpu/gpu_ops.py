"""What the guardian does through RM: move gates, set timeslices, and query objects.

Gates use our own client. RM lets only its owner set a TSG's timeslice, so that call goes through the owner's
descriptor, borrowed for the call. Every operation copes with objects that are freed meanwhile.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeVar

import structlog

from qgpu.errors import RmError
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.rm_object import Key, RmObject
from qgpu.linux import fd_budget, proc
from qgpu.linux.pod_fd_closer import PodFdCloser
from qgpu.linux.pod_fd_taker import PodFdTaker
from qgpu.nvidia import abi, rm_client
from qgpu.nvidia.abi import ffi
from qgpu.nvidia.rm_client import RmClient
from qgpu.nvidia.rm_device import RmDevice
from qgpu.nvidia.versions import Branch

#: How often a gate is tried again when channels are freed while it moves.
_GATE_TRIES = 3
#: How many handles of other objects one move of gates finds.
_MOST_OTHERS = 64
#: RM's status for a gate over a channel that does not exist.
_STALE = abi.UNKNOWN_TO_RM | {abi.NV_ERR_INVALID_CHANNEL}
_CONTROL_DEVICE = os.makedev(abi.NV_MAJOR, abi.NV_CONTROL_MINOR)
_T = TypeVar("_T")

_log = structlog.get_logger("guardian")


@dataclass(frozen=True, slots=True)
class Moved:
    """The result of moving a gate: channels that do not exist, channels that did not move, and the time it took."""

    gone: frozenset[Key] = frozenset()
    stuck: frozenset[Key] = frozenset()
    took_ns: int = field(default=0, compare=False)


class GpuOps:
    """Acts on the objects of an object table."""

    def __init__(self, table: ObjectTable, branch: Branch, client: RmClient, devices: Sequence[RmDevice]) -> None:
        self._table = table
        self._branch = branch
        self._client = client
        self._devices = {device.instance: device for device in devices}
        self._pidfds: dict[int, int] = {}
        self.closer = PodFdCloser()
        self.taker = PodFdTaker(lambda pidfd, fd: rm_client.take(pidfd, fd))
        #: Called with a client that RM has and that no known descriptor leads to.
        self.on_unreachable: Callable[[int], None] = lambda _client: None
        #: Called with an object whose handle names another one in RM by now.
        self.on_replaced: Callable[[RmObject], None] = lambda _rm: None
        #: Clients whose file was not found: RM does not let us set their TSGs' timeslices.
        self.lost: set[int] = set()

    @property
    def knows_contexts(self) -> bool:
        """Tell whether RM says which context a channel has; otherwise GPU time goes by the process of its client."""
        return self._branch.context_ids

    def watch(self, pid: int) -> int:
        """Open a pidfd of a process, to act through it and to notice its end. Raises OSError."""
        self._pidfds[pid] = fd_budget.check_headroom(os.pidfd_open(pid))
        return self._pidfds[pid]

    def unwatch(self, pid: int) -> None:
        """Close the pidfd of a process that has ended."""
        if (pidfd := self._pidfds.pop(pid, None)) is not None:
            os.close(pidfd)

    def pidfd(self, pid: int) -> int:
        """Return the pidfd of a watched process. Raises ProcessLookupError."""
        try:
            return self._pidfds[pid]
        except KeyError:
            raise ProcessLookupError(errno.ESRCH, "process is gone") from None

    def gate(self, device: RmDevice, channels: Sequence[Key], *, closed: bool, preempt: bool = True) -> Moved:
        """Close or open the gate over channels; return those that no longer exist, and those that did not move.

        RM refuses the whole call for one stale handle. Then ask which channels exist and try again. Before that, open
        what the failed call may have closed: RM counts disables (docs/decisions/0028-counted.md). A channel that
        cannot be opened counts as closed, so that it is opened when the plan opens it. A handle may exist and name
        something else by now: RM frees channels with their address space, too.
        """
        known = {key: rm for key in channels if (rm := self._table.objects.get(key)) is not None}
        alive, stuck, began_ns = list(channels), frozenset[Key](), time.monotonic_ns()
        for _ in range(_GATE_TRIES):
            try:
                if alive:
                    device.set_channels(alive, disabled=closed, preempt=preempt)
                stuck = frozenset()
                break
            except (RmError, OSError) as error:
                _log.info("gate refused", closed=closed, channels=len(alive), reason=str(error))
                alive = [key for key in alive if self.exists(key)]
                opened, others, unasked = self._open(device, alive)
                for key in others & known.keys():
                    self._check_class(known[key])
                alive = [key for key in alive if key not in others]
                stuck = frozenset(alive)
                if not closed or len(opened) < len(alive):
                    stuck = opened | unasked if closed else frozenset(alive) - opened
                    break
        return Moved(frozenset(channels) - frozenset(alive), stuck, time.monotonic_ns() - began_ns)

    def _open(self, device: RmDevice, channels: Sequence[Key]) -> tuple[frozenset[Key], frozenset[Key], frozenset[Key]]:
        """Open channels; return those that are certainly open, those that are no channels in RM, and the rest.

        A list that RM refuses is halved until it says which handle is the cause. After _MOST_OTHERS such handles it is
        not asked about the rest: the main loop has other work. Of a card that does not answer there is no rest.
        """
        opened, others = set[Key](), set[Key]()
        parts = [channels] if channels else []
        while parts and len(others) < _MOST_OTHERS:
            part = parts.pop()
            try:
                device.set_channels(part, disabled=False)
                opened |= set(part)
            except (RmError, OSError) as error:
                if not isinstance(error, RmError) or error.status not in _STALE:
                    break  # no single channel is the cause: a card that does not answer takes seconds per call
                middle = len(part) // 2
                if len(part) == 1:
                    others |= set(part)
                else:
                    parts += [part[middle:], part[:middle]]
        unasked = frozenset[Key]().union(*parts) if len(others) >= _MOST_OTHERS else frozenset[Key]()
        return frozenset(opened), frozenset(others), unasked

    def open_gates(self, device: RmDevice) -> None:
        """Open every pod's gate on a card, whichever guardian closed it."""
        tsgs = [*self._table.compute_tsgs(device.instance), *self._table.copy_tsgs(device.instance)]
        channels = [channel.key for tsg in tsgs for channel in self._table.channels(tsg)]
        self.gate(device, channels, closed=False)

    def exists(self, key: Key) -> bool:
        """Ask RM through our own client whether an object exists, wherever the pod's files are."""
        try:
            return self._client.knows(*key)
        except OSError:
            return True

    def has_client(self, client: int) -> bool:
        """Ask the same about a client."""
        return self.exists((client, client))

    def object_info(self, file: int, client: int, handle: int) -> tuple[int, int] | None:
        """Ask RM for (class, parent) of an object through a file of ours; None if the object is not this file's."""
        return _asked(rm_client.handle_info, file, client, handle)

    def reaches(self, file: int, client: int) -> bool:
        """Ask RM whether a file of ours leads to a client."""
        return self.object_info(file, client, client) is not None

    def timeslice(self, tsg: RmObject, timeslice_us: int) -> bool:
        """Set a TSG's timeslice; False if its owner is gone."""
        params = ffi.new("NVA06C_CTRL_TIMESLICE_PARAMS *", {"timesliceUs": timeslice_us})

        def put(file: int) -> bool:
            rm_client.control(file, tsg.client, tsg.handle, abi.NVA06C_SET_TIMESLICE, params)
            return True

        if self._via_client_file(tsg.client, put) is not None:
            return True
        self._check_class(tsg)
        return False

    def _check_class(self, rm: RmObject) -> None:
        """Tell of an object whose handle names one of another class by now, as far as its client's file is found."""
        if (found := self.find_object(rm)) is not None and found[0] != rm.rm_class:
            self.on_replaced(rm)

    def size_by_file(self, file: int, client: int, memory: int) -> int:
        """Ask RM through a file of ours how large memory is, in bytes; 0 if it does not exist."""
        return rm_client.memory_bytes(file, client, memory) or 0

    def fabric_info(self, file: int, client: int, handle: int) -> tuple[int, int] | None:
        """Ask RM through a file of ours for (bytes, flags) of an object of the fabric; None if RM does not say."""
        return _asked(rm_client.fabric_info, file, client, handle)

    def free(self, file: int, client: int, handle: int) -> None:
        """Free what RM made for a pod and the pod may not keep."""
        if not _asked(rm_client.free, file, client, handle, log="RM was not asked to free an object"):
            _log.warning("RM object not freed", client=client, handle=handle)

    def free_anywhere(self, key: Key) -> bool:
        """Free an object through any file of its client; False if there is none."""
        return self._via_client_file(key[0], lambda file: rm_client.free(file, *key) or None) is not None

    def duplicate(self, file: int, rm: RmObject, handle: int) -> bool:
        """Give an object a second handle in its own client."""
        return bool(_asked(rm_client.duplicate, file, rm.client, rm.parent, handle, rm.handle))

    def free_children(
        self, client: int, parents: Sequence[int], class_ids: Sequence[int], file: int | None = None
    ) -> int | None:
        """Free the objects of some of RM's own classes below others, through ``file`` or the client's own.

        Return how many there were; None if the file does not reach the client, or RM does not say or does not free one.
        """

        def free_all(file: int) -> int | None:
            if not self.reaches(file, client):
                return None
            found = 0
            for parent, class_id in product(parents, class_ids):
                while (handle := rm_client.child(file, client, parent, class_id)) is not None:
                    if not rm_client.free(file, client, handle):
                        return None
                    found += 1
            return found

        if not parents:
            return 0
        if file is None:
            return self._via_client_file(client, free_all)
        return _asked(free_all, file, log=f"RM does not say what client {client:#x} has")

    def free_os_event(self, client: int, number: int) -> None:
        """Free an OS event, whoever made it: RM does not ask."""
        call = ffi.new("nv_ioctl_os_event_t *", {"hClient": client, "fd": number})
        with suppress(OSError):
            abi.ioctl(self._client.fd, abi.NV_ESC_FREE_OS_EVENT, call)

    @contextmanager
    def shared_with(self, source: Key, client: int) -> Iterator[None]:
        """Let a client duplicate an object meanwhile, if the pod still has the file of the object's client.

        RM would share any client's object. If it is not shared, RM refuses the duplicate.
        """

        def ours(file: int) -> bool | None:
            return rm_client.share(file, *source, client) if rm_client.handle_info(file, *source) is not None else None

        shared = self._via_client_file(source[0], ours)
        try:
            yield
        finally:
            if shared:
                with suppress(OSError):
                    rm_client.share(self._client.fd, *source, client, revoke=True)

    def is_same(self, file: int, key: Key, parent: int, other: Key) -> bool:
        """Ask RM whether memory, reached through ``file``, is the same as ``other``, in any client of a pod."""
        carrier = self._via_client_file(other[0], lambda fd: rm_client.export(fd, *other))
        if carrier is None:
            return False
        what = "RM does not say whether memory is the same"
        try:
            return bool(_asked(rm_client.is_exported, file, key[0], parent, key[1], carrier, log=what))
        finally:
            os.close(carrier)

    def private_bytes(self, instance: int, pid: int) -> int | None:
        """Ask RM how much card memory only this process refers to; None if the driver branch does not report it."""
        device = self._devices.get(instance)
        return _asked(device.private_bytes, pid) if device is not None else None

    def instance_of(self, file: int, client: int, subdevice: int) -> int | None:
        """Ask RM, unless there is only one card, which of ours a subdevice is on; None if it is none of them."""
        if len(self._devices) == 1 and len(self._client.cards()) == 1:
            return next(iter(self._devices))
        params = ffi.new("NV2080_CTRL_GPU_GET_ID_PARAMS *")
        try:
            rm_client.control(file, client, subdevice, abi.NV2080_GPU_GET_ID, params)
        except (OSError, RmError) as error:
            _log.warning("RM does not say which card a device is on", reason=str(error))
            return None
        return next((i for i, device in self._devices.items() if device.gpu_id == params.gpuId), None)

    def gpu_ids(self, instances: Iterable[int]) -> set[int]:
        """Return RM's GPU ids of cards."""
        return {self._devices[instance].gpu_id for instance in instances if instance in self._devices}

    def make_preemptible(self, file: int, client: int, subdevice: int, tsg: int) -> bool:
        """Let RM preempt a TSG's compute at any instruction, as libcuda requests it; False if it does not.

        A card that cannot is only logged. RM says NV_ERR_NOT_SUPPORTED for it (ctrl2080gr.h; the firmware decides), and
        for anything but a subdevice (rs_resource.c:resControlLookup).
        """
        mode = {"flags": abi.PREEMPTION_MODE_FLAGS_CILP, "cilpPreemptMode": abi.PREEMPTION_MODE_COMPUTE_CILP}
        params = ffi.new("NV2080_CTRL_GR_SET_CTXSW_PREEMPTION_MODE_PARAMS *", mode | {"hChannel": tsg})
        try:
            rm_client.control(file, client, subdevice, abi.NV2080_GR_SET_CTXSW_PREEMPTION_MODE, params)
        except (OSError, RmError) as error:
            _log.warning("compute preemption not enabled", reason=str(error))
            if not isinstance(error, RmError) or error.status != abi.NV_ERR_NOT_SUPPORTED:
                return False
            found = self.object_info(file, client, subdevice)
            return found is not None and found[0] == abi.NV20_SUBDEVICE_0
        return True

    def register_p2p(self, file: int, client: int, handle: int) -> None:
        """Register the client's process for peer devices: RM had recorded the guardian, which made the call."""
        params = ffi.new("NV503C_CTRL_REGISTER_PID_PARAMS *", {"hClient": client})
        what = "peer devices will not find a process"
        _asked(rm_client.control, file, client, handle, abi.NV503C_REGISTER_PID, params, log=what)

    def find_object(self, rm: RmObject) -> tuple[int, int] | None:
        """Ask RM for (class, parent) of an object; None if it does not exist."""
        return self._via_client_file(rm.client, lambda file: rm_client.handle_info(file, rm.client, rm.handle))

    def size(self, rm: RmObject) -> int | None:
        """Ask RM for the true size of memory, in bytes."""
        return self._via_client_file(rm.client, lambda file: rm_client.memory_bytes(file, rm.client, rm.handle))

    def context(self, channel: RmObject) -> int:
        """Ask RM for the context id that context-switch records carry for a channel; 0 if the branch cannot tell."""
        if not self.knows_contexts:
            return 0
        return self._via_client_file(channel.client, lambda file: _context(file, channel)) or 0

    def context_by_file(self, file: int, channel: RmObject) -> int:
        """Ask the same through a file of ours. RM gives each channel a number of its own when it makes it."""
        if not self.knows_contexts:
            return 0
        return _asked(_context, file, channel, log="RM does not say which context a channel has") or 0

    def pod_has_file(self, client: int, pod: str, file: int) -> bool:
        """Tell whether a process of a pod still has a client's file (``file`` is our copy) where it was seen before."""
        entry = self._table.clients.get(client)
        users = list(entry.users) if entry is not None else []
        mine = [(pid, fd) for pid, fd in users if self._table.processes.get(pid) == pod]
        try:
            return any(self.taker.is_same(pod, file, pid, fd) for pid, fd in mine)
        except OSError:  # the pod delays the answer to another one's call
            return False

    def clients_behind_fd(self, pid: int, fd: int, clients: Set[int]) -> Set[int]:
        """Return which of a pod's RM clients a descriptor leads to. Raises OSError without a free descriptor."""
        entry = next((found for client in clients if (found := self._table.clients.get(client)) is not None), None)
        if entry is None or proc.device(pid, fd) != _CONTROL_DEVICE:
            return frozenset()
        try:
            pidfd = os.pidfd_open(pid)
            try:
                with self._borrowed(entry.pod, pidfd, pid, fd) as file:
                    return {client for client in clients if self.reaches(file, client)}
            finally:
                os.close(pidfd)
        except OSError as error:
            if error.errno in fd_budget.OUT_OF_FDS:
                raise
            return frozenset()

    def _via_client_file(self, client: int, act: Callable[[int], _T | None]) -> _T | None:
        """Act through the file on which a pod made an RM client; None if that fails.

        Only descriptors through which the client was used are tried. A process may end, or replace the file, while we
        take it. It may also have moved the file: if RM still has the client, ``on_unreachable`` is called.
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
                looked = looked and not (isinstance(error, OSError) and error.errno in fd_budget.OUT_OF_FDS)
                _log.debug("not through this file", pid=pid, fd=fd, reason=str(error))
        if looked and self.has_client(client):
            self.on_unreachable(client)
        return None

    @contextmanager
    def _borrowed(self, pod: str, pidfd: int, pid: int, fd: int) -> Iterator[int]:
        """Take a control file of a pod's process for the block. Raises OSError for any other file.

        The process can replace the file at the last moment. The pod's own threads look at it, take it and close it.
        """
        if self.closer.is_stuck(pod):
            raise OSError(errno.EBADF, "no control file there")
        if self.closer.is_full(pod):
            raise OSError(errno.EMFILE, "too many files of the pod wait to be closed")
        taken = self.taker.take(pod, pidfd, fd, lambda pidfd, fd: self._take_control_file(pod, pid, pidfd, fd))
        try:
            yield taken
        finally:
            self.closer.close(pod, taken)

    def _take_control_file(self, pod: str, pid: int, pidfd: int, fd: int) -> int:
        """Take a file if it is a control file. Some file systems ask their server what a file is, such as 9p."""
        if proc.device(pid, fd) == _CONTROL_DEVICE:
            taken = self.taker.take_fd(pidfd, fd)
            if proc.device_of(taken) == _CONTROL_DEVICE:
                return taken
            self.closer.close(pod, taken)
        raise OSError(errno.EBADF, "no control file there")


def _asked(ask: Callable[..., _T], *about: Any, log: str = "") -> _T | None:
    """Return what RM says; None if it refuses, or cannot be asked, which is then logged."""
    try:
        return ask(*about)
    except (OSError, RmError) as error:
        if log:
            _log.info(log, reason=str(error))
        return None


def _context(file: int, channel: RmObject) -> int:
    """Ask RM for a channel's context id (kernel_channel.c: cid, counted up for all channels of all cards)."""
    params = ffi.new("NVA06F_CTRL_GET_CONTEXT_ID_PARAMS *")
    rm_client.control(file, channel.client, channel.handle, abi.NVA06F_GET_CONTEXT_ID, params)
    return int(params.contextId)

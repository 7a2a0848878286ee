"""One pGPU in the guardian: its card, its enforcer, its GPU time, its lease."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import structlog

from qgpu.errors import BackendGoneError, RmError
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.rm_object import Key, RmObject
from qgpu.guardian.gpu.enforcer import Enforcer
from qgpu.guardian.gpu.gpfifo_progress import GpfifoProgress, slots_of
from qgpu.guardian.gpu.gpu_ops import GpuOps
from qgpu.ipc.codec import grant_to_json
from qgpu.linux.repeated_error import RepeatedError
from qgpu.model import NS_PER_MS, Grant, Plan
from qgpu.model.preemptions import preemptions
from qgpu.nvidia.ctxsw_log import ContextSwitches
from qgpu.nvidia.gpu_time import NOTHING
from qgpu.nvidia.gpu_time_reader import GpuTimeReader, GpuTimeReading
from qgpu.nvidia.rm_device import RmDevice

_log = structlog.get_logger("guardian")

#: How long a plan holds without a message from the daemon, which sends one every 100 ms (qgpu.planes.seccomp.backend).
#: Every gate is open, and every timeslice back to the driver's, well within a second of the daemon's end.
LEASE_NS = 600 * NS_PER_MS
#: How often context switches are drained between samples: the log holds over two seconds at the highest rate.
DRAIN_NS = 500 * NS_PER_MS
#: No channel's context.
_NO_CONTEXT = 0
#: Whose a context's GPU time is: a TSG's, or that of the pod whose TSG has ended.
Owner = Key | str


@dataclass(slots=True)
class Gpu:
    """Everything that belongs to one pGPU."""

    index: int
    device: RmDevice
    table: ObjectTable
    gpu_ops: GpuOps
    log: ContextSwitches
    #: Called with channels that no longer exist.
    lost: Callable[[Iterable[Key]], None]
    gpu_time: GpuTimeReader = field(init=False)
    enforcer: Enforcer = field(init=False)
    gpfifo_progress: GpfifoProgress = field(init=False)
    lease_until_ns: int | None = None
    #: When the log must be drained at the latest.
    drain_due_ns: int = DRAIN_NS
    _failure: RepeatedError = field(default_factory=lambda: RepeatedError(_log, "card fails"))
    #: The TSG of each (context, pid), and the compute TSGs of each pod, as of one revision of the object table.
    _owners: dict[Hashable, Key | None] = field(default_factory=dict)
    _tsgs: dict[str, list[RmObject]] = field(default_factory=dict)
    _indexed_as_of: int = -1
    _by_context: dict[int, Key] = field(default_factory=dict)
    _by_process: dict[int, Key] = field(default_factory=dict)
    #: Pods with compute channels, countable or not, as of one revision of the object table, and whether a plan was in
    #: force then.
    _with_channels: frozenset[str] = frozenset()
    _channels_as_of: tuple[int, bool] | None = None

    def __post_init__(self) -> None:
        self.gpu_time = GpuTimeReader(self.device, self.log)
        self.gpfifo_progress = GpfifoProgress(self.device)
        self.enforcer = Enforcer(self.device, self.table, self.gpu_ops, self.lost, self._tsgs_used_ns, self.drain)

    def apply(self, plan: Plan, now_ns: int) -> None:
        """Put a plan in force and renew the lease."""
        self.renew(now_ns)
        self.enforcer.adopt(plan, now_ns)

    def renew(self, now_ns: int) -> None:
        """Renew the lease of the plan in force."""
        self.lease_until_ns = now_ns + LEASE_NS

    def release(self, now_ns: int) -> None:
        """Open every gate, and return every TSG to its own timeslice."""
        self.lease_until_ns = None
        self.gpu_time.counter.record(wanted=False)
        self.gpfifo_progress.watch({})
        self._channels_as_of = None
        self.enforcer.adopt(None, now_ns)

    def sample(self, now_ns: int, *, detailed: bool = False, grants_revision: int | None = None) -> dict[str, Any]:
        """Report GPU time per pod and TSG since the last sample, in the terms of qgpu.model.Sample.

        Grants are in it only if they changed since ``grants_revision``, which an earlier sample gave.
        If this sample and the last one are ``detailed``, it lists when each pod ran. Raises BackendGoneError while the
        card fails.
        """
        self.drain(now_ns)
        if self._failure.text:
            raise BackendGoneError(f"pGPU {self.index}: {self._failure.text}")
        seen: GpuTimeReading[Owner] = self.gpu_time.read(self._owner_of, detailed=detailed, kept_as=self._kept_as)
        every = self.table.pods.items()
        grants = {name: grant for name, pod in every if (grant := pod.grants.get(self.index)) is not None}
        self._watch_channels(grants.keys())
        preempted, preempting = self._preemptions(seen.handovers, grants)
        pods = []
        for name in grants:
            closed, ended = self.enforcer.take_closed(name, now_ns), seen.uses.get(name, NOTHING)
            pods.append(
                {
                    "pod": name,
                    "gated_ns": sum(end_ns - start_ns for start_ns, end_ns in closed),
                    "closed": closed if detailed else [],
                    "preempted": preempted[name],
                    "preempting": preempting[name],
                    "ended_ns": ended.run_ns,
                    "ended_starts": ended.starts,
                    "gpfifo_entries": self._take_entries(name, any_ended=ended != NOTHING),
                    "tsgs": [
                        {
                            "tsg": f"{tsg.client:x}/{tsg.handle:x}",
                            "run_ns": seen.uses.get(tsg.key, NOTHING).run_ns,
                            "starts": seen.uses.get(tsg.key, NOTHING).starts,
                            "longest_ns": seen.uses.get(tsg.key, NOTHING).longest_ns,
                            "resident": tsg.key == seen.resident,
                            "runs": seen.runs.get(tsg.key, []),
                        }
                        for tsg in self._tsgs_of(name)
                    ],
                }
            )
        answer = {"pgpu": self.index, "now_ns": now_ns, "pods": pods, "lost": self.log.dropped if detailed else 0}
        if grants_revision != self.table.grants_revision:
            answer["grants_revision"] = self.table.grants_revision
            answer["grants"] = {name: grant_to_json(grant) for name, grant in grants.items()}
        return answer

    def _watch_channels(self, granted: Set[str]) -> None:
        """Let the progress of the pods' channels be counted, if several pods share the card by a plan."""
        as_of = self.table.revision, self.enforcer.plan is not None
        if self._channels_as_of == as_of:
            return
        self._channels_as_of = as_of
        self._index()
        slots = {name: slots_of(self.table, own) for name, own in self._tsgs.items() if name in granted}
        slots = {name: channels for name, channels in slots.items() if channels != frozenset()}
        self._with_channels = frozenset(slots)
        self.gpfifo_progress.watch(slots if self.enforcer.plan is not None and len(granted) > 1 else {})

    def _take_entries(self, pod: str, *, any_ended: bool) -> int | None:
        """Return how many GPFIFO entries a pod's channels took since the last sample; None if some are not counted."""
        entries = self.gpfifo_progress.take(pod)
        if any_ended:  # a TSG ran whose channels nobody read to the end
            return None
        return entries if pod in self._with_channels else 0

    def _preemptions(
        self, switches: Counter[tuple[Owner, Owner]], grants: Mapping[str, Grant]
    ) -> tuple[Counter[str], Counter[str]]:
        """Count switches straight from offline pods to online pods, by the preempted and by the preempting pod."""
        handovers: Counter[tuple[str, str]] = Counter()
        for owners, count in switches.items():
            before, after = (each if isinstance(each, str) else self.table.clients[each[0]].pod for each in owners)
            handovers[before, after] += count
        return preemptions(handovers, {name: grant.pod_class for name, grant in grants.items()})

    def drain(self, now_ns: int) -> None:
        """Move context switches from the log to the counter; after an error, try again at the next drain."""
        self.drain_due_ns = now_ns + DRAIN_NS
        with self._failure.logged(RmError, OSError, pgpu=self.index):
            self.gpu_time.drain()

    def _tsgs_used_ns(self, pod: str) -> dict[Key, int]:
        """Return the GPU time so far of each compute TSG of a pod, including TSGs that never ran."""
        used_ns = dict.fromkeys(sorted(tsg.key for tsg in self._tsgs_of(pod)), 0)
        for engine_context, use in self.gpu_time.counter.totals.items():
            if (key := self._tsg_of(engine_context)) in used_ns:
                used_ns[key] += use.run_ns
        return used_ns

    def _owner_of(self, engine_context: Hashable) -> Owner | None:
        """Return the TSG of a (context, pid); where that has ended, the pod of the context, else of the process."""
        if (tsg := self._tsg_of(engine_context)) is not None or not isinstance(engine_context, tuple):
            return tsg
        context, pid = engine_context
        by_process = self.table.processes.get(pid) or self.table.ended_processes.pod_of(pid)
        return self.table.ended_contexts.pod_of(context) or by_process

    def _tsg_of(self, engine_context: Hashable) -> Key | None:
        self._index()
        if engine_context not in self._owners:
            self._owners[engine_context] = self._find_tsg(engine_context)
        return self._owners[engine_context]

    def _find_tsg(self, engine_context: Hashable) -> Key | None:
        """Find the TSG of a (context, pid): by a channel with that context, else by its process.

        RM may name a process of another pod, or the guardian: the pod of a context that has ended is remembered.
        """
        if not isinstance(engine_context, tuple):
            return None
        context, pid = engine_context
        if (tsg := self._by_context.get(context)) is not None or (tsg := self._by_process.get(pid)) is None:
            return tsg
        pod = self.table.ended_contexts.pod_of(context)
        return tsg if pod in (None, self.table.clients[tsg[0]].pod) else None

    def _kept_as(self, engine_context: Hashable) -> Hashable:
        """Return one context for all of a process's contexts without a channel; None if the TSG has ended."""
        if self._tsg_of(engine_context) is None:
            return None
        if not isinstance(engine_context, tuple) or engine_context[0] in self._by_context:
            return engine_context
        return _NO_CONTEXT, engine_context[1]

    def _tsgs_of(self, pod: str) -> Sequence[RmObject]:
        """Return the compute TSGs of a pod."""
        self._index()
        return self._tsgs.get(pod, ())

    def _index(self) -> None:
        """If the object table has changed, index TSGs by pod, by their channels' contexts, and by processes.

        These are the maker and the users of its client; the first TSG of each counts. A process of another pod may have
        the client's file, too: its time is not this pod's.
        """
        if self._indexed_as_of == self.table.revision:
            return
        self._indexed_as_of = self.table.revision
        self._owners, self._tsgs, self._by_context, self._by_process = {}, {}, {}, {}
        for tsg in self.table.compute_tsgs(self.device.instance):
            self._tsgs.setdefault(self.table.pod_of(tsg), []).append(tsg)
            for channel in self.table.channels(tsg):
                if channel.context:
                    self._by_context.setdefault(channel.context, tsg.key)
            client = self.table.clients[tsg.client]
            users = [pid for pid, _ in client.users if self.table.processes.get(pid) == client.pod]
            for pid in (client.maker, *users):  # its maker may have ended
                self._by_process.setdefault(pid, tsg.key)

"""Handles the requests of the control socket, for one host and its loops.

It knows the requests and who may make them. Pods are made and retired in ``qgpu/daemon/pods.py``, containers in
``container_requests.py`` and Kubernetes claims in ``claim_requests.py`` there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog

import qgpu
from qgpu.config import Config, GpuSettings
from qgpu.daemon import caller, container_notes, views
from qgpu.daemon.claim_groups import ClaimGroups
from qgpu.daemon.claim_requests import ClaimRequests
from qgpu.daemon.container_requests import ContainerRequests, check_reach
from qgpu.daemon.container_runtimes import cdi_directory
from qgpu.daemon.device_isolation import DeviceIsolation
from qgpu.daemon.events import UNKNOWN, Events
from qgpu.daemon.gang_exchange import GangExchange
from qgpu.daemon.gpu_loop import GpuLoop
from qgpu.daemon.memory_turns import MemoryTurns
from qgpu.daemon.metric_counters import Counters
from qgpu.daemon.over_limit import over_limits
from qgpu.daemon.peer_filter import pod_of, refuse_pods
from qgpu.daemon.plane_choice import PlaneChoice, driver_version
from qgpu.daemon.pod_moves import PodMoves
from qgpu.daemon.pods import Pods
from qgpu.daemon.prepared_grants import PreparedGrants, claim_uid
from qgpu.daemon.request_args import Arguments
from qgpu.daemon.settings_file import SettingsFile
from qgpu.daemon.share_history import ShareHistories
from qgpu.daemon.simulated_loads import SimulatedLoads
from qgpu.daemon.slurm_jobs import SlurmJobs
from qgpu.daemon.suspension_file import SuspensionFile
from qgpu.daemon.suspensions import MOST_WORK_S, WORK_S, Suspensions
from qgpu.daemon.temporary_policies import TemporaryPolicies
from qgpu.daemon.trace_recordings import TraceRecordings
from qgpu.daemon.unmanaged_processes import UnmanagedProcesses
from qgpu.errors import InvalidValueError, PermissionDeniedError, QgpuError, RefusedError, UnknownNameError, no_pgpu
from qgpu.groups.group_files import GroupFiles
from qgpu.ipc.codec import grants_to_json
from qgpu.ipc.control_socket import Session, without_permission
from qgpu.linux import untrusted_fds
from qgpu.model import NS_PER_S
from qgpu.model.plane_api import Host, PodInfo
from qgpu.model.plane_names import Plane
from qgpu.nvidia import nvml
from qgpu.paths import default_runtime_dir
from qgpu.policies.registry import POLICIES
from qgpu.runtime.agent import LISTENER

_log = structlog.get_logger("control_requests")

#: Requests that are recorded once they are done, each with the arguments that it has checked: those are recorded, and
#: what it answers. Changes of settings are recorded before, and ends of claims after, by their own methods.
_RECORDED: dict[str, tuple[str, tuple[str, ...]]] = {
    "pod.create": ("pod created", ()),
    "pod.remove": ("pod removed", ("name",)),
    "pod.suspend": ("pod told to suspend", ("name",)),
    "pod.resume": ("pod told to resume", ("name",)),
    "pod.move": ("pod told to move", ("name", "gpu")),
    "container.bind": ("container bound", ()),
    "slurm.bind": ("job bound", ()),
    "grant.prepare": ("claim prepared", ("uid", "name")),
}

#: Those that record changes of settings, before they make them.
_SETTING = {"gpu.set", "gpu.set_temporarily", "pod.set"}

#: Those of container runtimes, Slurm, Kubernetes' driver and those who switch the module, all of which are root: what
#: they say of others is believed, so no other user may make them.
_OWN = {"container.bind", "slurm.bind", "grant.prepare", "grant.drop", "group.changed", "module.switched"}

#: Those that change things, and that a member of the socket's group makes when it is its turn. So are those that only
#: read. Others take the turn themselves, because they also look at processes, which may make that slow.
_IN_TURN = {"pod.create", "pod.remove", "pod.resume"}

#: Those that may make a pod.
_MAKING = {"pod.create", "container.bind", "slurm.bind"}

_Request = Callable[[Session, Arguments, list[int]], dict[str, Any]]


class ControlRequests:
    """The requests about one host, with what they need: a loop for each of its pGPUs, its pods, their moves."""

    def __init__(
        self,
        host: Host,
        chosen: PlaneChoice,
        config: Config,
        settings_file: SettingsFile,
        listener: Path | None = None,
        prepared: PreparedGrants | None = None,
        events: Events | None = None,
        suspension_file: SuspensionFile | None = None,
        runtime_dir: Path | None = None,
    ) -> None:
        self._host = host
        self._chosen = chosen
        self._config = config
        self._settings_file = settings_file
        self._events = events or Events(None)
        self._started_ns = time.monotonic_ns()
        self._isolation = DeviceIsolation(chosen.plane, config.device_files, host.pods())
        prepared = prepared or PreparedGrants(None, host.pgpus(), None)
        self.pods = pods = Pods(host, chosen.plane, prepared, self._isolation, self._all_settings, self._works)
        self._lock, self._turn = pods.lock, pods.turn
        #: Held while a setting changes: a slow disk that records it delays others' changes, but nothing that pods do.
        self._setting = threading.Lock()
        self._loads = loads = SimulatedLoads(host, pods.lock)
        self._groups = partial(GroupFiles, runtime_dir or default_runtime_dir())
        self._claims = claims = ClaimRequests(pods, ClaimGroups(pods, chosen.plane, self._groups))
        #: ``listener`` is the socket that receives containers' listeners, on the plane that needs them.
        self._containers = ContainerRequests(pods, claims, config.containers, listener, self._groups)
        self.take_listener = self._containers.take_listener
        jobs = SlurmJobs(pods, chosen.plane)
        for card in host.excluded_cards():
            _log.warning("card excluded", gpu=card.index, pci=card.pci, reason=card.why)
        known = {*pods.cards, *(pgpu.uuid for pgpu in pods.cards.values())}
        for unknown in sorted(map(str, config.gpus.keys() - known - config.mig)):
            _log.warning("configured, but there is no such pGPU here", pgpu=unknown)
        exchange = GangExchange()
        self._loops = {index: GpuLoop(host, index, self._settings(index), exchange) for index in pods.cards}
        self._moves = PodMoves(pods)
        self.suspensions = moves = Suspensions(
            host,
            pods.named,
            suspension_file or SuspensionFile(None),
            self._longest_period_ns,
            self._moves.arrived,
            config.suspended_memory,
        )
        self._traces = traces = TraceRecordings(self._loops, moves.state)
        self.turns = turns = MemoryTurns(pods, moves, self._loops, self._events)
        pods.yielding, pods.retired, self._moves.room = turns.yielding, turns.retired, turns.room
        turns.start()
        self._unmanaged = UnmanagedProcesses(list(pods.cards.values()), nvml.processes, host.pods, self._isolation)
        if chosen.plane is not Plane.SIM:
            self._unmanaged.start()
        self.counters = Counters(pods, chosen, self._loops, traces, self._isolation, self._unmanaged, moves, turns)
        temporary = TemporaryPolicies(pods, self._gpu, self._events)
        self._looking: dict[str, Callable[[Sequence[PodInfo]], dict[str, Any]]] = {
            "status": self._status,
            "gpu.list": lambda pods: {"gpus": self._gpus(pods)},
            "grant.list": claims.listed,
            "pod.list": self._pod_list,
        }
        self._reading: dict[str, _Request] = {
            "events": self._events.listed,
            "gpu.history": ShareHistories(self._loops).read,
            "pod.waits": self._pod_waits,
            "sim.card": loads.card,
            "sim.progress": loads.progress,
        }
        self._changing: dict[str, _Request] = {
            "gpu.set": self._gpu_set,
            "module.switched": self._module_switched,
            "group.changed": self._group_changed,
            "gpu.set_temporarily": temporary.begin,
            "grant.drop": self._grant_drop,
            "grant.prepare": claims.prepare,
            "pod.create": self._pod_create,
            "pod.attach": self._pod_attach,
            "pod.set": self._pod_set,
            "pod.remove": self._pod_remove,
            "pod.suspend": self._pod_suspend,
            "pod.resume": self._pod_resume,
            "pod.move": self._pod_move,
            "container.bind": self._container_bind,
            "slurm.filter": jobs.filter,
            "slurm.bind": jobs.bind,
            "sim.start": loads.start,
            "trace.start": traces.start,
            "trace.read": traces.read,
        }

    def handle(self, session: Session, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Answer one request. Raises a QgpuError if it cannot be done."""
        op = str(message.get("op"))
        if not op.startswith("sim."):  # a pod uses its simulated card through the daemon
            self._refuse_pods(session)
        if op in _OWN and not caller.is_own(session):
            raise PermissionDeniedError(f"{op}: only root and the daemon's own user may ask for this")
        if op in self._changing and not session.may_change:
            raise PermissionDeniedError(f"permission denied; {without_permission(self._config.socket_gid)}")
        if look := self._looking.get(op):
            with self._turn(session):
                return look(self._host.pods())
        request = self._changing.get(op) or self._reading.get(op)
        if request is None:
            raise InvalidValueError(f"request {op!r}: there is no such request; is qgpuctl of the daemon's version?")
        arguments = Arguments(message)
        if op in _RECORDED or op in _SETTING:
            self._turn.await_pace(session)
        with self._turn(session) if op in self._reading or op in _IN_TURN else nullcontext():
            answer = request(session, arguments, fds)
        if op in _RECORDED:
            what, checked = _RECORDED[op]
            told = {key: message[key] for key in checked} | answer
            on = {
                key: told[key]
                for key in ("name", "uid", "grants", "gpu", "old", "new")
                if told.get(key) not in (None, "", {})
            }
            if op in _MAKING and self.pods.is_new(on.get("name")):
                on["made"] = True
            self._events.happened(session, what, on)
        return answer

    def pod_of(self, session: Session) -> str:
        """Return the pod that a client is in. ``handle`` checks again for each request."""
        return pod_of(session.peer.pid, session.process, self.pods.by_cgroup, root=session.peer.uid == 0)

    def pod_around(self, pid: int, process: int | None) -> str:
        """Return the pod that a process is in, as ``peer_filter.pod_of`` does."""
        return pod_of(pid, process, self.pods.by_cgroup)

    def _refuse_pods(self, session: Session) -> None:
        refuse_pods(session.peer.pid, session.process, self.pods.by_cgroup, root=session.peer.uid == 0)

    @property
    def alive(self) -> bool:
        """Tell whether every scheduling loop still runs."""
        return all(each.alive for each in self._loops.values())

    def reap(self) -> None:
        """Retire pods without launcher and processes, and give what they had of a claim to its other containers."""
        left = self.pods.reap()
        self.suspensions.forget_ended(pod.name for pod in left)
        self._claims.divide(left)

    def close(self) -> None:
        """Stop the loops, which opens every gate, and release the host."""
        self.turns.stop()
        self.suspensions.close()
        for each in self._loops.values():
            each.stop()
        self._unmanaged.stop()
        try:
            pods = self._host.pods()
        except QgpuError:  # unknown whether there are any pods
            pods = None
        self._isolation.close(pods)
        self._host.close()

    def _settings(self, index: int) -> GpuSettings:
        """Return a pGPU's settings at start: those last set if they fit the grants, else the configured ones."""
        configured = self._configured(index)
        kept = self._settings_file.settings(self.pods.cards[index].uuid, configured)
        try:
            self.pods.check_settings(index, kept, configured)
        except RefusedError as error:
            _log.warning("last setting does not fit the grants, using the configuration", pgpu=index, reason=str(error))
            return configured
        return kept

    def _configured(self, index: int) -> GpuSettings:
        return self._config.gpu(index, self.pods.cards[index].uuid)

    def _all_settings(self) -> dict[int, GpuSettings]:
        return {index: loop.settings for index, loop in self._loops.items()}

    def _longest_period_ns(self) -> int:
        return max((loop.settings.period_ns for loop in self._loops.values()), default=0)

    def _works(self, name: str) -> bool:
        return self._loads.in_pod(name)

    def _gpu(self, index: int) -> GpuLoop:
        if index not in self._loops:
            raise no_pgpu(index, self._loops)
        return self._loops[index]

    def _status(self, pods: Sequence[PodInfo]) -> dict[str, Any]:
        return {
            "plane": self._chosen.plane.value,
            "why": self._chosen.why,
            "version": qgpu.__version__,
            "driver": driver_version(self._chosen.plane),
            "uptime_s": round((time.monotonic_ns() - self._started_ns) / 1e9, 3),
            "state_dir": None if (kept_in := self._settings_file.directory) is None else str(kept_in.absolute()),
            "traces": self._traces.count,
            "policies": {name: info.number for name, info in POLICIES.items()},
            "gpus": self._gpus(pods),
            "cdi": None if (directory := cdi_directory(self._chosen.plane, self._config)) is None else str(directory),
            "excluded_cards": [
                {"gpu": card.index, "pci": card.pci, "why": card.why} for card in self._host.excluded_cards()
            ],
            "device_files": self._isolation.shown(),
            "unmanaged_processes": [asdict(each) for there in self._unmanaged.seen.values() for each in there],
        }

    def _gpus(self, pods: Sequence[PodInfo]) -> list[dict[str, Any]]:
        held, usages, stuck = self.pods.held_outside(pods), self.counters.usages(), self.turns.stuck()
        return [
            views.gpu(self.pods.cards[index], loop, pods, usages)
            | {
                "held_outside": held[index],
                "memory_yielded": self.turns.yielded_bytes(index, pods),
                "memory_shortage": self.turns.shortage(index),
                "memory_stuck": {
                    pod.name: stuck[pod.name] for pod in pods if index in pod.grants and pod.name in stuck
                },
            }
            for index, loop in self._loops.items()
        ]

    def _gpu_set(self, session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        index, who = arguments.need("gpu", int), caller.of(session)
        with self._turn(session), self._setting:
            loop, uuid = self._gpu(index), self.pods.cards[index].uuid
            changes: dict[str, Any] = {
                name: value
                for name, kind in (
                    ("policy", str),
                    ("online_policy", str),
                    ("period_ns", int),
                    ("offline_floor", int),
                    ("memory_overcommit", float),
                )
                if (value := arguments.get(name, kind)) is not None
            }
            before, settings = loop.settings, replace(loop.settings, **changes)
            with self._lock:
                self.pods.check_settings(index, settings, before)
            if settings.memory_overcommit > 1:
                self._host.checkpointer().close()  # where no pod can be suspended, this raises NotSupportedError
            old, new = _changed(asdict(before), asdict(settings))
            with self._events.changing(who, "policy set", {"gpu": index}, old, new):
                self._settings_file.keep(uuid, self._configured(index), settings)
                try:
                    with self._lock:
                        self.pods.check_settings(index, settings, before)
                        if settings.memory_overcommit > 1:
                            self.turns.mark_all_begun()
                        loop.settings = settings
                except QgpuError:  # a pod has come meanwhile
                    self._settings_file.keep(uuid, self._configured(index), before)
                    raise
        return {"old": old, "new": new, "by": who, "kept": self._settings_file.directory is not None}

    def _module_switched(self, session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        self._events.switched(session, f"module switched {'on' if arguments.need('on', bool) else 'off'}")
        return {}

    def _group_changed(self, session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Record what a group's later members get. The files are its owner's, who has changed them."""
        name = arguments.need("name", str)
        self._groups(name).need_keeper()
        old, new = _changed(*(_part(Arguments(arguments.need(each, dict))) for each in ("old", "new")))
        who = caller.of(session)
        with self._events.changing(who, "group set", {"name": name}, old, new):
            return {"old": old, "new": new, "by": who}

    def _grant_drop(self, session: Session, arguments: Arguments, fds: list[int]) -> dict[str, Any]:
        uid = claim_uid(arguments)
        known = uid in self.pods.prepared.by_uid
        answer = self._claims.drop(session, arguments, fds)
        if known:
            self._events.happened(session, "claim dropped", {"uid": uid})
        return answer

    def _pod_list(self, pods: Sequence[PodInfo]) -> dict[str, Any]:
        ledgers, usages = {index: loop.ledger for index, loop in self._loops.items()}, self.counters.usages()
        origins = self._events.origins()
        return {
            "pods": [
                views.pod(pod, self.pods.labels_of(pod), ledgers, usages)
                | views.place(self.suspensions.state(pod.name), self.turns.waits(pod), origins.get(pod.name, UNKNOWN))
                for pod in pods
            ]
        }

    def _pod_create(self, session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        wanted = arguments.get("name", str)
        if wanted is not None and wanted in self.pods.prepared.by_group:
            return self._pod_created(wanted, self._claims.groups.launch(wanted, session))
        grants = arguments.grants()
        if wanted and self._groups(wanted).keeper() not in (None, session.peer.pid):
            raise RefusedError(f"pod name {wanted}: a group has it; choose another")
        may_wait = arguments.get("may_wait", bool) is not False
        name = self.pods.launch(wanted, grants, session, may_wait=may_wait)
        return self._pod_created(name, grants) | {"grants": grants_to_json(grants)}

    def _pod_created(self, name: str, cards: Iterable[int]) -> dict[str, Any]:
        return {
            "name": name,
            "waits": self.turns.pod_changed(name),
            "plane": self._chosen.plane.value,
            "gpus": [self.pods.cards[index].uuid for index in cards],
        }

    def _container_bind(self, session: Session, arguments: Arguments, fds: list[int]) -> dict[str, Any]:
        answer = self._containers.bind(session, arguments, fds)
        return answer | {"waits": self.turns.pod_changed(answer["name"])}

    def _pod_attach(self, session: Session, arguments: Arguments, fds: list[int]) -> dict[str, Any]:
        name = arguments.need("name", str)
        if any(untrusted_fds.kind(fd) != LISTENER for fd in fds):
            raise InvalidValueError(f"pod {name}: its launcher sent a descriptor that is no seccomp listener")
        with self._turn(session), self._lock:
            self.pods.users.check_entrant(self.pods.named(name), session)
            self._refuse_pods(session)  # it may have ended while it waited, and another process may have its pid
            taken = list(fds)
            fds.clear()
            self._host.attach(name, session.peer.pid, taken)
        return {}

    def _pod_set(self, session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        name, who = arguments.need("name", str), caller.of(session)
        with self._turn(session), self._setting:
            old, new, notes = self._set_pod(name, who, arguments)
        return {"notes": notes, "old": old, "new": new, "by": who}

    def _set_pod(
        self, name: str, who: dict[str, Any], arguments: Arguments
    ) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Change a pod's grants; return what has changed, before and after, and what there is to say of it."""
        with self._lock:
            pod = self.pods.named(name)
            if container_notes.devices_of(pod) or name in self.pods.prepared.by_group:
                raise RefusedError(f"pod {name}: its limits are those of its claim; change the claim")
            index = arguments.get("gpu", int)
            if index is not None and index not in pod.grants:
                self._gpu(index)  # raises if there is no such pGPU
                raise UnknownNameError(f"pod {name}: it has no grant on pGPU {index}; see: qgpuctl pod show {name}")
            if index is not None and self.suspensions.state(name).moves:  # the grant on one of its two cards is lost
                raise RefusedError(
                    f"pod {name}: it is moving to another card; try again when it is there, or without --gpu"
                )
            grants = {
                number: arguments.pods_grant(grant) if index in (None, number) else grant
                for number, grant in pod.grants.items()
            }
            if pod.cgroup and any(grant.memory is not None for grant in grants.values()):
                check_reach(pod)
            self.pods.check_amended(name, grants)
        old, new = _changed(grants_to_json(pod.grants), grants_to_json(grants))
        with self._events.changing(who, "pod set", {"name": name}, old, new), self._lock:
            now = self.pods.named(name)
            if (now.cgroups, now.grants) != (pod.cgroups, pod.grants):
                raise RefusedError(f"pod {name}: it has just changed; try again")
            self.pods.amend(name, grants)
        self.turns.pod_changed(name)
        changed = self.pods.named(name)
        return old, new, [*over_limits(changed), *self.turns.shortages(changed)]

    def _pod_remove(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        name = arguments.need("name", str)
        with self._lock:
            pod = self.pods.named(name)
            if self.pods.runs(pod):
                raise RefusedError(f"pod {name}: it still runs; end its processes first")
            self.pods.retire(pod)
        return {}

    def _pod_suspend(self, session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Begin to suspend a pod; ``pod.list`` shows how that goes on."""
        work_ns = arguments.get("work_ns", int)
        work_s = WORK_S if work_ns is None else work_ns / NS_PER_S
        if not 0 <= work_s <= MOST_WORK_S:
            raise InvalidValueError(f"work {work_s:g} s: work may take 0 to {MOST_WORK_S:g} s to end")
        self.suspensions.suspend(self._no_group(session, arguments.need("name", str)), work_s)
        return {}

    def _pod_resume(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Begin to resume a pod; where memory is overcommitted, it comes back when there is room."""
        name = arguments.need("name", str)
        if not self.turns.applies_to(self.pods.named(name)):
            self.suspensions.resume(name)
            return {"waits": ""}
        return {"waits": self.turns.recall(name)}

    def _pod_waits(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Return what a pod waits for before it may begin; empty if for nothing."""
        return {"waits": self.turns.waits(self.pods.named(arguments.need("name", str)))}

    def _pod_move(self, session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Begin to move a pod to another card."""
        target, source = arguments.need("gpu", int), arguments.get("from", int)
        name = self._no_group(session, arguments.need("name", str))
        left = self._moves.begin(session, self.suspensions, name, target, source)
        return {"old": {"gpu": left}, "new": {"gpu": target}}

    def _no_group(self, session: Session, name: str) -> str:
        """Return a pod's name, when it is the client's turn.

        Raises RefusedError for a group: its members' contexts are in the MPS server; UnknownNameError.
        """
        with self._turn(session):
            self.pods.named(name)
        if self._groups(name).keeper() is not None:
            raise RefusedError(
                f"pod {name}: it is a group, and the driver cannot take clients of MPS off a card; end its members and "
                "remove it, and make it anew on the other card or later"
            )
        return name


def _part(raw: Arguments) -> dict[str, Any]:
    return {"member_sm_percent": raw.get("sm", int), "member_memory_bytes": raw.get("memory", int)}


def _changed(old: dict[str, Any], new: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values that differ, before and after; those of tables within tables likewise."""
    before, after = {}, {}
    for key, value in new.items():
        if old[key] == value:
            continue
        before[key], after[key] = _changed(old[key], value) if isinstance(value, dict) else (old[key], value)
    return before, after

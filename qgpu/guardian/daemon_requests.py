"""What the daemon asks of the guardian, one method per request: pods, their listeners, plans, samples."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qgpu.errors import RefusedError, no_pod
from qgpu.guardian.accounting.client_entries import PodEntry
from qgpu.guardian.daemon_sessions import Answer, DaemonSession, Operation
from qgpu.guardian.gpu.gpu import Gpu
from qgpu.guardian.gpu.reconciler import BATCH
from qgpu.guardian.proxy.shared_state import SharedState
from qgpu.ipc.codec import PROTOCOL, grants_to_json, plan_from_json
from qgpu.linux import cgroup, fd_budget


@dataclass(eq=False)
class DaemonRequests:
    """Handles requests in the main loop, under the one lock."""

    _version: str
    _shared: SharedState
    _cards: Mapping[int, Gpu]
    #: Serves a listener, if it is not served yet.
    _serve: Callable[[int], None]
    #: Called with pods whose grants changed, and with pods that were retired.
    _amended: Callable[[str], None]
    _retired: Callable[[str], None]

    def find(self, name: str) -> Operation:
        """Return the handler of a request by name. Raises AttributeError."""
        found: Operation = getattr(self, f"_op_{name}")
        return found

    def _op_hello(self, session: DaemonSession, message: dict[str, Any], _: list[int]) -> Answer:
        session.watching = message["watch"]
        answer = {
            "protocol": PROTOCOL,
            "version": self._version,
            "pid": os.getpid(),
            "cards": [
                {"index": c.index, "minor": c.device.minor, "pci": c.device.pci, "divided": c.device.mig is not None}
                for c in self._cards.values()
            ],
            "listeners": {str(number): pod for number, (pod, _) in self._shared.listeners.items()},
        }
        return answer, [self._shared.journal.fd, self._shared.files.fd]

    def _op_listener(self, _: DaemonSession, message: dict[str, Any], __: list[int]) -> Answer:
        return {}, [self._shared.listeners[message["listener"]][1].fd]

    def _op_adopt(self, _: DaemonSession, message: dict[str, Any], fds: list[int]) -> None:
        """Take over a dead guardian's listener that we have no copy of; it is served once all are here."""
        self._shared.listeners.add(message["pod"], fds[0], message["listener"])

    def _op_adopted(self, _: DaemonSession, __: dict[str, Any], ___: list[int]) -> None:
        for number in self._shared.listeners:
            self._serve(number)
        self._shared.listeners.release_slots()
        served = {pod for pod, _ in self._shared.listeners.values()}
        known = {client.pod for client in self._shared.table.clients.values()}
        self._shared.clients.recheck_pods(known - served)

    def _op_attach(self, _: DaemonSession, message: dict[str, Any], fds: list[int]) -> Answer:
        """Bring a process and its listener into a pod. Again, after an answer that was lost, it changes nothing."""
        name, pid = message["name"], message["pid"]
        pod = self._known(name)
        try:
            listener = fd_budget.check_headroom(fds.pop())
        except (OSError, IndexError) as error:  # the kernel drops a passed descriptor if no number is free
            raise RefusedError(f"pod {name}: it cannot be served: too many open files; end other pods first") from error
        if (number := self._shared.listeners.number_of(name, listener)) is not None:
            os.close(listener)
            return {"listener": number}, []
        number = 0
        try:
            cgroup.ensure_in(name, pid, pod.cgroup, pod.joined)
            number = self._shared.listeners.add(name, listener)
            self._serve(number)
        except BaseException as error:
            if number:
                self._shared.listener_closed(number)
            os.close(listener)
            if isinstance(error, RuntimeError):  # no thread is available
                raise RefusedError(f"pod {name}: it cannot be served: {error}; end other pods first") from error
            raise
        return {"listener": number}, []

    def _op_pods(self, _: DaemonSession, __: dict[str, Any], ___: list[int]) -> Answer:
        instances = {card.device.instance: card.index for card in self._cards.values()}
        refused, live_pods = defaultdict[str, dict[str, int]](dict), self._shared.listeners.live_pods()
        for (name, what), count in self._shared.refusals.counts.items():
            refused[name][what] = count
        pods = [
            {
                "name": name,
                "cgroup": pod.cgroup,
                "joined": pod.joined,
                "alive": name in live_pods,
                "grants": grants_to_json(pod.grants),
                "memory": {index: self._shared.quota.used(name, i) for i, index in instances.items()},
                "refused": refused[name],
                "unrestorable": self._shared.table.unrestorable_of(name),
            }
            for name, pod in self._shared.table.pods.items()
        ]
        left = Counter[int]()
        for (name, i), size in self._shared.table.allocations.held.items():
            if name not in self._shared.table.pods and i in instances:
                left[instances[i]] += size
        names = sorted(self._shared.table.names_in_use())
        return {"pods": pods, "left": left, "names_in_use": names, "stuck": self._shared.listeners.stuck()}, []

    def _op_admit(self, _: DaemonSession, message: dict[str, Any], __: list[int]) -> None:
        self._check_name(message["name"])
        if not message["cgroup"]:
            cgroup.create(message["name"])
        self._set_grants(message)

    def _op_amend(self, _: DaemonSession, message: dict[str, Any], __: list[int]) -> None:
        self._known(message["name"])
        self._check_first_limit(message["name"], message["grants"])
        self._check_lost_cards(message["name"], message["grants"])
        self._set_grants(message)

    def _op_join(self, _: DaemonSession, message: dict[str, Any], __: list[int]) -> None:
        pod = self._known(message["name"])
        self._set_grants({"name": message["name"], "grants": grants_to_json(pod.grants), "joined": message["cgroups"]})

    def _op_retire(self, _: DaemonSession, message: dict[str, Any], __: list[int]) -> None:
        self._known(message["name"])
        if message["name"] in self._shared.listeners.live_pods():
            raise RefusedError(f"pod {message['name']}: a process of it still runs; end it first")
        self._shared.note({"fact": "pod_retired", "name": message["name"]})
        self._shared.retired(message["name"])
        cgroup.remove(message["name"])
        self._retired(message["name"])
        if not self._shared.table.pods:
            gc.collect()

    def _op_sample(self, _: DaemonSession, message: dict[str, Any], __: list[int]) -> Answer:
        card, detailed = self._cards[message["pgpu"]], bool(message.get("detailed"))
        return card.sample(time.monotonic_ns(), detailed=detailed, grants_revision=message.get("grants_revision")), []

    def _op_apply(self, session: DaemonSession, message: dict[str, Any], _: list[int]) -> None:
        plan = plan_from_json(message["plan"])
        session.cards.add(plan.pgpu)
        self._cards[plan.pgpu].apply(plan, time.monotonic_ns())

    def _op_renew(self, _: DaemonSession, message: dict[str, Any], __: list[int]) -> Answer:
        card = self._cards[message["pgpu"]]
        held = card.lease_until_ns is not None
        if held:
            card.renew(time.monotonic_ns())
        return {"held": held}, []

    def _set_grants(self, message: dict[str, Any]) -> None:
        self._shared.note(
            {"fact": "pod"} | {key: message[key] for key in ("name", "cgroup", "grants", "joined") if key in message}
        )
        self._amended(message["name"])

    def _check_name(self, name: str) -> None:
        """Refuse the name of a retired pod whose RM clients or memory others keep: they would be the new pod's."""
        table, has_client = self._shared.table, self._shared.gpu_ops.has_client
        if name in table.pods:
            return
        clients = table.clients_of(name)
        left = len(clients) > BATCH or any(map(has_client, clients))
        if left or table.is_kept_elsewhere(name):
            raise RefusedError(
                f"pod name {name}: other processes still have files or memory of an earlier pod of that name; choose "
                "another, or end them"
            )

    def _check_first_limit(self, name: str, grants: dict[str, Any]) -> None:
        """Refuse a first memory limit while programs run that may use UVM in ways that no call shows."""
        table = self._shared.table
        begun = any(table.processes.get(pid) == name for pid in table.allocations.managed)
        limited = any(grant["memory"] is not None for grant in grants.values())
        if begun and limited and not self._shared.allowance(name).limited:
            raise RefusedError(
                f"pod {name}: programs in it started without a memory limit and cannot be limited now; "
                "end them first, or start the pod with a limit"
            )

    def _check_lost_cards(self, name: str, grants: dict[str, Any]) -> None:
        """Refuse to take away a card on which programs of the pod run: nothing would bound their time there."""
        table = self._shared.table
        for index in table.pods[name].grants.keys() - set(map(int, grants)):
            card = self._cards.get(index)
            if card is not None and any(table.pod_of(tsg) == name for tsg in table.tsgs_on(card.device.instance)):
                raise RefusedError(f"pod {name}: it runs on pGPU {index}; stop its work there first")

    def _known(self, name: str) -> PodEntry:
        if (pod := self._shared.table.pods.get(name)) is None:
            raise no_pod(name)
        return pod

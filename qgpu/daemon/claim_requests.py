"""Prepares Kubernetes claims, drops them, and gives containers what their claims hold.

A claim holds its part of a card from its preparation to its end. Its containers take from that, and only from that: no
annotation, label or variable counts. Containers that use one claim at the same time divide it
(``qgpu/claim_division.py``): limits are lowered first, then what the others have is looked up, and only the rest is
given.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import structlog

from qgpu import claim_division
from qgpu.claim_division import LEAST_MEMORY, DeviceUser
from qgpu.daemon import container_notes
from qgpu.daemon.claim_groups import ClaimGroups
from qgpu.daemon.container_notes import ContainerNote, users
from qgpu.daemon.pods import Pods
from qgpu.daemon.prepared_grants import prepared_devices, shown
from qgpu.daemon.request_args import Arguments
from qgpu.errors import QgpuError, RefusedError
from qgpu.ipc.control_socket import Session
from qgpu.model import Grant
from qgpu.model.plane_api import PodInfo
from qgpu.model.prepared_grant import ANY_POD, PreparedDevice, PreparedGrant
from qgpu.runtime.driver_files import nodes_by_pgpu
from qgpu.runtime.oci_container import Container

_log = structlog.get_logger("claims")

#: How long the container of a pod that its claim does not know yet is kept waiting, in seconds. A pod may join a claim
#: that others use already, and its driver looks for such pods every second (``qgpu/k8s/resync.py``).
JOINING_S = 1.5


@dataclass(frozen=True, slots=True)
class _User:
    """A pod with prepared devices, or a container that is about to be one: it has no grants and no memory yet."""

    name: str
    bound: ContainerNote
    grants: Mapping[int, Grant]
    memory: Mapping[int, int]


class ClaimRequests:
    """Requests about claims and their containers. Callers of ``bind`` and ``divide`` hold the pods' lock."""

    def __init__(self, pods: Pods, groups: ClaimGroups) -> None:
        self._pods, self._prepared, self.groups = pods, pods.prepared, groups
        #: Notified when a claim is prepared, perhaps for further pods.
        self._consumers = threading.Condition()

    def listed(self, pods: Sequence[PodInfo]) -> dict[str, Any]:
        """Return all prepared grants, with the pods that use them."""
        return {
            "grants": [
                shown(grant) | {"pods": [pod.name for pod in _users_of(grant, pods)]} | self.groups.shown(grant)
                for grant in self._prepared.by_uid.values()
            ]
        }

    def prepare(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Hold what a claim asks for, until it is dropped. Raises a QgpuError.

        The same devices again are no change, whoever may use them now. Other devices replace unused ones. A claim with
        a group is prepared when the group takes members; with ``wait`` false, the request does not wait for that.
        """
        grant = self._prepared.parse(arguments)
        self.groups.check(grant)
        with self._prepared.written(grant) as new, self._pods.lock:
            before = self._prepared.by_uid.get(grant.uid)
            if before is None or (before.devices, before.part) != (grant.devices, grant.part):
                pods = self._pods.reap()
                if before is not None:
                    _check_unused(before, pods, "it is not prepared anew")
                self._pods.check_prepared(grant, pods)
            self.groups.begin(grant)
            self._prepared.keep(grant, new)
        self._prepared.flush()
        with self._consumers:
            self._consumers.notify_all()
        if before != grant:
            _log.info("claim prepared", claim=str(grant), uid=grant.uid)
        if arguments.get("wait", bool) is not False:
            self.groups.await_ready(grant)
        return {"devices": prepared_devices(grant)}

    def drop(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Hold nothing more for a claim. Raises RefusedError while a pod of it is left."""
        uid = arguments.need("uid", str)
        if (grant := self._prepared.by_uid.get(uid)) is not None and grant.group:
            self.groups.end(grant)
        with self._pods.lock:
            grant = self._prepared.by_uid.get(uid)
            if grant is not None:
                _check_unused(grant, self._pods.reap(), "it stays prepared")
                self._prepared.remove(uid)
                self.groups.forget(grant)
        self._prepared.flush()
        if grant is not None:
            _log.info("claim dropped", claim=str(grant), uid=uid)
        return {}

    def await_consumer(self, container: Container, devices: Sequence[str]) -> None:
        """Give claims a moment to learn of a container's pod. The caller holds no lock: nobody else waits for this."""
        uid = container.pod_uid()
        if uid:
            with self._consumers:
                self._consumers.wait_for(lambda: not self._strangers(uid, devices), JOINING_S)

    def owner(self, container: Container, devices: Sequence[str]) -> str:
        """Return whose a container of claims is: its Kubernetes namespace; empty for a container without claims.

        A device plugin's claims do not know the namespace, but only a pod of Kubernetes has one of them.
        """
        claims = [self._prepared.by_name[name][0].namespace for name in devices if name in self._prepared.by_name]
        names = container.kubernetes_names()
        return f"namespace {names[0] if names else claims[0]}" if claims else ""

    def group_of(self, container: Container, devices: Sequence[str]) -> str:
        """Return the group of a container's claim, if it may be a member now; empty for none. Raises a QgpuError."""
        known = [self._prepared.by_name[name][0] for name in devices if name in self._prepared.by_name]
        if not any(grant.group for grant in known):
            return ""
        found = self._reserved(container, devices)
        if len(found) > 1:
            raise RefusedError(
                f"container {container.id}: it has {len(found)} prepared devices, one of them in a group; a member of "
                "a group has that device alone"
            )
        self._check_cards(container, found)
        ((grant, _),) = found
        self.groups.check_ready(grant)
        return grant.group

    def bind(self, container: Container, bound: ContainerNote, at: str) -> str:
        """Make a container a pod with the grants of its prepared devices, and return its name. Raises a QgpuError."""
        found = self._reserved(container, bound.devices)
        self._pods.orphaned.used(bound.devices, self.owner(container, bound.devices))
        pods = self._pods.reap()
        last = [pod for pod in pods if pod.cgroup == at]
        self._check_cards(container, found)
        container.check_devices(device.grant for _, device in found)
        name = _free_name(container, {pod.name for pod in pods if pod not in last})
        try:
            grants = self._make_room(_User(name, bound, {}, {}), {pod.name for pod in last})
            self._pods.check_quotas(name, grants)  # a policy from the configuration holds whatever is prepared
            for pod in last:
                self._pods.retire(pod)
            container_notes.write(at, bound)
            try:
                self._pods.make(name, grants, at)
            except BaseException:
                container_notes.remove(at)
                raise
        except BaseException:
            with suppress(QgpuError):  # the others get back what was to be its part; later, if that fails
                self.divide(self._pods.listed())
            raise
        return name

    def divide(self, pods: Sequence[PodInfo]) -> None:
        """Give containers what those that are gone have left to them. Raises a QgpuError."""
        if not self._prepared.by_uid:
            return
        with self._pods.lock:
            before = self._users(pods)
            wanted = self._wanted(before)
            if any(grant != user.grants.get(index) for user in before for index, grant in wanted[user.name].items()):
                self._lower(before)
                self._raise(self._users(self._pods.listed()))

    def _reserved(self, container: Container, devices: Iterable[str]) -> list[tuple[PreparedGrant, PreparedDevice]]:
        """Return a container's devices with their claims. RefusedError unless they are reserved for its pod."""
        uid, result = container.pod_uid(), []
        for name in devices:
            found = self._prepared.by_name.get(name)
            if found is None:
                raise RefusedError(
                    f"container {container.id}: there is no prepared device {name}; have its claim prepared again"
                )
            if not uid or not _may_use(uid, found[0]):
                raise RefusedError(
                    f"container {container.id}: {found[0]} is not reserved for its Kubernetes pod "
                    f"({uid or 'without UID'}); name the claim in that pod"
                )
            result.append(found)
        return result

    def _strangers(self, uid: str, devices: Iterable[str]) -> list[str]:
        """Return the devices whose claims do not know a Kubernetes pod; not those that nobody has prepared."""
        found = self._prepared.by_name
        return [name for name in devices if name in found and not _may_use(uid, found[name][0])]

    def _check_cards(self, container: Container, found: Iterable[tuple[PreparedGrant, PreparedDevice]]) -> None:
        """Raise RefusedError unless a container reaches the cards of its devices, and no others."""
        cards = set()
        for grant, device in found:
            index = self._prepared.index(device)
            if index is None:
                raise RefusedError(f"container {container.id}: {grant}: card {device.gpu} is gone; make another claim")
            cards.add(index)
        reached = set(container.gpus(nodes_by_pgpu(self._pods.cards.values())))
        if reached - cards:
            raise RefusedError(
                f"container {container.id}: it reaches pGPU {min(reached - cards)}, of which no claim gives it a part; "
                "start it without that device"
            )
        if cards - reached:
            raise RefusedError(
                f"container {container.id}: its claim gives it a part of pGPU {min(cards - reached)}, but it does not "
                "reach that; see its runtime's log"
            )

    def _users(self, pods: Iterable[PodInfo], besides: Collection[str] = ()) -> list[_User]:
        """Return the pods with prepared devices, the longest-running first.

        One with a device that is not known any more is left as it is, and counts by what it has.
        """
        there = [(pod, container_notes.read(pod)) for pod in pods if pod.name not in besides]
        found = [
            _User(pod.name, bound, pod.grants, pod.memory)
            for pod, bound in there
            if bound and bound.devices and all(name in self._prepared.by_name for name in bound.devices)
        ]
        return sorted(found, key=lambda user: user.bound.since_ns)

    def _make_room(self, new: _User, besides: Collection[str]) -> dict[int, Grant]:
        """Lower the grants of the containers that a new one shares devices with, and return its grants.

        ``besides`` are pods that the new one replaces.
        """
        self._lower([*self._users(self._pods.listed(), besides), new])
        now = self._users(self._pods.listed(), besides)
        wanted, alone = self._wanted([*now, new])[new.name], self._wanted([new])[new.name]
        grants = {}
        for index, grant in sorted(wanted.items()):
            given = self._capped(index, grant, new, now)
            if given.memory is not None and given.memory < min(LEAST_MEMORY, alone[index].memory or 0):
                raise RefusedError(
                    f"pGPU {index}: nothing is left of the memory of the claim of pod {new.name}; end another "
                    "container that uses it, or make a claim for each"
                )
            grants[index] = given
        return grants

    def _lower(self, users: Sequence[_User]) -> None:
        """Lower the grants that are more than they should be."""
        wanted = self._wanted(users)
        for user in users:
            less = {
                index: replace(grant, cores=_least(grant.cores, aim.cores), memory=_least(grant.memory, aim.memory))
                for index, grant in user.grants.items()
                if (aim := wanted[user.name].get(index)) is not None
            }
            self._amend(user, less)

    def _raise(self, users: Sequence[_User]) -> None:
        """Raise the grants that are less than they should be, as far as the others leave room."""
        wanted = self._wanted(users)
        now = list(users)
        for place, user in enumerate(now):
            others = now[:place] + now[place + 1 :]
            more = {
                index: grant
                if (aim := wanted[user.name].get(index)) is None
                else self._capped(index, aim, user, others)
                for index, grant in user.grants.items()
            }
            now[place] = replace(user, grants=self._amend(user, more))

    def _amend(self, user: _User, grants: Mapping[int, Grant]) -> Mapping[int, Grant]:
        after = {**user.grants, **grants}
        if user.grants and after != user.grants:
            self._pods.host.amend(user.name, after)
            _log.info("claim divided", pod=user.name)
        return after

    def _capped(self, index: int, aim: Grant, user: _User, others: Sequence[_User]) -> Grant:
        """Return a user's grant with no more memory than the others of its devices leave, whatever they do.

        Memory that ended pods have left behind on the card is not given, either: its owner's first.
        """
        if aim.memory is None:
            return aim
        devices = self._devices(index)
        group = next(
            group
            for group in claim_division.connected(_on_card(index, [*others, user], devices))
            if user.name in {each.name for each in group}
        )
        taken = {
            other.name: max(other.memory.get(index, 0), other.grants[index].memory or 0)
            for other in others
            if index in other.grants
        }
        room = claim_division.spare(group, devices, taken) - self._pods.overdrawn(index)
        if left := self._pods.orphaned.of(whose := self._whose(user), index):
            beside = sum(taken.get(other.name, 0) for other in others if self._whose(other) == whose)
            room = min(room, self._pods.orphaned.held(whose, index) - left - beside)
        before = user.grants[index].memory if index in user.grants else 0
        return replace(aim, memory=max(before or 1, min(aim.memory, room)))

    def _whose(self, user: _User) -> str:
        return self._pods.orphaned.owner(user.bound.devices[0])

    def _wanted(self, users: Sequence[_User]) -> dict[str, dict[int, Grant]]:
        """Return what each user should have, by its name and card. Raises RefusedError."""
        result: dict[str, dict[int, Grant]] = {user.name: {} for user in users}
        for index in self._pods.cards:
            devices = self._devices(index)
            for name, grant in claim_division.divided(devices, _on_card(index, users, devices)).items():
                result[name][index] = grant
        return result

    def _devices(self, index: int) -> dict[str, Grant]:
        """Return the prepared devices of one card by name."""
        return {
            name: device.grant
            for name, (_, device) in self._prepared.by_name.items()
            if self._prepared.index(device) == index
        }


def _on_card(index: int, users: Sequence[_User], devices: Mapping[str, Grant]) -> list[DeviceUser]:
    """Return the users of one card's devices, the longest-running first."""
    return [
        DeviceUser(user.name, there, user.memory.get(index, 0), leaving=_is_succeeded(user, users[place + 1 :]))
        for place, user in enumerate(users)
        if (there := [name for name in user.bound.devices if name in devices])
    ]


def _is_succeeded(user: _User, later: Iterable[_User]) -> bool:
    """Tell whether a later run of the same container has begun, of the same devices."""
    return any(
        (other.bound.names, other.bound.pod_uid) == (user.bound.names, user.bound.pod_uid)
        and set(other.bound.devices) == set(user.bound.devices)
        for other in later
        if other.bound.names
    )


def _least(now: int | None, aim: int | None) -> int | None:
    return aim if now is None or aim is None else min(now, aim)


def _free_name(container: Container, taken: set[str]) -> str:
    """Return a container's name as a pod; its id where its last run, in another cgroup, has not quite ended."""
    for name in (container.own_name, container.short_id):
        if name not in taken:
            return name
    raise RefusedError(f"pod {name}: there is one of that name already; end it first")


def _may_use(uid: str, grant: PreparedGrant) -> bool:
    return uid in grant.consumers or ANY_POD in grant.consumers


def _users_of(grant: PreparedGrant, pods: Sequence[PodInfo]) -> list[PodInfo]:
    """Return the pods of a claim: its group's, or those that have a device of it."""
    if grant.group:
        return [pod for pod in pods if pod.name == grant.group]
    return users(pods, [device.name for device in grant.devices])


def _check_unused(grant: PreparedGrant, pods: Sequence[PodInfo], so: str) -> None:
    """Raise RefusedError if a pod that uses a claim is left."""
    if left := _users_of(grant, pods):
        raise RefusedError(f"{grant}: pod {left[0].name} still uses it, so {so}; end its processes first")

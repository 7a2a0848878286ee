"""Prepares the grant of a container's units when the kubelet allocates them, and gives it up when they are free.

The kubelet allocates all resources of one container, one after the other, before those of the next container. It never
says which container they are for, nor when they are free. So each resource's units have a grant of their own. If time
and memory of one family are allocated in immediate succession, the allocator assumes that they are for one container,
and computes the grants from both. Before a container starts, the kubelet's list says whose units they are, and the
allocator corrects the grants. Units are free when the kubelet allocates them again, or has not listed them for a while.

An init container may have some or all units of its pod's main container, and the list leaves init containers out. So
each of these containers gets its grant when it starts, in place of the others'. The CDI name follows from the units.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from qgpu.errors import QgpuError, RefusedError, UnknownNameError
from qgpu.k8s import device_units, pod_resources, resources, unit_usage
from qgpu.k8s.grpc_server import socket_identity
from qgpu.k8s.qgpud import Card, Qgpud
from qgpu.k8s.resources import Kind, Resource
from qgpu.k8s.unit_usage import HeldUnits
from qgpu.model.prepared_grant import ANY_POD, PreparedDevice, PreparedGrant

_log = structlog.get_logger("k8s.units")

#: The namespace of grants whose pods are not known.
NAMESPACE = "device-plugin"
#: The most seconds between two allocations for one container.
_TOGETHER_S = 3.0
#: How long an allocation waits until the last process of the units' previous container has ended.
_FREED_S, _FREED_STEP_S = 2.0, 0.1
#: How many pairs of allocations (time and memory) are remembered, for containers that the kubelet does not list.
_REMEMBERED = 4096


#: A container's namespace, pod and name, and the family of its units.
_Container = tuple[str, str, str, str]
#: Some units of a container: their resource, card and numbers.
_Stretch = tuple[Resource, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _HalfAllocation:
    """An allocation whose other half, time or memory, may follow."""

    units: _Stretch
    at_s: float

    def is_of(self, container: Iterable[_Stretch]) -> bool:
        """Tell whether a container with these units has this allocation."""
        return any(_overlap(each, self.units) for each in container)


class UnitAllocator:
    """The grants that stand for units, of all resources."""

    def __init__(
        self, qgpud: Qgpud, served: Sequence[Resource], reserve: int, patience_s: float, pod_resources: Path
    ) -> None:
        """``patience_s`` is how long the kubelet must not list units, at this socket, before they count as free."""
        self._qgpud = qgpud
        self._served = served
        self._reserve = reserve
        self._patience_s = patience_s
        self._socket = pod_resources
        self._lock = threading.Lock()
        self._open: _HalfAllocation | None = None
        #: All units that are assumed to be one container's, by the UID of each of its grants; the latest last.
        self._together: dict[str, Sequence[_Stretch]] = {}
        #: Since when the kubelet, known by its socket's identity, has not listed the units of a grant, by UID.
        self._absent: dict[str, float] = {}
        self._kubelet: tuple[int, int, int] | None = None

    def allocate(self, resource: Resource, names: Sequence[str]) -> str:
        """Prepare units for a container; return the CDI name. Raises QgpuError."""
        uuid, numbers = device_units.read_units(names)
        with self._lock:
            half = self._other_half(resource)
            self._open = None
            units = resource, uuid, numbers
            container = [units] if half is None else [half.units, units]
            self._free(*units)
            name = self._prepare(container)
            self._remember(container)
            if half is None:
                self._open = _HalfAllocation(units, time.monotonic())
        return name

    def settle(self, resource: Resource, names: Sequence[str]) -> None:
        """Prepare the grants of a container that is about to start. Raises QgpuError.

        The kubelet does not list an init container's units: it gets what was allocated for it.
        """
        uuid, numbers = device_units.read_units(names)
        units = resource, uuid, numbers
        listed = pod_resources.read(self._socket)
        with self._lock:
            containers = self._listed(listed).values()
            found = [container for container in containers if _uid(units) in map(_uid, container)]
            for container in found:
                if self._open is not None and self._open.is_of(container):
                    self._open = None  # the other half cannot follow any more
                self._replace(container)
            if not found and _uid(units) not in {each.uid for each in self._held()}:
                together = self._together.get(_uid(units), [units])
                self._replace(together)
                for each in together:
                    self._reserve_rest(each, containers)

    def prefer(self, resource: Resource, available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
        """Choose units of one card for a container: the card of its other half, if it has one."""
        with self._lock:
            half = self._other_half(resource)
        return device_units.preferred(available, must, size, half.units[1] if half is not None else "")

    def compare(self) -> None:
        """Give up grants whose units the kubelet does not list any more; prepare what is missing. Raises QgpuError."""
        kubelet = socket_identity(self._socket)
        listed = pod_resources.read(self._socket)
        with self._lock:
            # After a restart, the kubelet lists nothing until it has found its pods again.
            if kubelet != self._kubelet or kubelet is None:
                self._kubelet = kubelet
                self._absent.clear()
            held = self._held()
            wanted = self._listed(listed).values()
            now_s = time.monotonic()
            for each in held:
                if any(each.overlaps(*units) for container in wanted for units in container):
                    self._absent.pop(each.uid, None)
                elif now_s - self._absent.setdefault(each.uid, now_s) >= self._patience_s:
                    self._drop(each.uid)
            for uid in self._absent.keys() - {each.uid for each in held}:
                del self._absent[uid]
            for container in wanted:
                if not all(any(each.overlaps(*units) for each in held) for units in container):
                    self._prepare_again(container)

    def _held(self) -> list[HeldUnits]:
        return unit_usage.taken(self._qgpud.grants(), self._served)

    def _remember(self, container: Sequence[_Stretch]) -> None:
        for units in container:
            self._together.pop(_uid(units), None)
            self._together[_uid(units)] = container
        while len(self._together) > _REMEMBERED:
            del self._together[next(iter(self._together))]

    def _replace(self, container: Sequence[_Stretch]) -> None:
        """Prepare a container's units, and take them from its pod's other containers. Raises QgpuError."""
        for units in container:
            self._free(*units, besides=_uid(units))
        self._prepare(container)

    def _reserve_rest(self, units: _Stretch, containers: Iterable[Sequence[_Stretch]]) -> None:
        """Prepare the units of listed containers beyond an init container's, so that no other pod gets them."""
        for container in containers:
            rest = [_without(each, units) if _overlap(each, units) else each for each in container]
            if rest != container and all(numbers for _, _, numbers in rest):
                self._prepare_again(rest, only=units[0])

    def _prepare_again(self, container: Sequence[_Stretch], only: Resource | None = None) -> None:
        """Prepare the units of a container that have lost their grant: of all its resources, or of ``only`` one."""
        try:
            self._prepare(container, only)
        except QgpuError as error:
            names = ", ".join(resource.name for resource, _, _ in container)
            _log.error("units of a container have no grant", resources=names, error=str(error))

    def _listed(self, listed: pod_resources.PodResources) -> dict[_Container, list[_Stretch]]:
        """Return the units of each container and family, with resource, card and numbers."""
        by_name = {resource.name: resource for resource in self._served}
        found: dict[_Container, list[_Stretch]] = {}
        for each in listed.units:
            if (resource := by_name.get(each.resource)) is not None and each.units:
                key = each.namespace, each.pod, each.container, resource.family
                found.setdefault(key, []).append((resource, *device_units.read_units(each.units)))
        return found

    def _other_half(self, resource: Resource) -> _HalfAllocation | None:
        if (half := self._open) is None or time.monotonic() - half.at_s >= _TOGETHER_S:
            return None
        first = half.units[0]
        matches = first.family == resource.family and {first.kind, resource.kind} == {Kind.CORES, Kind.MEMORY}
        return half if matches else None

    def _free(self, resource: Resource, card: str, numbers: Iterable[int], besides: str = "") -> None:
        """Give up all grants of these units except ``besides``. Raises RefusedError if a process still uses one."""
        for each in self._held():
            if each.uid != besides and each.overlaps(resource, card, numbers):
                self._drop_soon(each)

    def _drop_soon(self, old: HeldUnits) -> None:
        """Give up a grant; its last process may need a moment to end. Raises RefusedError."""
        until_s = time.monotonic() + _FREED_S
        while True:
            try:
                self._qgpud.drop(old.uid)
                return
            except RefusedError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(_FREED_STEP_S)

    def _drop(self, uid: str) -> None:
        try:
            self._qgpud.drop(uid)
            if self._open is not None and _uid(self._open.units) == uid:
                self._open = None  # its container is gone: the next allocation is not its other half
            _log.info("units given up", uid=uid)
        except RefusedError as error:
            _log.info("units kept", uid=uid, error=str(error))

    def _prepare(self, container: Sequence[_Stretch], only: Resource | None = None) -> str:
        """Prepare a container's units of one family, one grant for each resource; return the last CDI name.

        With ``only``, prepare those of one resource. Raises QgpuError.
        """
        cards = {uuid for _, uuid, _ in container}
        if len(cards) > 1:
            places = " and ".join(f"{resource.name} on card {uuid}" for resource, uuid, _ in container)
            raise RefusedError(
                f"{places}: a container's share lies on one card; ask for less, or wait until one card has room"
            )
        card = self._card(cards.pop())
        units = {resource: numbers for resource, _, numbers in container}
        cdi = ""
        for resource, grant in resources.grants_for_units(card, self._reserve, units).items():
            if only not in (None, resource):
                continue
            uid = device_units.claim_uid(resource.name, card.uuid, units[resource])
            name = device_units.grant_name(resource.kind.value, units[resource])
            device = PreparedDevice(resource.name, "", card.uuid, grant)
            named = self._qgpud.prepare(PreparedGrant(uid, NAMESPACE, name, (ANY_POD,), (device,)))
            cdi = named[device.request, device.gpu, device.share]
            self._absent.pop(uid, None)
            _log.info("units prepared", uid=uid, name=name, card=card.uuid, cores=grant.cores, memory=grant.memory)
        return cdi

    def _card(self, uuid: str) -> Card:
        for card in self._qgpud.node().cards:
            if card.uuid == uuid:
                return card
        raise UnknownNameError(f"card {uuid}: qgpud has no such card any more")


def _uid(units: _Stretch) -> str:
    """Return the UID of the grant of some units."""
    resource, card, numbers = units
    return device_units.claim_uid(resource.name, card, numbers)


def _without(units: _Stretch, others: _Stretch) -> _Stretch:
    return units[0], units[1], tuple(number for number in units[2] if number not in others[2])


def _overlap(one: _Stretch, other: _Stretch) -> bool:
    """Tell whether two containers' units have some in common."""
    return one[:2] == other[:2] and not set(one[2]).isdisjoint(other[2])

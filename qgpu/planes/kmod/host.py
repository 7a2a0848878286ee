"""The pods and pGPUs of a machine through the module: create, grant, find again, remove."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from qgpu.checkpoint.process_checkpointer import ProcessCheckpointer
from qgpu.errors import NotSupportedError, QgpuError, RefusedError, UnknownNameError, no_pod
from qgpu.linux import cgroup
from qgpu.model import Grant
from qgpu.model.plane_api import ExcludedCard, Host, Pgpu, PodInfo
from qgpu.planes.kmod.backend import GpuTimeSource, KmodBackend
from qgpu.planes.kmod.device import (
    CLASSES,
    Card,
    Device,
    card_of,
    grant_of,
    missing_for_limits,
    problem_of,
    text_of,
)
from qgpu.planes.kmod.left_pods import LeftPods
from qgpu.planes.kmod.uapi import NUMBERS
from qgpu.units import format_count


class KmodHost(Host):
    """The pGPUs and pods of this machine, through the module.

    ``gpu_time`` starts to measure a card. ``describe`` returns the cards' descriptions in the given order. ``used``
    returns a function that tells in which part of the time a card runs kernels, 0 to 1. ``excluded`` lists the cards
    not to share.
    """

    plane = "kmod"

    def __init__(
        self,
        gpu_time: Callable[[Card], GpuTimeSource],
        describe: Callable[[Sequence[Card]], Sequence[Pgpu]],
        used: Callable[[Pgpu], Callable[[], float | None]] = lambda _: lambda: None,
        excluded: Callable[[], Sequence[ExcludedCard]] = tuple,
    ) -> None:
        self._device = Device()
        self._gpu_time = gpu_time
        self._used = used
        cgroup.mount()
        info = self._device.info()
        self.driver = text_of(info.driver)
        if info.abi != NUMBERS["QGPU_ABI_VERSION"]:
            raise NotSupportedError(f"qgpu.ko: it speaks ABI {info.abi}, this is {NUMBERS['QGPU_ABI_VERSION']}")
        if problem := problem_of(info):
            raise NotSupportedError(f"qgpu.ko: {problem}")
        #: The last known path of each cgroup id.
        self._paths: dict[int, str] = {}
        self._cards = sorted(map(self._card, range(info.nr_gpus)), key=lambda card: card.pci)
        self._left = LeftPods(self._device, self._cards)
        self._excluded = excluded()
        there = {card.pci for card in self._excluded}
        described = zip(self._cards, describe(self._cards), strict=True)
        self._pgpus = {pgpu.index: pgpu for card, pgpu in described if card.pci not in there}

    def pgpus(self) -> Sequence[Pgpu]:
        """List the cards of this machine in PCI order."""
        return list(self._pgpus.values())

    def excluded_cards(self) -> Sequence[ExcludedCard]:
        """List the cards in MIG mode."""
        return self._excluded

    def backend(self, pgpu: int) -> KmodBackend:
        """Open the backend of one pGPU."""
        card = self._cards[pgpu]
        return KmodBackend(pgpu, card, self._gpu_time(card), self._used(self._pgpus[pgpu]), lambda: self._left.idents)

    def pods(self) -> Sequence[PodInfo]:
        """List the module's pods that are not retired."""
        pods = list(self._each())
        paths = {pod.cgroup: self._path(pod.cgroup, text_of(pod.name)) for pod in pods}
        joined = {pod.pod: self._joined(pod.pod) for pod in pods}
        known = [paths, *joined.values()]
        self._paths = {ident: path for each in known for ident, path in each.items() if path is not None}
        return [self._info(pod, paths[pod.cgroup], joined[pod.pod].values()) for pod in pods]

    def orphaned_memory(self) -> Mapping[int, int]:
        """Return memory by pGPU that is still in use although its pod was retired."""
        held = {index: self._left.memory(self._cards[index]) for index in self._pgpus}
        return {index: size for index, size in held.items() if size}

    def names_in_use(self) -> Collection[str]:
        """Return the names of retired pods of which clients of RM, or memory, are left."""
        return [text_of(pod.name) for pod in self._left.each()]

    def admit(self, name: str, grants: Mapping[int, Grant], at: str = "") -> None:
        """Make a pod in an existing cgroup, or in a new one."""
        if not at:
            cgroup.create(name)
        try:
            ident = self._add(name, at or cgroup.path_of(name))
            try:
                self._grant(ident, grants)
            except BaseException:
                self._left.retire(ident)
                raise
        except BaseException:
            if not at:
                cgroup.remove(name)
            raise

    def _add(self, name: str, path: str) -> int:
        """Register a cgroup as a pod, and return the pod's number."""
        with _cgroup_fd(name, path) as fd:
            self._make_place(name, os.fstat(fd).st_ino)
            return int(self._device.call("POD_ADD", cgroup_fd=fd, name=name.encode()).pod)

    def _make_place(self, name: str, ident: int) -> None:
        """Give up the retired pod of a cgroup for a new one there. Raises RefusedError if another one has the name."""
        left = list(self._left.each())
        if any(text_of(pod.name) == name and pod.cgroup != ident for pod in left):
            raise RefusedError(
                f"pod name {name}: other processes still have files or memory of an earlier pod of that name; choose "
                "another, or end them"
            )
        for pod in left:
            if pod.cgroup == ident:
                self._left.replace(pod.pod)

    def amend(self, name: str, grants: Mapping[int, Grant]) -> None:
        """Change a pod's grants."""
        self._grant(self._pod(name).pod, grants)

    def attach(self, name: str, pid: int, fds: Sequence[int]) -> None:
        """Bring a process into a pod; what it opens from now on belongs to the pod."""
        for fd in fds:
            os.close(fd)
        pod = self._pod(name)
        joined = list(filter(None, self._joined(pod.pod).values()))
        path = self._path(pod.cgroup, name)
        if not path and not any(cgroup.within(cgroup.of(pid), each) for each in joined):
            raise RefusedError(f"pod {name}: its cgroup is gone, so nobody can enter it; start it anew")
        cgroup.ensure_in(name, pid, path or "", joined)

    def join(self, name: str, cgroups: Sequence[str]) -> None:
        """Let exactly these containers' cgroups count to a pod besides its own. Raises RefusedError."""
        pod = self._pod(name).pod
        there = self._joined(pod)
        for ident, path in there.items():
            if path not in cgroups:
                with suppress(FileNotFoundError):  # another request was first
                    self._device.call("POD_LEAVE", pod=pod, cgroup=ident)
        for path in cgroups:
            if path not in there.values():
                with _cgroup_fd(name, path) as fd:
                    self._device.call("POD_JOIN", pod=pod, cgroup_fd=fd)

    def retire(self, name: str) -> None:
        """Forget a pod, if it is there, and remove its cgroup."""
        with suppress(UnknownNameError):
            self._left.retire(self._pod(name).pod)
        cgroup.remove(name)

    def checkpointer(self) -> ProcessCheckpointer:
        """Open NVIDIA's checkpoints of processes. Raises NotSupportedError."""
        return ProcessCheckpointer(list(self._pgpus.values()), self.driver)

    def close(self) -> None:
        """Close the device; the module keeps the pods for the next daemon."""
        self._device.close()

    def _card(self, number: int) -> Card:
        return card_of(self._device, number)

    def _each(self) -> Iterator[Any]:
        left = {pod.pod for pod in self._left.each()}
        return (pod for pod in self._device.each("POD_NEXT", "pod") if pod.pod not in left)

    def _pod(self, name: str) -> Any:
        for pod in self._each():
            if text_of(pod.name) == name:
                return pod
        raise no_pod(name)

    def _grant(self, ident: int, grants: Mapping[int, Grant]) -> None:
        if any(grant.profiling for grant in grants.values()):
            raise RefusedError(
                "profiling: the kernel module lets no pod read hardware counters; run qgpud with --plane seccomp"
            )
        if any(grant.graphics for grant in grants.values()):
            raise RefusedError("graphics: the kernel module lets no pod draw; run qgpud with --plane seccomp")
        for pgpu, grant in grants.items():
            try:
                self._device.call(
                    "GRANT_SET",
                    pod=ident,
                    gpu=self._cards[pgpu].number,
                    pod_class=CLASSES[grant.pod_class],
                    cores=grant.cores or 0,
                    memory=grant.memory or 0,
                    latency_target_ns=grant.latency_target_ns or 0,
                )
            except OSError as error:
                if error.errno == errno.EOPNOTSUPP:
                    why = missing_for_limits(self._device.info()) or "something was missing a moment ago; try again"
                    raise RefusedError(f"pGPU {pgpu}: no limit can be enforced now: {why}") from error
                raise QgpuError(f"pGPU {pgpu}: the module refused the grant: {error.strerror}") from error

    def _info(self, pod: Any, path: str | None, joined: Iterable[str | None]) -> PodInfo:
        grants, memory = {}, {}
        for index, card in enumerate(self._cards):
            if (grant := grant_of(self._device, pod.pod, card)) is not None:
                grants[index] = grant
                with suppress(FileNotFoundError):  # removed meanwhile
                    memory[index] = int(self._device.call("USAGE", pod=pod.pod, gpu=card.number).memory)
        found = tuple(filter(None, joined))
        inside = cgroup.members(*filter(None, [path]), *found)
        alive = inside.alive or path is None or None in joined
        refused = int(pod.refused_allocs), int(pod.refused_controls)
        return PodInfo(
            text_of(pod.name), grants, inside.pids, memory, _problem(pod), path or "", *refused, alive, found
        )

    def _path(self, ident: int, name: str) -> str | None:
        """Return a cgroup by its id, first where a pod of this name has its own; empty if gone, None if that fails."""
        likely = self._paths.get(ident) or (cgroup.path_of(name) if name else "/")
        try:
            return cgroup.find(ident, likely) or ""
        except OSError:
            return None

    def _joined(self, pod: int) -> dict[int, str | None]:
        """Return a pod's joined cgroups by id; of one that is gone the last known path, None if a search fails."""
        found: dict[int, str | None] = {}
        for each in self._device.each("POD_JOINED_NEXT", "cgroup", pod=pod):
            path = self._path(each.cgroup, "")
            found[each.cgroup] = path if path != "" else self._paths.get(each.cgroup, "")
        return found


@contextmanager
def _cgroup_fd(name: str, path: str) -> Iterator[int]:
    """Open a cgroup to tell the module of it. Raises RefusedError, also for what the module says then."""
    try:
        fd = os.open(cgroup.mount() / path.lstrip("/"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        raise RefusedError(f"pod {name}: cgroup {path}: {error.strerror}") from error


def _problem(pod: Any) -> str:
    said = []
    if pod.flags & NUMBERS["QGPU_POD_LATE"]:
        said.append("it opened the GPU before it was a pod; that work is not limited")
    if pod.flags & NUMBERS["QGPU_POD_TAMPERED"]:
        said.append("it changed calls while they were checked")
    if pod.flags & NUMBERS["QGPU_POD_UNCHECKED"]:
        said.append("its calls were not checked for a time; it may hold more than its limit")
    if pod.refused_allocs:
        said.append(f"memory refused {format_count(pod.refused_allocs)}")
    if pod.refused_controls:
        said.append(f"scheduling controls refused {format_count(pod.refused_controls)}")
    if pod.refused_objects:
        said.append(f"too many objects of RM refused {format_count(pod.refused_objects)}")
    return "; ".join(said)

"""Notes of containers, kept as extended attributes of their cgroups: which run it is, its prepared devices, its names.

A note lasts as long as its container, whatever becomes of the daemon.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from qgpu.errors import RefusedError
from qgpu.linux import cgroup
from qgpu.model.container_labels import ContainerLabels
from qgpu.model.plane_api import PodInfo
from qgpu.model.prepared_grant import PreparedGrant
from qgpu.runtime.oci_container import Container

#: The key of the note.
_NOTE = "container"
#: A Kubernetes pod's UID. An image can write anything in its place, and the kernel refuses a note that is too long.
_UID = re.compile(r"[A-Za-z0-9._-]{1,63}")


@dataclass(frozen=True, slots=True)
class ContainerNote:
    """The note of one container that is a pod, or a member of one."""

    container: str
    #: Its prepared devices, by name.
    devices: tuple[str, ...] = ()
    #: Its namespace, pod and container in Kubernetes; empty if its runtime did not say.
    names: tuple[str, ...] = ()
    #: The UID of its Kubernetes pod; empty for none.
    pod_uid: str = ""
    #: Its first process, which tells its runs apart.
    pid: int = 0
    #: When it was bound, on CLOCK_MONOTONIC.
    since_ns: int = field(default_factory=time.monotonic_ns, compare=False)


def read(pod: PodInfo) -> ContainerNote | None:
    """Return the note of a pod's container; None if there is none.

    A note that another version wrote counts as none: the pod then counts by its own grants.
    """
    return read_at(pod.cgroup) if pod.cgroup else None


def read_at(path: str) -> ContainerNote | None:
    """Return as ``read`` the note at a container's cgroup; the container may be a member of a group."""
    if (text := cgroup.get_xattr(path, _NOTE)) is None:
        return None
    try:
        found = json.loads(text)
        devices, names = tuple(found["devices"]), tuple(found["names"])
        first, since_ns = int(found["pid"]), int(found["since_ns"])
        return ContainerNote(found["container"], devices, names, found["pod_uid"], first, since_ns)
    except (ValueError, KeyError, TypeError):
        return None


def note_of(container: Container, devices: Iterable[str]) -> ContainerNote:
    """Return the note for a container that is bound now. Raises RefusedError."""
    uid = container.pod_uid()
    return ContainerNote(
        container.id,
        tuple(devices),
        container.kubernetes_names(),
        uid if _UID.fullmatch(uid) else "",
        container.pid,
    )


def write(at: str, note: ContainerNote) -> None:
    """Write a container's note to its cgroup. Raises RefusedError if it has prepared devices and that fails."""
    try:
        cgroup.set_xattr(at, _NOTE, json.dumps(asdict(note)))
    except RefusedError:
        if note.devices:
            raise


def remove(at: str) -> None:
    """Remove a cgroup's note."""
    with suppress(RefusedError):
        cgroup.set_xattr(at, _NOTE, "")


def devices_of(pod: PodInfo) -> tuple[str, ...]:
    """Return a pod's prepared devices; none for a pod without."""
    note = read(pod)
    return note.devices if note is not None else ()


def labels_of(pod: PodInfo, prepared: Mapping[str, tuple[PreparedGrant, object]]) -> ContainerLabels:
    """Return what Kubernetes calls a pod's container. ``prepared`` are the prepared devices by name."""
    note = read(pod)
    if note is None:
        return ContainerLabels()
    claims = dict.fromkeys(prepared[name][0].name for name in note.devices if name in prepared)
    namespace, pod_name, name = note.names or ("", "", "")
    return ContainerLabels(namespace, pod_name, name, ",".join(claims))


def outside(pods: Iterable[PodInfo], prepared: Collection[str], groups: Collection[str]) -> list[PodInfo]:
    """Return the pods as admission counts them: those that use prepared devices have no grants of their own.

    ``prepared`` are the names of all prepared devices, ``groups`` those of claims' share groups, which are pods. A pod
    with a device that is not among them counts by its grants.
    """
    return [
        replace(pod, grants={}) if pod.name in groups or _is_inside(devices_of(pod), prepared) else pod for pod in pods
    ]


def users(pods: Iterable[PodInfo], names: Iterable[str]) -> list[PodInfo]:
    """Return the pods that use any of these prepared devices."""
    wanted = set(names)
    return [pod for pod in pods if wanted.intersection(devices_of(pod))]


def _is_inside(devices: Collection[str], prepared: Collection[str]) -> bool:
    return bool(devices) and all(name in prepared for name in devices)

"""A container as its runtime describes it to our hook: its name, the devices it may reach, the limits it asks for.

The description is the state of the OCI runtime specification, with the relevant parts of config.json. It comes from a
privileged client, but is checked all the same: for an invalid description the container does not start, with one error
line.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qgpu.errors import InvalidValueError, RefusedError
from qgpu.linux import cgroup, proc
from qgpu.model import ContainerPolicy, Grant
from qgpu.nvidia import abi, mig
from qgpu.runtime import device_cgroup, requested_limits
from qgpu.runtime.driver_files import Number

#: Prefix of the environment variable that a CDI device sets; the pGPU's number follows.
GPU_VARIABLE = "QGPU_GPU_"
#: Prefix of the environment variable that a prepared device sets to its own name.
CLAIM_VARIABLE = "QGPU_CLAIM_"
#: How the CDI name of a prepared device begins.
PREPARED_KIND = "qgpu.io/claim"
#: How the CDI name of a share group begins.
GROUP_KIND = "qgpu.io/group"

#: The prefix of crun's annotations (crun(1)), and those that change neither a container's cgroup nor its filter nor
#: its program: where hooks' output goes, what podman sets (--group-add keep-groups, label=nested), a stricter filter.
_CRUN = "run.oci."
_HARMLESS = {
    "run.oci.hooks.stdout",
    "run.oci.hooks.stderr",
    "run.oci.keep_original_groups",
    "run.oci.mount_context_type",
    "run.oci.seccomp_fail_unknown_syscall",
}
#: An annotation that is harmless if empty: crun then makes no cgroup below the container's scope. CRI-O often sets it.
_SUBGROUP = "run.oci.systemd.subgroup"

#: NVIDIA's device nodes that do not belong to a card.
_OF_EVERY_PROGRAM = {(abi.NV_MAJOR, abi.NV_CONTROL_MINOR), (abi.NV_MAJOR, abi.NV_MODESET_MINOR)}

_SHORT_ID = 12
_LONGEST = 63

#: Annotations in which Kubernetes runtimes name a container: namespace, pod, container.
_KUBERNETES = (
    # containerd
    ("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri.sandbox-name", "io.kubernetes.cri.container-name"),
    # CRI-O
    ("io.kubernetes.pod.namespace", "io.kubernetes.pod.name", "io.kubernetes.container.name"),
)
#: Valid names of Kubernetes objects (DNS subdomains).
_KUBERNETES_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
#: Annotations in which the same runtimes name the Kubernetes pod's UID, in the same order.
_POD_UIDS = ("io.kubernetes.cri.sandbox-uid", "io.kubernetes.pod.uid")
#: The annotation in which CRI-O passes on labels, as JSON. Other runtimes do not pass them on.
_LABELS = "io.kubernetes.cri-o.Labels"


@dataclass(frozen=True, slots=True)
class Container:
    """One container before its process starts."""

    id: str
    pid: int
    annotations: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Character devices it may reach: (major, minor).
    devices: Sequence[tuple[int, int]] = ()
    #: Its seccomp section, as in config.json.
    seccomp: Mapping[str, Any] = field(default_factory=dict)
    #: The rules of its device cgroup, as in config.json.
    rules: Sequence[Mapping[str, Any]] = ({"allow": False, "access": "rwm"},)
    #: What it may ask for.
    policy: ContainerPolicy = field(default_factory=ContainerPolicy)
    #: The prepared devices and groups that its runtime gave it.
    prepared: Sequence[str] = ()
    #: The prepared devices that its environment names; repeated names stay.
    markers: Sequence[str] = ()
    #: Whether it is restored from a checkpoint.
    restored: bool = False
    #: The kinds of namespaces that it has for itself.
    namespaces: Sequence[str] = ()
    #: Its mounts: the type of the file system, and for a bind mount the host's directory.
    mounts: Sequence[tuple[str, str]] = ()

    @property
    def pod(self) -> str:
        """Its name as a pod: the requested one, else the one from Kubernetes, else its id. Raises InvalidValueError."""
        wanted = self.wanted().name
        return cgroup.check_name(wanted) if wanted is not None else self.own_name

    @property
    def own_name(self) -> str:
        """Its name as a pod if it requests none: the one from Kubernetes, else its id. Raises InvalidValueError."""
        name = ".".join(self.kubernetes_names())
        return cgroup.check_name(name) if name and len(name) <= _LONGEST else self.short_id

    @property
    def short_id(self) -> str:
        """Its name as a pod by its id alone. Raises InvalidValueError."""
        return cgroup.check_name(re.sub(r"[^A-Za-z0-9._-]", "-", self.id)[:_SHORT_ID])

    def kubernetes_names(self) -> tuple[str, ...]:
        """Return its namespace, pod and container in Kubernetes; empty for none. Raises RefusedError as ``pod_uid``.

        An image can set these annotations to anything, so names that no Kubernetes object can have count as none.
        """
        said = {keys: tuple(self.annotations.get(key, "") for key in keys) for keys in _KUBERNETES}
        found = {names for names in said.values() if all(map(_KUBERNETES_NAME.fullmatch, names))}
        if len(found) > 1:
            raise self._contradicted(*(keys[1] for keys in _KUBERNETES))
        return found.pop() if found else ()

    def pod_uid(self) -> str:
        """Return the UID of its Kubernetes pod; empty for none.

        A runtime overwrites a forged annotation of its own, but passes on another runtime's. Raises RefusedError if the
        two differ.
        """
        said = {self.annotations[key] for key in _POD_UIDS if key in self.annotations}
        if len(said) > 1:
            raise self._contradicted(*_POD_UIDS)
        return said.pop() if said else ""

    def _contradicted(self, one: str, other: str) -> RefusedError:
        return RefusedError(
            f"container {self.id}: its annotations {one} and {other}"
            " differ; remove the one that its runtime did not set"
        )

    def prepared_devices(self) -> tuple[str, ...]:
        """Return its prepared devices. Raises RefusedError if its environment names one that it was not given."""
        given = self._given(PREPARED_KIND)
        if forged := sorted(set(self.markers) - set(given)):
            raise RefusedError(
                f"container {self.id}: its environment names the prepared device {forged[0]}, which it was not given; "
                f"remove its variables {CLAIM_VARIABLE}*"
            )
        return given

    def group(self) -> str:
        """Return its share group; empty for none. Raises RefusedError if it was also given other devices of qgpu's."""
        groups = self._given(GROUP_KIND)
        if len(groups) > 1 or (groups and self._given(PREPARED_KIND)):
            given = ", ".join(sorted(self.prepared))
            raise RefusedError(f"container {self.id}: it has {given}; a member of a group has that device alone")
        return groups[0] if groups else ""

    def _given(self, kind: str) -> tuple[str, ...]:
        names = (name.partition("=") for name in self.prepared)
        return tuple(dict.fromkeys(name for of, _, name in names if of == kind))

    def gpus(self, nodes: Mapping[int, Mapping[Number, str]]) -> list[int]:
        """Return its pGPUs: those whose device nodes it has; on the simulator, those that a CDI device named.

        ``nodes`` are the device nodes of each pGPU; empty on the simulator. An image can set the variables, so they
        count only on the simulator. Raises RefusedError for other devices, also for a part of a MIG instance's nodes.
        """
        majors = {abi.NV_MAJOR}.union(major for needed in nodes.values() for major, _ in needed)
        own = {(major, minor) for major, minor in self.devices if major in majors} - _OF_EVERY_PROGRAM
        found = [
            index
            for index, needed in nodes.items()
            if (needed.keys() <= own if needed else f"{GPU_VARIABLE}{index}" in self.environment)
        ]
        theirs = {number for index in found for number in nodes[index]}
        if strange := own - theirs:
            raise RefusedError(
                f"container {self.id}: {_path(min(strange))} is not shared by qgpu; start it without that device"
            )
        for needed in nodes.values() if found else ():
            for number in needed.keys() - theirs:
                if device_cgroup.opens(self.rules, number):
                    raise RefusedError(
                        f"container {self.id}: a device rule lets it open {_path(number)}, on which it has no grant; "
                        "start it with that device, or without the rule"
                    )
        if not found:
            raise RefusedError(f"container {self.id}: it has no pGPU; give it a device such as qgpu.io/gpu=0")
        return found

    def check_new(self, nodes: Mapping[int, Mapping[Number, str]]) -> None:
        """Raise RefusedError if it is restored from a checkpoint, except on the simulator (``nodes`` as in gpus()).

        CRIU installs the checkpoint's seccomp filters, which may be none, without a listener, and moves the processes
        to the checkpoint's cgroup (docs/moving-hosts.md).
        """
        if self.restored and any(nodes.values()):
            raise RefusedError(
                f"container {self.id}: it is restored from a checkpoint, without its seccomp listener and perhaps in "
                "another cgroup, so its limits would not hold; start it anew"
            )

    def check_annotations(self) -> None:
        """Raise RefusedError for an annotation of crun's that may be harmful.

        podman passes on an image's annotations. ``run.oci.delegate-cgroup`` and ``run.oci.systemd.subgroup`` move the
        container to a cgroup of the image's choice; others bring another seccomp filter or listener.
        """
        for name, value in self.annotations.items():
            harmless = name in _HARMLESS or (name == _SUBGROUP and not value)
            if name.startswith(_CRUN) and not harmless:
                raise RefusedError(
                    f"container {self.id}: annotation {name} may give it another cgroup or seccomp filter; start it "
                    "without"
                )

    def check_mounts(self) -> None:
        """Raise RefusedError if its processes could leave their cgroup through a mount of the host's cgroups.

        A read-only mount does not prevent that: clone3(CLONE_INTO_CGROUP) checks who may write to a cgroup, not the
        mount. A cgroup namespace of its own prevents it if no other cgroups are visible there, or if the kernel keeps
        processes inside (nsdelegate). On a hybrid host, file system type cgroup is version 1.
        """
        for kind, source in self.mounts:
            new = kind == "cgroup2" or (kind == "cgroup" and not cgroup.is_hybrid())
            bound = not new and cgroup.shows_tree(source)
            if (new or bound) and "cgroup" not in self.namespaces:
                raise RefusedError(
                    f"container {self.id}: cgroups of the host are mounted in it, so its processes can escape its "
                    "limits, even if the mount is read-only; start it with a cgroup namespace of its own "
                    "(--cgroupns=private), or without that mount"
                )
            if bound and not cgroup.bounds_namespaces():
                raise RefusedError(
                    f"container {self.id}: it has {source} of the host, and cgroup v2 is mounted without nsdelegate "
                    "here, so its processes can escape its limits; start it without that mount"
                )

    def check_alone(self, at: str) -> None:
        """Raise RefusedError if another process is in its cgroup or below: only its own can be in a new cgroup.

        This excludes cgroups of other pods, of login sessions and of qgpu's own programs. A restored container may have
        several processes of its own there.
        """
        try:
            others = set(cgroup.pids(at)) - {self.pid}
        except OSError as error:
            raise RefusedError(f"container {self.id}: cgroup {at}: {error.strerror}; start it in another") from error
        if others and not self.restored:
            raise RefusedError(
                f"container {self.id}: its cgroup {at} is not its own, process {min(others)} is there too; start it in "
                "another"
            )

    def check_devices(self, grants: Iterable[Grant] | None = None) -> None:
        """Raise RefusedError if it has a memory limit and reaches a device that makes video memory past any limit.

        ``grants`` are the grants that it gets; None: what it asks for.
        """
        limits = [self.wanted().grant] if grants is None else grants
        if any(grant.memory is not None for grant in limits) and (name := self.beyond_limits()):
            raise RefusedError(
                f"container {self.id}: {name} makes video memory that no limit covers; start it without that "
                "device and without a device rule that allows it (as --privileged has), or without a memory limit"
            )

    def beyond_limits(self) -> str:
        """Return the device it reaches that makes video memory past any limit; empty for none."""
        for (major, minor), name in device_cgroup.UNCOUNTED:
            if (major, minor) in self.devices or (minor is None and major in {each for each, _ in self.devices}):
                return name
            if device_cgroup.opens(self.rules, (major, minor)):
                return name
        return ""

    def cgroup(self) -> str:
        """Return its cgroup (v2). Raises RefusedError if it has none of its own."""
        try:
            at, parent = cgroup.of(self.pid), cgroup.of(_parent(self.pid))
        except OSError as error:
            raise RefusedError(f"container {self.id}: process {self.pid}: {error.strerror}") from error
        if at in ("/", parent):
            raise RefusedError(
                f"container {self.id}: it has no cgroup of its own (version 2: {at}), so its processes "
                "cannot be told from others; start it with one"
            )
        return at

    def wanted(self) -> requested_limits.RequestedLimits:
        """Return the limits that it asks for. Raises InvalidValueError; RefusedError if it may not ask for them."""
        try:
            labels = {name: str(value) for name, value in json.loads(self.annotations.get(_LABELS, "{}")).items()}
        except (ValueError, AttributeError, RecursionError) as error:
            raise InvalidValueError(f"container {self.id}: annotation {_LABELS}: {error}") from error
        return requested_limits.wanted(self.annotations, labels, self.environment, self.policy)


def described(message: Mapping[str, Any], policy: ContainerPolicy | None = None) -> Container:
    """Parse a description. Raises InvalidValueError."""
    try:
        variables = [entry.split("=", 1) for entry in message["env"] if "=" in entry]
        return Container(
            str(message["id"]),
            int(message["pid"]),
            {str(key): str(value) for key, value in message["annotations"].items()},
            dict(variables),
            [(int(major), int(minor)) for major, minor in message["devices"]],
            dict(message["seccomp"] or {}),
            list(map(_rule, message["rules"])),
            policy or ContainerPolicy(),
            [str(name) for name in message.get("prepared") or ()],
            [value for name, value in variables if name.startswith(CLAIM_VARIABLE)],
            message.get("restored") is True,
            [str(kind) for kind in message.get("namespaces") or ()],
            [(str(kind), str(source)) for kind, source in message.get("mounts") or ()],
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InvalidValueError(f"container: its runtime sent no valid description: {error!r}") from error


def _path(number: Number) -> str:
    """Name a device node of NVIDIA's."""
    major, minor = number
    return f"/dev/nvidia{minor}" if major == abi.NV_MAJOR else mig.node(minor)


def _rule(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read a device rule. Raises TypeError, ValueError, AttributeError."""
    numbers = {key: int(raw[key]) for key in ("major", "minor") if raw.get(key) is not None}
    words = {key: str(raw[key]) for key in ("type", "access") if raw.get(key)}
    return {"allow": raw.get("allow") is not False and bool(raw.get("allow")), **numbers, **words}


def _parent(pid: int) -> int:
    """Return a process's parent. Raises OSError."""
    found = proc.status(pid, "PPid")
    if not found:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return int(found[0])

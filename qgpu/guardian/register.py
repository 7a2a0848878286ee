"""The register: pod -> process -> RM client -> device -> TSG -> channel, and pod -> memory objects.

Kept from facts, one small dict each, so that the same facts written to the journal rebuild it. What RM is about to
be asked for is a claim, charged already; it is confirmed, or gone, when RM has answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from qgpu import cgroup
from qgpu.guardian.holdings import Holdings, Memory
from qgpu.messages import grants_from, grants_to
from qgpu.model import Grant
from qgpu.rm import abi

Fact = dict[str, Any]

#: Levels of objects below an RM client: device, TSG or subdevice, channel, what hangs on it; and room to spare.
_DEEPEST = 8
Key = tuple[int, int]

#: What RM itself takes of a card's memory for a TSG and its channels (context-switch buffers, instance memory, page
#: tables), which has no handle: a CUDA context's share was measured as 9.6 MiB on an H200, and more is charged.
COMPUTE_TSG_BYTES, OTHER_TSG_BYTES = 16 << 20, 1 << 20
#: The same for an address space, of which every device has one too: its first page tables, 20 KiB on an H200.
SPACE_BYTES = 64 << 10

#: Descriptors of a client's file that are remembered; it can be found without.
_MOST_USERS = 256

#: Of a device: which card it is on is not known yet.
NO_INSTANCE = 0xFFFFFFFF


@dataclass(slots=True)
class RmObject:
    """One object as RM has it. ``detail``: device instance, engine type, or bytes, by class."""

    client: int
    handle: int
    parent: int
    rm_class: int
    detail: int = 0
    confirmed: bool = False
    #: Channels: the id that context-switch records carry, 0 while unknown.
    context: int = 0
    #: TSGs: the timeslice its process asked for, which it gets when no plan says otherwise.
    wish_us: int = abi.RM_DEFAULT_TIMESLICE_US

    @property
    def key(self) -> Key:
        """What names the object on the whole machine: client handles are unique while they live."""
        return self.client, self.handle


@dataclass(slots=True)
class RmClientEntry:
    """One RM client of a pod, with the processes and descriptors through which it can be reached."""

    pod: str
    #: The process that RM takes for its owner: the first that was seen to use it.
    maker: int = 0
    users: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class PodEntry:
    """A pod: its cgroup, and its grants by pGPU index."""

    cgroup: str
    grants: dict[int, Grant] = field(default_factory=dict)


@dataclass(slots=True)
class Register:
    """Everything known of the pods' processes and their RM objects."""

    pods: dict[str, PodEntry] = field(default_factory=dict)
    processes: dict[int, str] = field(default_factory=dict)
    #: By process, the descriptors of control files on which it has made root clients.
    roots: dict[int, set[int]] = field(default_factory=dict)
    clients: dict[int, RmClientEntry] = field(default_factory=dict)
    objects: dict[Key, RmObject] = field(default_factory=dict)
    #: Devices, by their keys.
    devices: set[Key] = field(default_factory=set, compare=False)
    #: How many objects each pod has.
    counts: Counter[str] = field(default_factory=Counter, compare=False)
    _handles: dict[int, set[int]] = field(default_factory=dict, compare=False)
    _children: dict[Key, set[int]] = field(default_factory=dict)
    _tsgs: set[Key] = field(default_factory=set)
    #: Counts what may change who is scheduled, so that others can keep what they worked out.
    revision: int = field(default=0, compare=False)
    holdings: Holdings = field(default_factory=Holdings)

    def note(self, fact: Fact) -> None:
        """Take one fact in. Facts about what is not there (any more) change nothing."""
        getattr(self, f"_{fact['fact']}")(fact)
        if fact.get("class") != abi.NV01_MEMORY_LOCAL_USER:
            self.revision += 1

    def _pod(self, fact: Fact) -> None:
        entry = self.pods.setdefault(fact["name"], PodEntry(fact.get("cgroup") or cgroup.path_of(fact["name"])))
        entry.grants = grants_from(fact["grants"])

    def _unpod(self, fact: Fact) -> None:
        self.pods.pop(fact["name"], None)
        self._ended(fact)

    def _ended(self, fact: Fact) -> None:
        """Take note that no process of a pod is left, those that never made a call among them."""
        self.holdings.pod_ended(fact["name"])

    def _process(self, fact: Fact) -> None:
        self.processes[fact["pid"]] = fact["pod"]

    def _root(self, fact: Fact) -> None:
        known = self.roots.get(fact["pid"], set())
        if not fact["there"]:
            known.discard(fact["fd"])
        elif fact["pid"] in self.processes and len(known) < _MOST_USERS:
            self.roots[fact["pid"]] = known | {fact["fd"]}

    def _exit(self, fact: Fact) -> None:
        """Take a process out; its clients stay until RM says that they are gone: their files may be elsewhere."""
        self.processes.pop(fact["pid"], None)
        self.roots.pop(fact["pid"], None)
        self.holdings.exited(fact["pid"])
        for client in self.clients.values():
            client.users = [user for user in client.users if user[0] != fact["pid"]]

    def _client(self, fact: Fact) -> None:
        if "pod" in fact:
            users = [(pid, fd) for pid, fd in fact["users"]]
            self.clients[fact["client"]] = RmClientEntry(fact["pod"], fact["maker"], users)
            return
        pod = self.processes.get(fact["pid"])
        if pod is None:
            return
        entry = self.clients.setdefault(fact["client"], RmClientEntry(pod, fact["pid"]))
        if entry.pod != pod and not self._proven(fact["client"]):
            # Somebody named this handle before RM gave it out; the name alone proves nothing.
            self._drop_client(fact["client"])
            entry = self.clients.setdefault(fact["client"], RmClientEntry(pod, fact["pid"]))
        if (user := (fact["pid"], fact["fd"])) not in entry.users and len(entry.users) < _MOST_USERS:
            entry.users.append(user)

    def _object(self, fact: Fact) -> None:
        # RM takes parent 0 for the client itself (rs_server.c:serverAllocResource).
        parent = fact["parent"] or fact["client"]
        rm = RmObject(fact["client"], fact["handle"], parent, fact["class"], fact["detail"])
        if rm.client not in self.clients or not self._hangs_together(rm):
            return
        if (before := self.objects.get(rm.key)) is not None:
            self._leave_parent(before)
            self._tsgs.discard(rm.key)
            self.devices.discard(rm.key)
            self.holdings.drop(rm.key)
        else:
            self.counts[self.pod_of(rm)] += 1
        self.objects[rm.key] = rm
        self._handles.setdefault(rm.client, set()).add(rm.handle)
        if rm.rm_class == abi.NV01_DEVICE_0:
            self.devices.add(rm.key)
        if rm.rm_class == abi.KEPLER_CHANNEL_GROUP_A:
            self._tsgs.add(rm.key)
        if (size := self._takes(rm)) is not None:
            self._charge(rm, size, fact.get("memory"))
        self._children.setdefault((rm.client, rm.parent), set()).add(rm.handle)

    def _hangs_together(self, rm: RmObject) -> bool:
        """Refuse what would be its own ancestor: RM makes no such thing, and a pod may ask for it."""
        at = rm.parent
        for _ in range(_DEEPEST):
            if at == rm.handle or rm.handle == rm.client:
                return False
            above = self.objects.get((rm.client, at))
            if above is None or at == rm.client:
                return True
            at = above.parent
        return False

    def _confirm(self, fact: Fact) -> None:
        if (rm := self.objects.get((fact["client"], fact["handle"]))) is not None:
            rm.confirmed = True
            rm.context = fact.get("context", rm.context)

    def _wish(self, fact: Fact) -> None:
        if (rm := self.objects.get((fact["client"], fact["handle"]))) is not None:
            rm.wish_us = fact["us"]

    def _gone(self, fact: Fact) -> None:
        client, handle = fact["client"], fact["handle"]
        if client == handle:
            self._drop_client(client)
        else:
            self._drop((client, handle))

    def _proven(self, client: int) -> bool:
        return any(self.objects[client, handle].confirmed for handle in self._handles.get(client, ()))

    def _drop_client(self, client: int) -> None:
        entry = self.clients.pop(client, None)
        handles = self._handles.pop(client, set())
        if entry is not None:
            self.counts[entry.pod] -= len(handles)
        for handle in handles:
            key = client, handle
            self._children.pop((client, self.objects.pop(key).parent), None)
            self._tsgs.discard(key)
            self.devices.discard(key)
            self.holdings.drop(key)

    def _drop(self, key: Key) -> None:
        """Forget an object and all below it, as RM frees a subtree."""
        for handle in self._children.pop(key, set()):
            self._drop((key[0], handle))
        self._tsgs.discard(key)
        self.devices.discard(key)
        if (rm := self.objects.pop(key, None)) is not None:
            self.counts[self.pod_of(rm)] -= 1
            self._handles[rm.client].discard(rm.handle)
            self.holdings.drop(key)
            self._leave_parent(rm)

    def _leave_parent(self, rm: RmObject) -> None:
        if (siblings := self._children.get((rm.client, rm.parent))) is not None:
            siblings.discard(rm.handle)
            if not siblings:  # parents are whatever a pod says
                del self._children[rm.client, rm.parent]

    def _takes(self, rm: RmObject) -> int | None:
        """Return what an object takes of a card's memory, in bytes; None for none."""
        match rm.rm_class:
            case abi.NV01_MEMORY_LOCAL_USER:
                return rm.detail
            case abi.KEPLER_CHANNEL_GROUP_A:
                return COMPUTE_TSG_BYTES if self.is_compute(rm) else OTHER_TSG_BYTES
            case abi.FERMI_VASPACE_A | abi.NV01_DEVICE_0:
                return SPACE_BYTES
        return None

    def _charge(self, rm: RmObject, size: int, number: int | None) -> None:
        """Charge memory, unless it is a further handle on some that is charged."""
        if number is not None and self.holdings.duplicate(rm.key, number):
            return
        if (instance := self.instance_of(rm)) is not None:
            number = number if number is not None else self.holdings.next_number()
            self.holdings.allocate(rm.key, self.pod_of(rm), instance, size, number)

    def _kept(self, fact: Fact) -> None:
        self.holdings.keep(fact["memory"], fact["pod"], fact["instance"], fact["size"])
        if fact.get("pinned"):
            self.holdings.pin(fact["memory"])

    def _pin(self, fact: Fact) -> None:
        self.holdings.pin(fact["memory"])

    def _map(self, fact: Fact) -> None:
        self.holdings.map(fact["pid"], fact["base"], fact["length"], bytes.fromhex(fact["uuid"]), fact["memory"])

    def _unmap(self, fact: Fact) -> None:
        uuid = bytes.fromhex(fact["uuid"]) if fact["uuid"] is not None else None
        self.holdings.unmap(fact["pid"], fact["base"], fact["length"], uuid)

    def _unmapped(self, fact: Fact) -> None:
        self.holdings.unmap_all(fact["memory"])

    def _managed(self, fact: Fact) -> None:
        self.holdings.managed[fact["pid"]] = fact["bytes"]

    # -- questions ------------------------------------------------------------------------------------------

    def facts(self) -> Iterator[Fact]:
        """Say it all again in as few facts as there are things: what a compacted journal holds.

        Other facts may be noted between any two of them: each tells of the moment at which it is asked for.
        """
        for name in list(self.pods):
            if (pod := self.pods.get(name)) is not None:
                yield {"fact": "pod", "name": name, "cgroup": pod.cgroup, "grants": grants_to(pod.grants)}
        for pid in list(self.processes):
            if (of := self.processes.get(pid)) is not None:
                yield {"fact": "process", "pid": pid, "pod": of}
                yield from (
                    {"fact": "root", "pid": pid, "fd": fd, "there": True} for fd in sorted(self.roots.get(pid, ()))
                )
        for handle in list(self.clients):
            if (client := self.clients.get(handle)) is not None:
                known = {"pod": client.pod, "maker": client.maker, "users": [list(user) for user in client.users]}
                yield {"fact": "client", "client": handle} | known
        yield from self.holdings.facts()
        for key in list(self.objects):
            for say in (object_fact, _confirmed, _wished):
                rm = self.objects.get(key)
                if rm is not None and (fact := say(rm)) is not None:
                    yield fact | (self._number_of(rm) if say is object_fact else {})

    def _number_of(self, rm: RmObject) -> Fact:
        memory = self.holdings.by_handle.get(rm.key)
        return {"memory": memory.number} if memory is not None else {}

    def root_fds(self, pid: int) -> set[int]:
        """Return under which descriptors a process has, or had, control files with root clients."""
        used = {fd for client in self.clients.values() for user, fd in client.users if user == pid}
        return used | self.roots.get(pid, set())

    def pod_of(self, rm: RmObject) -> str:
        """Name the pod an object belongs to."""
        return self.clients[rm.client].pod

    def instance_of(self, rm: RmObject) -> int | None:
        """Return the device instance an object lives on; None for what lies under no device."""
        at: RmObject | None = rm
        while at is not None:
            if at.rm_class == abi.NV01_DEVICE_0:
                return at.detail if at.detail != NO_INSTANCE else None
            at = self.objects.get((at.client, at.parent))
        return None

    def compute_tsgs(self, instance: int) -> list[RmObject]:
        """List the confirmed TSGs of the compute engine of one card."""
        return [rm for rm in self._confirmed_tsgs() if self.is_compute(rm) and self.instance_of(rm) == instance]

    def copy_tsgs(self, instance: int) -> list[RmObject]:
        """List the confirmed TSGs of the copy engines of one card."""
        return [rm for rm in self._confirmed_tsgs() if self.is_copy(rm) and self.instance_of(rm) == instance]

    def _confirmed_tsgs(self) -> Iterator[RmObject]:
        return (rm for rm in (self.objects[key] for key in self._tsgs) if rm.confirmed)

    def is_compute(self, rm: RmObject) -> bool:
        """Tell whether an object is a TSG of the compute engine, as is one whose engine was left open."""
        return rm.rm_class == abi.KEPLER_CHANNEL_GROUP_A and (rm.detail == 0 or rm.detail in abi.GR_ENGINES)

    def is_copy(self, rm: RmObject) -> bool:
        """Tell whether an object is a TSG of a copy engine."""
        return rm.rm_class == abi.KEPLER_CHANNEL_GROUP_A and rm.detail in abi.COPY_ENGINES

    def channels(self, tsg: RmObject) -> list[RmObject]:
        """List the confirmed channels of a TSG."""
        below = (self.objects.get((tsg.client, handle)) for handle in self._children.get(tsg.key, ()))
        return [rm for rm in below if rm is not None and rm.confirmed and rm.rm_class in abi.GPFIFO_CLASSES]

    def below(self, key: Key) -> list[RmObject]:
        """List an object and everything under it; a client's handle names the client itself."""
        if key[0] == key[1]:
            return [self.objects[key[0], handle] for handle in self._handles.get(key[0], ())]
        found = [self.objects[key]] if key in self.objects else []
        for handle in self._children.get(key, ()):
            found += self.below((key[0], handle))
        return found

    def ending_with(self, key: Key) -> list[Memory]:
        """List the allocations all of whose handles go when an object is freed."""
        going = {rm.key for rm in self.below(key) if rm.rm_class == abi.NV01_MEMORY_LOCAL_USER}
        found = {
            self.holdings.by_handle[each].number: self.holdings.by_handle[each]
            for each in going & self.holdings.by_handle.keys()
        }
        return [memory for memory in found.values() if memory.handles <= going]

    def exported(self, pod: str, instance: int | None, size: int) -> list[Memory]:
        """List a pod's allocations of a size that a descriptor may carry and that still have a handle; newest first."""
        if instance is None:
            return []
        return [memory for memory in self.holdings.pinned(pod, instance, size) if memory.handles]

    def memory(self, pod: str) -> Mapping[int, int]:
        """Tell what a pod is charged by device instance, in bytes, without managed memory."""
        return {instance: held for (name, instance), held in self.holdings.held.items() if name == pod and held}

    def managed(self, pod: str) -> int:
        """Tell a pod's bytes of address space that could be managed memory, on any card."""
        return sum(held for pid, held in self.holdings.managed.items() if self.processes.get(pid) == pod)


def _confirmed(rm: RmObject) -> Fact | None:
    whose = {"client": rm.client, "handle": rm.handle}
    return {"fact": "confirm", **whose, "context": rm.context} if rm.confirmed else None


def _wished(rm: RmObject) -> Fact | None:
    wish = {"client": rm.client, "handle": rm.handle, "us": rm.wish_us}
    return {"fact": "wish", **wish} if rm.wish_us != abi.RM_DEFAULT_TIMESLICE_US else None


def object_fact(rm: RmObject) -> Fact:
    """Put an object into a fact."""
    return {
        "fact": "object",
        "client": rm.client,
        "handle": rm.handle,
        "parent": rm.parent,
        "class": rm.rm_class,
        "detail": rm.detail,
    }

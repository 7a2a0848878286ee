"""The object table: pod -> process -> RM client -> device -> TSG -> channel, and pod -> memory objects.

It is built from facts, one small dict each, and the same facts in the journal rebuild it. An object that RM is about to
be asked for is a claim, and is charged. RM's answer confirms it or removes it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from qgpu.guardian.accounting.allocations import Allocation, Allocations
from qgpu.guardian.accounting.client_entries import ALL_OBJECTS, MOST_USERS, UNRESTORABLE, PodEntry, RmClientEntry
from qgpu.guardian.accounting.ended_processes import EndedProcesses, LatelyEnded
from qgpu.guardian.accounting.object_tree import ObjectTree
from qgpu.guardian.accounting.rm_object import Fact, Key, RmObject, Userd, object_fact
from qgpu.guardian.accounting.sets_by_key import HandlesByClient, SetsByKey, while_there
from qgpu.ipc.codec import grants_from_json, grants_to_json
from qgpu.linux import cgroup
from qgpu.nvidia import abi

#: Card memory that RM takes for a TSG and its channels (context-switch buffers, instance memory, page tables). It has
#: no handle. A CUDA context's part was measured as 9.6 MiB on an H200; more than that is charged.
COMPUTE_TSG_BYTES, OTHER_TSG_BYTES = 16 << 20, 1 << 20
#: The same for an address space, which every device has too: its first page tables, 20 KiB on an H200.
SPACE_BYTES = 64 << 10

#: Where there are more allocations than this, nobody looks through them for what a retired pod left.
_MOST_LOOKED_AT = 1 << 15

#: Kinds of facts that change no scheduled object.
_NEVER_SCHEDULED = frozenset({"untracked", "unnamed", "dma_mappings", "cpu_mappings"})


@dataclass(slots=True)
class ObjectTable(ObjectTree):
    """Everything known about the pods' processes and their RM objects."""

    pods: dict[str, PodEntry] = field(default_factory=dict)
    processes: dict[int, str] = field(default_factory=dict)
    #: When each process started (``proc.start_time``): its pid may be another's by the time of a successor.
    started: dict[int, str] = field(default_factory=dict)
    ended_processes: EndedProcesses = field(default_factory=EndedProcesses, compare=False)
    #: Contexts of channels that are gone.
    ended_contexts: LatelyEnded = field(default_factory=LatelyEnded, compare=False)
    clients: dict[int, RmClientEntry] = field(default_factory=dict)
    #: By process, the descriptors of UVM files on which it has registered cards.
    uvm_fds: SetsByKey[int, int] = field(default_factory=SetsByKey)
    _pids: SetsByKey[str, int] = field(default_factory=SetsByKey, compare=False)
    #: Clients by the process that uses them.
    used: SetsByKey[int, int] = field(default_factory=SetsByKey, compare=False)
    #: The clients that got what a checkpoint cannot restore, by what it is. They stay listed until they are gone.
    unrestorable: dict[str, HandlesByClient] = field(
        default_factory=lambda: {what: HandlesByClient() for what in UNRESTORABLE}
    )
    shared_with_all: HandlesByClient = field(default_factory=HandlesByClient)
    #: Objects of other classes (``untracked_objects.py``), by whether they are system memory.
    untracked: dict[bool, HandlesByClient] = field(
        default_factory=lambda: {False: HandlesByClient(), True: HandlesByClient()}
    )
    #: How many more each pod may have made under handles that nobody knows, as long as it has any client.
    unnamed: dict[str, int] = field(default_factory=dict)
    #: How many mappings for the CPU each process has made, in steps (``cpu_mappings.py``), while a client that it made
    #: exists: only its maker maps a client's memory. RM undoes them with the client, not when the process ends.
    cpu_mappings: dict[int, int] = field(default_factory=dict)
    #: By pod and kind, the events that RM was asked to make (``os_events.py``).
    _events: SetsByKey[tuple[str, str], Key] = field(default_factory=SetsByKey)
    #: Changes whenever the set of scheduled objects may change, so that callers can cache what they derive.
    revision: int = field(default=0, compare=False)
    #: Changes whenever a grant may change. It starts at the time, so that no two guardians count alike.
    grants_revision: int = field(default_factory=time.monotonic_ns, compare=False)
    allocations: Allocations = field(default_factory=Allocations)

    def note(self, fact: Fact) -> None:
        """Apply one fact. A fact about an unknown object changes nothing."""
        getattr(self, f"_{fact['fact']}")(fact)
        if fact.get("class") != abi.NV01_MEMORY_LOCAL_USER and fact["fact"] not in _NEVER_SCHEDULED:
            self.revision += 1

    def _pod(self, fact: Fact) -> None:
        entry = self.pods.setdefault(fact["name"], PodEntry(fact.get("cgroup") or cgroup.path_of(fact["name"])))
        entry.grants = grants_from_json(fact["grants"])
        entry.joined = tuple(fact.get("joined", entry.joined))
        self.grants_revision += 1

    def _pod_retired(self, fact: Fact) -> None:
        self.pods.pop(fact["name"], None)
        self.ended_processes.retire(fact["name"])
        self.ended_contexts.retire(fact["name"])
        for whose in [whose for whose in self._events if whose[0] == fact["name"]]:
            del self._events[whose]
        self.grants_revision += 1
        self._ended(fact)

    def _ended(self, fact: Fact) -> None:
        """Record that a pod has no process left, including processes that never made a call."""
        self.allocations.pod_ended(fact["name"])

    def _carrier(self, fact: Fact) -> None:
        self._kept(fact)
        self.allocations.add_carrier(fact["carrier"], fact["memory"])

    def _carrier_closed(self, fact: Fact) -> None:
        self.allocations.carrier_closed(fact["carrier"])

    def _process(self, fact: Fact) -> None:
        self.processes[fact["pid"]] = fact["pod"]
        self.started[fact["pid"]] = fact.get("started", "")
        self._pids.add(fact["pod"], fact["pid"])
        self.allocations.process_started(fact["pod"])

    def _uvm_file(self, fact: Fact) -> None:
        there = fact["there"] and fact["pid"] in self.processes
        (self.uvm_fds.add if there else self.uvm_fds.discard)(fact["pid"], fact["fd"])

    def _exit(self, fact: Fact) -> None:
        """Remove a process; its clients stay until RM drops them, because their files may be open elsewhere."""
        if (pod := self.processes.pop(fact["pid"], None)) is not None:
            if pod in self.pods:  # else it was retired meanwhile, and nothing would forget the process
                self.ended_processes.add(fact["pid"], pod)
            self.started.pop(fact["pid"], None)
            self._pids.discard(pod, fact["pid"])
        self.uvm_fds.pop(fact["pid"], None)
        self._forget_cpu_mappings(fact["pid"])
        self.allocations.exited(fact["pid"], pod or "")
        for handle in self.used.pop(fact["pid"], ()):
            client = self.clients[handle]
            client.users = [user for user in client.users if user[0] != fact["pid"]]

    def _client(self, fact: Fact) -> None:
        client = fact["client"]
        if "pod" in fact:
            self._add_client(client, fact["pod"], fact["maker"])
            for pid, fd in fact["users"]:
                self._add_user(client, pid, fd)
            self.clients[client].made_here = fact.get("made_here", False)
            self.clients[client].notes = fact.get("notes", 0)
            self.clients[client].dma_mappings = fact.get("dma_mappings", 0)
            for what in fact.get("unrestorable", ()):
                self._unrestorable({"client": client, "what": what})
            return
        pod = self.processes.get(fact["pid"])
        if pod is None:
            return
        entry = self.clients.get(client)
        if entry is not None and entry.pod != pod:
            proven = any(self.objects[client, handle].confirmed for handle in self.handles.of(client))
            if proven or not fact.get("made_here"):
                return
            self._drop_client(client)  # RM has given its handle out again
            entry = None
        if entry is None:
            self._add_client(client, pod, fact["pid"])
        self.clients[client].made_here |= fact.get("made_here", False)
        self._add_user(client, fact["pid"], fact["fd"])

    def _unrestorable(self, fact: Fact) -> None:
        if (entry := self.clients.get(fact["client"])) is not None and fact["what"] in self.unrestorable:
            self.unrestorable[fact["what"]].add(entry.pod, fact["client"], ALL_OBJECTS)

    def _add_client(self, client: int, pod: str, maker: int) -> None:
        self.allocations.clients.add(pod, client)
        if (before := self.clients.get(client)) is not None:
            for kind in self.unrestorable.values():
                kind.drop(before.pod, client)
            if before.pod != pod:
                self.allocations.client_gone(before.pod, client)
            for pid, _ in before.users:
                self.used.discard(pid, client)
            self.ended_processes.client_gone(client, before.maker)
        self.clients[client] = RmClientEntry(pod, maker)
        self.ended_processes.client_made(client, maker, pod)

    def _add_user(self, client: int, pid: int, fd: int) -> None:
        entry = self.clients[client]
        if (pid, fd) not in entry.users and len(entry.users) < MOST_USERS:
            entry.users.append((pid, fd))
            self.used.add(pid, client)

    def _reached(self, fact: Fact) -> None:
        """Record a descriptor that leads to a client, in place of those that do not."""
        if (entry := self.clients.get(fact["client"])) is not None:
            for pid, _ in entry.users:
                self.used.discard(pid, fact["client"])
            entry.users = []
            self._add_user(fact["client"], fact["pid"], fact["fd"])

    def _owner(self, fact: Fact) -> None:
        """Move a client to the pod that has its file, with its objects and the memory without a handle elsewhere.

        RM still names its maker, unless it has reused the handle.
        """
        client, pod = fact["client"], fact["pod"]
        if (entry := self.clients.get(client)) is None:
            return
        if "maker" in fact:  # its objects are other ones
            for kind in self._kinds_without_objects():
                kind.drop(entry.pod, client)
        kinds = self.handles, *self._kinds_by_class(), *self._kinds_without_objects(), *self.unrestorable.values()
        for kind in kinds:
            kind.move(client, entry.pod, pod)
        before, entry.pod = entry.pod, pod
        if "maker" in fact:
            self.ended_processes.client_gone(client, entry.maker)
            entry.maker, entry.made_here = fact["maker"], fact.get("made_here", False)
            entry.notes = entry.dma_mappings = 0
            entry.memory_of = {}
        self.ended_processes.client_made(client, entry.maker, pod)
        handles = self.handles.of(client)
        for handle in handles:
            if (client, handle) in self._tsgs:
                self._leave_tsg((client, handle))
                self._join_tsg((client, handle))
        entry.transferred = True
        self._reached(fact)
        self.allocations.transfer([(client, handle) for handle in handles], pod)
        self.allocations.client_gone(before, client)
        self.allocations.clients.add(pod, client)

    def _object(self, fact: Fact) -> None:
        # RM reads parent 0 as the client itself (rs_server.c:serverAllocResource).
        parent = fact["parent"] or fact["client"]
        same_as = (fact["same_as"][0], fact["same_as"][1]) if fact.get("same_as") else None
        rm = RmObject(fact["client"], fact["handle"], parent, fact["class"], fact["detail"], same_as=same_as)
        rm.uses, rm.written = tuple(fact.get("uses", ())), tuple(fact.get("written", ()))
        rm.userd = Userd(*fact["userd"]) if "userd" in fact else None
        if rm.client not in self.clients or not self._hangs_together(rm):
            return
        if (before := self.objects.get(rm.key)) is not None:
            self._forget(before)
        self._add(rm, self.pod_of(rm))
        if (size := self._takes(rm)) is not None:
            card = fact.get("card", self.instance_of(rm))
            self._charge(rm, size, card, fact.get("memory"), compacted="compacted" in fact)
        elif "memory" in fact:  # an object that keeps memory, on the fabric
            self.allocations.duplicate(rm.key, fact["memory"])
        if "card" in fact and (memory := self.allocations.by_handle.get(rm.key)) is not None:
            memory.foreign = True
        if "confirmed" in fact:
            self._confirm({"client": rm.client, "handle": rm.handle, "context": fact["confirmed"]})

    def _shared(self, fact: Fact) -> None:
        if (entry := self.clients.get(fact["client"])) is None:
            return
        note = self.shared_with_all.add if fact["there"] else self.shared_with_all.discard
        note(entry.pod, fact["client"], fact["handle"])

    def _untracked(self, fact: Fact) -> None:
        """Record an object of which only the handle is known, or that it is gone."""
        if (entry := self.clients.get(fact["client"])) is None:
            return
        key, system = (fact["client"], fact["handle"]), fact.get("system", False)
        self._forget_untracked(entry.pod, key)
        if not fact["there"]:
            self._forget_uses(key)
        elif key not in self.objects:
            self.untracked[system].add(entry.pod, *key)
            entry.memory_of |= {key[1]: fact["of"]} if "of" in fact else {}

    def _forget_untracked(self, pod: str, key: Key) -> None:
        self.clients[key[0]].memory_of.pop(key[1], None)
        for kind in self.untracked.values():
            kind.discard(pod, *key)

    def _forget_uses(self, key: Key) -> None:
        """Record that nothing uses what RM has freed: those of its users that are left do not go with it."""
        for user in self._users.pop(key, ()):
            rm = self.objects[key[0], user]
            rm.uses = tuple(handle for handle in rm.uses if handle != key[1])

    def _unnamed(self, fact: Fact) -> None:
        if fact["pod"] in self.allocations.clients:
            self.unnamed[fact["pod"]] = fact["count"]

    def _count_in_client(self, fact: Fact) -> None:
        if (entry := self.clients.get(fact["client"])) is not None:
            setattr(entry, fact["fact"], fact["count"])

    _notes = _dma_mappings = _count_in_client

    def _cpu_mappings(self, fact: Fact) -> None:
        self.cpu_mappings[fact["pid"]] = fact["count"]
        self._forget_cpu_mappings(fact["pid"])

    def _forget_cpu_mappings(self, pid: int) -> None:
        if not self.ended_processes.has_made(pid):
            self.cpu_mappings.pop(pid, None)

    def _event(self, fact: Fact) -> None:
        note = self._events.add if fact["there"] else self._events.discard
        note((fact["pod"], fact["kind"]), (fact["client"], fact["number"]))

    def _confirm(self, fact: Fact) -> None:
        if (rm := self.objects.get((fact["client"], fact["handle"]))) is not None:
            rm.confirmed = True
            rm.context = fact.get("context", rm.context)
            self._forget_untracked(self.pod_of(rm), rm.key)  # RM freed that one with what it lay below

    def _timeslice(self, fact: Fact) -> None:
        if (rm := self.objects.get((fact["client"], fact["handle"]))) is not None:
            rm.requested_us = fact["us"]

    def _gone(self, fact: Fact) -> None:
        client, handle = fact["client"], fact["handle"]
        if client == handle:
            self._drop_client(client)
        else:
            self._drop((client, handle))

    def _drop_client(self, client: int) -> None:
        if (entry := self.clients.get(client)) is None:
            return
        self.ended_processes.client_gone(client, entry.maker)
        for handle in self.handles.drop(entry.pod, client):
            self._forget(self.objects.pop((client, handle)))
        del self.clients[client]
        self._forget_cpu_mappings(entry.maker)
        for kind in (*self._kinds_without_objects(), *self.unrestorable.values()):
            kind.drop(entry.pod, client)
        self.allocations.client_gone(entry.pod, client)
        if entry.pod not in self.allocations.clients:
            self.unnamed.pop(entry.pod, None)
        for pid, _ in entry.users:
            self.used.discard(pid, client)

    def _drop(self, key: Key) -> None:
        """Forget an object and all below it, as RM frees a subtree."""
        for handle in self._children.pop(key, ()):
            self._drop((key[0], handle))
        self._forget_uses(key)
        if (entry := self.clients.get(key[0])) is not None:
            self.shared_with_all.discard(entry.pod, *key)
        if (rm := self.objects.pop(key, None)) is not None:
            self.handles.discard(self.pod_of(rm), *key)
            self._forget(rm)

    def _forget(self, rm: RmObject) -> None:
        """Forget what follows from an object: where it lies, that it is scheduled, that it keeps memory."""
        pod = self.pod_of(rm)
        self._unlink(rm, pod)
        if rm.context and pod in self.pods:
            self.ended_contexts.add(rm.context, pod)
        self.allocations.drop(rm.key)

    def _kinds_without_objects(self) -> tuple[HandlesByClient, ...]:
        """Return the kinds of handles that may belong to no object of the table."""
        return (self.shared_with_all, *self.untracked.values())

    def _takes(self, rm: RmObject) -> int | None:
        """Return how many bytes of a card's memory an object takes; None for none."""
        match rm.rm_class:
            case abi.NV01_MEMORY_LOCAL_USER:
                return rm.detail
            case abi.NV_MEMORY_FABRIC if rm.detail:  # a copy, over memory that is not known to be the pod's
                return rm.detail
            case abi.KEPLER_CHANNEL_GROUP_A:
                return COMPUTE_TSG_BYTES if self.is_compute(rm) else OTHER_TSG_BYTES
            case channel if channel in abi.GPFIFO_CLASSES and self.stands_alone(rm):
                return OTHER_TSG_BYTES
            case abi.FERMI_VASPACE_A | abi.NV01_DEVICE_0:
                return SPACE_BYTES
        return None

    def _charge(self, rm: RmObject, size: int, instance: int | None, number: int | None, *, compacted: bool) -> None:
        """Charge memory on a card, unless this is a further handle on a charged allocation.

        Only a fact of a compacted journal makes the memory this pod's then: nobody has asked whether it fits.
        """
        if number is not None and self.allocations.duplicate(rm.key, number):
            self.allocations.grow(number, size)
            if compacted and self.clients[rm.client].transferred:
                self.allocations.transfer([rm.key], self.pod_of(rm))  # its fact may precede the client's new owner
            return
        if instance is not None:
            number = number if number is not None else self.allocations.next_number()
            self.allocations.allocate(rm.key, self.pod_of(rm), instance, size, number)

    def _kept(self, fact: Fact) -> None:
        """Charge the memory of a fact that says whose it is: the fact about its object may come later."""
        if "pod" in fact:
            self.allocations.keep(fact["memory"], fact["pod"], fact["instance"], fact["size"])
        if fact.get("pinned", fact["fact"] == "pin"):
            self.allocations.pin(fact["memory"])

    _pin = _kept

    def _map(self, fact: Fact) -> None:
        if (pod := self.processes.get(fact["pid"])) is not None:  # else it has ended, and so has its address space
            place = fact["pid"], fact["base"], fact["length"], bytes.fromhex(fact["uuid"])
            self.allocations.map(*place, fact["memory"], pod)

    def _unmap(self, fact: Fact) -> None:
        uuid = bytes.fromhex(fact["uuid"]) if fact["uuid"] is not None else None
        self.allocations.unmap(fact["pid"], fact["base"], fact["length"], uuid, whole=fact.get("whole", False))

    def _unmapped(self, fact: Fact) -> None:
        self.allocations.unmap_all(fact["memory"])

    def _managed(self, fact: Fact) -> None:
        if (pod := self.processes.get(fact["pid"])) is not None:
            self.allocations.set_managed(fact["pid"], fact["bytes"], pod)

    def _managed_left(self, fact: Fact) -> None:
        left = self.allocations.managed_left
        left.change(fact["pod"], fact["bytes"] - left[fact["pod"]])

    # -- questions ------------------------------------------------------------------------------------------

    def facts(self) -> Iterator[Fact]:
        """Yield the whole table again in as few facts as possible, for a compacted journal.

        Other facts may be noted in between: each fact states what is true when it is taken.
        """
        for name, pod in while_there(self.pods):
            places = {"cgroup": pod.cgroup, "joined": list(pod.joined)}
            yield {"fact": "pod", "name": name, "grants": grants_to_json(pod.grants)} | places
        for pid, of in while_there(self.processes):
            yield {"fact": "process", "pid": pid, "pod": of, "started": self.started.get(pid, "")}
            for fd in sorted(self.uvm_fds.of(pid)):
                if fd in self.uvm_fds.of(pid):
                    yield {"fact": "uvm_file", "pid": pid, "fd": fd, "there": True}
        for handle, client in while_there(self.clients):
            known = {"pod": client.pod, "maker": client.maker, "made_here": client.made_here}
            lost = [what for what, kind in self.unrestorable.items() if handle in kind]
            optional = {"unrestorable": lost, "notes": client.notes, "dma_mappings": client.dma_mappings}
            known |= {name: each for name, each in optional.items() if each}
            yield {"fact": "client", "client": handle} | known | {"users": [list(user) for user in client.users]}
            if (made := self.cpu_mappings.get(client.maker)) is not None:
                yield {"fact": "cpu_mappings", "pid": client.maker, "count": made}
            for handles, fact in (
                (self.shared_with_all, {"fact": "shared"}),
                (self.untracked[False], {"fact": "untracked"}),
                (self.untracked[True], {"fact": "untracked", "system": True}),
            ):
                for each in list(handles.of(handle)):
                    if each in handles.of(handle):
                        memory = client.memory_of.get(each)
                        more = {"of": memory} if memory is not None else {}
                        yield fact | {"client": handle, "handle": each, "there": True} | more
        for name, count in while_there(self.unnamed):
            yield {"fact": "unnamed", "pod": name, "count": count}
        for name, kind in list(self._events):
            event = {"fact": "event", "pod": name, "kind": kind, "there": True}
            for key in list(self.events(name, kind)):
                if key in self.events(name, kind):
                    yield event | {"client": key[0], "number": key[1]}
        yield from self.allocations.facts()
        for key, rm in while_there(self.objects):
            confirmed = {"confirmed": rm.context} if rm.confirmed else {}
            yield object_fact(rm) | confirmed | self._number_of(rm) | self._tsg_of(rm)
            if self.objects.get(key) is rm and rm.requested_us != abi.RM_DEFAULT_TIMESLICE_US:
                yield {"fact": "timeslice", "client": rm.client, "handle": rm.handle, "us": rm.requested_us}

    def _tsg_of(self, rm: RmObject) -> Fact:
        """Return what a fact adds about a handle of a TSG that has an earlier one."""
        first = self._tsgs.get(rm.key, [rm.key])[0]
        return {"same_as": list(first) if first != rm.key else None} if rm.same_as is not None else {}

    def _number_of(self, rm: RmObject) -> Fact:
        if (memory := self.allocations.by_handle.get(rm.key)) is None:
            return {}
        return {"memory": memory.number, "compacted": True} | ({"card": memory.instance} if memory.foreign else {})

    def records(self, pod: str) -> tuple[int, int]:
        """Return how many clients, objects, allocations and mappings are known, of a pod and of all pods."""
        held = self.allocations
        kinds = (self.handles, *self._kinds_without_objects())
        own = len(self.allocations.clients.of(pod)) + held.records[pod] + sum(kind.counts[pod] for kind in kinds)
        every = len(self.clients) + held.records.total() + sum(kind.counts.total() for kind in kinds)
        return own, every

    def is_shared(self, key: Key) -> bool:
        """Tell whether an object is shared with all, or its client shares all of them."""
        return not self.shared_with_all.of(key[0]).isdisjoint((key[1], ALL_OBJECTS))

    def pids_of(self, pod: str) -> list[int]:
        """List a pod's processes that have made calls. It needs no lock."""
        return list(self._pids.of(pod))

    def unrestorable_of(self, pod: str) -> list[str]:
        """List what a pod's processes hold that a checkpoint cannot restore."""
        return [what for what, kind in self.unrestorable.items() if pod in kind.counts]

    def clients_of(self, pod: str) -> list[int]:
        """List a pod's RM clients."""
        return list(self.allocations.clients.of(pod))

    def notes_of(self, pod: str) -> int:
        """Return how many notes of sharing RM keeps in a pod's clients. It takes as long as the pod has clients."""
        return sum(entry.notes for client in self.clients_of(pod) if (entry := self.clients.get(client)) is not None)

    def events(self, pod: str, kind: str) -> Set[Key]:
        """Return a pod's events of a kind; RM may have freed some with what they belonged to."""
        return self._events.of((pod, kind))

    def retired_pods(self) -> set[str]:
        """Name the retired pods that still have RM clients: another pod may have the files."""
        return self.allocations.clients.keys() - self.pods.keys()

    def names_in_use(self) -> set[str]:
        """Name the retired pods that still have RM clients or card memory: a new pod of the name would get them."""
        return self.retired_pods() | {pod for pod, _ in self.allocations.held} - self.pods.keys()

    def is_kept_elsewhere(self, pod: str) -> bool:
        """Tell whether memory of a retired pod may be kept by an open file, or by another pod's client or process."""
        allocations = self.allocations
        if not any(name == pod for name, _ in allocations.held):
            return False
        if len(allocations.memories) > _MOST_LOOKED_AT:  # the main loop must not look at them all
            return True
        own = (memory for memory in allocations.memories.values() if memory.pod == pod)
        return allocations.carries(pod)[0] > 0 or any(map(self._is_elsewhere, own))

    def _is_elsewhere(self, memory: Allocation) -> bool:
        owners = {entry.pod for client, _ in memory.handles if (entry := self.clients.get(client)) is not None}
        owners |= {self.processes.get(pid, memory.pod) for pid in self.allocations.mapped_by(memory.number)}
        return bool(owners - {memory.pod})

    def pod_of(self, rm: RmObject) -> str:
        """Name the pod an object belongs to."""
        return self.clients[rm.client].pod

    def ending_with(self, key: Key) -> list[Allocation]:
        """List what loses all handles but those on the fabric when an object is freed. It needs no lock."""
        going = {rm.key for rm in self.below(key) if rm.rm_class == abi.NV01_MEMORY_LOCAL_USER}
        return [
            memory
            for memory in self.allocations.behind(going)
            if all(each in going or self.is_on_fabric(each) for each in tuple(memory.handles))
        ]

    def contexts_with(self, key: Key) -> list[Allocation]:
        """List what the TSGs among an object and those below it are charged as, and the one of a channel."""
        keys = [rm.key for rm in self.below(key) if rm.key in self._tsgs]
        if (rm := self.objects.get(key)) is not None and rm.rm_class in abi.GPFIFO_CLASSES:
            keys.append((rm.client, rm.parent))
        return self.allocations.behind(keys)

    def exported(self, pod: str, instance: int | None, size: int, most: int) -> list[Allocation]:
        """List those with a handle of a pod's ``most`` newest allocations of a size that a file may carry."""
        if instance is None:
            return []
        return [memory for memory in self.allocations.kept_of_size(pod, instance, size, most) if memory.handles]

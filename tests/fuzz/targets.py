"""What is fuzzed: a target takes a ``Random`` and returns a function that tries one input and raises on a defect."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from qgpu.config import Config
from qgpu.daemon.control_requests import ControlRequests
from qgpu.daemon.plane_choice import PlaneChoice
from qgpu.daemon.prepared_grants import PreparedGrants
from qgpu.daemon.settings_file import SettingsFile
from qgpu.errors import QgpuError
from qgpu.guardian.accounting import object_table, rm_object
from qgpu.guardian.proxy import rm_calls
from qgpu.ipc import wire
from qgpu.ipc.control_socket import Session
from qgpu.model.plane_names import Plane
from qgpu.nvidia import abi
from qgpu.planes.sim.host import Clock, SimHost
from tests.fuzz import mutate
from tests.fuzz.judged import judged
from tests.traces import ARGUMENT, TRACES, decode, rows

Try = Callable[[], None]

_CALLS = (rm_calls.Alloc, rm_calls.AllocMemory, rm_calls.Free, rm_calls.Dup, rm_calls.Control, rm_calls.VidHeap)


class DefectError(AssertionError):
    """What must never be was found."""


def _seeds() -> list[tuple[int, bytes, bytes]]:
    """Return every different call of the recorded programs: request, argument, what it points to."""
    found = {(row.request, row.before, row.params): None for trace in TRACES for row in rows(trace)}
    return list(found)


def decoded(random: Random) -> Try:
    """The decoder on recorded calls gone wrong, over memory that is another one each time it is read."""
    seeds = _seeds()
    wrapped = abi.request(abi.NV_ESC_IOCTL_XFER_CMD, 16)

    def attempt() -> None:
        _decode(random, seeds, wrapped)

    return attempt


def _decode(random: Random, seeds: list[tuple[int, bytes, bytes]], wrapped: int) -> rm_calls.Call | None:
    request, before, params = random.choice(seeds)
    argument = mutate.data(random, before)
    outer = b""
    if random.randrange(4) == 0:
        outer = struct.pack("<IIQ", request & 0xFF, request >> 16 & 0x3FFF, ARGUMENT)
        outer = mutate.data(random, outer) if random.randrange(3) == 0 else outer
    elif random.randrange(8) == 0:
        request = request ^ 1 << random.randrange(32)

    def read(address: int, size: int) -> bytes | None:
        if outer and address == 0x800:
            return outer if size == len(outer) else None
        found = argument[address - ARGUMENT :] if 0 <= address - ARGUMENT < len(argument) else params
        if random.randrange(8) == 0:
            found = mutate.data(random, found)
        return found[:size] if len(found) >= size else None

    call = decode(wrapped if outer else request, 0x800 if outer else ARGUMENT, read)
    if call is not None and not isinstance(call, _CALLS):
        raise DefectError(f"decoded as {call!r}")
    return call


def registered(random: Random) -> Try:
    """The register fed with what decoded calls claim, with few clients and handles, so that they often collide."""
    seeds = _seeds()
    wrapped = abi.request(abi.NV_ESC_IOCTL_XFER_CMD, 16)
    kept = object_table.ObjectTable()
    tried = 0

    def attempt() -> None:
        nonlocal kept, tried
        tried += 1
        if tried % 300 == 0:
            check_register(kept)
            kept = object_table.ObjectTable()
        for fact in _facts(random, kept, seeds, wrapped):
            if not _is_out_of_order(kept, fact):
                kept.note(json.loads(json.dumps(fact)))

    return attempt


def _is_out_of_order(kept: object_table.ObjectTable, fact: rm_object.Fact) -> bool:
    """Tell whether RM makes no such object: it is on no card though it must be, or its handle is in use."""
    there = kept.objects.get((fact["client"], fact["handle"])) if fact["fact"] == "object" else None
    if there is not None and (there.rm_class, there.parent) != (fact["class"], fact["parent"] or fact["client"]):
        return True  # ObjectClaims.claim refuses it
    if fact.get("class") not in (abi.NV01_MEMORY_LOCAL_USER, abi.KEPLER_CHANNEL_GROUP_A):
        return False
    above = kept.objects.get((fact["client"], fact["parent"]))
    return above is None or kept.instance_of(above) is None


_PIDS = (11, 12, 13)
_PODS = ("web", "train")
_UUIDS = ("aa" * 16, "bb" * 16)
_INTERESTING = (
    *(abi.NV01_DEVICE_0, abi.NV20_SUBDEVICE_0, abi.NV01_MEMORY_LOCAL_USER, abi.NV01_MEMORY_LOCAL_USER),
    *(abi.KEPLER_CHANNEL_GROUP_A, 0xC86F, abi.NV01_ROOT_CLIENT),
)


def _facts(
    random: Random, kept: object_table.ObjectTable, seeds: list[tuple[int, bytes, bytes]], wrapped: int
) -> list[rm_object.Fact]:
    pid = random.choice(_PIDS)
    if pid not in kept.processes:
        return [{"fact": "process", "pid": pid, "pod": random.choice(_PODS)}]
    kind = random.randrange(28)
    if kind == 0:
        grant = {"class": "offline", "cores": 10, "memory": random.choice([None, 1 << 30])}
        return [{"fact": "pod", "name": random.choice(_PODS), "grants": {"0": grant}}]
    if kind == 1:
        return [{"fact": random.choice(["exit", "pod_retired"]), "pid": pid, "name": random.choice(_PODS)}]
    if kind < 6:
        return [_memory_fact(random, pid)]
    client, handle, other = (0xC1D00000 + random.randrange(3), random.randrange(1, 9), random.randrange(9))
    if kind < 18:
        made = random.choice(_INTERESTING)
        return _made(random, client, random.choice([other, client, 0]), handle, made, pid)
    match _decode(random, seeds, wrapped):
        case rm_calls.Alloc() as call:
            return _made(random, call.client, call.parent, call.handle, call.rm_class, pid)
        case rm_calls.Free() as call:
            return [{"fact": "gone", "client": call.client, "handle": call.handle}]
        case rm_calls.Dup() as call:
            return _made(random, call.client, call.parent, call.handle, abi.NV01_MEMORY_LOCAL_USER, pid)
        case _:
            who = {"client": client, "pid": pid, "fd": random.randrange(4), "pod": kept.processes[pid]}
            untracked = {"fact": "untracked", "client": client, "handle": handle, "there": random.random() < 0.8}
            untracked |= {"system": True} if random.randrange(2) else {}
            found: list[rm_object.Fact] = [{"fact": "owner", **who}, {"fact": "reached", **who}, untracked]
            return [
                random.choice([{"fact": "gone", "client": client, "handle": random.choice([handle, client])}, *found])
            ]


def _made(random: Random, client: int, parent: int, handle: int, made: int, pid: int) -> list[rm_object.Fact]:
    size = random.choice([0, 1, 1 << 20, 1 << 63])
    uses = tuple(random.sample([handle, parent, client, 1, 2, 3], random.randrange(3)))
    asked = rm_object.object_fact(rm_object.RmObject(client, handle, parent, made, size, uses=uses))
    if random.randrange(4) == 0:
        asked["memory"] = random.randrange(1, 20)
    facts = [{"fact": "client", "client": client, "pid": pid, "fd": random.randrange(4)}, asked]
    if random.randrange(2):
        facts.append({"fact": "confirm", "client": client, "handle": handle, "context": 7})
    return facts


def _memory_fact(random: Random, pid: int) -> rm_object.Fact:
    number, base = random.randrange(1, 20), random.randrange(8) << 20
    where = {"pid": pid, "base": base, "length": random.randrange(1, 4) << 20, "uuid": random.choice(_UUIDS)}
    return random.choice(
        [
            {"fact": "pin", "memory": number, "keeper": random.choice([0, pid])},
            {"fact": "map", "memory": number, **where},
            {"fact": "unmap", **where},
            {"fact": "unmapped", "memory": number},
            {"fact": "carrier", "memory": number, "carrier": random.randrange(1, 5)},
            {"fact": "carrier_closed", "carrier": random.randrange(1, 5)},
            {"fact": "uvm_file", "pid": pid, "fd": random.randrange(4), "there": random.random() < 0.5},
            {"fact": "managed", "pid": pid, "bytes": random.choice([0, 1 << 20])},
        ]
    )


def _check_sums(kept: object_table.ObjectTable) -> None:
    """Raise DefectError unless what is summed by pod is the sum of what its processes have."""
    records = Counter(memory.pod for memory in kept.allocations.memories.values())
    managed: Counter[str] = Counter()
    tables: Counter[tuple[str, bytes]] = Counter()
    for pid, space in kept.allocations.mappings.items():
        records[kept.processes[pid]] += len(space.mappings)
        tables.update({(kept.processes[pid], uuid): most for uuid, most in space.most_tables.items()})
    for pid, size in kept.allocations.managed.items():
        managed[kept.processes[pid]] += size
    sums = kept.allocations.records, kept.allocations.managed_of, kept.allocations.tables_of
    if sums != (+records, +managed, +tables):
        raise DefectError(f"sums {sums}, in fact {records}, {managed}, {tables}")


def check_register(kept: object_table.ObjectTable) -> None:
    """Raise DefectError unless what is charged is what is there, and the same comes back from the facts."""
    while kept.allocations.forget_some(1000):
        pass
    for rm in kept.objects.values():
        if rm.client not in kept.clients:
            raise DefectError(f"object {rm.key} of no client")
    charged: Counter[tuple[str, int]] = Counter()
    for memory in kept.allocations.memories.values():
        charged[memory.pod, memory.instance] += -(-memory.size >> 16) << 16  # in pieces of 64 KiB
    if +charged != +kept.allocations.held:
        raise DefectError(f"held {kept.allocations.held}, charged {charged}")
    _check_sums(kept)
    for kind in (kept.handles, kept.devices, kept.shared_with_all, *kept.untracked.values()):
        counts = Counter(entry.pod for client, entry in kept.clients.items() for _ in kind.of(client))
        if +kind.counts != counts:
            raise DefectError(f"counts {kind.counts}, in fact {counts}")
    users = {((rm.client, used), rm.handle) for rm in kept.objects.values() for used in rm.uses}
    if {(used, user) for used, each in kept._users.items() for user in each} != users:
        raise DefectError(f"users {kept._users}, in fact {users}")
    again = object_table.ObjectTable()
    for fact in kept.facts():
        again.note(json.loads(json.dumps(fact)))
    for part in ("pods", "processes", "clients", "objects", "untracked", "allocations"):
        before, after = getattr(kept, part), getattr(again, part)
        if part == "allocations":
            before, after = ((each.memories, +each.held, each.managed_left) for each in (before, after))
        if before != after:
            raise DefectError(f"{part} before the journal and after it: {before} {after}")


_REQUESTS: tuple[dict[str, Any], ...] = (
    {"op": "status"},
    {"op": "gpu.list"},
    {"op": "pod.list"},
    {"op": "pod.create", "name": "web", "grants": {"0": {"class": "online", "cores": 20, "memory": 1 << 30}}},
    {"op": "pod.set", "name": "web", "gpu": 0, "class": "offline", "cores": 30, "memory": None},
    {"op": "pod.attach", "name": "web"},
    {"op": "pod.remove", "name": "web"},
    {"op": "gpu.set", "gpu": 0, "policy": "fixed-share", "online_policy": "best-effort", "period_ns": 10**8},
    {"op": "sim.start", "pod": "web", "gpu": 0, "workload": {"kernel_us": 1000.0}},
    {"op": "sim.card", "gpu": 0},
    {"op": "sim.progress", "load": 0},
    {
        "op": "container.bind",
        "id": "c0ffee",
        "pid": 1,
        "annotations": {"qgpu.cores": "20"},
        "env": ["A=b"],
        "devices": [[195, 0]],
        "prepared": ["qgpu.io/claim=c0ffee-s"],
        "seccomp": {"listenerPath": "/run/qgpu/agent.sock", "syscalls": []},
        "namespaces": ["pid", "cgroup"],
        "mounts": [["bind", "/srv"], ["cgroup", "cgroup"]],
    },
    {
        "op": "grant.prepare",
        "uid": "c0ffee",
        "namespace": "shop",
        "name": "model",
        "consumers": ["pod-1"],
        "devices": [{"request": "gpu", "share": "s", "gpu": SimHost(1).pgpus()[0].uuid, "class": "online", "cores": 5}],
    },
    {"op": "grant.list"},
    {"op": "grant.drop", "uid": "c0ffee"},
    {"op": "trace.start", "gpus": [0]},
    {"op": "trace.read"},
)


def framed(random: Random) -> Try:
    """The framing of messages, by bytes that arrive in pieces, with descriptors or without."""

    def attempt() -> None:
        body = json.dumps(random.choice(_REQUESTS)).encode()
        stream = struct.pack("<I", len(body)) + body
        for _ in range(random.randrange(3)):
            stream += mutate.data(random, stream)
        if random.randrange(2):
            stream = mutate.data(random, stream)
        ours, theirs = socket.socketpair()
        connection = wire.Connection(theirs)
        try:
            with ours, contextlib.suppress(wire.WireError):
                fds = [ours.fileno()] * random.randrange(3) if random.randrange(8) == 0 else []
                cut = random.randrange(len(stream) + 1)
                for part in (stream[:cut], stream[cut:]):
                    if part:
                        socket.send_fds(ours, [part], fds)
                        connection.fill()
                    while (message := connection.next_buffered()) is not None:
                        for fd in message[1]:
                            os.close(fd)
                        if not isinstance(message[0], dict):
                            raise DefectError(f"no message: {message[0]!r}")
        finally:
            connection.close()

    return attempt


#: No process has this number, so a pod that it was brought into ends when its launcher hangs up.
_NOBODY = 1 << 30
#: Where that one daemon keeps claims.
_CLAIMS = tempfile.TemporaryDirectory()


@cache
def _daemon() -> tuple[SimHost, ControlRequests]:
    """Return the one daemon of this process: its loops are threads."""
    host = SimHost(2, Clock.REAL)
    prepared = PreparedGrants(Path(_CLAIMS.name), host.pgpus(), None)
    return host, ControlRequests(host, PlaneChoice(Plane.SIM, "fuzz"), Config(), SettingsFile(None), prepared=prepared)


def end_daemon() -> None:
    """End that daemon, if it has begun."""
    if _daemon.cache_info().currsize:
        _daemon()[1].close()
        _daemon.cache_clear()


def requested(random: Random) -> Try:
    """The daemon's requests, whole but wrong: each is answered or refused, and what is refused has changed nothing."""
    host, requests = _daemon()
    peer = wire.Peer(_NOBODY, 0, 0)
    held: list[Session] = []

    def state() -> list[Any]:
        grants = sorted((pod.name, str(pod.grants)) for pod in host.pods())
        claims = dict(requests.pods.prepared.by_uid), sorted(path.name for path in Path(_CLAIMS.name).glob("*/*"))
        return [grants, [loop.settings for loop in requests._loops.values()], claims]

    def attempt() -> None:
        session = Session(peer, may_change=random.randrange(8) > 0, process=None)
        original = random.choice(_REQUESTS)
        message = mutate.message(random, original) if random.randrange(4) else original
        if len(held) > 6:
            for call in held.pop(random.randrange(len(held))).at_end:
                call()
        requests.reap()
        before = state()
        try:
            json.dumps(requests.handle(session, json.loads(json.dumps(message)), []))
        except QgpuError as error:
            if str(error) == "" or "\n" in str(error):
                raise DefectError(f"refused with {str(error)!r}: {message!r}") from error
            if state() != before:
                raise DefectError(f"refused, and yet it changed something: {message!r}") from error
        if message.get("op") == "pod.create":
            held.append(session)
        else:
            for call in session.at_end:
                call()

    return attempt


TARGETS: dict[str, Callable[[Random], Try]] = {
    "decode": decoded,
    "register": registered,
    "judge": judged,
    "wire": framed,
    "requests": requested,
}

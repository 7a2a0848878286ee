"""Objects that the module does not keep: RM frees only so many of them at once, or for one pod."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import threading
import time
from pathlib import Path

import nv
import pytest
import qg
import simcard
from programs import program, status_of
from test_hostile import read_only

BINAPI, SYSTEM, NO_DISPLAY, SURFACE, DEBUGGER, SHARED_PAGE = 0x2081, 0x3E, 0x73, 0xDA, 0x83DE, 0xDE
#: Besides its subdevice.
OF_CLIENT = (1 << 11) - 1
MEMORY_OF_CLIENT = 1 << 15
WATCHED = Path("/proc/lockdep_stats").exists()
quick = pytest.mark.skipif(WATCHED, reason="too many calls for a kernel that watches every lock")


def make(state, count, cls=BINAPI, parent="subdevice"):
    """Make so many objects, or as many as RM's first refusal lets; their number, and the last status."""
    p, made = state["p"], 0
    try:
        while made < count:
            p.alloc(getattr(p, parent), cls)
            made += 1
    except nv.RmError as error:
        return made, error.status
    return made, 0


def fill(state, clients):
    """So many further programs in the process, each with as many objects as a client may have; how many they got."""
    full = state.setdefault("full", [])
    full += [nv.Program() for _ in range(clients)]
    return [make({"p": program}, OF_CLIENT)[0] for program in full[-clients:]]


def free(state, name):
    return state["p"].free(getattr(state["p"], name))


def free_last(state):
    return state["p"].free(state["p"].last)


def test_a_client_has_so_many_at_most(web):
    (process,) = web.processes
    assert process.run(make, OF_CLIENT + 1) == (OF_CLIENT, nv.NO_RESOURCES)
    before = qg.sim()["objects"]

    assert process.run(make, 1) == (0, nv.NO_RESOURCES)
    assert process.run(make, 1, SYSTEM, "device") == (1, 0)
    assert (qg.sim()["objects"], web.info().refused_objects, web.info().refused_allocs) == (before + 1, 2, 0)
    host = simcard.open_host()
    said = {each.name: each.problem for each in host.pods()}
    host.close()
    assert said["web"] == "too many objects of RM refused 2 times"


@pytest.mark.parametrize(
    ("cls", "parent"),
    [(nv.VASPACE, "device"), (nv.SUBDEVICE, "device"), (0x9067, "device"), (0xFD, "client")],
    ids=["address spaces", "subdevices", "context shares", "multicast"],
)
def test_each_kind_of_object_is_bounded_with_others(pod, cls, parent):
    process = pod("web").process()
    process.run(program)
    process.run(make, OF_CLIENT - 4)

    assert process.run(make, 5, cls, parent) == (4, nv.NO_RESOURCES)
    assert process.run(lambda state: state["p"].free(state["p"].last - 1)) == 0
    assert process.run(make, 2, cls, parent) == (1, nv.NO_RESOURCES)


def test_semaphore_surfaces_are_bounded_with_others(web):
    """RM keeps the memory that each names, and maps all of it for itself."""

    def surfaces(state, count):
        p = state["p"]
        named = struct.pack("II8x", p.memory(0x10000), 0)
        return [status_of(state, "alloc", p.device, SURFACE, named) for _ in range(count)]

    (process,) = web.processes
    process.run(make, OF_CLIENT - 4)

    assert process.run(surfaces, 5) == [0] * 4 + [nv.NO_RESOURCES]


def test_debuggers_of_a_pod_are_bounded(web):
    """RM frees those of all of a pod's clients with one compute object, each with a client of RM's own."""
    (first,) = web.processes
    second = web.process()
    second.run(program)
    assert first.run(make, 300, DEBUGGER, "device") == (300, 0)

    assert second.run(make, 213, DEBUGGER, "device") == (212, nv.NO_RESOURCES)
    assert second.run(make, 1) == (1, 0)
    first.run(free_last)
    assert second.run(make, 2, DEBUGGER, "device") == (1, nv.NO_RESOURCES)
    first.run(free, "device")
    assert second.run(make, 300, DEBUGGER, "device") == (299, nv.NO_RESOURCES)


def test_a_client_has_so_many_shared_pages_at_most(web):
    """As RM frees one it may look through all objects of all clients."""
    (process,) = web.processes

    assert process.run(make, 17, SHARED_PAGE) == (16, nv.NO_RESOURCES)
    assert process.run(make, 1) == (1, 0)
    process.run(lambda state: state["p"].free(state["p"].last - 2))
    assert process.run(make, 2, SHARED_PAGE) == (1, nv.NO_RESOURCES)
    process.run(program)
    assert process.run(make, 1, SHARED_PAGE) == (1, 0)


def bindings(state, surface, count, command=0xDA0002):
    """Bind as many channels to a surface, or undo that; each status that RM gave, and how often."""
    said = [status_of(state, "control", surface, command, bytes(40)) for _ in range(count)]
    return {status: said.count(status) for status in said}


def test_bindings_of_semaphore_surfaces_are_bounded(web):
    """For each RM makes up to eight events of its own, and goes through them in interrupts."""

    def surface(state):
        p = state["p"]
        return p.alloc(p.device, SURFACE, struct.pack("II16x", *[p.alloc(p.device, SYSTEM)] * 2))

    (process,) = web.processes
    first, second = process.run(surface), process.run(surface)
    assert process.run(bindings, first, 48) == {0: 48}

    assert process.run(bindings, second, 2002) == {0: 2000, nv.NO_RESOURCES: 2}
    assert process.run(bindings, first, 8, 0xDA0006) == {0: 8}
    assert process.run(bindings, second, 9) == {0: 8, nv.NO_RESOURCES: 1}
    process.run(lambda state, first: state["p"].free(first), first)
    assert process.run(bindings, second, 41) == {0: 40, nv.NO_RESOURCES: 1}


@pytest.mark.parametrize("which", ["itself", "parent", "old heap"])
def test_what_is_freed_makes_room(web, which):
    """RM frees what lies below an object with it, and no call names that: the module asks RM."""
    (process,) = web.processes
    process.run(make, OF_CLIENT)
    if which == "itself":
        assert process.run(free_last) == 0
    elif which == "parent":
        assert process.run(free, "subdevice") == 0
    else:
        process.run(lambda state: state["p"].heap(3, w44=state["p"].last) and None)

    room = OF_CLIENT + 1 if which == "parent" else 1
    assert process.run(make, room + 1, BINAPI, "device") == (room, nv.NO_RESOURCES)


def test_handles_of_freed_objects_may_be_anything_else(web):
    """Below a freed subdevice, unseen: the handle of one, given to a subdevice, is the subdevice's."""

    def again(state):
        p = state["p"]
        handle = p.alloc(p.subdevice, BINAPI)
        p.free(p.subdevice)
        p.subdevice = p.alloc(p.device, nv.SUBDEVICE, bytes(4), handle)

    (process,) = web.processes
    process.run(again)

    assert process.run(make, OF_CLIENT + 1) == (OF_CLIENT, nv.NO_RESOURCES)
    process.run(free, "subdevice")
    assert process.run(make, OF_CLIENT + 2, BINAPI, "device") == (OF_CLIENT + 1, nv.NO_RESOURCES)


def test_calls_that_fail_cost_nothing(web):
    def refused(state):
        p = state["p"]
        said = {status_of(state, "alloc", p.device, NO_DISPLAY) for _ in range(OF_CLIENT)}
        p.alloc(p.subdevice, BINAPI)
        return said | {status_of(state, "alloc", p.subdevice, BINAPI, b"", p.last) for _ in range(OF_CLIENT)}

    (process,) = web.processes
    assert process.run(refused) == {nv.NOT_SUPPORTED, 0x19}

    assert process.run(make, OF_CLIENT) == (OF_CLIENT - 1, nv.NO_RESOURCES)


def test_a_program_that_makes_and_frees_goes_on(web):
    def turn_over(state):
        p = state["p"]
        return {p.free(p.alloc(p.subdevice, BINAPI)) for _ in range(OF_CLIENT + 10)}

    (process,) = web.processes
    assert process.run(turn_over) == {0}
    assert process.run(make, OF_CLIENT) == (OF_CLIENT, 0)


def test_objects_that_rm_made_and_denies_count(web):
    def denied(state):
        p = state["p"]
        return {read_only(state, p.subdevice, BINAPI, 4, 0x5D000000 + i)[0] for i in range(64)}

    (process,) = web.processes
    assert process.run(denied) == {0x1E}

    assert process.run(make, OF_CLIENT) == (OF_CLIENT - 64, nv.NO_RESOURCES)


def test_duplicates_and_address_space_of_the_old_heap_count(web):
    def name_again(state, count):
        p = state["p"]
        state["source"] = p.alloc(p.subdevice, BINAPI)
        for _ in range(count):
            p.dup(p.client, state["source"])
        space = {"w44": 0, "w52": 0x80000 | 0x400, "u88": 4096}
        return {struct.unpack_from("I", p.heap(2, **space), 20)[0] for _ in range(count)}

    (process,) = web.processes
    assert process.run(name_again, 64) == {0}
    assert process.run(make, OF_CLIENT) == (OF_CLIENT - 129, nv.NO_RESOURCES)
    before = qg.sim()["objects"]

    again = process.run(lambda state: status_of(state, "dup", state["p"].client, state["source"]))
    space = process.run(lambda state: struct.unpack_from("I", state["p"].heap(2, w52=0x80400, u88=4096), 20)[0])
    assert (again, space) == (nv.NO_RESOURCES, nv.NO_RESOURCES)
    assert (qg.sim()["objects"], web.info().refused_objects) == (before, 3)


@quick
def test_system_memory_counts_however_it_is_made(web):
    """By RM_ALLOC, the old heap, RM_ALLOC_MEMORY, and that where RM makes it and cannot map it."""

    def make_each(state, count):
        p = state["p"]
        for _ in range(count):
            p.alloc(p.device, 0x3E)
            p.heap(2, w56=1 << 25, u88=4096)
            p.old_memory(0x71)
            with contextlib.suppress(OSError):
                p.old_memory(0x3E, flags=0)

    (process,) = web.processes
    process.run(make_each, 16)

    assert process.run(make, MEMORY_OF_CLIENT, SYSTEM, "device") == (MEMORY_OF_CLIENT - 64, nv.NO_RESOURCES)
    assert process.run(status_of, "old_memory", 0x71) == nv.NO_RESOURCES
    assert process.run(make, 1) == (1, 0)


def test_memory_under_a_handle_of_rms_choice_is_refused(web):
    """By RM_ALLOC_MEMORY, which does not say which handle RM has chosen."""
    (process,) = web.processes
    process.run(status_of, "old_memory", 0x71)  # the file is tied
    before = qg.sim()["objects"]

    assert process.run(status_of, "old_memory", 0x71, 0) == nv.BAD_HANDLE
    assert qg.sim()["objects"] == before


@quick
def test_a_pod_has_so_many_at_most_until_clients_end(pod):
    """Eight full clients: what is freed unseen in one of them, its end and its process's end make room in others."""
    first, other = (pod(name) for name in ("first", "other"))
    one, two = first.process(), first.process()
    for process in (one, two):
        process.run(program)
        process.run(fill, 4)
    neighbour = other.process()
    neighbour.run(program)

    assert [two.run(make, 1), one.run(make, 1)] == [(0, nv.NO_RESOURCES)] * 2
    assert neighbour.run(make, 1) == (1, 0)
    one.run(lambda state: state["full"][0].free(state["full"][0].subdevice))
    assert two.run(make, OF_CLIENT + 1) == (OF_CLIENT, nv.NO_RESOURCES)
    two.run(lambda state: os.close(state["p"].ctl))
    two.run(program)
    assert two.run(make, OF_CLIENT + 1) == (OF_CLIENT, nv.NO_RESOURCES)
    one.kill()
    assert two.run(fill, 3) == [OF_CLIENT] * 3
    two.run(program)
    assert two.run(make, 2) == (1, nv.NO_RESOURCES)
    assert first.info().refused_objects == 6


def turn(p, other, at):
    """Make, name again or free something in a client, or free and make the parent of most, as it comes."""
    what = at.randrange(8)
    if what < 3:
        p.alloc(p.subdevice, (BINAPI, SYSTEM, 0x79)[what], struct.pack("I", p.client) + bytes(60))
    elif what == 3:
        p.dup(other.client, other.last)
    elif what == 4:
        p.free(p.last - at.randrange(8))
    elif what == 5:
        p.heap(3, w44=p.last)
    elif what == 6:
        p.alloc(p.device, nv.SUBDEVICE, bytes(4), p.last)
    else:
        p.free(p.subdevice)
        p.alloc(p.device, nv.SUBDEVICE, bytes(4), p.subdevice)


def churn(state, turns):
    """Threads that share two clients, of which one ends, and of the other all that it has."""
    programs = state["p"], nv.Program()
    for p in programs:
        make({"p": p}, 16)

    def work(seed):
        at = random.Random(seed)
        for _ in range(turns):
            with contextlib.suppress(nv.RmError):
                turn(*at.sample(programs, 2), at)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(programs[1].ctl)
    state["p"].free(state["p"].device)


def another(state):
    try:
        state["another"] = nv.Program()
    except nv.RmError as error:
        return error.status
    return 0


def test_after_any_turmoil_the_room_is_as_before(web):
    """Of a client, and of the pod."""
    (process,) = web.processes
    process.run(churn, 500)
    assert qg.sim()["objects"] == 0
    process.run(lambda state: state["p"].alloc(state["p"].client, nv.DEVICE, bytes(56), state["p"].device))

    assert process.run(make, OF_CLIENT + 2, BINAPI, "device") == (OF_CLIENT + 1, nv.NO_RESOURCES)
    assert WATCHED or process.run(fill, 7) == [OF_CLIENT] * 7
    assert WATCHED or process.run(another) == nv.NO_RESOURCES


MAP, UNMAP = 0x4E, 0x4F
MAPPINGS_OF_CLIENT = 1 << 15


def map_by_rm(state, handle, count, status=0):
    """Map so often, or until the first refusal; how often, and the last status."""
    p = state["p"]
    call = struct.pack("4I3Q2IiI", p.client, p.device, handle, 0, 0, 4096, 0, status, 0, -1, 0)
    for made in range(count):
        data = bytearray(call)
        nv.call(p.ctl, MAP, data)
        (answer,) = struct.unpack_from("I", data, 40)
        if answer:
            return made, answer
    return count, 0


def unmap_by_rm(state, handle):
    p = state["p"]
    nv.call(p.ctl, UNMAP, bytearray(struct.pack("4IQ2I", p.client, p.device, handle, 0, 0, 0, 0)))


def system(state):
    return state["p"].alloc(state["p"].device, SYSTEM)


@quick
def test_a_client_has_so_many_mappings_at_most(web):
    (process,) = web.processes
    handle, other = process.run(system), process.run(system)
    assert process.run(map_by_rm, handle, MAPPINGS_OF_CLIENT + 1) == (MAPPINGS_OF_CLIENT, nv.NO_RESOURCES)
    assert process.run(map_by_rm, other, 1) == (0, nv.NO_RESOURCES)
    process.run(unmap_by_rm, handle)
    assert process.run(map_by_rm, other, 2) == (1, nv.NO_RESOURCES)

    process.run(lambda state, handle: state["p"].free(handle), handle)
    assert process.run(map_by_rm, other, 100) == (100, 0)


def remake_device(state):
    state["p"].device = state["p"].alloc(state["p"].client, nv.DEVICE, bytes(56))


@quick
def test_mappings_of_memory_freed_with_its_device_are_forgotten(web):
    """No call says that RM has freed the memory; so RM is asked before a refusal."""
    (process,) = web.processes
    handle = process.run(system)
    assert process.run(map_by_rm, handle, MAPPINGS_OF_CLIENT) == (MAPPINGS_OF_CLIENT, 0)
    process.run(lambda state: state["p"].free(state["p"].device))
    process.run(remake_device)

    assert process.run(map_by_rm, process.run(system), 1) == (1, 0)


def update(state, handle, seconds):
    """Have RM look for a mapping that is not there; how often it did."""
    p, until, times = state["p"], time.monotonic() + seconds, 0
    while time.monotonic() < until:
        nv.call(p.ctl, 0x5E, bytearray(struct.pack("4I2Q2I", p.client, p.device, handle, 0, 0x1000, 0x2000, 0, 0)))
        times += 1
    return times


def test_looking_through_many_mappings_costs_the_pod_time(web, linger):
    """RM holds the card's lock meanwhile. A call of 20 ms: three of them in a second, with what they cost."""
    (process,) = web.processes
    few, many = process.run(system), process.run(system)
    assert process.run(map_by_rm, few, 2) == (2, 0)
    assert process.run(map_by_rm, many, 1025) == (1025, 0)
    linger(20000)

    assert process.run(update, few, 1) > 8
    assert process.run(update, many, 1) <= 4


def test_a_mapping_that_rm_refuses_does_not_count(web):
    (process,) = web.processes
    handle = process.run(system)
    for _ in range(100):
        assert process.run(map_by_rm, handle, 1, 0x1F) == (0, 0x1F)
    # a process's end with a count left would be seen by the module's WARN_ON in client_free()
    process.stop()
    assert web.info().nr_clients == 0

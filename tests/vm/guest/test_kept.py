"""What keeps memory keeps its charge: exports, imports, duplicates, and what RM holds by itself."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from pathlib import Path

import nv
import pytest
import qg
from programs import MIB, ROOM, program, status_of, take


def test_memory_is_not_exported_as_a_dma_buf_under_a_limit(web):
    def export(state):
        try:
            nv.call(state["p"].card, 217, bytearray(568))
        except OSError as error:
            return error.errno
        return 0

    assert web.processes[0].run(export) == errno.EOPNOTSUPP


def by_descriptor(state, handle):
    state["fd"] = state["p"].export(handle)


def by_descriptor_for_many(state, handle):
    state["fd"] = state["p"].export(handle, plural=True)


def by_multicast(state, handle):
    state["p"].control(state["p"].device, 0xFD0102, struct.pack("II32x", state["p"].subdevice, handle))


def by_keys_of_confidential_computing(state, handle):
    state["p"].control(state["p"].device, 0xC56F010B, struct.pack("124xI", handle))


EXPORTS = [by_descriptor, by_descriptor_for_many, by_multicast, by_keys_of_confidential_computing]


@pytest.mark.parametrize("export", EXPORTS)
def test_exported_memory_stays_charged_until_last_file_closes(web, export):
    """A descriptor keeps it, whichever that is: neither its handle's end nor its client's says anything."""
    (process,) = web.processes
    handle = process.run(take, 32 * MIB)
    process.run(export, handle)
    process.run(lambda state, handle: state["p"].free(handle), handle)
    process.run(lambda state: state["p"].free(state["p"].client))
    process.run(program)

    assert web.held() == 32 * MIB
    assert process.run(take, 48 * MIB) == -nv.NO_MEMORY
    process.stop()
    assert web.held() == 0


def take_many_and_export_all(state, count):
    program(state)
    handle = [take(state, MIB >> 4) for _ in range(count)][-1]
    state["fd"] = state["p"].export(handle, plural=True)


def on_the_last_cpu(state):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def close_all_when_nobody_else_runs(state):
    on_the_last_cpu(state)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.close(state["fd"])
    state["p"].close()


GO = Path("/tmp/go")


def take_export_and_free(state, size):
    while not GO.exists():
        pass
    program(state)
    handle = take(state, size)
    export(state, handle)
    state["p"].free(handle)


def test_export_during_last_files_close_stays_charged(qgpu, pod):
    """Letting go of what was exported takes a while; the pod opens its next file as soon as it has none."""
    web = pod("web", memory=600 * MIB + ROOM)
    first, second = web.process(), web.process()
    first.run(take_many_and_export_all, 1 << 13)
    second.run(on_the_last_cpu)
    before = qgpu.info().nr_objects
    first.start(close_all_when_nobody_else_runs)
    while qgpu.info().nr_objects > before // 2:
        pass
    second.start(take_export_and_free, 32 * MIB)  # it keeps the CPU from the first
    while web.info().nr_files:
        pass
    GO.touch()
    second.result()
    GO.unlink()
    first.result()

    assert qg.used() == web.held() == 32 * MIB


def test_a_source_is_not_swapped_during_a_dup(web, linger):
    """The duplicate waits in the driver, and the call that would free the source waits for that."""
    first, second = web.processes[0], web.process()
    second.run(program)
    handle = first.run(take, MIB)
    client = first.run(lambda state: state["p"].client)
    linger(1500000)
    second.start(lambda state, client, handle: state["p"].dup(client, handle), client, handle)
    threading.Event().wait(0.1)
    linger(0)
    first.run(lambda state, handle: state["p"].free(handle), handle)
    first.run(take, 16 * MIB, handle)
    second.result()
    first.run(lambda state, handle: state["p"].free(handle), handle)

    assert qg.used() == web.held() == MIB


def duplicate_as(state, source, handle):
    """Another handle on what a handle of the same client is, under a given one."""
    state["p"].last = handle - 1
    state["p"].dup(state["p"].client, source)


def test_source_swapped_back_during_dup_hides_no_memory(web, linger, late):
    """Other memory of its size has the source's handle while RM makes the duplicate, and only then."""
    first, second = web.processes[0], web.process()
    second.run(program)
    handle, spare = first.run(take, 16 * MIB), 0x5C00AA00
    first.run(duplicate_as, handle, spare)
    client, objects = first.run(lambda state: state["p"].client), qg.sim()["objects"]
    linger(1500000)
    second.start(lambda state, client, handle: state["p"].dup(client, handle), client, handle)
    threading.Event().wait(0.1)
    linger(0)
    first.run(lambda state, handle: state["p"].free(handle), handle)
    first.run(take, 16 * MIB, handle)
    late(1500000)
    qg.until(lambda: qg.sim()["objects"] > objects)
    late(0)
    first.run(lambda state, handle: state["p"].free(handle), handle)
    first.run(duplicate_as, spare, handle)
    second.result()

    assert qg.used() == web.held()


def export(state, handle):
    state["fd"] = state["p"].export(handle)
    return state["fd"]


def import_from(state, pid, fd, plural):
    taken = qg.take_descriptor(pid, fd)
    try:
        return state["p"].import_(taken, plural=plural)
    except nv.RmError as error:
        return -error.status
    finally:
        os.close(taken)


@pytest.mark.parametrize("plural", [False, True])
def test_memory_that_comes_back_by_a_descriptor_is_charged_once(web, plural):
    """Two processes of a pod share memory, as by cudaIpc."""
    first, second = web.processes[0], web.process()
    second.run(program)
    fd = first.run(export, first.run(take, 32 * MIB))

    assert second.run(import_from, first.pid, fd, plural) > 0
    assert web.held() == 32 * MIB


def import_all(state, fd, handles, count):
    try:
        state["p"].import_all(fd, *handles, count=count)
    except nv.RmError as error:
        return error.status
    return 0


@pytest.mark.parametrize(("places", "count", "expected"), [(1, 0, 0), (1, 1, 0x19), (2, 2, 0x19)])
def test_an_import_frees_nothing_that_was_there(web, places, count, expected):
    """RM looks at the first places only, skips those without an export, and undoes them all when one fails."""
    (process,) = web.processes
    handle = process.run(take, 32 * MIB)
    fd = process.run(export, handle)
    handles = [handle, 0x5C0000FF][:places]

    assert process.run(import_all, fd, handles, count) == expected
    assert qg.used() == web.held() == 32 * MIB


def test_places_without_an_export_stay_as_they_are(web):
    (process,) = web.processes
    handle = process.run(take, 32 * MIB)
    fd = process.run(export, handle)

    assert process.run(import_all, fd, [0x5C0000FE, 0x5C0000FF], 2) == 0
    assert qg.used() == web.held() == 32 * MIB


def test_export_keeps_only_named_memory_charged(web):
    (process,) = web.processes
    handles = [process.run(take, 16 * MIB) for _ in range(2)]
    process.run(export, handles[0])
    for handle in handles:
        process.run(lambda state, handle: state["p"].free(handle), handle)

    assert web.held() == 16 * MIB


@pytest.mark.parametrize("plural", [False, True])
def test_memory_of_foreign_descriptor_is_charged_to_importer(web, pod, plural):
    """Else it would be nobody's when the other pod has ended."""
    other = pod("other", memory=48 * MIB + ROOM)
    (first,), second = web.processes, other.process()
    second.run(program)
    fd = first.run(export, first.run(take, 32 * MIB))
    assert second.run(import_from, first.pid, fd, plural) > 0
    first.stop()

    assert (web.held(), other.held()) == (0, 32 * MIB)
    assert second.run(take, 32 * MIB) == -nv.NO_MEMORY
    assert qg.used() == 32 * MIB


@pytest.mark.parametrize("plural", [False, True])
def test_another_pods_descriptor_is_no_way_past_the_limit(web, pod, plural):
    other = pod("other", memory=16 * MIB + ROOM)
    (first,), second = web.processes, other.process()
    second.run(program)
    fd = first.run(export, first.run(take, 32 * MIB))
    before = qg.sim()["objects"]

    assert second.run(import_from, first.pid, fd, plural) == -nv.NO_MEMORY
    assert (other.held(), qg.sim()["objects"]) == (0, before)
    first.stop()
    second.stop()
    assert qg.used() == 0


def put_into_file(state, what, plural):
    """Export what is no memory, after memory if one call may name both, and free it; RM's status."""
    p, state["file"] = state["p"], os.open(nv.CTL, os.O_RDWR)
    handle = p.alloc(p.device, nv.VASPACE, bytes(48)) if what == "space" else p.compute()[0]
    named = p.alloc(p.subdevice, 0x2081, handle=0) - 1 if what == "graphics context" else handle
    if plural:
        objects = [p.memory(MIB), named]
        params = struct.pack("iIH66x512IHH", state["file"], p.device, 2, *objects, *bytes(510), 2, 0)
        status = status_of(state, "control", p.client, 0x3D0B, params)
        p.free(objects[0])
    else:
        params = struct.pack("IIIIiI", 1, p.device, p.device, named, state["file"], 0)
        status = status_of(state, "control", p.client, 0x3D05, params)
    p.free(handle)
    return status


@pytest.mark.parametrize("plural", [False, True])
@pytest.mark.parametrize("what", ["tsg", "space", "graphics context"])
def test_what_is_no_memory_is_not_exported(web, parameter, what, plural):
    """RM would keep what it took of the card for a TSG or an address space, and nobody would be charged."""
    parameter("contexts", "Y")
    before = qg.used()

    assert web.processes[0].run(put_into_file, what, plural) == nv.NOT_SUPPORTED
    assert (web.held(), qg.used()) == (0, before)


EXPORTS_OF_POD, EXPORTS_OF_CALL = 1 << 14, 512
#: Each handle is a call of RM's.
quick = pytest.mark.skipif(
    Path("/proc/lockdep_stats").exists(), reason="too many calls for a kernel that watches every lock"
)


def export_often(state, count, handle=0):
    """Export memory as often by each of so many files; how many files, and RM's first other status."""
    p, files = state["p"], state.setdefault("files", [])
    if not handle:
        handle = state.setdefault("memory", state.get("memory") or p.memory(MIB))
    for done in range(count):
        fd = os.open(nv.CTL, os.O_RDWR)
        files.append(fd)
        objects = [handle] * EXPORTS_OF_CALL
        params = struct.pack("iIH66x512IHH", fd, p.device, EXPORTS_OF_CALL, *objects, EXPORTS_OF_CALL, 0)
        if status := status_of(state, "control", p.client, 0x3D0B, params):
            return done, status
    return count, 0


def close_files(state, count):
    for _ in range(count):
        os.close(state["files"].pop())


@quick
def test_a_pod_has_so_many_exports_until_files_close(web, pod):
    """RM has places for so many on the whole host, and frees all of a file's with its lock held."""
    (process,) = web.processes
    most = EXPORTS_OF_POD // EXPORTS_OF_CALL
    assert process.run(export_often, most + 1) == (most, nv.NO_RESOURCES)
    assert web.info().refused_objects == 1
    other = pod("other").process()
    other.run(program)
    assert other.run(export_often, 1) == (1, 0)

    process.run(close_files, 3)  # the last one carries nothing
    assert process.run(export_often, 3) == (2, nv.NO_RESOURCES)


@quick
def test_exports_that_rm_refuses_make_room_again(web):
    def without_a_file(state):
        p = state["p"]
        return status_of(state, "control", p.client, 0x3D05, struct.pack("IIIIiI", 1, 0, 0, state["memory"], -1, 0))

    (process,) = web.processes
    most = EXPORTS_OF_POD // EXPORTS_OF_CALL
    assert process.run(export_often, most - 1) == (most - 1, 0)
    assert process.run(without_a_file)
    for _ in range(3):  # RM refuses them as soon as it has the file
        done, status = process.run(export_often, 1, 0x5EADBEEF)
        assert (done, status != nv.NO_RESOURCES) == (0, True)
        process.run(close_files, 1)

    assert process.run(export_often, 2) == (1, nv.NO_RESOURCES)


@quick
def test_failed_exports_by_a_file_count_until_it_closes(web):
    """RM may have exported some of what a call names, which stays with the file."""

    def by_one_file(state, count):
        p, fd = state["p"], os.open(nv.CTL, os.O_RDWR)
        state["memory"], state["files"] = p.memory(MIB), [fd]
        params = struct.pack("IIIIiI", 1, p.device, p.device, state["memory"], fd, 0)
        return [status_of(state, "control", p.client, 0x3D05, params) for _ in range(count)]

    (process,) = web.processes
    most = EXPORTS_OF_POD // EXPORTS_OF_CALL
    assert set(process.run(by_one_file, EXPORTS_OF_CALL + 16)[16:]) == {nv.NO_MEMORY}
    assert process.run(export_often, most) == (most - 2, nv.NO_RESOURCES)
    process.run(close_files, most)

    assert process.run(export_often, most + 1) == (most, nv.NO_RESOURCES)


@quick
def test_exports_by_another_pods_file_count_for_good(web, pod):
    """Whoever closes it would have room for more."""

    def by_file_of(state, pid, fd, count):
        taken = qg.take_descriptor(pid, fd)
        params = struct.pack("iIH66x512IHH", taken, state["p"].device, 512, *[state["memory"]] * 512, 512, 0)
        state["files"].append(taken)
        return [status_of(state, "control", state["p"].client, 0x3D0B, params) for _ in range(count)]

    (process,), friend = web.processes, pod("friend")
    first, second = friend.process(), friend.process()
    for each in (first, second):
        each.run(program)
    first.run(export_often, 1)
    (fd,) = first.run(lambda state: state["files"])
    assert process.run(export_often, 1) == (1, 0)
    assert process.run(by_file_of, first.pid, fd, 2) == [0, 0]
    process.run(close_files, 2)
    first.stop()

    most = EXPORTS_OF_POD // EXPORTS_OF_CALL
    assert process.run(export_often, most) == (most - 2, nv.NO_RESOURCES)
    assert second.run(export_often, most + 1) == (most, nv.NO_RESOURCES)


def test_unsealed_exports_keep_what_any_object_took(qgpu, web):
    """Another thread may name a TSG after the check."""

    def make(state):
        state["memory"], (state["tsg"], _) = state["p"].memory(MIB), state["p"].compute()

    def export_and_free(state):
        state["file"] = state["p"].export(state["memory"])
        state["p"].free(state["tsg"])

    (process,) = web.processes
    process.run(make)
    held = web.held()
    with qg.switched_off(qg.KPROBES):
        assert qgpu.info().missing
        process.run(export_and_free)
    qg.until(lambda: not qgpu.info().missing)

    assert web.held() == held


def test_a_graphics_context_has_no_second_handle(web, parameter):
    """It would keep buffers of a TSG that has gone."""

    def duplicate_context(state):
        p = state["p"]
        p.compute()
        context = p.alloc(p.subdevice, 0x2081, handle=0) - 1
        before = qg.sim()["objects"]
        return status_of(state, "dup", p.client, context), qg.sim()["objects"] - before

    parameter("contexts", "Y")

    assert web.processes[0].run(duplicate_context) == (nv.NOT_SUPPORTED, 0)


def export_on_both_cards(state):
    """Two descriptors, each with memory of another card."""
    p = nv.Program()
    q = nv.Program(1)
    state["both"] = p, q
    return p.export(p.memory(8 * MIB)), q.export(q.memory(8 * MIB))


def import_swapped(state, pid, fd, other, plural):
    """Import a descriptor that another thread replaces before RM looks at it."""
    taken, second = (qg.take_descriptor(pid, each) for each in (fd, other))
    threading.Timer(0.1, os.dup2, (second, taken)).start()
    state["p"].import_(taken, plural=plural)
    os.close(taken)
    os.close(second)


@pytest.mark.parametrize("plural", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_an_import_counts_on_the_card_of_its_memory(pod, parameter, linger, plural, swapped):
    """Its handle lies below a device of the first card."""
    parameter("gpus", 2)
    giver, taker = pod("giver"), pod("taker")
    first, second = giver.process(), taker.process()
    on_first, on_second = first.run(export_on_both_cards)
    for gpu in range(2):
        taker.grant(gpu=gpu, memory=12 * MIB)
    second.run(program)
    before = [int(taker.usage(gpu).memory) for gpu in range(2)]
    if swapped:
        linger(300000)
        second.run(import_swapped, first.pid, on_first, on_second, plural)
        linger(0)
    else:
        assert second.run(import_from, first.pid, on_second, plural) > 0
    first.kill()
    after = [int(taker.usage(gpu).memory) for gpu in range(2)]
    second.kill()

    assert [now - then for then, now in zip(before, after, strict=True)] == [0, 8 * MIB]


def test_an_import_of_unknown_memory_counts_on_each_card(pod, parameter):
    """A process in no pod has exported it."""
    parameter("gpus", 2)
    state = {}
    exported = export_on_both_cards(state)
    taker = pod("taker")
    process = taker.process()
    process.run(export_on_both_cards)
    process.run(program)
    for gpu in range(2):
        taker.grant(gpu=gpu, memory=20 * MIB)
    before = [int(taker.usage(gpu).memory) for gpu in range(2)]
    assert process.run(import_from, os.getpid(), exported[1], False) > 0
    after = [int(taker.usage(gpu).memory) for gpu in range(2)]
    process.kill()
    for fd in exported:
        os.close(fd)
    for each in state["both"]:
        each.close()

    assert [now - then for then, now in zip(before, after, strict=True)] == [8 * MIB] * 2


def test_an_import_below_another_card_has_the_limit_of_its_own(pod, parameter):
    parameter("gpus", 2)
    giver, taker = pod("giver"), pod("taker")
    first, second = giver.process(), taker.process()
    _, on_second = first.run(export_on_both_cards)
    taker.grant(gpu=1, memory=4 * MIB)
    second.run(program)

    assert second.run(import_from, first.pid, on_second, False) == -nv.NO_MEMORY
    first.kill()
    second.kill()


def test_an_import_under_a_handle_that_rm_chooses_is_charged_too(web, pod):
    def import_any(state, pid, fd):
        return state["p"].import_(qg.take_descriptor(pid, fd), handle=0)

    other = pod("other", memory=48 * MIB + ROOM)
    (first,), second = web.processes, other.process()
    second.run(program)
    fd = first.run(export, first.run(take, 32 * MIB))

    assert second.run(import_any, first.pid, fd) > 0
    assert other.held() == 32 * MIB


def test_a_handle_exchanged_while_it_is_imported_gains_nothing(web, pod, linger):
    """The name under which memory is to come stands behind a pointer: RM gives it the one that was looked at."""

    def race(state, pid, fd):
        p = state["p"]
        params = ctypes.create_string_buffer(
            struct.pack("iIIII", qg.take_descriptor(pid, fd), 1, p.device, p.device, 0x5C00AA00), 20
        )
        data = bytearray(nv._CONTROL.pack(p.client, p.client, 0x3D06, 0, ctypes.addressof(params), 20, 0xFFFF))
        late = threading.Timer(0.05, lambda: struct.pack_into("I", params, 16, 0x5C00BB00))
        late.start()
        nv.call(p.ctl, 0x2A, data)
        late.join()
        return nv._CONTROL.unpack(data)[6]

    other = pod("other", memory=48 * MIB + ROOM)
    (first,), second = web.processes, other.process()
    second.run(program)
    fd = first.run(export, first.run(take, 32 * MIB))
    linger(300000)

    assert second.run(race, first.pid, fd) == 0
    assert other.held() == 32 * MIB


def test_memory_held_by_semaphore_surface_stays_charged(web):
    """RM duplicates it in a client of its own; its handle's end says nothing."""
    (process,) = web.processes
    handle = process.run(take, 32 * MIB)
    process.run(lambda state, handle: state["p"].alloc(state["p"].device, 0xDA, struct.pack("I20x", handle)), handle)
    process.run(lambda state, handle: state["p"].free(handle), handle)

    assert web.held() == 32 * MIB
    assert process.run(take, 48 * MIB) == -nv.NO_MEMORY

"""Pods that mean harm: what RM allows and no program does must not cost the limit, the register or the kernel."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from contextlib import suppress

import nv
import pytest
import qg
from programs import MIB, program, status_of, take

INVALID_STATE = 0x40


def test_a_control_file_is_not_registered_with_another(web):
    def register(_state):
        first, second = os.open(nv.CTL, os.O_RDWR), os.open(nv.CTL, os.O_RDWR)
        card = os.open(nv.GPU.format(0), os.O_RDWR)
        nv.call(card, 201, bytearray(struct.pack("I", first)))
        try:
            nv.call(second, 201, bytearray(struct.pack("I", first)))
        except OSError as error:
            return error.errno
        return 0

    assert web.processes[0].run(register) == errno.EINVAL


@pytest.mark.parametrize("cls", [0x82, 0x83, 0xC2, nv.MEM])
def test_memory_by_address_is_refused_in_the_old_call_too(web, cls):
    """Class 0x40 in this call is all of the card's memory, where the caller is an administrator."""

    def allocate(state, cls):
        try:
            return state["p"].old_memory(cls)
        except nv.RmError as error:
            return error.status

    before = qg.sim()["objects"]

    assert web.processes[0].run(allocate, cls) == nv.BAD_CLASS
    assert qg.sim()["objects"] == before
    assert web.held() == 0


def test_a_struct_that_cannot_be_written_back_saves_nothing(web):
    """The driver answers EFAULT, when RM has made the memory already."""

    def allocate(state, size):
        p = state["p"]
        block = ctypes.create_string_buffer(struct.pack("64xQ56x", size), 128)
        libc = ctypes.CDLL(None, use_errno=True)
        page = mmap.mmap(-1, 4096)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        codes = []
        for _ in range(8):
            p.last += 1
            at = ctypes.addressof(block)
            call = nv._ALLOC.pack(p.client, p.device, p.last, nv.MEM, at, 0, 0, 0, 0, 0)
            libc.mprotect(ctypes.c_void_p(address), 4096, 3)
            ctypes.memmove(address, call, len(call))
            libc.mprotect(ctypes.c_void_p(address), 4096, 1)
            libc.ioctl(p.ctl, nv.word(0x2B, 48), ctypes.c_void_p(address))
            codes.append(ctypes.get_errno())
        return codes

    assert errno.EFAULT in web.processes[0].run(allocate, 16 * MIB)
    used = qg.used()
    assert used == web.held() <= 64 * MIB


def read_only(state, parent, cls, size, handle, params=b""):
    """Allocate with parameters in a page that RM cannot write back to; RM's status."""
    p = state["p"]
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.mmap(-1, 4096)
    page[: len(params) or size] = params or bytes(size)
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    libc.mprotect(ctypes.c_void_p(at), 4096, 1)
    data = bytearray(nv._ALLOC.pack(0 if cls == nv.ROOT else p.client, parent, handle, cls, at, 0, 0, 0, 0, 0))
    nv.call(p.ctl, 0x2B, data)
    libc.mprotect(ctypes.c_void_p(at), 4096, 3)
    return nv._ALLOC.unpack(data)[8], nv._ALLOC.unpack(data)[2]


def test_memory_that_rm_made_and_denies_is_not_had(web):
    def allocate(state, size):
        p = state["p"]
        return read_only(state, p.device, nv.MEM, 0, 0x5C00FF00, struct.pack("64xQ56x", size))[0]

    before = qg.sim()["objects"]

    assert web.processes[0].run(allocate, 16 * MIB) == 0x1E
    assert (qg.sim()["objects"], web.held()) == (before, 0)
    assert qg.used() == 0


def test_a_tsg_that_rm_made_and_denies_is_not_had(web):
    def allocate(state):
        return read_only(state, state["p"].device, nv.TSG, 20, 0x5C00FF00)[0]

    assert web.processes[0].run(allocate) == 0x1E
    assert qg.sim_tsgs() == []


def test_client_made_despite_rm_error_belongs_to_pod(web, qgpu):
    def allocate(state, size):
        p = state["p"]
        status, p.client = read_only(state, 0, nv.ROOT, 120, 0)
        p.device = p.alloc(p.client, nv.DEVICE, bytes(56))
        p.subdevice = p.alloc(p.device, nv.SUBDEVICE, bytes(4))
        return status, take(state, size)

    before = qgpu.info().nr_clients

    assert web.processes[0].run(allocate, 65 * MIB) == (0x1E, -nv.NO_MEMORY)
    assert (qgpu.info().nr_clients, web.held()) == (before + 1, 0)


def test_a_handle_taken_twice_costs_the_first_nothing(web):
    (process,) = web.processes
    handle = process.run(take, 16 * MIB)

    assert process.run(take, 16 * MIB, handle) == -0x19
    assert qg.used() == web.held() == 16 * MIB


def test_a_device_of_no_known_card_gets_nothing(web):
    def bare(state):
        p = state["p"]
        p.free(p.device)
        p.device = p.alloc(p.client, nv.DEVICE, bytes(56))

    (process,) = web.processes
    process.run(bare)

    assert process.run(take, MIB) == -INVALID_STATE
    assert process.run(status_of, "tsg") == INVALID_STATE
    assert process.run(status_of, "channel", process.run(lambda state: state["p"].device)) == INVALID_STATE


def test_a_device_whose_parameters_overlap_its_call_is_refused(web):
    """RM would answer the handle into the card's number. The class behind it stands where a client is named."""

    def overlap(state):
        p = state["p"]
        p.free(p.device)
        data = ctypes.create_string_buffer(128)
        at = ctypes.addressof(data)
        data[:48] = nv._ALLOC.pack(p.client, p.client, 0, nv.DEVICE, at + 8, 0, 0, 0, 0xFFFF, 0)
        ctypes.CDLL(None).ioctl(p.ctl, nv.word(0x2B, 48), data)
        return struct.unpack_from("I", data, 40)[0]

    before = qg.sim()["objects"]

    assert web.processes[0].run(overlap) == nv.BAD_HANDLE
    assert qg.sim()["objects"] == before - 2  # the device that was there, and its subdevice


def test_freeing_by_heap_call_frees_anything(web, qgpu):
    """VID_HEAP_CONTROL's free takes a TSG as well; its handle, used anew, is memory like any other."""

    def swap(state, size):
        p = state["p"]
        tsg, (channel,) = p.compute()
        p.heap(3, w44=tsg)
        return [p.memory(size, tsg), p.memory(size, channel)]

    before = qgpu.info().nr_objects
    web.processes[0].run(swap, 16 * MIB)

    assert web.held() == 32 * MIB
    assert (qgpu.info().nr_objects, qgpu.tsgs(web.id)) == (before + 2, [])


def test_what_goes_with_an_address_space_is_forgotten(web, qgpu):
    def free(state):
        p = state["p"]
        space = p.alloc(p.device, nv.VASPACE)
        tsg = p.alloc(p.device, nv.TSG, struct.pack("8xII4x", space, 1))
        p.channel(tsg)
        p.free(space)

    before = qgpu.info().nr_objects
    web.processes[0].run(free)

    assert qg.sim_tsgs() == []
    assert (qgpu.info().nr_objects, qgpu.tsgs(web.id)) == (before, [])


def test_an_object_with_parent_0_goes_with_its_client(web, qgpu):
    """RM reads parent 0 as the client. Last, for what is left behind by a module that does not is used after it."""

    def orphan(state):
        p = state["p"]
        p.device = p.alloc(0, nv.DEVICE, bytes(56))
        p.subdevice = p.alloc(p.device, nv.SUBDEVICE, bytes(4))
        p.compute()
        p.memory(MIB)

    process = web.process()
    process.run(program)
    process.run(orphan)
    assert web.held() == (16 + 1) * MIB + qg.SPACE  # its client has two devices
    process.stop()

    assert (web.held(), qgpu.tsgs(web.id)) == (0, [])


def os_events(state, client, numbers, call=206, file="events"):
    """Make OS events of a client on a file of this name, or free them (207); the statuses."""
    if file not in state:
        state[file] = os.open(nv.CTL, os.O_RDWR)
    said = []
    for number in numbers:
        data = bytearray(struct.pack("4I", client, 0, number, 0))
        nv.call(state[file], call, data)
        said.append(struct.unpack("4I", data)[3])
    return said


def own_client(state):
    return state["p"].client


def close(state, file):
    os.close(state.pop(file))


def test_event_objects_of_a_pod_are_bounded(web):
    """RM frees those of a device with it, and no call names them: the module asks RM."""

    def make(state, number):
        p, made = state["p"], 0
        if "device" not in state:
            state["device"] = p.alloc(p.client, 0x80, bytes(56))
        with suppress(nv.RmError):
            while made < number:
                p.alloc(state["device"], 0x79, struct.pack("I", p.client) + bytes(60))
                made += 1
        return made

    def free(state):
        state["p"].free(state.pop("device"))

    process = web.processes[0]
    assert [process.run(make, 2052), process.run(make, 1)] == [2048, 0]
    process.run(free)
    assert process.run(make, 100) == 100


def test_os_events_are_of_ones_own_clients(web, pod):
    """RM asks nobody whose they are: a neighbour whose event is freed waits for ever."""
    neighbour = pod("neighbour")
    neighbour.process().run(program)
    clients = [each.processes[0].run(own_client) for each in (web, neighbour)]

    for call in (206, 207):
        said = [web.processes[0].run(os_events, client, [5], call) for client in (*clients, 0)]
        assert said == [[0], [nv.BAD_CLIENT], [nv.BAD_CLIENT]]


def share(state, client, share_type=1, target=0, handle=None):
    """Share a client, or an object of it, with all, as CUDA IPC does, or with one client."""
    data = bytearray(struct.pack("6I", client, handle or client, target, 1, share_type, 0))
    nv.call(state.setdefault("sharing", os.open(nv.CTL, os.O_RDWR)), 0x35, data)
    return struct.unpack("6I", data)[5]


def test_only_objects_of_ones_own_clients_are_shared(web, pod):
    """RM asks nobody whose they are: whoever shares a neighbour's may duplicate them."""
    neighbour = pod("neighbour")
    neighbour.process().run(program)
    clients = [each.processes[0].run(own_client) for each in (web, neighbour)]

    assert [web.processes[0].run(share, client) for client in (*clients, 0)] == [0, nv.NO_PERMISSION, nv.NO_PERMISSION]


def test_nothing_is_shared_with_a_single_client(web):
    """RM notes each sharing in that client, without bound."""
    own = web.processes[0].run(own_client)

    assert web.processes[0].run(share, own, 3, own) == nv.NO_PERMISSION


def test_nothing_is_shared_while_calls_are_not_sealed(web):
    """Another thread could name a neighbour's object after the check."""
    own = web.processes[0].run(own_client)
    with qg.switched_off(qg.KPROBES):
        qg.until(lambda: web.processes[0].run(share, own) == nv.NO_PERMISSION)

    qg.until(lambda: web.processes[0].run(share, own) == 0)


def share_all(state):
    """Share whatever a client has and will have with all."""
    return status_of(state, "control", state["p"].client, 0xD04, struct.pack("IIHH", 0, 1, 1, 0))


def test_no_policy_is_set_while_calls_are_not_sealed(web):
    """Another thread could name a neighbour's client after the check."""
    (process,) = web.processes
    with qg.switched_off(qg.KPROBES):
        qg.until(lambda: process.run(share_all) == nv.NO_PERMISSION)

    qg.until(lambda: process.run(share_all) != nv.NO_PERMISSION)


def test_os_events_of_a_pod_are_bounded(web):
    process = web.processes[0]
    own = process.run(own_client)
    said = process.run(os_events, own, range(2052))

    assert said == [0] * 2048 + [nv.NO_RESOURCES] * 4
    assert process.run(os_events, own, [1], 207) + process.run(os_events, own, [1, 2]) == [0, 0, nv.NO_RESOURCES]
    process.run(close, "events")
    assert process.run(os_events, own, [1]) == [0]


def test_os_events_freed_through_another_file_are_bounded(web):
    process = web.processes[0]
    own = process.run(own_client)

    for _ in range(3):
        process.run(os_events, own, range(1000), 206, "first")
        process.run(os_events, own, range(1000), 207)
        process.run(close, "first")

    assert process.run(os_events, own, range(2052)) == [0] * 2048 + [nv.NO_RESOURCES] * 4


def test_os_events_made_anew_are_of_the_newer_file(web):
    """The simulated RM does not mind that they are there; a real one has lost them with a client of this handle."""
    process = web.processes[0]
    own = process.run(own_client)

    process.run(os_events, own, range(2047), 206, "first")
    assert process.run(os_events, own, range(2047)) == [0] * 2047
    process.run(close, "first")
    assert process.run(os_events, own, [2047, 2048]) == [0, nv.NO_RESOURCES]
    process.run(close, "events")
    assert process.run(os_events, own, [1]) == [0]


def test_os_events_whose_answer_cannot_be_written_are_bounded(web):
    """The driver answers EFAULT, when RM has made the event already."""

    def allocate(state, client, numbers):
        libc = ctypes.CDLL(None, use_errno=True)
        page = mmap.mmap(-1, 4096)
        at = ctypes.addressof(ctypes.c_char.from_buffer(page))
        for number in numbers:
            libc.mprotect(ctypes.c_void_p(at), 4096, 3)
            page[:16] = struct.pack("4I", client, 0, number, 0)
            libc.mprotect(ctypes.c_void_p(at), 4096, 1)
            libc.ioctl(state["events"], nv.word(206, 16), ctypes.c_void_p(at))
        return ctypes.get_errno()

    process = web.processes[0]
    own = process.run(own_client)
    process.run(os_events, own, [0])

    assert process.run(allocate, own, range(1, 2000)) == errno.EFAULT
    assert process.run(os_events, own, range(2000, 2052)) == [0] * 48 + [nv.NO_RESOURCES] * 4


def shared_page(state):
    """The page that RM shares with all programs."""
    return state["p"].alloc(state["p"].subdevice, 0xDE)


def map_for_the_card(state, memory):
    p = state["p"]
    space = p.alloc(p.device, 0x50A0, struct.pack("8xI116x", 0x80400))
    data = bytearray(struct.pack("16I", p.client, p.device, space, memory, *bytes(12)))
    p.send(p.ctl, 0x57, data)
    return struct.unpack_from("I", data, 56)[0]


def test_rm_maps_no_shared_page_for_the_card(pod):
    """RM keeps only CPUs from writing there; without a memory limit a pod has RM map other memory."""
    web = pod("web")
    process = web.process()
    process.run(program)

    answers = [process.run(map_for_the_card, process.run(make)) for make in (shared_page, lambda s: s["p"].memory(MIB))]
    assert (answers, web.info().refused_allocs) == ([nv.NOT_SUPPORTED, 0], 1)


def test_rm_maps_nothing_while_calls_are_not_sealed(pod):
    """Another thread could name the shared page after the check."""
    process = pod("web").process()
    process.run(program)
    memory = process.run(take, MIB)
    with qg.switched_off(qg.KPROBES):
        qg.until(lambda: process.run(map_for_the_card, memory) == nv.NOT_SUPPORTED)

    qg.until(lambda: process.run(map_for_the_card, memory) == 0)


def share_page(state, page):
    return share(state, state["p"].client, handle=page)


def duplicate_page(state, page):
    return status_of(state, "dup", state["p"].client, page)


def export_page(state, page):
    return status_of(state, "export", page)


def export_page_among_others(state, page):
    return status_of(state, "export", page, plural=True)


@pytest.mark.parametrize("ask", [duplicate_page, export_page, export_page_among_others, share_page])
def test_the_shared_page_gets_no_second_handle(web, ask):
    """A pod could map the page by another handle, whose class nobody looks at."""
    (process,) = web.processes
    page = process.run(shared_page)
    before = qg.sim()["objects"]

    assert process.run(ask, page) == (nv.NO_PERMISSION if ask is share_page else nv.NOT_SUPPORTED)
    assert (qg.sim()["objects"], web.info().refused_allocs) == (before, 1)


@pytest.mark.parametrize("plural", [False, True])
def test_the_shared_page_is_not_imported(web, outside, plural):
    """A process in no pod can export it."""

    def take_in(state, pid, fd, plural):
        return status_of(state, "import_", qg.take_descriptor(pid, fd), plural=plural)

    fd = outside["p"].export(shared_page(outside))
    before = qg.sim()["objects"]

    assert web.processes[0].run(take_in, os.getpid(), fd, plural) == nv.NOT_SUPPORTED
    assert (qg.sim()["objects"], web.info().refused_allocs) == (before, 1)
    os.close(fd)

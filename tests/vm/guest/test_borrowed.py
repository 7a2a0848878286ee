"""What is somebody else's: clients, objects and files of others give a pod no part in it and no way out."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading
from pathlib import Path

import nv
import pytest
import qg
from programs import MIB, ROOM, duplicate, free, program, take

TAKEN, NOT_WRITTEN = 0x19, 0x1E
AT_ONCE = Path("/sys/module/nvidia/parameters/at_once")


def make_client(state, root, handle, at=0, file="ctl", rights=0):
    """A client under a handle that the process chooses; RM's status, and the handle it says."""
    data = bytearray(nv._ALLOC.pack(root, 0, handle, nv.ROOT, at, rights, 0, 0, 0xFFFF, 0))
    try:
        nv.call(getattr(state["p"], file), 0x2B, data)
    except OSError as error:
        return error.errno, 0
    return nv._ALLOC.unpack(data)[8], nv._ALLOC.unpack(data)[2]


def make_in(state, client, parent, handle, cls):
    """An object in any client; RM's status."""
    block = ctypes.create_string_buffer(struct.pack("64xQ56x", MIB), 128)
    data = bytearray(nv._ALLOC.pack(client, parent, handle, cls, ctypes.addressof(block), 0, 0, 0, 0xFFFF, 0))
    nv.call(state["p"].ctl, 0x2B, data)
    return nv._ALLOC.unpack(data)[8]


def free_os_event(state, client):
    data = bytearray(struct.pack("IIII", client, 0, 7, 0xFFFF))
    nv.call(state["p"].ctl, 207, data)
    return struct.unpack("IIII", data)[3]


@pytest.mark.parametrize("file", ["ctl", "card"])
@pytest.mark.parametrize("how", ["taken", "unreadable"])
def test_a_client_that_rm_did_not_make_is_not_claimed(web, outside, file, how):
    """The module leaves the client and its objects to the process outside of pods that made them."""
    victim, (process,) = outside["p"], web.processes
    memory = victim.memory(16 * MIB)
    before = qg.sim()["objects"], qg.used()
    root, params = (victim.client, 0) if how == "taken" else (0, 1)

    assert process.run(make_client, root, victim.client, params, file)[0] != 0
    assert web.info().nr_clients == 1
    assert process.run(make_in, victim.client, victim.device, memory, nv.MEM) == nv.BAD_CLIENT
    assert process.run(make_in, victim.client, victim.client, victim.device, nv.DEVICE) == nv.BAD_CLIENT
    assert process.run(free_os_event, victim.client) == nv.BAD_CLIENT
    assert (qg.sim()["objects"], qg.used()) == before


def test_a_client_that_rm_dropped_again_is_not_claimed(web, outside, parameter):
    """RM names it before it refuses its rights. When the call comes back, a process outside has the handle."""
    (process,) = web.processes
    parameter("late_us", 1_000_000)
    parameter("at_once", 0)
    process.start(make_client, 0xC1D0ABCD, 0, 0, "ctl", 1)
    qg.until(lambda: int(AT_ONCE.read_text()))
    parameter("next_client", 0xC1D0ABCD)
    second = outside["p"].alloc(0, nv.ROOT, handle=0)
    said = process.result()

    assert (said, second) == ((nv.NO_PERMISSION, 0xC1D0ABCD), 0xC1D0ABCD)
    assert web.info().nr_clients == 1


def test_a_client_under_a_handle_that_is_free_is_a_pods(web):
    (process,) = web.processes

    assert process.run(make_client, 0xC1D0F00D, 0) == (0, 0xC1D0F00D)
    assert process.run(make_client, 0xC1D0F00D, 0xC1D0F00D)[0] == TAKEN
    assert web.info().nr_clients == 2


@pytest.mark.parametrize(("root", "handle"), [(0, 0), (0, 0xC1D0ABCD), (0xC1D0ABCD, 0), (0xC1D0ABCD, 0xC1D0ABCD)])
def test_a_client_that_rm_made_and_denies_is_a_pods(web, parameter, root, handle):
    """RM cannot write the parameters back, and keeps the client. A pod that foresees its handle hides nothing."""

    def denied(state, root, handle):
        page = mmap.mmap(-1, mmap.PAGESIZE)
        at = ctypes.addressof(ctypes.c_char.from_buffer(page))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), mmap.PAGESIZE, mmap.PROT_READ) == 0
        return make_client(state, root, handle, at)

    parameter("next_client", 0 if root else 0xC1D0ABCD)

    assert web.processes[0].run(denied, root, handle) == (NOT_WRITTEN, 0xC1D0ABCD)
    assert web.info().nr_clients == 2


def opened(state):
    state["ctl"], state["card"] = os.open(nv.CTL, os.O_RDWR), os.open(nv.GPU.format(0), os.O_RDWR)
    return os.getpid(), state["ctl"], state["card"]


def take_files(state, pid, *files):
    state["files"] = [qg.take_descriptor(pid, fd) for fd in files]


def errno_of(function, *args):
    try:
        function(*args)
    except OSError as error:
        return error.errno
    return 0


def use(state):
    """Make a client by each file, and map it; what comes of that."""
    calls = [errno_of(nv.call, fd, 0x2B, bytearray(48)) for fd in state["files"]]
    return calls + [errno_of(mmap.mmap, fd, mmap.PAGESIZE) for fd in state["files"]]


def test_files_of_an_ended_pod_are_of_no_use_to_another(qgpu, pod):
    """Nobody would be charged for what it made, and no gate would close."""
    ended, other = pod("ended"), pod("other", memory=64 * MIB + ROOM)
    first, second = ended.process(), other.process()
    second.run(take_files, *first.run(opened))
    assert errno.EPERM not in second.run(use)  # the first pod's, while there is one
    first.kill()
    qgpu.ioctl("POD_REMOVE", pod=ended.id)

    assert second.run(use) == [errno.EPERM] * 4
    assert (other.held(), qg.sim()["clients"]) == (0, 1)  # made above


@pytest.fixture
def two(pod):
    """Programs of two pods: one has what the other wants."""
    has, wants = (pod(name, memory=64 * MIB + ROOM) for name in ("has", "wants"))
    for each in (has, wants):
        each.process().run(program)
    return has, wants


def client_of(state):
    return state["p"].client


def test_what_another_pod_shares_with_all_is_not_duplicated(two):
    """The simulated driver lets anybody duplicate anything, as RM does where an object is shared with all."""
    has, wants = two
    (owner,), (thief,) = has.processes, wants.processes
    memory = owner.run(take, 16 * MIB)
    before = qg.sim()["objects"]

    assert thief.run(duplicate, owner.run(client_of), memory) == -nv.NO_PERMISSION
    assert (wants.held(), wants.info().refused_allocs, qg.sim()["objects"]) == (0, 1, before)


def test_what_is_in_no_pod_is_not_duplicated(web, outside):
    memory = outside["p"].memory(MIB)

    assert web.processes[0].run(duplicate, outside["p"].client, memory) == -nv.NO_PERMISSION


def test_processes_of_a_pod_share_memory(web):
    """As by cudaIpcOpenMemHandle: it is charged once, and for as long as one of the two has it."""
    owner, other = web.processes[0], web.process()
    other.run(program)
    memory = owner.run(take, 32 * MIB)

    assert other.run(duplicate, owner.run(client_of), memory) > 0
    owner.stop()
    assert web.held() == qg.used() == 32 * MIB


def exchange(friend, owner, client, parameter):
    """Free a client, and give its handle to one of another pod that has memory. False: the call that frees it waits."""
    friend.start(free, client)
    parameter("next_client", client)
    exchanged = friend.pipe.poll(0.5)
    if exchanged:
        owner.run(program)
        owner.run(take, MIB, 0x5C00BEEF)
    return exchanged


def test_a_client_is_not_exchanged_during_a_duplicate(pod, linger, late, parameter):
    """Until the module looks at what RM has made, another process of the pod could duplicate that."""
    has, wants = pod("has"), pod("wants", memory=64 * MIB + ROOM)
    owner, (thief, friend, heir) = has.process(), (wants.process() for _ in range(3))
    for each in (thief, friend, heir):
        each.run(program)
    client, copy = friend.run(client_of), thief.run(lambda state: (state["p"].client, state["p"].last + 1))
    friend.run(take, MIB, 0x5C00BEEF)
    linger(1500000)
    thief.start(duplicate, client, 0x5C00BEEF)
    threading.Event().wait(0.1)
    linger(0)
    exchanged = exchange(friend, owner, client, parameter)
    late(1500000)
    objects = qg.sim()["objects"]
    qg.until(lambda: qg.sim()["objects"] > objects)
    late(0)
    took = heir.run(duplicate, *copy)
    thief.result()
    friend.result()

    assert not (exchanged and took > 0)
    assert qg.used() == wants.held() == MIB


def test_clients_that_duplicate_from_each_other_go_on(web):
    """Each call needs both."""

    def dup_often(state, client, handle):
        for _ in range(200):
            state["p"].free(state["p"].dup(client, handle))

    first, second = web.processes[0], web.process()
    second.run(program)
    names = [(each.run(client_of), each.run(take, MIB)) for each in (first, second)]
    first.start(dup_often, *names[1])
    second.start(dup_often, *names[0])
    first.result()
    second.result()

    assert web.held() == qg.used() == 2 * MIB


def event(state, client):
    """An event in a client that the parameters name; RM's status."""
    p = state["p"]
    try:
        p.alloc(p.device, 0x79, struct.pack("II24x", client, p.device))
    except nv.RmError as error:
        return error.status
    return 0


def move_mapping(state, client):
    """Tell RM that a mapping of a client's memory is elsewhere now; RM's status."""
    p = state["p"]
    data = bytearray(struct.pack("4I2Q2I", client, p.device, p.device, 0, 0x1000, 0x2000, 0, 0))
    nv.call(p.ctl, 0x5E, data)
    return struct.unpack_from("I", data, 32)[0]


def test_mappings_of_another_pod_are_not_changed(two):
    """RM asks for no file: by the number of the process alone."""
    has, wants = two
    (owner,), (thief,) = has.processes, wants.processes
    client = owner.run(client_of)

    assert thief.run(move_mapping, client) == nv.BAD_CLIENT
    assert (owner.run(move_mapping, client), thief.run(move_mapping, thief.run(client_of))) == (0, 0)


def test_parameters_name_no_client_that_could_be_exchanged(two, linger, parameter):
    """The call waits in the driver; meanwhile another pod's client takes the handle of the one that it names."""
    has, wants = two
    (owner,), (thief, friend) = has.processes, (*wants.processes, wants.process())
    friend.run(program)
    client = friend.run(client_of)
    linger(1500000)
    thief.start(event, client)
    threading.Event().wait(0.1)
    linger(0)
    friend.run(free, client)
    parameter("next_client", client)
    owner.run(program)
    assert owner.run(client_of) == client

    assert thief.result() == nv.BAD_HANDLE
    assert thief.run(event, thief.run(client_of)) == 0


def test_nothing_is_duplicated_while_calls_are_not_sealed(web):
    """Another thread could name another pod's client after the check."""
    (process,) = web.processes
    client, memory = process.run(client_of), process.run(take, MIB)
    with qg.switched_off(qg.KPROBES):
        qg.until(lambda: process.run(duplicate, client, memory) == -nv.NO_PERMISSION)

    qg.until(lambda: process.run(duplicate, client, memory) > 0)


def test_programs_of_a_pod_older_than_the_module_share_memory(two):
    """The module does not know whose their clients are. RM looks at who may have what."""
    has, wants = two
    old = [qg.Process(None), qg.Process(None)]
    for each in old:
        each.run(program)
        (wants.cgroup / "cgroup.procs").write_text(str(each.pid))
    wants.processes += old
    lent, kept = old[0].run(take, MIB), has.processes[0].run(take, MIB)

    assert old[1].run(duplicate, old[0].run(client_of), lent) > 0
    assert old[1].run(duplicate, has.processes[0].run(client_of), kept) == -nv.NO_PERMISSION


def take_control(state, pid, fd):
    """Another process's control file, and a card's file of its own."""
    state["ctl"], state["card"] = qg.take_descriptor(pid, fd), os.open(nv.GPU.format(0), os.O_RDWR)


def ctl_of(state):
    return os.getpid(), state["p"].ctl


def tie(state):
    return errno_of(nv.call, state["card"], 201, bytearray(struct.pack("I", state["ctl"])))


def make_by_card(state, client, parent):
    """Memory in any client, by the card's file; RM's status, or an errno with a minus."""
    block = ctypes.create_string_buffer(struct.pack("64xQ56x", MIB), 128)
    data = bytearray(nv._ALLOC.pack(client, parent, 0x5C00ABCD, nv.MEM, ctypes.addressof(block), 0, 0, 0, 0xFFFF, 0))
    return -errno_of(nv.call, state["card"], 0x2B, data) or nv._ALLOC.unpack(data)[8]


def device_of(state):
    return state["p"].client, state["p"].device


def test_a_cards_file_is_not_tied_to_another_pods_control_file(two):
    """RM would take its calls for calls on that one, and the memory would be charged to nobody."""
    has, wants = two
    (owner,), (thief,) = has.processes, wants.processes
    thief.run(take_control, *owner.run(ctl_of))

    assert thief.run(tie) == errno.EPERM
    assert thief.run(make_by_card, *owner.run(device_of)) == -errno.EPERM
    assert qg.used() == 0


def test_a_file_tied_to_another_pods_reaches_no_client(two):
    """As where a second thread exchanges the control file after the module has looked at it."""
    has, wants = two
    thief = qg.Process(None)
    thief.run(take_control, *has.processes[0].run(ctl_of))
    assert thief.run(tie) == 0  # in no pod yet: RM alone looks
    (wants.cgroup / "cgroup.procs").write_text(str(thief.pid))
    wants.processes.append(thief)

    assert thief.run(make_by_card, *has.processes[0].run(device_of)) == -errno.EPERM
    assert qg.used() == 0


def test_files_of_one_pod_are_tied_from_process_to_process(web):
    other = web.process()
    other.run(take_control, *web.processes[0].run(ctl_of))

    assert other.run(tie) == 0
    assert other.run(make_by_card, *web.processes[0].run(device_of)) == 0
    assert web.held() == qg.used() == MIB

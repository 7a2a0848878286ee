"""Share groups: a TSG with handles in several clients of a pod, as MPS makes them, and pods of several cgroups."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import struct
import threading
from pathlib import Path

import nv
import pytest
import qg
from faults import ENFORCE
from programs import MIB, ROOM, program, status_of

GROUPS, SHARED = qg.N["QGPU_INFO_GROUPS"], qg.N["QGPU_TSG_SHARED"]
NOT_SUPPORTED, INVALID_STATE, NO_RESOURCES = 0x56, 0x40, 0x1A
CONTEXT_SHARE = 0x9067
COMPUTE = 16 * MIB
CILP = 2


def server(state, channels=1, kernel_us=100):
    """A TSG as an MPS server makes it, with work; the names that a client duplicates."""
    p = state["p"] = nv.Program()
    state["tsg"], state["channels"] = p.compute(channels)
    for channel in state["channels"]:
        p.submit(channel, kernel_us)
    return p.client, state["tsg"]


def join(state, client, tsg, channels=1, kernel_us=100):
    """Duplicate it, and make channels below; 0, or RM's status."""
    p = state.setdefault("p", None) or nv.Program()
    state["p"] = p
    try:
        state["tsg"] = p.dup(client, tsg)
    except nv.RmError as error:
        return error.status
    state["channels"] = [p.channel(state["tsg"]) for _ in range(channels)]
    for channel in state["channels"]:
        p.submit(channel, kernel_us)
    return 0


def free_tsg(state):
    return state["p"].free(state["tsg"])


def run_ns(state):
    seen = state["p"].query(state["channels"][0])
    return seen["run_ns"], seen["now_ns"]


def card():
    """By TSG of the card: channels off, and the timeslice in us."""
    return [(tsg["off"], tsg["slice_ns"] // 1000) for tsg in qg.sim_tsgs()]


@pytest.fixture
def group(qgpu, pod):
    """A pod with a server, and with a client that has two channels below its handle."""
    made = pod("group", memory=10 * COMPUTE + ROOM)
    first = made.process()
    named = first.run(server)
    second = made.process()
    assert second.run(join, *named, 2) == 0
    return made


def test_channels_below_each_handle_are_one_tsgs(group, qgpu):
    usage, (tsg,) = group.usage(), qgpu.tsgs(group.id)

    assert (usage.nr_tsgs, usage.nr_channels, tsg.nr_channels) == (1, 3, 3)
    assert tsg.flags == SHARED | qg.N["QGPU_ENGINE_COMPUTE"]
    assert len(qg.sim_tsgs()) == 1
    assert qgpu.info().flags & GROUPS


def test_gate_and_slice_are_those_of_all_handles(group, qgpu):
    qgpu.plan((group.id, 5000, []))
    closed = card()
    qgpu.plan((group.id, 3000))

    assert closed == [(3, 5000)]
    assert card() == [(0, 3000)]


def test_a_channel_made_behind_a_closed_gate_is_off(group, qgpu):
    qgpu.plan((group.id, 5000, []))
    group.processes[1].run(lambda state: state["p"].channel(state["tsg"]))

    assert card() == [(4, 5000)]


@pytest.mark.parametrize("first", [0, 1], ids=["server first", "client first"])
def test_what_one_handle_leaves_is_gated_until_the_last(group, qgpu, first):
    qgpu.plan((group.id, 5000, []))
    channels = [1, 2]
    assert group.processes[first].run(free_tsg) == 0
    left = card()
    qgpu.plan((group.id, 3000))
    opened = card()
    assert group.processes[1 - first].run(free_tsg) == 0

    assert (left, opened) == ([(channels[1 - first], 5000)], [(0, 3000)])
    assert (qg.sim_tsgs(), qgpu.tsgs(group.id)) == ([], [])


@pytest.mark.parametrize("killed", [0, 1], ids=["server", "client"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_member_leaves_the_others_gated(group, qgpu, killed, how):
    qgpu.plan((group.id, 5000, []))
    group.processes[killed].kill(how)
    qg.until(lambda: card() == [([2, 1][killed], 5000)])
    (tsg,) = qgpu.tsgs(group.id)
    before, after = (group.processes[1 - killed].run(run_ns) for _ in range(2))
    qgpu.plan()

    assert tsg.tgid == group.processes[1 - killed].pid
    assert before[0] == after[0]
    assert card() == [(0, 1024)]


def test_each_members_process_is_told(group, qgpu):
    (tsg,) = qgpu.tsgs(group.id)
    found, last = [], 0
    with contextlib.suppress(FileNotFoundError):
        while True:
            found.append(qgpu.ioctl("HANDLE_NEXT", tsg=tsg.id, stamp=last))
            last = found[-1].stamp

    assert [each.tgid for each in found] == [process.pid for process in group.processes]
    assert (found[0].client, found[0].handle, tsg.tgid) == (tsg.client, tsg.handle, found[0].tgid)


def test_each_handle_is_charged_and_bounded_by_the_limit(pod):
    small = pod("small", memory=2 * COMPUTE + ROOM)
    named = small.process().run(server)
    second, third = small.process(), small.process()

    assert second.run(join, *named) == 0
    assert small.held() == 2 * COMPUTE
    objects = qg.sim()["objects"]
    assert third.run(join, *named) == nv.NO_MEMORY
    assert qg.sim()["objects"] == objects + 2  # its device and its subdevice
    second.run(free_tsg)
    assert third.run(join, *named) == 0


def test_a_client_of_another_pod_gets_no_handle(group, pod):
    other = pod("other").process()
    other.run(program)
    objects = qg.sim()["objects"]
    client, tsg = group.processes[0].run(lambda state: (state["p"].client, state["tsg"]))

    assert other.run(join, client, tsg) == nv.NO_PERMISSION
    assert qg.sim()["objects"] == objects


@pytest.mark.parametrize("what", ["channel", "context share"])
def test_other_gated_objects_have_one_handle(group, what):
    def handle(state, what, context_share):
        p = state["p"]
        return p.client, state["channels"][0] if what == "channel" else p.alloc(state["tsg"], context_share)

    client, second = group.processes[0].run(handle, what, CONTEXT_SHARE)

    assert group.processes[1].run(join, client, second) == NOT_SUPPORTED


@pytest.mark.parametrize("freed", [False, True], ids=["never had", "freed"])
def test_a_handle_needs_a_device_with_a_subdevice(group, freed):
    def bare(state, client, tsg, freed):
        p = nv.Program()
        if freed:
            p.free(p.subdevice)
        else:
            p.device = p.alloc(p.client, nv.DEVICE, struct.pack("I52x", 0))
        try:
            p.dup(client, tsg)
        except nv.RmError as error:
            return error.status
        finally:
            p.close()
        return 0

    client, tsg = group.processes[0].run(lambda state: (state["p"].client, state["tsg"]))

    assert group.processes[1].run(bare, client, tsg, freed) == INVALID_STATE


def test_a_tsg_has_a_bounded_number_of_handles(pod):
    def many(state, client, tsg):
        taken = 0
        p = state["p"] = nv.Program()
        while True:
            try:
                p.dup(client, tsg)
            except nv.RmError as error:
                return taken, error.status
            taken += 1

    big = pod("big")
    named = big.process().run(server)

    assert big.process().run(many, *named) == (127, NO_RESOURCES)


def test_another_tsg_takes_no_sources_place_during_a_duplicate(group, linger):
    """The duplicate waits in the driver, and the call that would free the source waits for that."""

    def replace(state):
        p = state["p"]
        handle = state["tsg"]
        p.free(handle)
        return p.alloc(p.device, nv.TSG, struct.pack("12xI4x", 1), handle)

    maker, taker = group.processes
    client, tsg = maker.run(lambda state: (state["p"].client, state["tsg"]))
    linger(500000)
    taker.start(join, client, tsg)
    threading.Event().wait(0.1)
    linger(0)
    maker.run(replace)

    assert taker.result() == 0
    assert len(qg.sim_tsgs()) == 2


def join_beside_another_client(state, client, tsg):
    """Duplicate a TSG in the younger of two clients of a file; the elder."""
    p = state["p"] = nv.Program()
    elder, p.client = p.client, 0
    p.client = p.alloc(0, nv.ROOT, handle=0)
    p.device = p.alloc(p.client, nv.DEVICE, bytes(56))
    p.subdevice = p.alloc(p.device, nv.SUBDEVICE, bytes(4))
    p.dup(client, tsg)
    return elder


def free_in(state, client):
    """Another process's client; RM refuses it."""
    data = bytearray(struct.pack("IIII", client, 0, 0x5C00BEEF, 0xFFFF))
    nv.call(state["p"].ctl, 0x29, data)


def test_a_file_that_waits_to_close_leaves_the_gate_closed(qgpu, pod, linger):
    """A call has the elder client's lock, for as long as its process likes."""
    made = pod("group", memory=10 * COMPUTE + ROOM)
    first, member, holder = (made.process() for _ in range(3))
    elder = member.run(join_beside_another_client, *first.run(server))
    holder.run(program)
    qgpu.plan((made.id, 5000, []))
    linger(3000000)
    holder.start(free_in, elder)
    threading.Event().wait(0.1)
    linger(0)
    member.start(lambda state: os.close(state["p"].ctl))
    threading.Event().wait(1)
    meanwhile = card()
    for each in (member, holder):
        each.result()

    assert (meanwhile, card()) == ([(1, 5000)], [(1, 5000)])


def clients_of_one_file(state):
    """Three clients, of which the youngest has a kernel on the card; their handles."""
    p = state["p"] = nv.Program()
    handles = [p.client]
    for _ in range(2):
        p.client = p.alloc(0, nv.ROOT, handle=0)
        handles.append(p.client)
    p.device = p.alloc(p.client, nv.DEVICE, bytes(56))
    p.subdevice = p.alloc(p.device, nv.SUBDEVICE, bytes(4))
    _, (channel,) = p.compute()
    p.submit(channel, 100)
    return handles


@pytest.mark.parametrize("before", [False, True], ids=["younger client", "elder client"])
def test_a_duplicate_keeps_no_client_of_a_file_that_closes(qgpu, pod, linger, before):
    """Else gates of the file's other clients would be open for as long as another call of the pod likes.

    The module locks the client with the lower handle first.
    """
    made = pod("web")
    member, taker, *holders = (made.process() for _ in range(5))
    if before:
        taker.run(program)
    elder, source, _ = member.run(clients_of_one_file)
    if not before:
        taker.run(program)
    for process in holders:
        process.run(program)
    own = taker.run(lambda state: state["p"].client)
    assert (own < source) is before
    qgpu.plan((made.id, 5000, []))
    linger(2000000)
    holders[0].start(free_in, elder)
    threading.Event().wait(0.1)
    linger(1000000)
    holders[1].start(free_in, source)
    threading.Event().wait(0.1)
    linger(0)
    member.start(lambda state: os.close(state["p"].ctl))
    threading.Event().wait(0.1)
    taker.start(status_of, "dup", source, 0x5C00BEEF)
    threading.Event().wait(0.1)
    linger(4000000)
    holders[2].start(free_in, own)
    threading.Event().wait(2.5)
    meanwhile = card()
    linger(0)
    for process in (member, *holders):
        process.result()

    assert (taker.result(), meanwhile) == (nv.NO_PERMISSION, [])


def duplicate_into(state, client):
    """Another process's client; RM refuses it."""
    p = state["p"]
    own, p.client = p.client, client
    return status_of(state, "dup", own, 0x5C00BEEF)


def test_a_duplicate_into_a_file_that_closes_keeps_no_client(qgpu, pod, linger):
    """It gives up the lock of its own client, which ends while the duplicate waits for the source's."""
    made = pod("web")
    member, taker, *holders = (made.process() for _ in range(5))
    for process in (taker, *holders):
        process.run(program)
    elder, own, _ = member.run(clients_of_one_file)
    source = taker.run(lambda state: state["p"].client)
    assert own > source
    qgpu.plan((made.id, 5000, []))
    for us, process, client in ((2000000, 0, elder), (1000000, 1, own), (1600000, 2, source)):
        linger(us)
        holders[process].start(free_in, client)
        threading.Event().wait(0.1)
    linger(4000000)
    taker.start(duplicate_into, own)
    threading.Event().wait(0.1)
    member.start(lambda state: os.close(state["p"].ctl))
    threading.Event().wait(2.2)
    meanwhile = card()
    linger(0)
    for process in (member, *holders):
        process.result()

    assert (taker.result(), meanwhile) == (nv.NO_PERMISSION, [])


def test_compute_below_a_duplicate_can_be_preempted(pod):
    def compute(state):
        state["p"].alloc(state["channels"][0], 0xCBC0)

    made = pod("group")
    named = made.process().run(server)
    client = made.process()
    client.run(join, *named)
    client.run(compute)

    assert [tsg["mode"] for tsg in qg.sim_tsgs()] == [CILP]


def test_each_channel_is_gated_by_its_own_client(group, qgpu, parameter):
    """Even if the firmware takes a client's channels from nobody else."""
    parameter("gate_own_clients", "Y")
    qgpu.plan((group.id, 5000, []))
    qg.until(lambda: card() == [(3, 5000)])
    group.processes[0].run(free_tsg)
    qg.until(lambda: card() == [(2, 5000)])
    qgpu.plan()

    qg.until(lambda: card() == [(0, 1024)])


@pytest.mark.parametrize("how", ["die", "lapse", "off", "remove"])
@pytest.mark.parametrize("left", [0, 1], ids=["servers", "clients"])
def test_the_gate_opens_by_whichever_handle_is_left(qgpu, group, how, left):
    daemon = qg.Qgpu()
    daemon.plan((group.id, 5000, []), lease_ns=200 * qg.MS if how == "lapse" else 60_000 * qg.MS)
    group.processes[1 - left].kill()
    if how == "die":
        daemon.close()
    elif how == "off":
        ENFORCE.write_text("0")
    elif how == "remove":
        qgpu.ioctl("POD_REMOVE", pod=group.id)
    qg.until(lambda: card() == [(0, 1024)])
    daemon.close()
    ENFORCE.write_text("1")

    assert card() == [(0, 1024)]


def test_ends_of_processes_with_handles_gain_no_time(group, qgpu):
    """Each end opens the gate, so each new handle is paid for."""

    def loop(state, client, tsg):
        before = state["p"].query(state["channels"][0])
        for _ in range(15):
            p = nv.Program()
            p.channel(p.dup(client, tsg))
            p.close()
        after = state["p"].query(state["channels"][0])
        return (after["run_ns"] - before["run_ns"]) / (after["now_ns"] - before["now_ns"])

    client, tsg = group.processes[0].run(lambda state: (state["p"].client, state["tsg"]))
    qgpu.plan((group.id, 5000, []))

    assert group.processes[1].run(loop, client, tsg) < 0.25
    assert card() == [(3, 5000)]


def test_the_module_goes_while_handles_are_duplicated(group, qgpu):
    planner = qg.Qgpu()
    planner.plan((group.id, 5000, []))
    assert card() == [(3, 5000)]
    planner.close()
    qgpu.close()
    qg.until(lambda: card() == [(0, 1024)])
    qg.rmmod("qgpu")
    group.processes[0].run(free_tsg)
    left = [row["off"] for row in qg.sim_tsgs()]
    qg.insmod("qgpu.ko")
    qgpu.__init__()
    group.id = group.add()

    assert left == [0]


# -- pods of several cgroups


@pytest.fixture
def container():
    """A cgroup of its own, as a container has."""
    made = qg.CGROUPS / "container"
    made.mkdir()
    yield made
    for path in (made / "below", made):
        with contextlib.suppress(FileNotFoundError):
            qg.until(lambda path=path: _removed(path))


def _removed(path: Path) -> bool:
    try:
        path.rmdir()
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise
    return True


def pod_join(qgpu, pod, path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        qgpu.ioctl("POD_JOIN", pod=pod, cgroup_fd=fd)
    finally:
        os.close(fd)


def joined(qgpu, pod):
    found, last = [], 0
    with contextlib.suppress(FileNotFoundError):
        while True:
            last = qgpu.ioctl("POD_JOINED_NEXT", pod=pod, cgroup=last).cgroup
            found.append(last)
    return found


@pytest.fixture
def member(container):
    """A process in the container's cgroup; it ends before the pods do."""
    made: list[qg.Process] = []

    def make(path=container):
        made.append(qg.Process(path))
        return made[-1]

    yield make
    for each in made:
        each.kill()


def test_a_process_of_a_joined_cgroup_is_the_pods(group, qgpu, container, member):
    pod_join(qgpu, group.id, container)
    (container / "below").mkdir()
    named = group.processes[0].run(lambda state: (state["p"].client, state["tsg"]))
    assert member().run(join, *named) == 0
    assert member(container / "below").run(join, *named) == 0

    assert group.usage().nr_channels == 5
    assert joined(qgpu, group.id) == [container.stat().st_ino]


def test_a_cgroup_that_left_is_the_pods_no_more(group, qgpu, container, member):
    pod_join(qgpu, group.id, container)
    qgpu.ioctl("POD_LEAVE", pod=group.id, cgroup=container.stat().st_ino)
    outside = member()
    outside.run(program)
    clients = group.info().nr_clients
    with pytest.raises(FileNotFoundError):
        qgpu.ioctl("POD_LEAVE", pod=group.id, cgroup=container.stat().st_ino)
    outside.kill()

    assert (clients, joined(qgpu, group.id)) == (2, [])


def test_a_cgroup_counts_to_one_pod(group, qgpu, pod, container):
    other = pod("other")
    pod_join(qgpu, group.id, container)
    for taken in (container, group.cgroup, other.cgroup):
        with pytest.raises(FileExistsError):
            pod_join(qgpu, other.id, taken)
    fd = os.open(container, os.O_RDONLY | os.O_DIRECTORY)
    with pytest.raises(FileExistsError):
        qgpu.ioctl("POD_ADD", cgroup_fd=fd, name=b"third")
    os.close(fd)
    qgpu.ioctl("POD_REMOVE", pod=group.id)
    pod_join(qgpu, other.id, container)

    assert joined(qgpu, other.id) == [container.stat().st_ino]


def test_the_deepest_cgroup_of_several_counts(group, qgpu, pod, container, member):
    """A pod of its own inside a container that has joined another."""
    (container / "below").mkdir()
    pod_join(qgpu, group.id, container)
    fd = os.open(container / "below", os.O_RDONLY | os.O_DIRECTORY)
    inner = qgpu.ioctl("POD_ADD", cgroup_fd=fd, name=b"inner").pod
    os.close(fd)
    inside = member(container / "below")
    inside.run(program)
    clients = {each.pod: each.nr_clients for each in qgpu.pods()}
    inside.kill()
    qgpu.ioctl("POD_REMOVE", pod=inner)

    assert (clients[group.id], clients[inner]) == (2, 1)


def test_joined_cgroups_are_bounded_and_checked(group, qgpu, container):
    folders = [container / str(i) for i in range(qg.N["QGPU_MAX_JOINED"] + 1)]
    for folder in folders:
        folder.mkdir()
    for folder in folders[:-1]:
        pod_join(qgpu, group.id, folder)
    with pytest.raises(OSError, match="No space"):
        pod_join(qgpu, group.id, folders[-1])
    for call, fields, error in (
        ("POD_JOIN", {"cgroup_fd": 0}, errno.EBADF),
        ("POD_JOIN", {"cgroup_fd": 0, "flags": 1}, errno.EINVAL),
        ("POD_JOIN", {"cgroup_fd": 0, "cgroup": 1}, errno.EINVAL),
        ("POD_LEAVE", {"cgroup": 1, "cgroup_fd": 1}, errno.EINVAL),
        ("POD_LEAVE", {"cgroup": 1, "flags": 1}, errno.EINVAL),
        ("POD_JOINED_NEXT", {"cgroup_fd": 1}, errno.EINVAL),
    ):
        with pytest.raises(OSError, match=os.strerror(error)):
            qgpu.ioctl(call, pod=group.id, **fields)
    count = len(joined(qgpu, group.id))
    for folder in folders:
        folder.rmdir()

    assert count == qg.N["QGPU_MAX_JOINED"]

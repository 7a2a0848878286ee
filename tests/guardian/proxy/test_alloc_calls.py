"""What a pod makes of RM is in the register, and what would be out of every gate's reach is not made."""

from __future__ import annotations

import errno
import os
import struct

import pytest

from qgpu.guardian.accounting import memory_quota
from qgpu.guardian.accounting.object_table import OTHER_TSG_BYTES, ObjectTable
from qgpu.guardian.proxy import alloc_checks, client_registry, object_claims, os_events
from qgpu.guardian.rules import classes
from qgpu.linux import fd_budget
from qgpu.linux.inflight_syscalls import InflightSyscalls
from qgpu.nvidia import abi
from qgpu.nvidia.rm_client import take
from tests.guardian.asked import (
    DEVICE_PARAMS,
    TSG,
    TSG_PARAMS,
    alloc,
    alloc_status,
    device,
    dup,
    dup_status,
    free,
    heap,
    heap_status,
    subdevice,
)
from tests.guardian.charges import charged
from tests.guardian.fake_rm import PAGE
from tests.guardian.pod import MINOR, allocate, device_of, make_device


@pytest.mark.parametrize("form", ["long", "short"])
def test_rm_objects_enter_table_when_made_and_leave_when_freed(on_card, form):
    asked = alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A)
    on_card.call(abi.NV_ESC_RM_ALLOC, asked if form == "long" else asked[:24] + bytes(8), TSG_PARAMS)
    made = [tsg.key for tsg in on_card.shared.table.compute_tsgs(0)]
    on_card.call(abi.NV_ESC_RM_FREE, free(TSG))

    assert made == [(7, TSG)]
    assert on_card.shared.table.compute_tsgs(0) == []


def test_a_card_without_a_grant_gives_no_device(pod):
    answer = pod.call(abi.NV_ESC_RM_ALLOC, device(), struct.pack("<I", 1) + bytes(52))

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_ERR_INSUFFICIENT_PERMISSIONS)
    assert pod.rm.seen == []


def test_first_device_is_made_by_kernel_and_its_card_verified(pod):
    make_device(pod)
    pod.rm.instances[7, 2] = 1  # it was made on another card than was checked
    answer = pod.call(abi.NV_ESC_RM_ALLOC, subdevice(), bytes(4))

    assert alloc_status(answer[2]) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
    assert (7, 2) not in pod.rm.objects
    assert pod.shared.refusals.counts["web", "card without a grant"] == 1


def test_no_memory_below_device_whose_card_is_unknown(pod):
    make_device(pod)

    assert allocate(pod, 10, PAGE) == abi.NV_ERR_INVALID_STATE


@pytest.mark.parametrize("found", [True, False])
def test_a_device_under_another_handle_is_freed_or_remembered(pod, found):
    """What lies below a device that nobody knows would be looked at by nobody."""
    make_device(pod)
    pod.rm.objects[7, 66] = pod.rm.objects.pop((7, 2))
    pod.rm.stale |= set() if found else {7}
    second = pod.call(abi.NV_ESC_RM_ALLOC, device(4), DEVICE_PARAMS)

    assert ((7, 66) in pod.rm.objects) is not found
    assert alloc_status(second[2]) == abi.NV_OK  # the guardian made it


def test_a_device_out_of_reach_for_a_moment_is_kept(pod, monkeypatch):
    looks, find = [], pod.rm.find_object
    monkeypatch.setattr(pod.rm, "find_object", lambda rm: looks.append(rm) or (find(rm) if len(looks) > 2 else None))
    make_device(pod)
    pod.call(abi.NV_ESC_RM_ALLOC, subdevice(), bytes(4))

    assert (7, 2) in pod.rm.objects
    assert pod.shared.table.objects[7, 2].confirmed
    assert not pod.dispatcher._passthrough.may_have_device(7)


def channel_on(engine):
    """Return a channel's parameters with an engine type."""
    at = abi.offsetof("NV_CHANNEL_ALLOC_PARAMS", "engineType")
    return bytes(at) + engine.to_bytes(4, "little") + bytes(368 - at - 4)


@pytest.mark.parametrize("engine", [0, 1, 8], ids=["no engine", "GR0", "GR7"])
def test_compute_channel_outside_a_tsg_is_refused(on_card, engine):
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(9, 2, 0xC86F), channel_on(engine))

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_ERR_INVALID_ARGUMENT)


@pytest.mark.parametrize("parent", [3, 1 << 20], ids=["subdevice", "nothing known"])
def test_channel_below_anything_but_a_device_is_refused(on_card, parent):
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(9, parent, 0xC86F), channel_on(11))

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_ERR_INVALID_ARGUMENT)


@pytest.mark.parametrize(("engine", "copies"), [(11, True), (0x13, False)], ids=["copy", "video"])
def test_channel_of_another_engine_may_stand_alone(on_card, engine, copies):
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(9, 2, 0xC86F), channel_on(engine))

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_OK)
    table = on_card.shared.table
    assert [rm.handle for rm in table.copy_tsgs(0)] == [9] * copies
    assert [rm.handle for rm in table.channels(table.objects[7, 9])] == [9]
    assert charged(table, "web")[0] == OTHER_TSG_BYTES


#: MPEG, the software engine, VIC, the host, the firmware of the frame buffer, one beyond the last, all engines.
OTHER_ENGINES = [0x21, 0x22, 0x24, 0x27, 0x2A, 0x54, 0xFFFFFFFF]


def tsg_and_lone_channel(pod, engine):
    """Ask for both on an engine; return their statuses."""
    group = struct.pack("<IIIII", 0, 0, 0, engine, 0)
    tsg = pod.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), group)
    alone = pod.call(abi.NV_ESC_RM_ALLOC, alloc(9, 2, 0xC86F), channel_on(engine))
    return [alloc_status(each[2]) for each in (tsg, alone)]


@pytest.mark.parametrize("engine", OTHER_ENGINES, ids=hex)
def test_engine_that_no_share_covers_is_refused(on_card, engine):
    assert tsg_and_lone_channel(on_card, engine) == [abi.NV_ERR_INVALID_ARGUMENT] * 2
    assert on_card.shared.refusals.counts["web", alloc_checks.OTHER_ENGINE] == 2


#: The first and the last of copy, video decoders, encoders, JPEG, OFA and compression, and SEC2.
USED = [0x09, 0x12, 0x13, 0x1A, 0x1B, 0x1D, 0x26, 0x2B, 0x32, 0x33, 0x34, 0x3D, 0x3E, 0x3F, 0x40, 0x53]


@pytest.mark.parametrize("engine", USED, ids=hex)
def test_engine_that_programs_use_is_allowed(on_card, engine):
    assert tsg_and_lone_channel(on_card, engine) == [abi.NV_OK] * 2


def test_compute_on_a_channel_that_stands_alone_is_refused(on_card):
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(9, 2, 0xC86F), channel_on(11))
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(10, 9, 0xCBC0), bytes(16))

    assert alloc_status(answer[2]) == abi.NV_ERR_INVALID_ARGUMENT


def test_a_lone_channel_on_the_compute_runlist_is_refused(on_card):
    """Nothing could set its timeslice, and its copies take the time of kernels."""
    on_card.shared.table.grces = {0: {0x09}}

    assert tsg_and_lone_channel(on_card, 0x09) == [abi.NV_OK, abi.NV_ERR_INVALID_ARGUMENT]


#: A TSG's engine, and that of a copy object as a number (0) or a type (1): whose runlist is the TSG's, whose is not.
STAYS = [(11, 0, 2), (11, 1, 12), (1, 0, 1), (0, 1, 0x09), (0x0A, 0, 0)]
LEAVES = [(11, 0, 1), (11, 1, 0x0A), (0x13, 0, 0), (0x13, 0, 2), (1, 0, 2), (11, 1, 1), (11, 0, 64)]


def copy_object(pod, engine, params):
    """Ask for one on a channel of a TSG on an engine; return its status."""
    pod.shared.table.grces = {0: {0x09, 0x0A}}
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), struct.pack("<5I", 0, 0, 0, engine, 0))
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(20, TSG, 0xC86F), bytes(368))
    return alloc_status(pod.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC8B5), params)[2])


@pytest.mark.parametrize(("engine", "form", "copies"), STAYS)
def test_a_copy_object_for_the_runlist_of_its_tsg_is_made(on_card, engine, form, copies):
    assert copy_object(on_card, engine, struct.pack("<II", form, copies)) == abi.NV_OK


@pytest.mark.parametrize(("engine", "form", "copies"), LEAVES)
def test_a_copy_object_for_another_runlist_is_refused(on_card, engine, form, copies):
    """RM would put the TSG there, whose gate and timeslice are those of its own engine."""
    assert copy_object(on_card, engine, struct.pack("<II", form, copies)) == abi.NV_ERR_INVALID_ARGUMENT
    assert on_card.shared.refusals.counts["web", alloc_checks.OTHER_RUNLIST] == 1


def test_a_copy_object_that_names_no_engine_is_refused(on_card):
    assert copy_object(on_card, 0x0A, b"") == abi.NV_ERR_INVALID_ARGUMENT


def test_copies_stay_if_it_is_unknown_where_they_run(on_card):
    """A card may not say which copy engines are on the compute engine's runlist."""
    copy_object(on_card, 1, b"")
    on_card.shared.table.grces = {0: frozenset()}
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(22, 20, 0xC8B5), struct.pack("<II", 0, 1))

    assert alloc_status(answer[2]) == abi.NV_OK


def test_a_class_that_nobody_knows_is_refused(on_card):
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(9, 2, 0x0071), bytes(64))

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_ERR_INVALID_CLASS)


def test_a_tsg_may_have_two_handles_in_its_pod(on_card):
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    answer = on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(20, TSG))
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), bytes(368))

    assert dup_status(answer[2]) == abi.NV_OK
    (tsg,) = on_card.shared.table.compute_tsgs(0)
    assert tsg.handle == TSG
    assert [channel.handle for channel in on_card.shared.table.channels(tsg)] == [21]


def test_tsgs_of_a_pod_get_so_many_handles_and_no_more(on_card, monkeypatch):
    """Each gate that moves looks below all of them, and the main loop sets the timeslice of each."""
    monkeypatch.setattr(client_registry, "_MOST_TSGS", 3)
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    answers = [dup_status(on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(handle, TSG))[2]) for handle in (20, 21, 22)]
    on_card.call(abi.NV_ESC_RM_FREE, free(20))
    again = dup_status(on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(23, TSG))[2])
    copy = struct.pack("<IIIII", 0, 0, 0, min(abi.COPY_ENGINES), 0)
    another = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(24, 2, abi.KEPLER_CHANNEL_GROUP_A), copy)[2]

    full = abi.NV_ERR_INSUFFICIENT_RESOURCES
    assert (answers, again, alloc_status(another)) == ([abi.NV_OK, abi.NV_OK, full], abi.NV_OK, full)
    assert on_card.shared.refusals.counts["web", "too many TSGs"] == 2


def test_a_pod_gets_so_many_channels_and_no_more(on_card, monkeypatch):
    """RM gates 64 of them in a millisecond."""
    monkeypatch.setattr(client_registry, "_MOST_CHANNELS", 2)
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)

    def make(handle):
        return alloc_status(on_card.call(abi.NV_ESC_RM_ALLOC, alloc(handle, TSG, 0xC86F), bytes(368))[2])

    answers = [make(handle) for handle in (20, 21, 22)]
    on_card.call(abi.NV_ESC_RM_FREE, free(20))

    assert (answers, make(23)) == ([abi.NV_OK, abi.NV_OK, abi.NV_ERR_INSUFFICIENT_RESOURCES], abi.NV_OK)
    assert on_card.shared.refusals.counts["web", "too many channels"] == 1


FULL = abi.NV_ERR_INSUFFICIENT_RESOURCES


def status_of(pod, handle, rm_class, parent=2):
    """Have the pod make an object, of its device unless told otherwise; return RM's status."""
    return alloc_status(pod.call(abi.NV_ESC_RM_ALLOC, alloc(handle, parent, rm_class), bytes(128))[2])


def test_a_pod_gets_so_many_debuggers_and_no_more(on_card, monkeypatch):
    """With each, RM makes a client, a device and a subdevice; it frees those of all clients with one compute object."""
    monkeypatch.setattr(client_registry, "_MOST_DEBUGGERS", 2)
    answers = [status_of(on_card, handle, classes.DEBUGGER) for handle in (20, 21, 22)]
    on_card.call(abi.NV_ESC_RM_FREE, free(20))

    assert (answers, status_of(on_card, 23, classes.DEBUGGER)) == ([abi.NV_OK, abi.NV_OK, FULL], abi.NV_OK)
    assert on_card.shared.refusals.counts["web", "too many debuggers"] == 1


def test_a_device_gets_so_many_subdevices_and_no_more(on_card):
    """RM looks through all of them for each piece of memory that it frees; the pod has one already."""
    answers = [status_of(on_card, 20 + i, abi.NV20_SUBDEVICE_0) for i in range(9)]
    on_card.call(abi.NV_ESC_RM_FREE, free(20))
    again = status_of(on_card, 40, abi.NV20_SUBDEVICE_0)

    assert (answers, again) == ([abi.NV_OK] * 7 + [FULL] * 2, abi.NV_OK)
    assert on_card.shared.refusals.counts["web", "too many subdevices of a device"] == 2


def test_a_client_gets_few_handles_of_the_drivers_shared_page(on_card):
    """As RM frees one, it looks through all objects of all clients for what is still to be shown there."""
    answers = [status_of(on_card, 20 + i, abi.RM_USER_SHARED_DATA, parent=3) for i in range(18)]
    on_card.call(abi.NV_ESC_RM_FREE, free(20))
    again = status_of(on_card, 40, abi.RM_USER_SHARED_DATA, parent=3)

    assert (answers, again) == ([abi.NV_OK] * 16 + [FULL] * 2, abi.NV_OK)
    assert on_card.shared.refusals.counts["web", "too many handles of the driver's shared page"] == 2


def test_another_pods_tsg_gets_no_second_handle(on_card):
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    on_card.shared.table.clients[7].pod = "another"
    answer = on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(20, TSG))

    assert dup_status(answer[2]) != abi.NV_OK
    assert [tsg.handle for tsg in on_card.shared.table.compute_tsgs(0)] == [TSG]


def test_a_channel_gets_no_second_handle(on_card):
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(21, TSG, 0xC86F), bytes(368))
    answer = on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(22, 21))

    assert dup_status(answer[2]) == abi.NV_ERR_NOT_SUPPORTED


def test_an_address_space_has_one_name_under_a_limit(on_card):
    """Its page tables count by it."""
    on_card.rm.objects[7, 10] = (abi.FERMI_VASPACE_A, 2)
    answer = on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(20, 10))

    assert dup_status(answer[2]) == abi.NV_ERR_NOT_SUPPORTED
    assert (7, 20) not in on_card.rm.objects


def test_no_object_in_client_not_owned_by_the_calling_file(on_card):
    on_card.rm.objects[7, 10] = (0x3E, 2)
    answer = on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(20, 10, client=99))

    assert dup_status(answer[2]) == abi.NV_ERR_NOT_SUPPORTED
    assert (99, 20) not in on_card.rm.objects


def test_a_control_file_is_not_tied_to_another(pod, monkeypatch):
    """It would take on the other one's clients."""
    monkeypatch.setattr(abi, "NV_CONTROL_MINOR", MINOR)

    assert pod.call(abi.NV_ESC_REGISTER_FD, struct.pack("<i", -1))[:2] == (-1, errno.EINVAL)
    assert pod.shared.refusals.counts["web", "control file registered with a control file"] == 1
    assert pod.rm.seen == []


def test_an_object_whose_handle_rm_would_choose_is_refused(on_card):
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(0, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_ERR_INVALID_ARGUMENT)


def test_a_client_that_rm_does_not_know_on_this_file_is_nobodys(pod):
    pod.call(abi.NV_ESC_RM_ALLOC, device(client=8), DEVICE_PARAMS)

    assert pod.shared.table.clients == {}


def test_a_root_client_is_made_by_the_kernel_for_the_pod_itself(pod):
    before = alloc(0, 0, abi.NV01_ROOT, client=0)
    result, error, after = pod.call(abi.NV_ESC_RM_ALLOC, before)

    assert (result, error, after) == (-1, errno.EINVAL, before)  # /dev/random's answer
    assert pod.rm.seen == []


def ask_for_root(pod):
    result, error, after = pod.call(abi.NV_ESC_RM_ALLOC, alloc(0, 0, abi.NV01_ROOT, client=0))
    return error if result else alloc_status(after)


def made_root(pod):
    """Return the client that the guardian made."""
    answer = pod.call(abi.NV_ESC_RM_ALLOC, alloc(0, 0, abi.NV01_ROOT, client=0))
    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_OK)
    return struct.unpack_from("<I", answer[2], 8)[0]


def test_a_client_is_used_first_by_the_process_that_made_it(pod):
    """RM lets UVM map a client's memory for that process alone, so that one's files of UVM count."""
    ask_for_root(pod)
    pod.tell("fork")
    pod.child.said()
    answer = pod.call(abi.NV_ESC_RM_ALLOC, device(), DEVICE_PARAMS)

    assert alloc_status(answer[2]) == abi.NV_ERR_INVALID_CLIENT
    assert pod.shared.table.clients == {}
    assert pod.shared.refusals.counts["web", client_registry.OTHER_PROCESS] == 1


def test_the_process_that_made_a_client_may_use_it(pod):
    ask_for_root(pod)
    pod.call(abi.NV_ESC_RM_ALLOC, device(), DEVICE_PARAMS)

    assert pod.shared.table.clients[7].maker == pod.process.pid


def test_a_freed_root_client_leaves_no_maker_on_its_file(pod):
    """The next client of the file may be another process's."""
    ask_for_root(pod)
    pid, pidfd = pod.process.pid, os.pidfd_open(pod.process.pid)
    file = take(pidfd, device_of(pod))
    before = pod.files.makers.is_by(file, pid)
    pod.call(abi.NV_ESC_RM_FREE, free(7))
    pod.files.roots.add(file)
    after = pod.files.makers.is_by(file, pid)
    os.close(file)
    os.close(pidfd)

    assert (before, after) == (True, False)


def test_only_one_process_makes_clients_on_a_file(pod):
    ask_for_root(pod)
    pod.tell("fork")
    pod.child.said()

    assert ask_for_root(pod) == abi.NV_ERR_INVALID_CLIENT


def test_second_root_client_of_a_file_is_made_by_guardian(pod):
    assert ask_for_root(pod) == errno.EINVAL  # /dev/random's answer
    client = made_root(pod)

    assert pod.rm.objects[client, client] == (abi.NV01_ROOT, 0)
    assert pod.shared.clients.owns("web", client)


def test_device_of_a_second_client_is_made_by_guardian(pod):
    ask_for_root(pod)
    client = made_root(pod)
    answer = pod.call(abi.NV_ESC_RM_ALLOC, device(client=client), DEVICE_PARAMS)

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_OK)
    assert pod.rm.objects[client, 2] == (abi.NV01_DEVICE_0, client)


@pytest.mark.parametrize(("known", "answer"), [(True, abi.NV_OK), (False, abi.NV_ERR_INVALID_ARGUMENT)])
def test_second_client_has_tsgs_only_where_rm_tells_contexts(pod, known, answer):
    """Elsewhere time goes by process, and RM takes the guardian for this client's."""
    pod.rm.knows_contexts = known
    ask_for_root(pod)
    client = made_root(pod)
    pod.call(abi.NV_ESC_RM_ALLOC, device(client=client), DEVICE_PARAMS)
    made = pod.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A, client), TSG_PARAMS)

    assert alloc_status(made[2]) == answer


def test_device_on_a_file_of_two_clients_is_made_by_guardian(pod):
    """The kernel could make it below the other client, if another process rewrites the call."""
    ask_for_root(pod)
    made_root(pod)
    answer = pod.call(abi.NV_ESC_RM_ALLOC, device(), DEVICE_PARAMS)

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_OK)
    assert (7, 2) in pod.rm.objects


def test_pod_with_too_many_clients_gets_no_other(on_card, monkeypatch):
    monkeypatch.setattr(client_registry, "_MOST_CLIENTS", 1)
    before = set(on_card.rm.objects)

    assert ask_for_root(on_card) == abi.NV_ERR_INSUFFICIENT_RESOURCES
    assert set(on_card.rm.objects) == before
    assert on_card.shared.refusals.counts["web", "too many clients of RM"] == 1


def test_first_client_passes_again_after_the_only_one_was_freed(pod):
    pod.rm.objects = {(8, 8): (abi.NV01_ROOT_CLIENT, 0)}
    first = ask_for_root(pod)
    pod.call(abi.NV_ESC_RM_FREE, free(8, client=8))

    assert (first, ask_for_root(pod)) == (errno.EINVAL, errno.EINVAL)  # /dev/random's answers


def test_file_that_had_a_device_gets_no_client_from_the_kernel(pod):
    """What came of the device's call may be something else, and outlive the client that it was asked for."""
    make_device(pod)
    pod.call(abi.NV_ESC_RM_FREE, free(7))
    pod.rm.objects[9, 9] = (abi.NV01_ROOT, 0)

    assert pod.shared.clients.owns("web", made_root(pod))


@pytest.mark.parametrize(("engine", "answer"), [(1, abi.NV_OK), (9, abi.NV_ERR_INVALID_ARGUMENT)])
def test_compute_object_needs_tsg_on_compute_engine(on_card, engine, answer):
    group = struct.pack("<IIIII", 0, 0, 0, engine, 0)
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), group)
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), bytes(368))
    compute = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(22, 21, 0xCBC0), bytes(16))
    copies = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(23, 21, 0xC8B5), bytes(16))

    assert (alloc_status(compute[2]), alloc_status(copies[2])) == (answer, abi.NV_OK)


def test_each_compute_tsg_is_made_preemptible_exactly_once(on_card):
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    for channel in (21, 23):
        on_card.call(abi.NV_ESC_RM_ALLOC, alloc(channel, 20, 0xC86F), bytes(368))
        on_card.call(abi.NV_ESC_RM_ALLOC, alloc(channel + 1, channel, 0xCBC0), bytes(16))

    assert on_card.rm.preemptible == [(7, 3, 20)]


def test_another_tsg_of_the_same_name_is_made_preemptible_too(on_card):
    for _ in range(2):
        on_card.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
        on_card.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), bytes(368))
        on_card.call(abi.NV_ESC_RM_ALLOC, alloc(22, 21, 0xCBC0), bytes(16))
        on_card.call(abi.NV_ESC_RM_FREE, free(20))

    assert on_card.rm.preemptible == [(7, 3, 20)] * 2


@pytest.fixture
def walks(monkeypatch):
    """Count the lists of objects that a call makes. A client can have 100,000, and others wait for the lock."""
    made, below = [], ObjectTable.below
    monkeypatch.setattr(ObjectTable, "below", lambda self, key: made.append(key) or below(self, key))
    return made


def test_compute_is_made_without_a_walk_over_all_objects(on_card, walks):
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), bytes(368))
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(22, 21, 0xCBC0), bytes(16))

    assert (on_card.rm.preemptible, walks) == ([(7, 3, 20)], [])


def test_an_object_without_its_capability_leaves_no_claim(on_card):
    """The guardian would keep claims of objects that RM was never asked for, and its successor ask about each."""
    params = struct.pack("<Q", 999) + bytes(56)
    said = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(20, 3, abi.AMPERE_SMC_PARTITION_REF), params)

    assert said[:2] == (-1, errno.EBADF)
    assert (7, 20) not in on_card.shared.table.objects


@pytest.mark.parametrize("handle", [2, 7])
def test_heap_free_of_what_is_no_memory_walks_nothing(on_card, walks, handle):
    """RM frees neither a device nor a client here, so a pod could ask for ever."""
    asked = bytearray(heap(handle))
    struct.pack_into("<I", asked, 8, 3)
    answer = on_card.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, bytes(asked))[2]

    assert (heap_status(answer), walks) == (abi.NV_ERR_OBJECT_NOT_FOUND, [])


@pytest.mark.parametrize(("how", "opened"), [("here", [(7, 21)]), ("elsewhere", []), ("by the heap", [])])
def test_free_opens_gates_only_where_rm_would_accept_it(on_card, how, opened):
    """A file that has none of the clients, or the heap's own call, could be asked for ever."""
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), bytes(368))
    on_card.rm.bare = how == "elsewhere"
    if how == "by the heap":
        asked = bytearray(heap(20))
        struct.pack_into("<I", asked, 8, 3)
        on_card.call(abi.NV_ESC_RM_VID_HEAP_CONTROL, bytes(asked))
    else:
        on_card.call(abi.NV_ESC_RM_FREE, free(20))

    assert on_card.left == opened


def test_free_opens_gates_when_all_else_has_been_looked_at(on_card):
    """A pod makes that long, by a mapping in progress or by thousands of clients, and its channels would run."""
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), bytes(368))
    allocate(on_card, 10, PAGE)
    opened = []

    class Looked(InflightSyscalls):
        def wait(self, patience_s):
            opened.append(list(on_card.left))
            return True

    on_card.dispatcher._ctx.uvm_mappings = Looked()
    look = on_card.rm.private_bytes
    on_card.rm.private_bytes = lambda *which: opened.append(list(on_card.left)) or look(*which)
    on_card.call(abi.NV_ESC_RM_FREE, free(2))

    assert opened == [[], [], [(7, 21)]]  # the last look is after the free


@pytest.mark.parametrize("rm_class", [0x906F, 0xCE6F, 0x00FF])
def test_channels_of_classes_that_carry_no_gate_here_are_refused(on_card, rm_class):
    """RM takes the first of all channel classes for a channel on any card (gpuGetNoEngClassList)."""
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, rm_class), bytes(368))

    assert alloc_status(answer[2]) == abi.NV_ERR_INVALID_CLASS


def test_root_client_on_file_with_a_device_is_made_by_guardian(on_card):
    assert on_card.shared.clients.owns("web", made_root(on_card))


def test_children_of_a_pod_are_in_the_pod(pod):
    pod.tell("fork")
    child = pod.child.said()
    make_device(pod)

    assert pod.shared.table.processes == {child: "web"}


def test_pods_share_what_a_successor_has_to_read(on_card, monkeypatch):
    """Whatever one pod has, another gets some."""
    table = on_card.shared.table
    monkeypatch.setattr(memory_quota, "_GUARANTEED_RECORDS", 1)
    monkeypatch.setattr(memory_quota, "_MOST_RECORDS", 60 + fd_budget.FOR_NEW_PODS)
    first = [allocate(on_card, handle, PAGE) for handle in range(10, 40)]
    own, every = table.records("web")

    assert {*first} == {abi.NV_OK, abi.NV_ERR_INSUFFICIENT_RESOURCES}
    assert (own, every) == (20, 20)
    assert on_card.shared.quota.may_record("another")


def test_pinned_memory_that_was_freed_counts_to_the_share(on_card, monkeypatch):
    """A pod could have any number of these: each is charged, but a pod may have no limit on another card."""
    monkeypatch.setattr(memory_quota, "_GUARANTEED_RECORDS", 1)
    monkeypatch.setattr(memory_quota, "_MOST_RECORDS", 30 + fd_budget.FOR_NEW_PODS)
    statuses = []
    for handle in range(10, 40):
        statuses.append(allocate(on_card, handle, PAGE))
        on_card.shared.quota.pin_handles(7, [handle])
        on_card.call(abi.NV_ESC_RM_FREE, free(handle))

    assert abi.NV_ERR_INSUFFICIENT_RESOURCES in statuses
    assert len(on_card.shared.table.allocations.memories) <= 10


def test_a_pod_has_so_many_objects_and_the_next_is_refused(on_card, monkeypatch):
    monkeypatch.setattr(object_claims, "_MOST_OBJECTS", 5)
    statuses = [allocate(on_card, handle, PAGE) for handle in range(10, 15)]

    assert statuses == [abi.NV_OK] * 3 + [abi.NV_ERR_INSUFFICIENT_RESOURCES] * 2
    on_card.call(abi.NV_ESC_RM_FREE, free(10))
    assert allocate(on_card, 16, PAGE) == abi.NV_OK


@pytest.mark.parametrize("rm_class", [each for each, row in classes.CLASSES.items() if row.why is classes.GRAPHICS])
def test_no_pod_draws_without_the_grant(on_card, rm_class):
    """No timeslice and no gate ends a draw."""
    asked, params = alloc(21, 20, rm_class), bytes(24)
    on_card.rm.seen.clear()
    without = alloc_status(on_card.call(abi.NV_ESC_RM_ALLOC, asked, params)[2])
    assert (without, on_card.rm.seen) == (abi.NV_ERR_INSUFFICIENT_PERMISSIONS, [])

    on_card.graphics = True
    assert alloc_status(on_card.call(abi.NV_ESC_RM_ALLOC, asked, params)[2]) != abi.NV_ERR_INSUFFICIENT_PERMISSIONS


@pytest.mark.parametrize(("entries", "made"), [(1 << 10, True), (1 << 16, True), (1 << 31, False)])
def test_queue_of_a_memory_mapper_is_short(on_card, entries, made):
    """RM keeps it in the host's memory."""
    on_card.graphics = True
    params = struct.pack("<IIIIQ", 19, entries, 0, 0, 0)
    answer = alloc_status(on_card.call(abi.NV_ESC_RM_ALLOC, alloc(20, 3, abi.NV_MEMORY_MAPPER), params)[2])

    assert answer == (abi.NV_OK if made else abi.NV_ERR_INVALID_ARGUMENT)


#: Flags of an address space of the fabric, and libcuda's: owned by UVM, with page faults.
_FABRIC, _CUDA = abi.NV_VASPACE_ALLOCATION_FLAGS_IS_FLA, 0x48


@pytest.mark.parametrize(
    ("index", "flags", "made"),
    [
        *((0, 0, True), (0, _CUDA, True), (3, 0, True), (1, 0, False), (2, 0, False), (4, 0, False)),
        *((0, _FABRIC, False), (3, _FABRIC, False), (0, _FABRIC | _CUDA, False)),
    ],
)
def test_address_space_of_card_or_fabric_is_refused(on_card, index, flags, made):
    on_card.limits.clear()
    params = struct.pack("<II", index, flags) + bytes(56)
    answer = alloc_status(on_card.call(abi.NV_ESC_RM_ALLOC, alloc(30, 2, abi.FERMI_VASPACE_A), params)[2])

    assert answer == (abi.NV_OK if made else abi.NV_ERR_INVALID_ARGUMENT)
    assert ((7, 30) in on_card.rm.objects) is made


@pytest.mark.parametrize("rm_class", [abi.NV01_EVENT, abi.NV01_EVENT_OS_EVENT])
def test_event_objects_are_bounded(on_card, monkeypatch, rm_class):
    """RM notifies every one of them in an interrupt."""
    monkeypatch.setattr(os_events, "_MOST_EVENTS", 2)

    def make(handle):
        return alloc_status(on_card.call(abi.NV_ESC_RM_ALLOC, alloc(handle, 3, rm_class), bytes(24))[2])

    assert [make(30), make(31), make(32)] == [0, 0, abi.NV_ERR_INSUFFICIENT_RESOURCES]
    on_card.call(abi.NV_ESC_RM_FREE, free(30))
    assert [make(30), make(32)] == [0, abi.NV_ERR_INSUFFICIENT_RESOURCES]
    del on_card.rm.objects[7, 31]  # it went with what it was below
    assert make(32) == 0


def make_compute(pod, parent=2, handle=22):
    """Make a TSG, a channel and a compute object; return RM's status of the last."""
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(20, parent, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    pod.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), bytes(368))
    return alloc_status(pod.call(abi.NV_ESC_RM_ALLOC, alloc(handle, 21, 0xCBC0), bytes(16))[2])


def test_compute_is_made_preemptible_on_its_own_card(on_card):
    """RM refuses it through another card's subdevice."""
    on_card.minors[1], on_card.limits[1] = MINOR, on_card.limits[0]
    on_card.rm.instances[7, 4] = 1
    on_card.call(abi.NV_ESC_RM_ALLOC, device(4), struct.pack("<I52x", 1))
    on_card.call(abi.NV_ESC_RM_ALLOC, subdevice(5, parent=4), bytes(4))

    assert (make_compute(on_card, parent=4), on_card.rm.preemptible) == (abi.NV_OK, [(7, 5, 20)])


@pytest.mark.parametrize("handle", [22, 0], ids=["the pod's handle", "RM's handle"])
def test_compute_whose_card_rm_does_not_find_is_freed(on_card, monkeypatch, handle):
    make = on_card.rm._alloc

    def choosing(data):
        if not struct.unpack_from("<I", data, 8)[0]:
            struct.pack_into("<I", data, 8, 99)
        return make(data)

    monkeypatch.setattr(on_card.rm, "_alloc", choosing)
    with monkeypatch.context() as patch:
        patch.setattr(on_card.rm, "make_preemptible", lambda *asked: False)
        assert make_compute(on_card, handle=handle) == abi.NV_ERR_INVALID_STATE

    assert 0xCBC0 not in {rm_class for rm_class, _ in on_card.rm.objects.values()}
    assert on_card.shared.refusals.counts["web", "compute that cannot be preempted"] == 1
    assert alloc_status(on_card.call(abi.NV_ESC_RM_ALLOC, alloc(22, 21, 0xCBC0), bytes(16))[2]) == abi.NV_OK
    assert on_card.rm.preemptible == [(7, 3, 20)]


def test_pod_that_may_draw_keeps_what_rm_cannot_preempt(on_card, monkeypatch):
    """No gate ends a draw either, and graphics programs begin with a 2D object."""
    monkeypatch.setattr(on_card.rm, "make_preemptible", lambda *asked: False)
    on_card.graphics = True

    assert make_compute(on_card) == abi.NV_OK


def test_compute_whose_device_lost_its_subdevice_is_freed(on_card):
    """Another process of the pod can free it while the object is being made."""
    on_card.call(abi.NV_ESC_RM_FREE, free(3))

    assert make_compute(on_card) == abi.NV_ERR_INVALID_STATE
    assert ((7, 22) in on_card.rm.objects, on_card.rm.preemptible) == (False, [])

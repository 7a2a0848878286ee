"""What becomes of a pod's controls: refused, asked of RM in its place, and what it is shown of the card."""

from __future__ import annotations

import ctypes
import struct
import threading
from types import SimpleNamespace

import pytest

from qgpu.guardian.proxy import alloc_checks, control_calls, fast_path, rare_calls, refusals
from qgpu.guardian.rules import controls
from qgpu.linux.seccomp_notify import ProcessMemory
from qgpu.nvidia import abi
from tests.guardian.asked import TSG, TSG_PARAMS, alloc, alloc_status, control, free, status
from tests.guardian.pod import LIMIT, allocate

NO = abi.NV_ERR_INSUFFICIENT_PERMISSIONS


def test_a_scheduling_control_is_refused_in_rms_own_words(pod):
    result, _, argument = pod.call(abi.NV_ESC_RM_CONTROL, control(abi.NV2080_FIFO_DISABLE_CHANNELS))

    assert (result, status(argument)) == (0, abi.NV_ERR_INSUFFICIENT_PERMISSIONS)
    assert pod.shared.refusals.counts["web", "NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS"] == 1
    assert pod.rm.seen == []


def test_unknown_control_is_answered_not_supported(pod):
    result, _, argument = pod.call(abi.NV_ESC_RM_CONTROL, control(0x2080FFF1))

    assert (result, status(argument)) == (0, abi.NV_ERR_NOT_SUPPORTED)
    assert pod.shared.refusals.counts["web", "control 0x2080fff1"] == 1


BIND = 0xA06F0104


def bound(pod, engine, *, at=21, size=4, command=BIND):
    """Ask for a channel to be bound to an engine, or for another command; return the status."""
    answer = pod.call(abi.NV_ESC_RM_CONTROL, control(command, at, size), struct.pack("<IIII", engine, 1, 0, 0))
    return status(answer[2])


def channel(pod, engine, *, alone):
    """Make a channel, alone or in a TSG, for an engine, on a card where COPY0 shares the compute engine's runlist."""
    pod.shared.table.grces = {0: {0x09}}
    place = abi.offsetof("NV_CHANNEL_ALLOC_PARAMS", "engineType")
    if not alone:
        group = struct.pack("<5I", 0, 0, 0, engine, 0)
        pod.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), group)
    params = bytes(place) + engine.to_bytes(4, "little") + bytes(368 - place - 4)
    made = pod.call(abi.NV_ESC_RM_ALLOC, alloc(21, 2 if alone else TSG, 0xC86F), params)
    assert alloc_status(made[2]) == abi.NV_OK


@pytest.mark.parametrize("alone", [False, True], ids=["in a TSG", "alone"])
@pytest.mark.parametrize(("engine", "other"), [(11, 1), (11, 0x09), (0x13, 1), (0x13, 0x09), (0x13, 11), (11, 0x13)])
def test_channel_is_not_bound_to_an_engine_shared_otherwise(on_card, engine, other, alone):
    """RM would put it on that engine's runlist; a gate and a timeslice follow from its TSG's own engine."""
    channel(on_card, engine, alone=alone)

    assert bound(on_card, other) == abi.NV_ERR_INVALID_ARGUMENT
    assert on_card.shared.refusals.counts["web", alloc_checks.OTHER_RUNLIST] == 1
    assert bound(on_card, engine) == abi.NV_OK


@pytest.mark.parametrize("engine", [0x22, 0x54, 0xFFFFFFFF], ids=hex)
def test_channel_is_not_bound_to_an_engine_of_no_program(on_card, engine):
    channel(on_card, 0x13, alone=True)

    assert bound(on_card, engine) == abi.NV_ERR_INVALID_ARGUMENT


def test_channel_is_bound_to_engines_that_are_shared_alike(on_card):
    """Compute, and copies on its runlist; one copy engine and another; one decoder and another."""
    for engine, other in ((1, 0x09), (11, 12), (0x13, 0x14)):
        channel(on_card, engine, alone=False)
        assert bound(on_card, other) == abi.NV_OK
        on_card.call(abi.NV_ESC_RM_FREE, free(TSG))


@pytest.mark.parametrize(("at", "size"), [(99, 4), (TSG, 4), (21, 0), (21, 8)])
def test_a_binding_without_channel_or_engine_is_refused(on_card, at, size):
    channel(on_card, 1, alone=False)

    assert bound(on_card, 1, at=at, size=size) == abi.NV_ERR_INVALID_ARGUMENT


RESET = 0x906F0102


@pytest.mark.parametrize("alone", [False, True], ids=["in a TSG", "alone"])
@pytest.mark.parametrize(("engine", "other"), [(11, 1), (11, 12), (0x13, 0x14), (0x13, 1)])
def test_channel_resets_no_engine_but_its_tsgs(on_card, engine, other, alone):
    """RM resets the engine with the channel (ctrl906f.h), and others may run there; what is no engine it judges."""
    channel(on_card, engine, alone=alone)
    answers = [bound(on_card, each, command=RESET, size=16) for each in (other, engine, 0x27, 0xFFFFFFFF)]

    assert answers == [abi.NV_ERR_INVALID_ARGUMENT, *[abi.NV_OK] * 3]
    assert on_card.shared.refusals.counts["web", alloc_checks.OTHER_RUNLIST] == 1


def test_a_serialized_control_is_not_for_rm(pod):
    """What it holds could not be read."""
    plain = bytearray(control(0x20800110))
    struct.pack_into("<I", plain, 12, abi.NVOS54_FLAGS_SERIALIZED)
    result, _, argument = pod.call(abi.NV_ESC_RM_CONTROL, bytes(plain), bytes(8))

    assert (result, status(argument)) == (0, abi.NV_ERR_INVALID_ARGUMENT)
    assert pod.rm.seen == []


def test_a_serialized_allocation_is_not_for_rm(pod):
    asked = bytearray(alloc(2, 7, abi.NV01_DEVICE_0))
    struct.pack_into("<I", asked, 36, abi.NVOS64_FLAGS_SERIALIZED)
    result, _, argument = pod.call(abi.NV_ESC_RM_ALLOC, bytes(asked), bytes(56))

    assert (result, alloc_status(argument)) == (0, abi.NV_ERR_INVALID_ARGUMENT)
    assert pod.rm.seen == []


def test_a_control_is_asked_of_rm_for_the_pod_and_answered_to_it(pod):
    def answer(params):
        params[0:4] = b"RM's"

    pod.rm.answers[0x20800110] = answer
    result, _, argument, params = pod.call_for_params(abi.NV_ESC_RM_CONTROL, control(0x20800110, size=8), b"pod's...")

    assert (result, status(argument)) == (0, abi.NV_OK)
    assert params == b"RM'ss..."


def test_a_control_whose_parameters_hold_pointers_finds_them(pod):
    """GR_GET_INFO: a count, a pointer to so many pairs."""

    def answer(params):
        (address,) = struct.unpack_from("<Q", params, 8)
        (ctypes.c_char * 8).from_address(address)[:] = b"answered"

    pod.rm.answers[0x20801201] = answer
    params = struct.pack("<IIQQQ", 1, 0, 0, 0, 0)
    answer = pod.call_nested(abi.NV_ESC_RM_CONTROL, control(0x20801201, size=len(params)), params, 8, b"question")

    assert answer == b"answered"


@pytest.mark.parametrize(("command", "least"), [(0x101, 40), (0x801C01, 24)], ids=["BUILD_VERSION", "BSP_GET_CAPS"])
@pytest.mark.parametrize("less", [8, 1, 0])
def test_parameters_are_as_long_as_rm_takes_them_for(pod, command, least, less):
    """RM writes so many bytes, whatever size the call gives, so the guardian's memory behind fewer."""
    asked = control(command, 7, least - less)

    answer = abi.NV_ERR_INVALID_ADDRESS if less else abi.NV_OK
    assert status(pod.call(abi.NV_ESC_RM_CONTROL, asked, bytes(40))[2]) == answer
    assert len(pod.rm.seen) == (answer == abi.NV_OK)


def test_a_profiler_streams_nothing_into_the_shared_page(on_card):
    """RM keeps only CPUs from writing to it."""
    on_card.profiling = True
    on_card.rm.objects |= {(7, 30): (abi.NV01_MEMORY_SYSTEM, 3), (7, 31): (abi.RM_USER_SHARED_DATA, 3)}
    on_card.rm.find_object = lambda rm: None  # the pod hides the file at the descriptors where it was used

    def stream(*memories):
        params = bytearray(56)
        for at, memory in zip((0, 24), memories, strict=True):
            struct.pack_into("<I", params, at, memory)
        return status(on_card.call(abi.NV_ESC_RM_CONTROL, control(0xB0CC0105, 3, 56), bytes(params))[2])

    refused = abi.NV_ERR_INVALID_OBJECT_HANDLE
    assert [stream(30, 30), stream(31, 30), stream(30, 31)] == [abi.NV_OK, refused, refused]
    on_card.shared.monitors.bound("web", on_card.process.pid, 7, 29, on_card.listener)
    assert on_card.shared.monitors.unbinds("web", 7, 30, holds_others=False)  # RM frees the profiler with it
    on_card.shared.monitors.retired("web")


@pytest.mark.parametrize("stays", [True, False])
def test_a_binding_ends_only_with_its_profiler(on_card, stays):
    """RM frees a profiler with memory into which it streams, but not once the stream has ended."""
    memory, profiler = 30, 29
    on_card.rm.objects |= {(7, memory): (abi.NV01_MEMORY_SYSTEM, 3)}
    if stays:
        on_card.rm.objects[7, profiler] = 0xB2CC, 3
    monitors = on_card.shared.monitors
    monitors.streams("web", [(7, memory)], on_card.rm.exists)
    monitors.bound("web", on_card.process.pid, 7, profiler, on_card.listener)
    on_card.call(abi.NV_ESC_RM_FREE, free(memory))

    assert monitors.unbinds("web", 7, profiler, holds_others=False) is stays
    monitors.retired("web")


def test_a_legacy_control_on_anothers_client_is_refused(on_card):
    mine = on_card.call(abi.NV_ESC_RM_CONTROL, control(0x20808159))
    other = on_card.call(abi.NV_ESC_RM_CONTROL, control(0x20808159, client=8))

    assert status(mine[2]) == abi.NV_OK
    assert status(other[2]) == abi.NV_ERR_INVALID_CLIENT


def test_cudas_timeslice_is_stored_once_then_refused(on_card):
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    request = struct.pack("<Q", 2048)

    first = on_card.call(abi.NV_ESC_RM_CONTROL, control(abi.NVA06C_SET_TIMESLICE), request)
    second = on_card.call(abi.NV_ESC_RM_CONTROL, control(abi.NVA06C_SET_TIMESLICE), struct.pack("<Q", 4096))

    assert (first[0], status(first[2])) == (0, abi.NV_OK)
    assert (second[0], status(second[2])) == (0, abi.NV_ERR_INSUFFICIENT_PERMISSIONS)
    assert on_card.shared.table.objects[7, TSG].requested_us == 2048


def test_a_timeslice_request_may_not_be_a_way_to_a_larger_share(on_card):
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)

    answer = on_card.call(abi.NV_ESC_RM_CONTROL, control(abi.NVA06C_SET_TIMESLICE), struct.pack("<Q", 10**6))

    assert status(answer[2]) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS


def test_fb_info_shows_limit_as_size_and_pod_usage_as_used(on_card):
    def answer(params):
        for i, index in enumerate((0x08, 0x16, 0x10)):
            struct.pack_into("<II", params, 4 + 8 * i, index, 1 << 31)

    on_card.rm.answers[abi.NV2080_FB_GET_INFO_V2] = answer
    allocate(on_card, 10, 1 << 30)
    call = control(abi.NV2080_FB_GET_INFO_V2, target=3, size=28)
    *_, params = on_card.call_for_params(abi.NV_ESC_RM_CONTROL, call, struct.pack("<I", 3) + bytes(24))

    figures = dict(struct.iter_unpack("<II", params[4:]))
    assert figures == {0x08: LIMIT >> 10, 0x16: (LIMIT - (1 << 30)) >> 10, 0x10: 1 << 31}


def test_only_a_pods_own_processes_are_listed(on_card):
    def answer(params):
        struct.pack_into("<IIII", params, 8, 3, 1, on_card.process.pid, 4242)

    on_card.rm.answers[abi.NV2080_GPU_GET_PIDS] = answer
    call = control(abi.NV2080_GPU_GET_PIDS, size=3812)
    *_, params = on_card.call_for_params(abi.NV_ESC_RM_CONTROL, call, bytes(3812))

    assert struct.unpack_from("<III", params, 8) == (1, on_card.process.pid, 0)


def test_only_a_pods_own_processes_are_told_of(on_card):
    """GPU_GET_PID_INFO: whoever is asked about, RM answers with figures."""
    others, own, size = 4242, on_card.process.pid, 8 + 2 * 72

    def answer(params):
        asked.extend(struct.unpack_from("<I", params, 8 + 72 * i)[0] for i in range(2))
        for i in range(2):
            params[8 + 72 * i + 16 : 8 + 72 * i + 64] = b"f" * 48

    asked = []
    on_card.rm.answers[abi.NV2080_GPU_GET_PID_INFO] = answer
    params = struct.pack("<II", 2, 0) + struct.pack("<I68x", others) + struct.pack("<I68x", own)
    *_, params = on_card.call_for_params(abi.NV_ESC_RM_CONTROL, control(abi.NV2080_GPU_GET_PID_INFO, size=size), params)

    assert asked == [0, own]
    assert params[8:80] == struct.pack("<I68x", others)
    assert params[80 + 16 : 80 + 64] == b"f" * 48


def ask_about(pod, pids, index=0):
    """Ask RM about pids; return which it was asked about, by call, and what is told of each."""
    calls, size = [], 8 + 72 * len(pids)

    def answer(params):
        calls.append([struct.unpack_from("<I", params, 8 + 72 * i)[0] for i in range(len(pids))])
        for i, about in enumerate(calls[-1]):
            params[8 + 72 * i + 16 : 8 + 72 * i + 64] = struct.pack("<I", about) * 12

    pod.rm.answers[abi.NV2080_GPU_GET_PID_INFO] = answer
    params = struct.pack("<II", len(pids), 0) + b"".join(struct.pack("<II64x", pid, index) for pid in pids)
    *_, params = pod.call_for_params(abi.NV_ESC_RM_CONTROL, control(abi.NV2080_GPU_GET_PID_INFO, size=size), params)
    told = [struct.unpack_from("<I", params, 8 + 72 * i + 16)[0] for i in range(len(pids))]
    assert [struct.unpack_from("<I", params, 8 + 72 * i)[0] for i in range(len(pids))] == pids
    return [[pid for pid in call if pid] for call in calls], told


def test_rm_is_asked_about_each_process_once(on_card):
    """It looks through all objects of the process each time, under its locks."""
    own = on_card.process.pid

    assert ask_about(on_card, [own] * 200) == ([[own]], [own] * 200)


def test_rm_is_asked_about_few_processes_at_once(on_card, monkeypatch):
    many = [*range(4_000_000, 4_000_040), on_card.process.pid]
    monkeypatch.setattr(control_calls, "_inside", lambda pid, tid: pid)
    for pid in many:
        on_card.shared.note({"fact": "process", "pid": pid, "pod": "web"})
    calls, told = ask_about(on_card, [*many, 5_000_000])

    assert [len(call) for call in calls] == [16, 16, 9]
    assert told == [*many, 0]


@pytest.mark.parametrize("index", [1, 0xFFFFFFFF])
def test_other_things_to_ask_of_a_process_are_rms_to_refuse(on_card, index):
    assert ask_about(on_card, [on_card.process.pid], index) == ([[]], [0])


def test_a_plain_control_that_is_too_large_takes_the_long_way():
    """There is no room for it where plain ones are carried out."""
    params = ctypes.create_string_buffer(fast_path._MOST_BYTES + 1)
    asked = bytearray(control(0x20800110, size=len(params)))
    struct.pack_into("<Q", asked, 16, ctypes.addressof(params))
    argument = (ctypes.c_char * len(asked)).from_buffer(asked)
    performed = []
    judge = fast_path.FastPath(lambda *call: performed.append(call) or 0, ProcessMemory(), [])

    assert judge.control(threading.get_native_id(), 0, ctypes.addressof(argument)) is None
    assert performed == []


@pytest.mark.parametrize(("status", "data"), [(0, b"asked..."), (3, b"asked..."), (0, b"answered"), (3, b"answered")])
def test_a_plain_control_writes_back_only_what_rm_changed(status, data):
    """Its memory may take no writes: without a change, none may be tried."""
    params = ctypes.create_string_buffer(b"asked...", 8)
    where = ctypes.addressof(params)
    asked = ctypes.create_string_buffer(struct.pack("<IIIIQII", 7, 7, next(iter(controls.PLAIN)), 0, where, 8, 0))

    def perform(file, request, call):
        call.status = status
        ctypes.memmove(call.params, data, 8)
        return 0

    judge = fast_path.FastPath(perform, ProcessMemory(), writes := [])

    assert judge.control(threading.get_native_id(), 0, ctypes.addressof(asked)) == 0
    changed = ([(ctypes.addressof(asked) + 28, struct.pack("<I", status))] if status else [], [(where, data)])
    assert writes == changed[0] + (changed[1] if data == b"answered" else [])


def test_refusal_kinds_per_pod_are_bounded(pod, monkeypatch):
    monkeypatch.setattr(refusals, "_MOST_KINDS", 3)
    for number in range(8):
        pod.call(abi.NV_ESC_RM_CONTROL, control(0x2080F000 + number))

    assert len(pod.shared.refusals.counts) == 4
    assert pod.shared.refusals.counts["web", "other calls"] == 5


@pytest.mark.parametrize(
    ("flags", "mode", "answer"),
    [
        (1, 2, abi.NV_OK),
        (1, 0, abi.NV_ERR_INSUFFICIENT_PERMISSIONS),
        (1, 1, abi.NV_ERR_INSUFFICIENT_PERMISSIONS),
        (3, 0, abi.NV_ERR_INSUFFICIENT_PERMISSIONS),
        (2, 0, abi.NV_OK),
    ],
)
def test_compute_stays_preemptible_at_any_instruction(on_card, flags, mode, answer):
    """No gate takes the engine from a kernel that is waited for."""
    params = struct.pack("<IIIIQQ", flags, TSG, 0, mode, 0, 0)
    asked = control(abi.NV2080_GR_SET_CTXSW_PREEMPTION_MODE, target=3, size=32)

    assert status(on_card.call(abi.NV_ESC_RM_CONTROL, asked, params)[2]) == answer


@pytest.mark.parametrize(("limited", "graphics", "refused"), [(True, 1, True), (True, 0, False), (False, 1, False)])
def test_graphics_preemption_buffers_need_no_limit(on_card, limited, graphics, refused):
    """RM takes them for the context, and nobody can count them."""
    if not limited:
        on_card.limits.clear()
    params = struct.pack("<IIIIQQ", 3, TSG, graphics, 2, 0, 0)
    asked = control(abi.NV2080_GR_SET_CTXSW_PREEMPTION_MODE, target=3, size=32)
    answer = abi.NV_ERR_INSUFFICIENT_PERMISSIONS if refused else abi.NV_OK

    assert status(on_card.call(abi.NV_ESC_RM_CONTROL, asked, params)[2]) == answer


def preempt(pod, client=7, target=20, command=abi.NVA06C_PREEMPT, size=8, flags=0, params=b"\1" + bytes(15)):
    asked = bytearray(control(command, target, size, client))
    struct.pack_into("<I", asked, 12, flags)
    before = len(pod.rm.seen)
    answer = status(pod.call(abi.NV_ESC_RM_CONTROL, bytes(asked), params)[2])
    return answer, len(pod.rm.seen) - before


@pytest.fixture
def own_tsg(on_card):
    """A pod with TSG 20 and channel 21 below it."""
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(20, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(21, 20, 0xC86F), bytes(368))
    return on_card


def test_a_pod_gives_its_own_turn_away(own_tsg):
    """As libcuda does when a context is destroyed; refused, it makes no other one."""
    assert preempt(own_tsg) == (abi.NV_OK, 1)
    assert not own_tsg.shared.refusals.counts


@pytest.fixture
def preempted(own_tsg, monkeypatch):
    """Preempt, with each one taking so many ns of a clock that nothing else moves but rests; return the rest in ns."""
    now_ns, rests, took_ns = [10**9], [], [0]

    def sleep(seconds):
        rests.append(round(seconds * 1e9))
        now_ns[0] += rests[-1]

    def answer(params):
        now_ns[0] += took_ns[0]

    def preempted(took, before=0, command=abi.NVA06C_PREEMPT):
        took_ns[0] = took
        now_ns[0] += before
        own_tsg.rm.answers[command] = answer
        preempt(own_tsg, command=command)
        return rests[-1]

    monkeypatch.setattr(rare_calls, "time", SimpleNamespace(sleep=sleep, monotonic_ns=lambda: now_ns[0]))
    preempted.now_ns = now_ns
    return preempted


def test_two_preemptions_of_a_context_that_ends_do_not_rest(preempted):
    assert [preempted(400_000) for _ in range(2)] == [0, 0]
    assert [preempted(400_000, before=10**9) for _ in range(2)] == [0, 0]


def test_who_gives_turns_away_all_the_time_rests_in_between(preempted):
    """Gates and neighbours wait for RM's locks meanwhile: a twenty-first part of the time is taken, no more."""
    began = preempted.now_ns[0]
    for _ in range(100):
        preempted(400_000)

    assert preempted.now_ns[0] - began + 20 * 10**6 > 99 * 400_000 * 20


def test_a_slow_preemption_delays_the_next_by_a_second_at_most(preempted):
    preempted(3 * 10**8)

    assert preempted(400_000) == 10**9 - 3 * 10**8 - 20 * 10**6


@pytest.mark.parametrize(
    ("command", "times"),
    [(abi.NVB0CC_RESERVE_HWPM_LEGACY, 21), (abi.NVB0CC_BIND_PM_RESOURCES, 42), (abi.NVB0CC_UNBIND_PM_RESOURCES, 21)],
    ids=hex,
)
def test_monitors_that_stop_the_card_are_moved_rarely(preempted, own_tsg, command, times):
    """The death of a process unbinds what it bound: a binding counts twice."""
    own_tsg.profiling = True
    preempted(20_000_000, command=command)

    assert preempted(20_000_000, command=command) == (times - 1) * 20_000_000 - 20_000_000


@pytest.mark.parametrize("command", [abi.NV2080_GPU_GET_PIDS, abi.NV2080_GPU_GET_PID_INFO], ids=hex)
def test_searches_through_all_clients_are_rare(preempted, command):
    preempted(20_000_000, command=command)

    assert preempted(20_000_000, command=command) == 20 * 20_000_000 - 20_000_000


@pytest.mark.parametrize(
    "asked",
    [
        *({"client": 8}, {"target": 21}, {"target": 22}, {"target": 3}),
        *({"size": 0}, {"size": 4}, {"size": 16}),
        *({"params": bytes(8)}, {"params": b"\1\1" + bytes(6)}, {"params": b"\1\1" + bytes(2) + b"\x40\x42\x0f\0"}),
    ],
    ids=str,
)
def test_preempt_other_than_of_own_tsg_is_refused(own_tsg, asked):
    """A neighbour's, a channel, nothing, a subdevice, sizes; not waited for, patience of its own."""
    assert preempt(own_tsg, **asked) == (NO, 0)
    assert own_tsg.shared.refusals.counts["web", "NVA06C_CTRL_CMD_PREEMPT"] == 1


def test_a_neighbours_tsg_is_not_preempted_by_its_name(own_tsg):
    own_tsg.shared.note({"fact": "pod", "name": "neighbour", "grants": {}})
    with own_tsg.shared.lock:
        own_tsg.shared.table.clients[7].pod = "neighbour"

    assert preempt(own_tsg) == (NO, 0)


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ({"command": abi.NVA06C_PREEMPT | 0x8000}, abi.NV_ERR_NOT_SUPPORTED),
        ({"flags": abi.NVOS54_FLAGS_SERIALIZED}, abi.NV_ERR_INVALID_ARGUMENT),
    ],
    ids=["as firmware's", "serialized"],
)
def test_a_turn_ends_by_the_plain_control_alone(own_tsg, asked, answer):
    assert preempt(own_tsg, **asked) == (answer, 0)
    assert sum(own_tsg.shared.refusals.counts.values()) == 1

"""Controls: a pod does not schedule itself, and everything else works as ever."""

from __future__ import annotations

import ctypes
import mmap
import struct
import time

import nv
import pytest
import qg

PREEMPT = 0xA06C0105
END_TURN = struct.pack("BBxxI", 1, 0, 0)
PIDS, PID_INFO = 0x2080018D, 0x2080018E
SHARED_PAGE = 0xDE


def program(state):
    p = state["p"] = nv.Program()
    tsg, (channel,) = p.compute()
    state["handles"] = {"device": p.device, "subdevice": p.subdevice, "tsg": tsg, "channel": channel}


def control(state, cmd, on, params=b"", client=0, flags=0):
    try:
        state["p"].control(state["handles"][on], cmd, params, client=client, flags=flags)
    except nv.RmError as error:
        return error.status
    return 0


@pytest.fixture
def web(pod):
    made = pod("web")
    made.process().run(program)
    return made


def test_a_refused_control_is_counted_and_told(web, qgpu):
    asked = [0x80170F, 0x801714, 0x2080012C, 0x2080110B, 0x83DE0317, 0xA06C0107]
    answers = [web.processes[0].run(control, cmd, "tsg") for cmd in asked]

    assert answers == [nv.NO_PERMISSION] * len(asked)
    assert web.info().refused_controls == len(asked)
    told = [event.value for event in qgpu.events() if event.type == qg.uapi.NUMBERS["QGPU_EVENT_CONTROL_REFUSED"]]
    assert told == asked


def test_a_timeslice_of_its_own_is_answered_ok_and_not_set(web):
    assert web.processes[0].run(control, 0xA06C0103, "tsg", (1_000_000).to_bytes(8, "little")) == 0
    assert [tsg["slice_ns"] for tsg in qg.sim_tsgs()] == [1_024_000]


def test_a_pod_gives_its_own_turn_away_as_libcuda_does(web):
    assert web.processes[0].run(control, PREEMPT, "tsg", END_TURN) == 0
    assert web.info().refused_controls == 0


@pytest.mark.parametrize(
    ("cmd", "params"),
    [
        (PREEMPT, bytes(8)),
        (PREEMPT, struct.pack("BBxxI", 1, 1, 0)),
        (PREEMPT, struct.pack("BBxxI", 1, 1, 1_000_000)),
    ],
    ids=["not waited for", "no patience", "a second's patience"],
)
def test_a_turn_ends_by_a_call_that_waits_alone(web, cmd, params):
    assert web.processes[0].run(control, cmd, "tsg", params) == nv.NO_PERMISSION
    assert web.info().refused_controls == 1


def test_a_turn_does_not_end_by_a_control_for_firmware(web):
    assert web.processes[0].run(control, PREEMPT | 0x8000, "tsg", END_TURN) == nv.NOT_SUPPORTED
    assert web.info().refused_controls == 1


def test_a_turn_of_others_is_not_a_pods_to_end(web):
    outside = nv.Program()  # the same calls in the same order: its TSG has the same handle
    outside.compute()
    try:
        assert web.processes[0].run(control, PREEMPT, "tsg", END_TURN, outside.client) == nv.BAD_CLIENT
    finally:
        outside.close()


def give_away(state, seconds, asked=(PREEMPT, "tsg", END_TURN)):
    until, times = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        control(state, *asked)
        times += 1
    return times


def test_who_ends_its_turn_over_and_over_gains_nothing(web, pod):
    def flood(state):
        state["p"].submit(state["handles"]["channel"], 1000)

    neighbour = pod("neighbour")
    neighbour.process().run(program)
    for made in (web, neighbour):
        made.processes[0].run(flood)
    before = [tsg["run_ns"] for tsg in qg.sim_tsgs()]
    web.processes[0].run(give_away, 2)
    own, other = (tsg["run_ns"] - then for tsg, then in zip(qg.sim_tsgs(), before, strict=True))

    assert own < 1.05 * other


@pytest.mark.parametrize(
    "asked",
    [(PREEMPT, "tsg", END_TURN), (PIDS, "subdevice"), (PID_INFO, "subdevice", bytes(14408))],
    ids=["end of turn", "pids", "pid info"],
)
def test_a_call_that_gates_wait_for_costs_twenty_times_its_time(web, linger, asked):
    """A call of 20 ms: three of them in a second, with what they cost."""
    linger(20000)

    assert web.processes[0].run(give_away, 1, asked) <= 4


def ask_for_figures(state, seconds, mask):
    """Make handles of the page that RM shares with all, each with a mask of figures; how many."""
    p, until, times = state["p"], time.monotonic() + seconds, 0
    while time.monotonic() < until:
        p.alloc(p.subdevice, SHARED_PAGE, struct.pack("Q", mask))
        times += 1
    return times


@pytest.mark.parametrize("mask", [1 << 1, 1 << 63])
def test_pages_with_figures_cost_forty_times_their_time(web, linger, mask):
    """RM looks through all clients' objects, and once more as the process ends. A call of 20 ms: five in 3 s."""
    linger(20000)

    assert web.processes[0].run(ask_for_figures, 3, mask) <= 5


def free_pages(state, pages, seconds):
    until, times = time.monotonic() + seconds, 0
    while pages and time.monotonic() < until:
        times += not state["p"].free(pages.pop())
    return times


def test_frees_of_the_shared_page_cost_twenty_times_their_time(web, linger):
    """With or without a mask, RM looks through all clients' objects."""

    def make(state, number):
        p = state["p"]
        return [p.alloc(p.subdevice, SHARED_PAGE, bytes(8)) for _ in range(number)]

    (process,) = web.processes
    pages = process.run(make, 12)
    linger(20000)

    assert process.run(free_pages, pages, 1) <= 4


def pid_infos(state, *pids):
    """Ask what processes have on the card; of each entry its number, the status, and the bytes."""
    params = struct.pack("I4x", len(pids)) + b"".join(struct.pack("I68x", pid) for pid in pids)
    said = state["p"].control(state["handles"]["subdevice"], PID_INFO, params.ljust(14408, b"\0"))
    return [struct.unpack_from("I4xI4xQ", said, 8 + 72 * i) for i in range(len(pids))]


def test_a_process_asked_about_twice_is_answered_once(web):
    """RM would look through all of its objects each time."""
    outside = {}
    program(outside)
    asked = (7, 5, 7, 6, 7)

    assert web.processes[0].run(pid_infos, *asked) == [
        (7, 0, 7),
        (5, 0, 5),
        (7, nv.BAD_ARGUMENT, 0),
        (6, 0, 6),
        (7, nv.BAD_ARGUMENT, 0),
    ]
    assert not web.info().flags & qg.N["QGPU_POD_TAMPERED"]
    assert pid_infos(outside, *asked) == [(pid, 0, pid) for pid in asked]
    outside["p"].close()


def test_as_many_processes_as_rm_allows_are_asked_about(web):
    asked = tuple(range(1, 201))

    assert web.processes[0].run(pid_infos, *asked) == [(pid, 0, pid) for pid in asked]


def test_a_list_that_cannot_be_written_is_an_error(web):
    """The module marks the second entry of a process in the list itself."""

    def ask(state):
        page = mmap.mmap(-1, 4 * mmap.PAGESIZE)
        struct.pack_into("I4xI68xI", page, 0, 2, 7, 7)
        at = ctypes.addressof(ctypes.c_char.from_buffer(page))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), len(page), mmap.PROT_READ) == 0
        p = state["p"]
        data = bytearray(nv._CONTROL.pack(p.client, p.subdevice, PID_INFO, 0, at, 14408, 0xFFFF))
        nv.call(p.ctl, 0x2A, data)
        return nv._CONTROL.unpack(data)[6]

    assert web.processes[0].run(ask) == 0x1E


@pytest.mark.parametrize(("share_type", "answer"), [(1, 0), (4, 0), (3, nv.NO_PERMISSION)])
def test_a_policy_for_all_objects_names_no_client(web, share_type, answer):
    policy = struct.pack("<IIHBx", 1, 1, share_type, 0)

    assert web.processes[0].run(control, 0xD04, "device", policy) == answer


def test_other_controls_pass(web):
    assert web.processes[0].run(control, 0x20801701, "subdevice") == 0
    assert web.processes[0].run(control, 0x20801357, "subdevice") == 0x56
    assert web.info().refused_controls == 0


def test_raw_firmware_controls_need_a_client_of_the_pod(web):
    outside = nv.Program()
    try:
        assert web.processes[0].run(control, 0x20808159, "subdevice") == 0
        assert web.processes[0].run(control, 0x20808159, "subdevice", b"", outside.client) == nv.BAD_CLIENT
    finally:
        outside.close()


def test_serialised_parameters_are_refused(web):
    assert web.processes[0].run(control, 0x20801701, "subdevice", b"", 0, 4) == nv.BAD_ARGUMENT


def test_outside_pods_scheduling_controls_pass(web):
    outside = nv.Program()
    tsg = outside.tsg()
    outside.control(tsg, 0xA06C0103, (5000).to_bytes(8, "little"))
    try:
        assert {"slice_ns": 5_000_000}.items() <= qg.sim_tsgs()[-1].items()
    finally:
        outside.close()

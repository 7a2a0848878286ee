"""Copy TSGs under a plan: which timeslices they get, when they are behind their pod's gate, and that it opens again."""

from __future__ import annotations

import struct
import time

import nv
import pytest
import qg
from faults import ENFORCE, FAULTS, cleared, fault, inject
from programs import status_of
from test_slice import measure, measure_share

from qgpu.model import Grant
from tests.contract import kmod_rig
from tests.contract.test_backend import MEASURE_NS, SETTLE_NS, drive, near, opened, seen, settings

MS = qg.MS
YIELD = qg.N["QGPU_WINDOW_YIELD"]
BUSY, INVALID_STATE = 0x03, 0x40
BIND, RESET, COPIES = 0xA06F0104, 0x906F0102, 0xC8B5
#: COPY2, which CUDA uses.
COPY = 11
#: COPY0 and COPY1, which are on the compute engine's runlist, as on an H200.
GRCES = [0x09, 0x0A, 0x40, 0x41]
#: Of a TSG that nobody gates or schedules: channels off, and the timeslice in us.
OWN = (0, 1024)


def copier(state, engine=COPY, kernel_us=1000):
    """A TSG of the compute engine and one of a copy engine, with work for both."""
    p = state["p"] = nv.Program()
    state["tsg"], state["channels"] = p.compute()
    state["copies"] = p.tsg(engine)
    state["copy"] = p.channel(state["copies"])
    for channel in (*state["channels"], state["copy"]):
        p.submit(channel, kernel_us)
    return p.client, state["copies"]


def copies_only(state, kernel_us=1000):
    p = state["p"] = nv.Program()
    state["copies"] = p.tsg(COPY)
    state["channels"] = [p.channel(state["copies"])]
    p.submit(state["channels"][0], kernel_us)


def kernels(state):
    return [state["p"].query(channel)["kernels"] for channel in (*state["channels"], state["copy"])]


def card():
    """Compute TSGs, then copy TSGs: channels off, and the timeslice in us."""
    rows = [(tsg["runlist"] > 0, tsg["off"], tsg["slice_ns"] // 1000) for tsg in qg.sim_tsgs()]
    return [row[1:] for row in rows if not row[0]], [row[1:] for row in rows if row[0]]


def met(call):
    return int(dict(line.split() for line in FAULTS.read_text().splitlines())[call])


@pytest.fixture
def pods(pod):
    """Pods with a process that computes and copies."""

    def make(*names, engine=COPY):
        made = [pod(name) for name in names]
        for each in made:
            each.process().run(copier, engine)
        return made

    yield make
    cleared()


def test_copy_tsgs_get_their_pods_copy_timeslice(qgpu, pods):
    a, b = pods("a", "b")
    qgpu.plan((a.id, 5000), (b.id, 6000), copies={a.id: 4000, b.id: 2000})

    assert card() == ([(0, 5000), (0, 6000)], [(0, 4000), (0, 2000)])


@pytest.mark.parametrize("engine", [0x0B, 0x12, 0x34, 0x3D, 0x42, 0x53], ids=hex)
def test_copy_engines_are_known_by_each_of_their_names(qgpu, pods, engine):
    (a,) = pods("a", engine=engine)
    qgpu.plan((a.id, 5000, []), copies={a.id: 4000}, gate=qg.GATED)

    assert card() == ([(1, 5000)], [(0, 4000)])


@pytest.mark.parametrize("engine", GRCES, ids=hex)
def test_copies_on_the_compute_runlist_are_as_compute(qgpu, pods, engine):
    """They would take the time of other pods' kernels."""
    (a,) = pods("a", engine=engine)
    qgpu.plan((a.id, 5000, []), copies={a.id: 4000}, gate=qg.GATED)

    assert card() == ([(1, 5000), (1, 5000)], [])


def test_a_codecs_tsg_is_as_compute(qgpu, pods):
    (a,) = pods("a", engine=0x13)
    qgpu.plan((a.id, 5000, []), copies={a.id: 4000}, gate=qg.GATED)

    assert card() == ([(1, 5000), (1, 5000)], [])


def test_an_engine_that_rm_does_not_tell_is_as_compute(qgpu, pod, pods):
    inject([fault("copies", BUSY)])
    (a,) = pods("a")
    qgpu.plan((a.id, 5000, []), copies={a.id: 4000}, gate=qg.GATED)

    assert card() == ([(1, 5000)], [(1, 5000)])


def test_an_engine_that_is_not_sealed_is_as_compute(qgpu, pods):
    """RM may have read another one than the module."""
    with qg.switched_off(qg.KPROBES):
        (a,) = pods("a")
    qgpu.plan((a.id, 5000, []), copies={a.id: 4000}, gate=qg.GATED)

    assert card() == ([(1, 5000)], [(1, 5000)])


def test_without_a_copy_timeslice_rm_is_not_asked(qgpu, pods):
    (a,) = pods("a")
    inject([fault("slice", 0)])
    before = met("slice")
    qgpu.plan((a.id, 5000))
    qgpu.plan((a.id, 5000))
    qgpu.plan()

    assert met("slice") - before == 2  # of the compute TSG: the plan's, and its own again
    assert card() == ([OWN], [OWN])


@pytest.mark.parametrize("after", ["no plan", "no timeslice", "no pod"])
def test_unplanned_copy_tsg_gets_drivers_timeslice_back(qgpu, pods, after):
    a, b = pods("a", "b")
    qgpu.plan((a.id, 5000), (b.id, 5000), copies={a.id: 4000, b.id: 2000})
    if after == "no plan":
        qgpu.plan()
    elif after == "no timeslice":
        qgpu.plan((a.id, 5000), (b.id, 5000), copies={b.id: 2000})
    else:
        qgpu.plan((b.id, 5000), copies={b.id: 2000})

    assert card()[1] == [OWN, OWN if after == "no plan" else (0, 2000)]


def test_a_gate_of_lent_windows_leaves_copies_on_the_card(qgpu, pods):
    (a,) = pods("a")
    qgpu.plan((a.id, 5000, [(0, 1, YIELD)]), copies={a.id: 4000}, gate=qg.GATED)
    before = a.processes[0].run(kernels)
    time.sleep(0.3)
    after = a.processes[0].run(kernels)

    assert card() == ([(1, 5000)], [(0, 4000)])
    assert (after[0], after[1] > before[1]) == (before[0], True)


def test_a_gate_over_copies_takes_them_off_the_card(qgpu, pods):
    """Nobody else wants the copy engine: only preemption takes it away."""
    (a,) = pods("a")
    qgpu.plan((a.id, 5000, []), copies={a.id: 4000})
    before = a.processes[0].run(kernels)
    time.sleep(0.3)

    assert card() == ([(1, 5000)], [(1, 4000)])
    assert a.processes[0].run(kernels) == before


@pytest.mark.parametrize("after", ["no plan", "always open", "lent windows"])
def test_copies_closed_by_one_plan_are_open_under_the_next(qgpu, pods, after):
    (a,) = pods("a")
    qgpu.plan((a.id, 5000, []), copies={a.id: 4000})
    closed = card()[1]
    if after == "no plan":
        qgpu.plan()
    elif after == "always open":
        qgpu.plan((a.id, 5000), copies={a.id: 4000})
    else:
        qgpu.plan((a.id, 5000, []), copies={a.id: 4000}, gate=qg.GATED)

    assert closed == [(1, 4000)]
    assert card()[1] == [OWN if after == "no plan" else (0, 4000)]


@pytest.mark.parametrize("how", ["die", "lapse", "off", "remove"])
def test_what_opens_gates_opens_copies_too(qgpu, pods, how):
    (a,) = pods("a")
    daemon = qg.Qgpu()
    daemon.plan((a.id, 5000, []), copies={a.id: 4000}, lease_ns=200 * MS if how == "lapse" else 60_000 * MS)
    if how == "die":
        daemon.close()
    elif how == "off":
        ENFORCE.write_text("0")
    elif how == "remove":
        qgpu.ioctl("POD_REMOVE", pod=a.id)
    qg.until(lambda: card() == ([OWN], [OWN]))
    daemon.close()
    ENFORCE.write_text("1")

    assert card() == ([OWN], [OWN])


@pytest.mark.parametrize("how", ["kill", "copies", "copy", "client"])
def test_gated_copies_that_go_away_wait_for_no_gate(qgpu, pods, how):
    a, b = pods("a", "b")
    before = qg.sim()["waits"]
    qgpu.plan((a.id, 5000, []), (b.id, 5000, []))
    if how == "kill":
        a.processes[0].kill()
    elif how == "client":
        a.processes[0].run(lambda state: state["p"].free(state["p"].client))
    elif how == "copies":
        a.processes[0].run(lambda state: state["p"].free(state["copies"]))
    else:
        a.processes[0].run(lambda state: state["p"].free(state["copy"]))
    qg.until(lambda: a.usage().nr_channels == (how in ("copies", "copy")))

    assert qg.sim()["waits"] == before
    assert card()[1][-1][0] == 1


@pytest.mark.parametrize(("gate", "waits"), [(qg.GATED | qg.COPIES, True), (qg.GATED, False)], ids=["gated", "open"])
def test_a_free_of_copies_is_paid_if_it_opened_a_gate(qgpu, pods, late, gate, waits):
    """The driver takes 0.1 s for it, and the pod's next free waits twenty times as long."""

    def timed_frees(state):
        p = state["p"]
        second = p.tsg(COPY)
        p.free(state["copies"])
        started = time.monotonic()
        p.free(second)
        return time.monotonic() - started

    (a,) = pods("a")
    qgpu.plan((a.id, 5000, []), gate=gate)
    late(100_000)

    assert (a.processes[0].run(timed_frees) > 0.7) is waits


def test_copy_channel_made_behind_a_closed_gate_is_off(qgpu, pods):
    (a,) = pods("a")
    qgpu.plan((a.id, 5000, []))
    a.processes[0].run(lambda state: state["p"].channel(state["copies"]))
    a.process().run(copier)

    assert [off for off, _ in card()[1]] == [2, 1]


def test_a_pod_cannot_start_its_copies_behind_a_closed_gate(qgpu, pods):
    (a,) = pods("a")
    qgpu.plan((a.id, 5000, []))
    a.processes[0].run(lambda state: state["p"].control(state["copies"], 0xA06C0101, b"\1\0\0"))

    assert card()[1][0][0] == 1


@pytest.mark.parametrize(("gate", "off"), [(qg.GATED | qg.COPIES, 1), (qg.GATED, 0)], ids=["all", "without copies"])
def test_lone_copy_channel_moves_with_its_pods_copies(qgpu, pod, gate, off):
    """RM makes a TSG for it that has no handle, so nobody sets its timeslice."""

    def lone(state):
        p = state["p"] = nv.Program()
        p.submit(p.alloc(p.device, nv.CHANNEL, struct.pack("128xI232x", COPY)), 1000)

    a = pod("a")
    a.process().run(lone)
    qgpu.plan((a.id, 5000, []), copies={a.id: 4000}, gate=gate)
    closed = card()
    qgpu.plan()

    assert closed == ([], [(off, 1024)])
    assert card() == ([], [OWN])


def test_copies_below_every_handle_of_a_group_are_its_tsgs(qgpu, pods):
    """A client of MPS makes its channels below a duplicate of the server's TSG."""

    def join(state, client, tsg):
        p = state["p"] = nv.Program()
        p.channel(p.dup(client, tsg))

    (a,) = pods("a")
    names = a.processes[0].run(lambda state: (state["p"].client, state["copies"]))
    a.process().run(join, *names)
    seen = []
    for gate in (qg.GATED | qg.COPIES, qg.GATED):
        qgpu.plan((a.id, 5000, []), copies={a.id: 4000}, gate=gate)
        seen.append(card()[1])

    assert seen == [[(2, 4000)], [(0, 4000)]]


def test_a_refused_copy_timeslice_is_set_when_rm_sets_it(qgpu, pods):
    (a,) = pods("a")
    qgpu.events()
    inject([fault("slice", INVALID_STATE)])
    qgpu.plan((a.id, 5000), copies={a.id: 4000})
    refused = card()
    cleared()
    qg.until(lambda: card() == ([(0, 5000)], [(0, 4000)]))

    assert refused == ([OWN], [OWN])
    assert qg.N["QGPU_EVENT_GATE_FAILED"] in [event.type for event in qgpu.events()]


@pytest.mark.parametrize("status", [BUSY, INVALID_STATE])
def test_copies_that_rm_does_not_open_are_open_once_it_does(qgpu, pods, status):
    (a,) = pods("a")
    qgpu.plan((a.id, 5000, []), copies={a.id: 4000})
    inject([fault("open", status)])
    qgpu.plan()
    refused = [off for off, _ in card()[1]]
    cleared()
    qg.until(lambda: card() == ([OWN], [OWN]))

    assert refused == [1]


def test_plan_without_copies_treats_copy_tsgs_as_all_others(qgpu, pods):
    """Of a caller that does not know of them: elements of its array end before."""
    (a,) = pods("a")
    known = {"pod": a.id, "timeslice_us": 5000, "flags": qg.GATED}
    element = qg.uapi.ffi.new("struct qgpu_pod_plan *", known)
    qgpu.plan(pods=int(qg.uapi.ffi.cast("uintptr_t", element)), nr_pods=1, pod_plan_size=0)

    assert card() == ([(1, 5000)], [(1, 5000)])


@pytest.mark.quiet
def test_copies_divide_by_copy_timeslices(qgpu, pod, figure):
    made = [pod(name) for name in ("a", "b")]
    for each in made:
        each.process().run(copies_only)
    a, b = made
    qgpu.plan((a.id, 5000), (b.id, 5000), copies={a.id: 20000, b.id: 10000})
    first, second = measure(3, a, b)
    figure("copies_ratio_2_1", first / second)

    assert first / second == pytest.approx(2, rel=0.05)


@pytest.mark.quiet
def test_copies_of_a_pod_alone_get_its_windows(qgpu, pod, figure):
    a = pod("a")
    a.process().run(copies_only)
    qgpu.plan((a.id, 1000, [(0, 300 * MS, 0)]), period_ns=1000 * MS)
    share = measure_share(7, 0.30, lambda rate: rate / 1000, a)
    figure("copies_fixed_30_alone", share)

    assert share == pytest.approx(0.30, rel=0.05)


@pytest.fixture
def rig(module):
    """The daemon's side of the plane."""
    made = kmod_rig.KmodRig()
    yield made
    made.close()


@pytest.fixture
def copying(rig):
    """Admit a pod with this quota, and start a process in it that computes and copies."""
    started = []

    def start(name, cores):
        rig.host.admit(name, {rig.pgpu: Grant(cores=cores)})
        started.append(qg.Process(None))
        rig.host.attach(name, started[-1].pid, ())
        started[-1].run(copier)
        return started[-1]

    yield start
    for process in started:
        process.kill()


def test_a_policys_copy_timeslices_reach_the_card(rig, copying):
    for name, cores in (("a", 60), ("b", 30)):
        copying(name, cores)
    with opened(rig) as backend:
        drive(backend, settings("burst-share"), SETTLE_NS)
        (_, first), (_, second) = card()[1]

    assert (first / second, first + second) == (pytest.approx(2, rel=0.01), pytest.approx(4000, rel=0.01))
    assert card()[1] == [OWN, OWN]


@pytest.mark.quiet
def test_fixed_share_holds_copies_to_the_quota(rig, copying):
    process = copying("alone", 30)
    with opened(rig) as backend:

        def share():
            ledger = drive(backend, settings("fixed-share"), SETTLE_NS)
            before = process.run(kernels)[1]
            drive(backend, settings("fixed-share"), MEASURE_NS, ledger)
            return (process.run(kernels)[1] - before) * MS / MEASURE_NS

        found = seen(rig, share, lambda got: near(got, 0.30))

    assert near(found, 0.30), found


def moved(state, own, by, engine):
    """Have a TSG's only channel put on an engine's runlist; RM's status."""
    p = state["p"] = nv.Program()
    channel = p.channel(p.tsg(own))
    if by == "bind":
        return status_of(state, "control", channel, BIND, struct.pack("I", engine))
    params = struct.pack("II", 1, engine) if by == "type" else struct.pack("II", 0, engine - 0x09)
    return status_of(state, "alloc", channel, COPIES, params)


@pytest.mark.parametrize("by", ["bind", "type", "number"])
@pytest.mark.parametrize(
    ("own", "engine", "status"),
    [
        (COPY, COPY + 1, 0),
        (1, GRCES[0], 0),
        (COPY, GRCES[0], nv.BAD_ARGUMENT),
        (1, COPY, nv.BAD_ARGUMENT),
        (GRCES[0], COPY, nv.BAD_ARGUMENT),
    ],
)
def test_a_channel_stays_with_its_tsgs_kind_of_engine(pod, own, by, engine, status):
    """RM puts the TSG on another runlist, where its gate and timeslice are not those of the others."""
    assert pod("a").process().run(moved, own, by, engine) == status
    assert [tsg["runlist"] > 0 for tsg in qg.sim_tsgs()] == [own == COPY]


@pytest.mark.parametrize("engine", [1, 0x3F, 0x7FFFFFFF])
def test_a_copy_channel_is_bound_to_copy_engines_only(pod, engine):
    assert pod("a").process().run(moved, COPY, "bind", engine) == nv.BAD_ARGUMENT


def test_where_copies_run_unknown_a_compute_tsg_may_copy(pod):
    inject([fault("copies", 0x56)])
    try:
        assert pod("a").process().run(moved, 1, "type", COPY) == 0
    finally:
        cleared()


def reset(state, own, engine):
    """Reset a TSG's only channel together with an engine; RM's status."""
    p = state["p"] = nv.Program()
    state["channel"] = p.channel(p.tsg(own))
    return reset_again(state, engine)


def reset_again(state, engine):
    return status_of(state, "control", state["channel"], RESET, struct.pack("III4x", engine, 0, 0))


@pytest.mark.parametrize(
    ("own", "engine", "status"),
    [
        (1, 1, 0),
        (0, 1, 0),
        (1, 0, 0),
        (COPY, COPY, 0),
        (1, COPY, nv.BAD_ARGUMENT),
        (COPY, 1, nv.BAD_ARGUMENT),
        (COPY, COPY + 1, nv.BAD_ARGUMENT),
        (1, 0x7FFFFFFF, nv.BAD_ARGUMENT),
    ],
)
def test_a_channel_is_reset_with_its_own_engine_only(pod, own, engine, status):
    """Neighbours may run on another one."""
    assert pod("a").process().run(reset, own, engine) == status


def test_no_channel_is_reset_while_calls_are_not_sealed(pod):
    """Another thread could name another engine after the check."""
    process = pod("a").process()
    assert process.run(reset, 1, 1) == 0
    with qg.switched_off(qg.KPROBES):
        qg.until(lambda: process.run(reset_again, 1) == nv.BAD_ARGUMENT)

    qg.until(lambda: process.run(reset_again, 1) == 0)


def resets(state, seconds):
    until, times = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        times += not reset_again(state, 1)
    return times


def test_a_reset_behind_a_closed_gate_costs_as_a_start(qgpu, pod, linger):
    """A call of 20 ms: three of them in a second, with what they cost. RM may put the channel on the card."""
    made = pod("a")
    process = made.process()
    process.run(reset, 1, 1)
    qgpu.plan((made.id, 5000, []))
    linger(20000)

    assert process.run(resets, 1) <= 4

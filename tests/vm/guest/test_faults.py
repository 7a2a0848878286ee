"""Whatever RM answers, and if it does not, no gate stays closed: every way to end a plan, under every fault."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import nv
import pytest
import qg
from faults import ENFORCE, FAULTS, POWER, cleared, fault, inject
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

MS = qg.MS
RUNS = int(os.environ.get("QGPU_VM_FAULTS", "60"))
#: Fewer if they take longer than so many seconds.
END = time.monotonic() + float(os.environ.get("QGPU_VM_FAULTS_S", "600"))
#: Of the first fifty runs; the next fifty have the next one.
SEED = int(os.environ.get("QGPU_VM_SEED", "1"))
STALLED = qg.uapi.NUMBERS["QGPU_EVENT_STALLED"]

pytestmark = pytest.mark.quiet

#: What RM may say, of its objects, of the card and of itself (nvstatuscodes.h).
STATUSES = {
    "BUSY_RETRY": 0x03,
    "GPU_IS_LOST": 0x0F,
    "INSUFFICIENT_RESOURCES": 0x1A,
    "INSUFFICIENT_PERMISSIONS": 0x1B,
    "INVALID_ARGUMENT": 0x1F,
    "INVALID_CHANNEL": 0x21,
    "INVALID_CLIENT": 0x23,
    "INVALID_OBJECT": 0x31,
    "INVALID_STATE": 0x40,
    "NO_MEMORY": 0x51,
    "NOT_SUPPORTED": 0x56,
    "OBJECT_NOT_FOUND": 0x57,
    "RESET_REQUIRED": 0x62,
    "STATE_IN_USE": 0x63,
    "TIMEOUT": 0x65,
    "GENERIC": 0xFFFF,
}
CALLS = ("any", "gate", "close", "open", "slice", "info", "subdevice")
UNTIL_CLEARED = -1


def flood(state, tsgs=2):
    p = state["p"] = nv.Program()
    for _ in range(tsgs):
        _, channels = p.compute(2)
        p.submit(channels[0], 1000)


def own(state, plan, lease_ns, period_ns):
    state["q"] = qg.Qgpu()
    state["q"].plan(*plan, lease_ns=lease_ns, period_ns=period_ns)


def close(state):
    state["q"].close()


def replace(state):
    state["q"].plan()


def is_free():
    return all((tsg["off"], tsg["slice_ns"]) == (0, 1_024_000) for tsg in qg.sim_tsgs())


class Host:
    """Two pods and a daemon, whatever has become of those of the run before."""

    def __init__(self) -> None:
        self.qgpu: qg.Qgpu | None = None
        self.pods: list[qg.Pod] = []
        self.daemon: qg.Process | None = None
        self.threads: list[threading.Thread] = []
        self.made = 0

    def start(self, plan_of: Callable[..., tuple[list[tuple], int]], lease_ns: int) -> None:
        if not self.qgpu:
            qg.insmod("qgpu.ko")
            self.qgpu = qg.Qgpu()
        while len(self.pods) < 2:
            self.made += 1
            self.pods.append(qg.Pod(self.qgpu, f"pod{self.made}"))
            self.pods[-1].process().run(flood)
        plan, period_ns = plan_of(*(pod.id for pod in self.pods))
        self.daemon = self.daemon or qg.Process(None)
        self.daemon.run(own, plan, lease_ns, period_ns)

    def later(self, function: Callable[[], object]) -> None:
        """Do what may wait for the driver."""
        thread = threading.Thread(target=function)
        thread.start()
        self.threads.append(thread)

    def drop_pod(self) -> None:
        self.pods.pop().close()

    def join(self) -> None:
        for thread in self.threads:
            thread.join()
        self.threads.clear()

    def end_daemon(self) -> None:
        if self.daemon:
            self.daemon.kill()
        self.daemon = None

    def renew(self) -> None:
        """New pods: those that ran while nothing was enforced have work without a gate."""
        while self.pods:
            self.drop_pod()

    def unload(self) -> None:
        self.renew()
        self.qgpu = self.qgpu and self.qgpu.close()
        qg.until(lambda: not qg.loaded("qgpu") or unloads())

    def stop(self) -> None:
        cleared()
        self.join()
        self.end_daemon()
        self.unload()


def unloads():
    with contextlib.suppress(BlockingIOError):
        qg.rmmod("qgpu")
    return not qg.loaded("qgpu")


def write(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):  # a sleep is refused while a gate does not open
        path.write_text(text)


# Ways to end a plan: what is done under the faults, and what afterwards.


def daemon_closes(host):
    host.daemon.start(close)


def daemon_dies(host):
    host.later(host.end_daemon)


def daemon_opens_all(host):
    host.daemon.start(replace)


def lease_lapses(host):
    """It was given a short one."""


def switched_off(host):
    host.later(lambda: write(ENFORCE, "0"))


def driver_sleeps(host):
    host.later(lambda: write(POWER, "suspend"))


def pod_dies(host):
    pod = host.pods[0]
    host.later(lambda: pod.processes[0].kill())
    host.daemon.start(close)


def pod_removed(host):
    host.later(lambda: host.qgpu.ioctl("POD_REMOVE", pod=host.pods[0].id))
    host.daemon.start(close)


def unloaded(host):
    host.end_daemon()
    host.later(unloads)  # refused while a gate may be closed, and while the test has its own descriptor


EVENTS = (
    daemon_closes,
    daemon_dies,
    daemon_opens_all,
    lease_lapses,
    switched_off,
    driver_sleeps,
    pod_dies,
    pod_removed,
    unloaded,
)


def both_closed(a, b):
    return [(a, 5000, []), (b, 2000, [])], 100 * MS


def turns(a, b):
    return [(a, 1000, [(0, 20 * MS, 0)]), (b, 1000, [(20 * MS, 40 * MS, 0)])], 40 * MS


faults = st.lists(
    st.builds(
        fault,
        st.sampled_from(CALLS),
        st.sampled_from(sorted(STATUSES.values())),
        count=st.sampled_from([0, 0, 1, 2, 5, 40]),
        effect=st.integers(0, 2),
        stall_ms=st.sampled_from([0, 0, 0, 3, UNTIL_CLEARED]),
    )
    | st.builds(fault, st.just("any"), st.just(0), stall_ms=st.sampled_from([20, UNTIL_CLEARED, -30])),
    min_size=1,
    max_size=3,
)


@pytest.fixture
def host(_driver):
    made = Host()
    yield made
    made.stop()


@pytest.mark.timeout(3600)
def test_no_gate_stays_closed_whatever_rm_answers(host, figure):
    seen, worst, left, runs = set(), [0.0], [0], [0]

    @settings(
        max_examples=min(RUNS, 50),
        phases=[Phase.generate],  # a failure is shown as it was: shrinking would take minutes
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(
        faults,
        st.sampled_from(EVENTS),
        st.sampled_from([both_closed, turns]),
        st.booleans(),
        st.integers(0, 60),
        st.integers(0, 80),
    )
    def run(injected, event, plan_of, before, delay_ms, kept_ms):
        host.start(plan_of, 150 * MS if event is lease_lapses else 60_000 * MS)
        if before:  # the fault is there when the plan ends; else it comes at the same time
            inject(injected)
            time.sleep(delay_ms / 1000)
            event(host)
        else:
            event(host)
            inject(injected)
        time.sleep((kept_ms + (150 if event is lease_lapses else 0)) / 1000)
        cleared()
        answered = time.monotonic()
        try:
            if event is unloaded:
                host.end_daemon()
            qg.until(is_free, 20)
        except AssertionError:
            left[0] += 1
            raise
        worst[0] = max(worst[0], time.monotonic() - answered)
        host.join()
        with contextlib.suppress(BrokenPipeError, AttributeError, EOFError, ConnectionResetError):
            if event in (daemon_closes, daemon_opens_all, pod_dies, pod_removed):
                host.daemon.result()
        if event is driver_sleeps:
            write(POWER, "resume")
            qg.until(lambda: plan_of is turns or not is_free())  # it goes on
        if event in (driver_sleeps, lease_lapses, daemon_opens_all):
            host.daemon.run(close)
            qg.until(is_free)
        if event is switched_off:
            host.daemon.run(close)
            ENFORCE.write_text("1")
            host.renew()
        if event in (pod_dies, pod_removed):
            host.pods.reverse()
            host.drop_pod()
        if event is unloaded:
            host.unload()
        runs[0] += 1
        seen.update(f"{each.call} {each.status:#x} {each.effect} {each.stall_ms and 'late'}" for each in injected)

    before, chunk = sum(met(call) for call in CALLS), 0
    while runs[0] < RUNS and (not chunk or time.monotonic() < END):
        seed(SEED + chunk)(run)()
        chunk += 1
        figure("seeds", chunk)
        figure("fault_runs", runs[0])
        figure("fault_kinds", len({each.split()[1] for each in seen}))
        figure("fault_combinations", len(seen))
        figure("fault_calls", sum(met(call) for call in CALLS) - before)
        figure("gates_left_closed", left[0])
        figure("open_after_answer_s", worst[0])
    assert worst[0] <= 1


@pytest.fixture
def closed(qgpu, pod):
    """A pod behind a closed gate; its plan's daemon."""
    a = pod("a")
    a.process().run(flood)
    daemon = qg.Process(None)
    daemon.run(own, [(a.id, 5000, [])], 60_000 * MS, 100 * MS)
    yield daemon
    cleared()
    daemon.kill()


@pytest.mark.parametrize("status", ["TIMEOUT", "BUSY_RETRY", "GPU_IS_LOST", "RESET_REQUIRED"])
def test_switching_off_waits_until_every_gate_is_open(closed, qgpu, status):
    inject([fault("open", STATUSES[status])])
    switch = threading.Thread(target=write, args=(ENFORCE, "0"))
    switch.start()
    qg.until(lambda: met("open") > 2)
    assert (switch.is_alive(), qgpu.info().nr_objects > 0) == (True, True)
    cleared()
    switch.join()

    assert is_free()
    ENFORCE.write_text("1")


def test_driver_is_let_go_of_once_timeslices_are_back(closed):
    """Of TSGs whose gates are open, too."""
    inject([fault("slice", STATUSES["BUSY_RETRY"])])
    switch = threading.Thread(target=write, args=(ENFORCE, "0"))
    switch.start()
    qg.until(lambda: met("slice") > 2)
    assert switch.is_alive()
    cleared()
    switch.join()

    assert is_free()
    ENFORCE.write_text("1")


def test_a_timeslice_set_in_spite_of_an_error_goes_back(qgpu, pod):
    a = pod("a")
    a.process().run(flood)
    inject([fault("slice", STATUSES["INVALID_STATE"], effect=1)])
    qgpu.plan((a.id, 7000))
    assert [tsg["slice_ns"] for tsg in qg.sim_tsgs()] == [7_000_000] * 2
    cleared()
    qgpu.plan()

    qg.until(is_free)


def test_rm_is_not_believed_at_once_that_a_channel_is_gone(closed):
    gone = [fault(call, STATUSES["INVALID_OBJECT"], count=40) for call in ("open", "info")]
    inject(gone)
    closed.run(close)
    qg.until(lambda: met("info"))
    cleared()

    qg.until(is_free)


def test_retry_of_an_opening_comes_soon_however_many_failed(closed):
    inject([fault("open", STATUSES["BUSY_RETRY"])])
    before = met("open")
    closed.run(close)
    qg.until(lambda: met("open") > before + 12)  # by doubling, the pauses would add up to a minute


def met(call):
    return int(dict(line.split() for line in FAULTS.read_text().splitlines())[call])


def test_module_stays_loaded_while_a_gate_may_be_closed(closed, qgpu):
    inject([fault("open", STATUSES["BUSY_RETRY"])])
    closed.run(close)
    qgpu.close()
    with pytest.raises(BlockingIOError):
        qg.rmmod("qgpu")
    assert not is_free()
    cleared()

    qg.until(is_free)
    qg.until(unloads)
    qg.insmod("qgpu.ko")
    qgpu.fd = qg.Qgpu().fd


def test_a_stalled_card_is_told_and_stalls_no_daemon(closed, qgpu):
    qgpu.events()
    inject([fault("any", 0, stall_ms=UNTIL_CLEARED)])
    closed.run(replace)  # which waits for gates, but not for ever
    assert qgpu.info().stalled == 1
    cleared()
    qg.until(lambda: qgpu.info().stalled == 0)

    assert [event.value for event in qgpu.events() if event.type == STALLED] == [1, 0]


def worker():
    """The process id of the card's thread."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if (path / "comm").read_text().strip() == "qgpu/0":
                return int(path.name)
    return None


def test_a_cards_thread_has_priority_before_any_control(qgpu):
    assert os.sched_getscheduler(worker()) == os.SCHED_FIFO


def test_a_stalled_thread_has_no_priority(closed):
    thread = worker()
    assert os.sched_getscheduler(thread) == os.SCHED_FIFO
    inject([fault("any", 0, stall_ms=UNTIL_CLEARED)])
    closed.start(close)
    qg.until(lambda: os.sched_getscheduler(thread) == os.SCHED_OTHER)
    cleared()
    closed.result()

    qg.until(lambda: os.sched_getscheduler(thread) == os.SCHED_FIFO)


def test_a_lost_card_is_told_and_asked_less_often(closed, qgpu):
    """Closing gates there is given up for a while; a new plan's call returns."""
    inject([fault("any", STATUSES["GPU_IS_LOST"])])
    closed.run(replace)
    qg.until(lambda: qgpu.info().stalled == 1)
    before = met("any")
    time.sleep(1)
    assert met("any") - before < 10
    cleared()
    qg.until(lambda: qgpu.info().stalled == 0)

    assert is_free()


def test_pods_open_the_driver_while_rm_keeps_a_gate(closed, pod):
    """No lock of ours is held meanwhile: what a pod asks RM for does wait, for RM."""
    inject([fault("open", 0, stall_ms=UNTIL_CLEARED)])
    closed.start(close)
    qg.until(lambda: met("open"))
    other = pod("b")
    process = other.process()
    process.run(lambda state: state.update(fd=os.open(nv.CTL, os.O_RDWR)))
    cleared()
    closed.result()

    assert other.info().nr_files == 1


def test_sleep_is_refused_while_a_gate_does_not_open(closed):
    before = qg.sim()["sleeps"]
    inject([fault("open", STATUSES["BUSY_RETRY"])])
    with pytest.raises(OSError, match="Input/output"):
        POWER.write_text("suspend")
    cleared()
    assert qg.sim()["sleeps"] == before

    qg.until(lambda: not is_free())  # the plan goes on


def take(state):
    p = state["p"]
    return p.free(p.memory(1 << 20))


def test_nothing_is_sent_while_the_driver_sleeps_by_itself(closed, qgpu, pod):
    other = pod("b", memory=64 << 20)
    other.process().run(flood)
    before = qg.sim()
    POWER.write_text("suspend")
    other.processes[0].start(take)  # which asks RM what memory takes of the card
    time.sleep(0.2)
    after = qg.sim()
    POWER.write_text("resume")

    assert other.processes[0].result() == 0
    assert {name: after[name] - before[name] for name in ("sleeps", "asleep_off", "asleep_calls")} == {
        "sleeps": 1,
        "asleep_off": 0,
        "asleep_calls": 0,
    }
    qg.until(lambda: not is_free())

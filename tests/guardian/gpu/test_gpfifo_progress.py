"""How many GPFIFO entries the card took from a pod's channels: all of them, or unknown."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.rm_object import RmObject, Userd, object_fact
from qgpu.guardian.gpu import gpfifo_progress
from qgpu.guardian.gpu.gpfifo_progress import GpfifoProgress, PodProgress, slots_of
from qgpu.guardian.gpu.gpu import Gpu
from qgpu.guardian.gpu.userd_mapping import Area, Slot
from qgpu.ipc.codec import grants_to_json
from qgpu.model import NS_PER_MS, NS_PER_S, Grant, Plan
from qgpu.nvidia import abi
from qgpu.nvidia.ctxsw_log import START, ContextSwitch
from tests.guardian.gpu.userd_program import CLIENT, DEVICE, ENTRIES, SIZE, USERD_MEMORY, UserdProgram
from tests.guardian.pod import PATIENCE_S, until

CHANNEL = min(abi.GPFIFO_CLASSES)
#: Longer than any pause between searches, and so long that every count is late.
LATER_NS = 60 * NS_PER_S
#: A ring that no delay of a test is long enough for.
LARGE = 1 << 30
PLAN = Plan(0, 10 * NS_PER_MS, ())


@pytest.fixture
def program(tmp_path: Path) -> Iterator[UserdProgram]:
    """A process with USERD in one file."""
    made = UserdProgram(tmp_path)
    yield made
    made.end()


def is_open(program: UserdProgram) -> bool:
    """Tell whether the program's memory is open in this process."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return f"/proc/{program.process.pid}/mem" in [os.readlink(link) for link in links if os.path.islink(link)]


class Counted:
    """A pod's progress, step by step, on a clock of the test's."""

    def __init__(self, program: UserdProgram, *slots: Slot) -> None:
        self.program, self.now_ns = program, NS_PER_S
        wanted = frozenset(slots or [program.slot()])
        self.progress = PodProgress(wanted, frozenset({DEVICE}), program.device_at, lambda: self.now_ns)

    def step(self, after_ns: int = 4 * NS_PER_MS) -> int:
        self.now_ns += after_ns
        return self.progress.step()

    def begin(self) -> None:
        """Take what was counted before all channels were."""
        self.step()
        assert self.progress.take() is None


@pytest.fixture
def count(program: UserdProgram) -> Iterator[Callable[..., Counted]]:
    """Count channels of the program, which is looked at in full once."""
    made = []

    def begin(*slots: Slot) -> Counted:
        made.append(Counted(program, *slots))
        made[-1].begin()
        return made[-1]

    yield begin
    for counted in made:
        counted.progress.watch(None)
        counted.progress.run()


def test_all_entries_of_all_channels_are_counted_once(program, count):
    program.put(1000)
    counted = count(program.slot(), program.slot(0x5000))
    assert counted.progress.take() == 0
    program.put(1010)
    program.put(7, offset=0x5000)
    counted.step()

    assert [counted.progress.take(), counted.progress.take()] == [17, 0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(st.lists(st.integers(0, ENTRIES - 1)))
def test_advances_add_up_however_often_the_ring_wraps(program, count, advances):
    get = 0
    program.put(get, 1)
    counted = count()
    for advance in advances:
        get = (get + advance) % ENTRIES
        program.put(get)
        counted.step()

    assert counted.progress.take() == sum(advances)


def test_nothing_is_known_of_the_time_before_all_was_counted(program):
    counted = Counted(program)
    assert counted.progress.take() is None
    counted.step()
    program.put(5)
    counted.step()

    assert [counted.progress.take(), counted.progress.take()] == [None, 0]
    counted.progress.watch(None)
    counted.progress.run()


def test_a_ring_that_may_have_wrapped_makes_one_count_unknown(program, count):
    counted = count()
    program.put(5)
    counted.step(11 * NS_PER_MS)
    assert counted.progress.take() is None
    program.put(7)
    counted.step(10 * NS_PER_MS)

    assert counted.progress.take() == 2


def test_a_late_look_at_a_ring_that_rests_is_certain(program, count):
    counted = count()
    counted.step(LATER_NS)

    assert counted.progress.take() == 0


def test_a_thread_that_is_stuck_makes_counts_unknown(program, count):
    counted = count()
    counted.now_ns += 60 * NS_PER_MS
    assert counted.progress.take() is None
    counted.step()

    assert [counted.progress.take(), counted.progress.take()] == [None, 0]


def test_channels_that_rest_are_read_less_often(program, count):
    counted = count()
    assert counted.step() == 4 * NS_PER_MS
    assert counted.step(10 * NS_PER_S) == 20 * NS_PER_MS
    program.put(5)
    counted.step(19 * NS_PER_MS)
    assert counted.progress.take() == 0
    counted.step(NS_PER_MS)

    assert counted.progress.take() is None  # it may have wrapped
    assert counted.step() == 4 * NS_PER_MS


@pytest.mark.parametrize("value", [ENTRIES, 0xFFFFFFFF])
def test_values_that_are_no_indices_make_counts_unknown(program, count, value):
    counted = count()
    program.put(value)
    counted.step()
    assert counted.progress.take() is None
    counted.step()
    program.put(5)
    counted.step()
    assert counted.progress.take() is None  # it is searched for later
    counted.step(LATER_NS)

    assert [counted.progress.take(), counted.progress.take()] == [None, 0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 0xFFFFFFFF), st.integers(0, 0xFFFFFFFF), st.integers(0, LATER_NS))))
def test_no_value_counts_as_more_than_a_ring_per_read(program, count, lies):
    program.put(0, 1)
    counted = count()
    for get, put, after_ns in lies:
        program.put(get, put)
        counted.step(after_ns)
        entries = counted.progress.take()

        assert entries is None or 0 <= entries < ENTRIES


def test_an_ended_process_is_dropped(program, count):
    counted = count()
    assert is_open(program)
    program.end()
    counted.step()

    assert counted.progress.take() is None
    assert not is_open(program)


def test_a_channel_that_is_not_found_makes_counts_unknown(program, count):
    counted = count(program.slot(), program.slot(SIZE))
    counted.step(LATER_NS)

    assert counted.progress.take() is None
    assert not is_open(program)


def test_another_set_of_channels_is_counted_from_its_start(program, count):
    counted = count()
    counted.progress.watch(frozenset({program.slot()}))  # the same
    assert counted.progress.take() == 0
    counted.progress.watch(frozenset({program.slot(), program.slot(0x5000)}))
    program.put(9)
    assert counted.progress.take() is None
    counted.step(250 * NS_PER_MS)
    assert counted.progress.take() is None
    program.put(3, offset=0x5000)
    counted.step()

    assert counted.progress.take() == 3


def test_searches_are_kept_rare(program, count, monkeypatch):
    program.put(ENTRIES)
    searches, find = [], gpfifo_progress.userd_mapping.find
    monkeypatch.setattr(gpfifo_progress.userd_mapping, "find", lambda *about: searches.append(1) or find(*about))
    counted = count()
    for _ in range(250):
        counted.step()
    assert len(searches) == 3  # after 0, 250 and 750 ms
    for number in range(250):
        counted.progress.watch(frozenset({program.slot(0x5000 if number % 2 else 0x8000)}))
        counted.step()

    assert len(searches) <= 8  # others each time


def test_searches_take_a_small_part_of_the_time(program, count, monkeypatch):
    """A process can map very much, and its pod can make and free channels all the time."""
    program.put(ENTRIES)
    spent, searches, find = [0], [], gpfifo_progress.userd_mapping.find
    fake = SimpleNamespace(thread_time_ns=lambda: spent[0], monotonic_ns=lambda: 0)
    monkeypatch.setattr(gpfifo_progress, "time", fake)

    def search(*about):
        searches.append(1)
        spent[0] += NS_PER_S
        return find(*about)

    monkeypatch.setattr(gpfifo_progress.userd_mapping, "find", search)
    counted = count()
    for number in range(99):
        counted.progress.watch(frozenset({program.slot(0x5000 if number % 2 else 0x8000)}))
        counted.step(NS_PER_S)

    assert len(searches) == 5  # after 0, 20, 40, 60 and 80 s


def test_a_thread_counts_until_a_pod_is_no_longer_watched(program, monkeypatch):
    monkeypatch.setattr(gpfifo_progress, "_STUCK_NS", LATER_NS)
    progress = GpfifoProgress(SimpleNamespace(minor=3), program.device_at)  # type: ignore[arg-type]
    slots = frozenset({program.slot(ring_size=LARGE)})
    threads = threading.active_count()
    progress.watch({"web": slots, "batch": None})
    until(lambda: progress.take("web") == 0)
    program.put(5)
    taken = []
    until(lambda: any(taken.append(progress.take("web")) or taken))

    assert taken[-1] == 5
    assert [progress.take("batch"), progress.take("other")] == [None, None]
    progress.watch({})
    assert progress.take("web") is None
    until(lambda: threading.active_count() == threads)
    assert not is_open(program)


def test_counting_begins_with_a_second_pod(program):
    progress = GpfifoProgress(SimpleNamespace(minor=3), program.device_at)  # type: ignore[arg-type]
    threads = threading.active_count()
    progress.watch({"p0": frozenset({program.slot()})})

    assert threading.active_count() == threads
    assert progress.take("p0") is None


def test_pods_that_come_and_go_end_no_others_count(program, monkeypatch):
    """A count over any time would be unknown to whoever frees and makes channels in it."""
    monkeypatch.setattr(gpfifo_progress, "_STUCK_NS", LATER_NS)
    progress = GpfifoProgress(SimpleNamespace(minor=3), program.device_at)  # type: ignore[arg-type]
    pods = {f"p{number}": frozenset({program.slot()}) for number in range(1, 10)}
    progress.watch({"web": pods["p1"], "p1": pods["p1"]})
    until(lambda: progress.take("web") == 0)
    for others in ({}, {"p1": None}, pods):
        progress.watch({**others, "web": pods["p1"]})

        assert progress.take("web") == 0
    assert len(progress._pods) == 8
    assert "p9" not in progress._pods
    progress.watch({})
    until(lambda: not is_open(program))


def test_a_pod_that_is_slow_to_read_delays_only_itself(program, tmp_path):
    (tmp_path / "other").mkdir()
    other, began, go_on = UserdProgram(tmp_path / "other"), threading.Event(), threading.Event()

    def device_at(pid: int, area: Area) -> int | None:
        if pid == program.process.pid:
            return program.device_at(pid, area)
        began.set()
        assert go_on.wait(PATIENCE_S)
        return other.device_at(pid, area)

    progress = GpfifoProgress(SimpleNamespace(minor=3), device_at)  # type: ignore[arg-type]
    progress.watch({"slow": frozenset({other.slot()}), "uncounted": None})
    assert began.wait(PATIENCE_S)
    progress.watch({"slow": frozenset({other.slot()}), "web": frozenset({program.slot()})})
    until(lambda: progress.take("web") == 0)
    assert progress.take("slow") is None
    go_on.set()
    until(lambda: progress.take("slow") == 0)
    progress.watch({})
    until(lambda: not is_open(other))
    other.end()


def test_a_stuck_pod_has_few_runs_waiting(program):
    go_on = threading.Event()
    progress = GpfifoProgress(SimpleNamespace(minor=3), lambda *_: go_on.wait(PATIENCE_S) and None)  # type: ignore[arg-type]
    slots = {"stuck": frozenset({program.slot()}), "other": None}
    for _ in range(50):
        progress.watch(slots)
        progress.watch({})
    assert progress._threads.waiting("stuck") <= 2
    go_on.set()
    until(lambda: not progress._threads.waiting("stuck"))


def make_pod(table: ObjectTable, name: str, pid: int, client: int, *userds: Userd | None, started: str = "9") -> None:
    """Give a pod a TSG with channels that have these USERDs."""
    grants = grants_to_json({0: Grant(cores=30)})
    table.note({"fact": "pod", "name": name, "cgroup": f"/{name}", "grants": grants})
    table.note({"fact": "process", "pid": pid, "pod": name, "started": started})
    table.note({"fact": "client", "client": client, "pod": name, "maker": pid, "users": [(pid, 3)]})
    made = [
        RmObject(client, 2, client, abi.NV01_DEVICE_0),
        RmObject(client, USERD_MEMORY, 2, abi.NV01_MEMORY_LOCAL_USER, SIZE),
        RmObject(client, 3, 2, abi.KEPLER_CHANNEL_GROUP_A, 1),
        *(RmObject(client, 20 + i, 3, CHANNEL, userd=userd) for i, userd in enumerate(userds)),
    ]
    for rm in made:
        table.note(object_fact(rm) | {"confirmed": rm.handle})


def slots(table: ObjectTable) -> frozenset[Slot] | None:
    return slots_of(table, table.compute_tsgs(0))


def test_slots_tell_process_memory_and_ring_of_each_channel():
    table = ObjectTable()
    make_pod(table, "web", 50, CLIENT, Userd(USERD_MEMORY, 0x2000, 1024), Userd(3, 0x5000, 32))

    assert slots(table) == {
        Slot(50, "9", (CLIENT, USERD_MEMORY), SIZE, 0x2000, 1024, 20),
        Slot(50, "9", (CLIENT, 3), 0, 0x5000, 32, 21),
    }


@pytest.mark.parametrize("userd", [None, Userd(USERD_MEMORY, 0, 0)], ids=["no USERD", "no ring"])
def test_a_part_of_the_channels_is_not_counted(userd):
    table = ObjectTable()
    make_pod(table, "web", 50, CLIENT, Userd(USERD_MEMORY, 0x2000, 1024), userd)

    assert slots(table) is None


def test_a_pod_with_many_channels_or_processes_is_not_counted():
    table = ObjectTable()
    userds = [Userd(USERD_MEMORY, 0x1000 * i, 1024) for i in range(64)]
    make_pod(table, "web", 50, CLIENT, *userds)
    assert len(slots(table) or ()) == 64
    make_pod(table, "web", 50, CLIENT + 1, userds[0])
    assert slots(table) is None
    table = ObjectTable()
    for i in range(9):
        assert slots(table) is not None
        make_pod(table, "web", 50 + i, CLIENT + i, userds[0])

    assert slots(table) is None


@pytest.mark.parametrize("holder", ["another", None], ids=["another pod's", "gone"])
def test_no_process_but_the_pods_own_is_read(holder):
    """A client can be passed on, and outlive its maker, whose number another pod's process may have then."""
    table = ObjectTable()
    make_pod(table, "web", 50, CLIENT, Userd(USERD_MEMORY, 0, 1024))
    table.note({"fact": "exit", "pid": 50})
    if holder is not None:
        table.note({"fact": "process", "pid": 50, "pod": holder, "started": "10"})

    assert slots(table) is None


@pytest.fixture
def card(
    program: UserdProgram, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Gpu, ObjectTable, list[ContextSwitch]]]:
    """A card under a plan: the program uses it in one pod, nothing is known of another's channel, a third has none."""
    table, log = ObjectTable(), list[ContextSwitch]()
    make_pod(table, "web", program.process.pid, CLIENT, Userd(USERD_MEMORY, 0x2000, LARGE), started=program.started)
    make_pod(table, "batch", 50, CLIENT + 1, None)
    make_pod(table, "idle", 51, CLIENT + 2)
    device = SimpleNamespace(instance=0, minor=3, time_ns=lambda: 10**9)
    read = SimpleNamespace(dropped=0, read=lambda: [log.pop()] if log else [])
    made = Gpu(0, device, table, SimpleNamespace(lost=set()), read, lambda keys: None)  # type: ignore[arg-type]
    made.gpfifo_progress.device_at = program.device_at
    made.enforcer.plan = PLAN
    monkeypatch.setattr(gpfifo_progress, "_STUCK_NS", LATER_NS)
    yield made, table, log
    made.release(0)


def entries(card: Gpu) -> dict[str, int | None]:
    return {pod["pod"]: pod["gpfifo_entries"] for pod in card.sample(10**9)["pods"]}


def test_samples_tell_each_pods_entries(card, program):
    made, _, _ = card
    until(lambda: entries(made) == {"web": 0, "batch": None, "idle": 0})
    program.put(5)
    taken = []
    until(lambda: any(taken.append(entries(made)["web"]) or taken))

    assert taken[-1] == 5


def test_entries_of_a_tsg_that_ended_are_not_left_out(card):
    made, table, log = card
    until(lambda: entries(made)["web"] == 0)
    table.ended_contexts.add(0x100, "web")
    log.append(ContextSwitch(10**9 - 4000, START, 0x100, 7))

    assert entries(made)["web"] is None


@pytest.mark.parametrize("change", ["no plan", "one pod"])
def test_nothing_is_counted_while_no_pods_share_the_card(card, change):
    made, table, _ = card
    until(lambda: entries(made)["web"] == 0)
    if change == "no plan":
        made.enforcer.plan = None
    else:
        for name in ("batch", "idle"):
            table.note({"fact": "pod_retired", "name": name})

    assert entries(made)["web"] is None
    assert not made.gpfifo_progress._pods


def test_a_neighbour_without_channels_ends_no_count(card):
    made, table, _ = card
    until(lambda: entries(made)["web"] == 0)
    table.note({"fact": "gone", "client": CLIENT + 1, "handle": 3})

    assert entries(made) == {"web": 0, "batch": 0, "idle": 0}


def test_counting_ends_with_the_lease_and_with_the_pod(card):
    made, table, _log = card
    until(lambda: entries(made)["web"] == 0)
    made.gpfifo_progress.forget("web")
    assert made.gpfifo_progress.take("web") is None
    table.revision += 1
    until(lambda: entries(made)["web"] == 0)
    made.release(0)
    assert not made.gpfifo_progress._pods
    made.enforcer.plan = PLAN

    until(lambda: entries(made)["web"] == 0)

"""What a sample of one GPU carries: grants only after they changed, and the time of TSGs that have ended."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from qgpu.guardian.accounting import ended_processes
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.gpu.gpu import Gpu
from qgpu.ipc.codec import grant_from_json, grants_to_json, sample_from_json
from qgpu.model import Grant
from qgpu.nvidia import abi
from qgpu.nvidia.ctxsw_log import START, ContextSwitch

NOW_NS = 10**9
CHANNEL = min(abi.GPFIFO_CLASSES)
#: The process that made the client, another one of the pod, and the guardian.
MAKER, CHILD, GUARDIAN = 7, 8, 4242
_GRANTS = {name: Grant(cores=30) for name in ("web", "batch")}


def gpu(table: ObjectTable, read: Callable[[], list[ContextSwitch]] = list) -> Gpu:
    """Make a GPU with this log; nothing runs by default."""
    device = SimpleNamespace(instance=0, time_ns=lambda: NOW_NS)
    return Gpu(0, device, table, None, SimpleNamespace(dropped=0, read=read), lambda keys: None)  # type: ignore[arg-type]


def grant(table: ObjectTable, name: str, cores: int) -> None:
    """Give a pod a quota on the first GPU."""
    table.note({"fact": "pod", "name": name, "cgroup": f"/{name}", "grants": grants_to_json({0: Grant(cores=cores)})})


def test_grants_are_sent_again_only_after_a_change() -> None:
    table = ObjectTable()
    grant(table, "web", 30)
    made = gpu(table)
    first = made.sample(NOW_NS)
    known = first["grants_revision"]

    assert grant_from_json(first["grants"]["web"]) == Grant(cores=30)
    assert "grants" not in made.sample(NOW_NS, grants_revision=known)
    grant(table, "web", 40)
    changed = made.sample(NOW_NS, grants_revision=known)
    assert grant_from_json(changed["grants"]["web"]) == Grant(cores=40)
    table.note({"fact": "pod_retired", "name": "web"})
    assert made.sample(NOW_NS, grants_revision=changed["grants_revision"])["grants"] == {}


def test_guardians_never_share_a_revision_of_grants() -> None:
    assert ObjectTable().grants_revision != ObjectTable().grants_revision


def test_a_sample_is_read_with_the_grants_sent_before() -> None:
    table = ObjectTable()
    grant(table, "web", 30)
    answer = gpu(table).sample(NOW_NS, grants_revision=table.grants_revision)

    assert sample_from_json(answer, {"web": Grant(cores=30)}).pods[0].grant == Grant(cores=30)


def start_process(table: ObjectTable, pid: int, context: int) -> None:
    """Let a process of the pod make a TSG with one channel."""
    table.note({"fact": "process", "pid": pid, "pod": "web"})
    table.note({"fact": "client", "client": 1, "pod": "web", "maker": pid, "users": [(pid, 3)]})
    make_tsg(table, context)


@pytest.mark.parametrize("ended", [[], ["gone"], ["gone", "exit"]], ids=["none", "TSG", "process"])
def test_gpu_time_of_an_ended_tsg_is_its_pods(ended: list[str]) -> None:
    table, log = ObjectTable(), [ContextSwitch(NOW_NS - 4000, START, 0x100, 7)]
    grant(table, "web", 30)
    start_process(table, 7, 0x100)
    made = gpu(table, lambda: [log.pop()] if log else [])
    for fact in ended:
        table.note({"fact": fact, "client": 1, "handle": 3, "pid": 7})
    (pod,) = sample_from_json(made.sample(NOW_NS), {"web": Grant(cores=30)}).pods

    alive = [(tsg.run_ns, tsg.starts) for tsg in pod.tsgs]
    expected = [(4000, 1)] if ended else [(4000, 1), (0, 0)]
    assert [*alive, (pod.ended_ns, pod.ended_starts)] == expected


@pytest.fixture
def long_ended(monkeypatch):
    """Let a process that ended have ended long ago."""
    monkeypatch.setattr(ended_processes, "KEPT_S", -1)


def make_client(table: ObjectTable, *, context: int, made_here: bool = False) -> None:
    """Let MAKER make a client with a TSG that has one channel; CHILD has the client's file, too."""
    for name in _GRANTS:
        grant(table, name, 30)
    for pid in (MAKER, CHILD):
        table.note({"fact": "process", "pid": pid, "pod": "web"})
    users = [(MAKER, 3), (CHILD, 3)]
    table.note({"fact": "client", "client": 1, "pod": "web", "maker": MAKER, "users": users, "made_here": made_here})
    make_tsg(table, context)


def make_tsg(table: ObjectTable, context: int, client: int = 1) -> None:
    """Make a TSG with one channel in a client."""
    for handle, parent, rm_class in (
        (2, client, abi.NV01_DEVICE_0),
        (3, 2, abi.KEPLER_CHANNEL_GROUP_A),
        (4, 3, CHANNEL),
    ):
        fact = {"fact": "object", "client": client, "handle": handle, "parent": parent, "class": rm_class, "detail": 0}
        table.note(fact | {"confirmed": context if rm_class == CHANNEL else 0})


def used(table: ObjectTable, context: int, pid: int) -> dict[str, int]:
    """Return each pod's GPU time after one context ran for 4000 ns, from a sample."""
    log = [ContextSwitch(NOW_NS - 4000, START, context, pid)]
    answer = gpu(table, lambda: [log.pop()] if log else []).sample(NOW_NS)
    pods = sample_from_json(answer, _GRANTS).pods
    return {pod.pod: pod.ended_ns + sum(tsg.run_ns for tsg in pod.tsgs) for pod in pods}


@pytest.mark.parametrize("freed", [False, True])
def test_time_in_a_client_made_here_is_its_pods(freed: bool) -> None:
    table = ObjectTable()
    make_client(table, context=0x100, made_here=True)
    if freed:
        table.note({"fact": "gone", "client": 1, "handle": 3})

    assert used(table, 0x100, GUARDIAN) == {"web": 4000, "batch": 0}


@pytest.mark.parametrize("freed", [2, 1], ids=["device", "client"])
def test_contexts_are_remembered_of_all_that_goes_at_once(freed: int) -> None:
    table = ObjectTable()
    make_client(table, context=0x100, made_here=True)
    table.note({"fact": "gone", "client": 1, "handle": freed})

    assert used(table, 0x100, GUARDIAN)["web"] == 4000


@pytest.mark.usefixtures("long_ended")
@pytest.mark.parametrize("freed", [False, True])
def test_a_maker_is_its_pods_while_its_client_exists(freed: bool) -> None:
    """Where RM does not say which context a channel has."""
    table = ObjectTable()
    make_client(table, context=0)
    table.note({"fact": "exit", "pid": MAKER})
    if freed:
        table.note({"fact": "gone", "client": 1, "handle": 3})

    assert used(table, 0x100, MAKER) == {"web": 4000, "batch": 0}
    table.note({"fact": "gone", "client": 1, "handle": 1})
    assert used(table, 0x100, MAKER)["web"] == 0


@pytest.mark.parametrize("busy", [False, True])
def test_a_context_is_told_whoever_has_the_makers_number_now(busy: bool) -> None:
    table = ObjectTable()
    make_client(table, context=0x100)
    table.note({"fact": "exit", "pid": MAKER})
    table.note({"fact": "process", "pid": MAKER, "pod": "batch"})
    table.note({"fact": "gone", "client": 1, "handle": 3})
    if busy:
        table.note({"fact": "client", "client": 50, "pod": "batch", "maker": MAKER, "users": [(MAKER, 3)]})
        make_tsg(table, 0, client=50)

    assert used(table, 0x100, MAKER) == {"web": 4000, "batch": 0}
    assert used(table, 0x200, MAKER) == {"web": 0, "batch": 4000}


def test_contexts_of_a_retired_pod_are_not_remembered() -> None:
    table = ObjectTable()
    make_client(table, context=0x100)
    table.note({"fact": "pod_retired", "name": "web"})
    table.note({"fact": "gone", "client": 1, "handle": 1})

    assert table.ended_contexts.pod_of(0x100) is None


def test_a_context_used_again_is_the_later_pods() -> None:
    table = ObjectTable()
    make_client(table, context=0x100, made_here=True)
    table.note({"fact": "gone", "client": 1, "handle": 1})
    table.note({"fact": "process", "pid": 9, "pod": "batch"})
    table.note({"fact": "client", "client": 1, "pod": "batch", "maker": 9, "users": [(9, 3)], "made_here": True})
    make_tsg(table, 0x100)

    assert used(table, 0x100, GUARDIAN) == {"web": 0, "batch": 4000}


@pytest.mark.usefixtures("long_ended")
@pytest.mark.parametrize("context", [0, 0x100], ids=["by process", "by context"])
@pytest.mark.parametrize("freed", [False, True])
def test_time_in_a_client_that_moved_is_its_new_pods(context: int, freed: bool) -> None:
    """RM goes on naming the process that made it."""
    table = ObjectTable()
    make_client(table, context=context)
    table.note({"fact": "process", "pid": 9, "pod": "batch"})
    table.note({"fact": "exit", "pid": MAKER})
    table.note({"fact": "owner", "client": 1, "pod": "batch", "pid": 9, "fd": 3})
    if freed:
        table.note({"fact": "gone", "client": 1, "handle": 3})

    assert used(table, 0x100, MAKER) == {"web": 0, "batch": 4000}

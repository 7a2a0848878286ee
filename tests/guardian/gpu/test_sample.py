"""What a sample of one GPU carries: grants only after they changed, and the time of TSGs that have ended."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.gpu.gpu import Gpu
from qgpu.ipc.codec import grant_from_json, grants_to_json, sample_from_json
from qgpu.model import Grant
from qgpu.nvidia import abi
from qgpu.nvidia.ctxsw_log import START, ContextSwitch

NOW_NS = 10**9
CHANNEL = min(abi.GPFIFO_CLASSES)


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
    for handle, parent, rm_class in ((2, 1, abi.NV01_DEVICE_0), (3, 2, abi.KEPLER_CHANNEL_GROUP_A), (4, 3, CHANNEL)):
        fact = {"fact": "object", "client": 1, "handle": handle, "parent": parent, "class": rm_class, "detail": 0}
        table.note(fact | {"confirmed": context if rm_class == CHANNEL else 0})


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

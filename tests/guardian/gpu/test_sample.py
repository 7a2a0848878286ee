"""What a sample of one GPU carries: grants only after they changed."""

from __future__ import annotations

from types import SimpleNamespace

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.gpu.gpu import Gpu
from qgpu.ipc.codec import grant_from_json, grants_to_json, sample_from_json
from qgpu.model import Grant

NOW_NS = 10**9


def gpu(table: ObjectTable) -> Gpu:
    """Make a GPU on which nothing runs."""
    device = SimpleNamespace(instance=0, time_ns=lambda: NOW_NS)
    return Gpu(0, device, table, None, SimpleNamespace(dropped=0, read=list), lambda keys: None)  # type: ignore[arg-type]


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

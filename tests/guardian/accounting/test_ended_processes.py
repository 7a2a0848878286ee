"""Which pod an ended process was in, as long as the card may report its GPU time."""

from __future__ import annotations

from qgpu.guardian.accounting import ended_processes
from qgpu.guardian.accounting.ended_processes import EndedProcesses


def test_each_pod_forgets_only_its_own_oldest(monkeypatch):
    monkeypatch.setattr(ended_processes, "MOST_ENDED", 2)
    ended = EndedProcesses()
    for pid, pod in ((1, "web"), (2, "batch"), (3, "batch"), (4, "batch")):
        ended.add(pid, pod)

    assert [ended.pod_of(pid) for pid in (1, 2, 3, 4)] == ["web", None, "batch", "batch"]


def test_a_number_used_again_is_the_later_pods():
    ended = EndedProcesses()
    ended.add(1, "web")
    ended.add(1, "batch")
    ended.retire("web")

    assert ended.pod_of(1) == "batch"
    ended.retire("batch")
    assert ended.pod_of(1) is None


def test_a_number_is_nobodys_some_time_after_the_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(ended_processes.time, "monotonic", lambda: now[0])
    ended = EndedProcesses()
    ended.add(1, "web")
    now[0] = ended_processes.KEPT_S
    assert ended.pod_of(1) == "web"

    now[0] += 1
    assert ended.pod_of(1) is None


def test_a_maker_is_remembered_while_its_client_exists(monkeypatch):
    monkeypatch.setattr(ended_processes, "KEPT_S", -1)
    ended = EndedProcesses()
    ended.add(1, "web")
    ended.client_made(10, 1, "web")
    ended.client_made(11, 1, "web")
    assert ended.pod_of(1) == "web"

    ended.client_made(11, 1, "batch")  # another pod's now
    assert ended.pod_of(1) == "batch"
    ended.client_gone(11, 1)
    assert ended.pod_of(1) == "web"
    ended.client_gone(10, 1)
    ended.client_made(10, 2, "batch")  # RM gave the handle to another client
    assert [ended.pod_of(pid) for pid in (1, 2)] == [None, "batch"]
    ended.client_gone(10, 2)
    assert ended.pod_of(2) is None

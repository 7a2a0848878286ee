"""Whether a pod's card memory fits into host memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from qgpu.checkpoint import host_memory
from qgpu.errors import RefusedError

GIB = 1 << 30


def test_available_memory_is_what_the_kernel_says() -> None:
    assert host_memory.available("MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable:   2048 kB\n") == 2 << 20
    assert host_memory.available("MemTotal: 99 kB\n") == 0


@pytest.mark.parametrize(
    ("limit", "used", "cached", "room"),
    [("max", 5, 0, None), ("100", 40, 0, 60), ("100", 40, 30, 90), ("100", 140, 0, 0)],
)
def test_room_in_a_cgroup_counts_its_page_cache(
    tmp_path: Path, limit: str, used: int, cached: int, room: int | None
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\nactive_file 0\n")

    assert host_memory.room(tmp_path) == room


def test_a_cgroup_without_the_controller_has_no_limit(tmp_path: Path) -> None:
    assert host_memory.room(tmp_path) is None


def test_more_than_the_host_has_is_refused_with_figures() -> None:
    with pytest.raises(RefusedError, match=r"pod web: it holds 1048576\.0 GiB on cards, and the host has"):
        host_memory.check("web", 1 << 50, 0, "")


def test_what_other_pods_are_about_to_bring_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available", lambda _: 10 * GIB)
    host_memory.check("web", 6 * GIB, 2 * GIB, "")
    with pytest.raises(RefusedError, match=r"the host has 7\.0 GiB available, of which 2 GiB stay free"):
        host_memory.check("web", 6 * GIB, 3 * GIB, "")


def test_the_limit_of_a_cgroup_above_the_pods_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pod = tmp_path / "slice" / "pod"
    pod.mkdir(parents=True)
    for name, text in (("max", str(GIB)), ("current", str(GIB // 2)), ("stat", "anon 1\n")):
        (tmp_path / "slice" / f"memory.{name}").write_text(text)
    monkeypatch.setattr(host_memory.cgroup, "mount", lambda: tmp_path)
    monkeypatch.setattr(host_memory, "available", lambda _: 1 << 50)
    host_memory.check("web", GIB // 4, 0, "/slice/pod")
    with pytest.raises(RefusedError, match=r"cgroup slice has 0\.5 GiB left of its memory\.max; raise that limit"):
        host_memory.check("web", GIB, 0, "/slice/pod")

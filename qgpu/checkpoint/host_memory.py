"""Checks whether a pod's card memory fits into host memory. The kernel charges the pages to the pod's cgroup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from qgpu.errors import RefusedError
from qgpu.linux import cgroup
from qgpu.units import GIB

#: Bytes that stay free on the host, for the driver's own buffers and for other programs.
MARGIN = 2 * GIB
_MEMINFO = Path("/proc/meminfo")


def check(pod: str, needed: int, beside: int, path: str) -> None:
    """Raise RefusedError unless ``needed`` bytes fit into host memory and below the limits of cgroup ``path``.

    ``beside`` is how many bytes other pods are about to move into host memory.
    """
    on_host = max(0, available(_MEMINFO.read_text()) - beside)
    if needed > on_host - MARGIN:
        raise RefusedError(
            f"pod {pod}: it holds {needed / GIB:.1f} GiB on cards, and the host has {on_host / GIB:.1f} GiB available, "
            f"of which {MARGIN // GIB} GiB stay free; free host memory, or suspend a smaller pod"
        )
    for directory in _upwards(path):
        if (left := room(directory)) is not None and needed > left:
            raise RefusedError(
                f"pod {pod}: it holds {needed / GIB:.1f} GiB on cards, and cgroup {directory.name} has "
                f"{left / GIB:.1f} GiB left of its memory.max; raise that limit"
            )


def free() -> int:
    """Return how many bytes suspended pods may take now, whatever the limits of their cgroups."""
    return max(0, available(_MEMINFO.read_text()) - MARGIN)


def available(meminfo: str) -> int:
    """Find the bytes that the kernel calls available in the text of /proc/meminfo."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def room(directory: Path) -> int | None:
    """Return how many bytes a cgroup may still take, its page cache included; None without a limit."""
    try:
        limit = (directory / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((directory / "memory.current").read_text())
        cached = sum(
            int(value)
            for key, value in (line.split() for line in (directory / "memory.stat").read_text().splitlines())
            if key in ("inactive_file", "active_file")
        )
    except FileNotFoundError:  # the memory controller is not enabled here, or the cgroup is gone
        return None
    return max(0, int(limit) - used + cached)


def _upwards(path: str) -> Iterator[Path]:
    top = cgroup.mount()
    directory = cgroup.directory_of(path)
    while path and directory != top:
        yield directory
        directory = directory.parent

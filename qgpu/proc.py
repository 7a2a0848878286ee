"""What /proc tells of processes and threads, where a process has a say in what stands there.

It chooses its own name, and those of the files it maps, out of any bytes but a newline: so these are read as bytes and
cut where the kernel ends a line, and nowhere else. What is gone tells nothing.
"""

from __future__ import annotations

from pathlib import Path


def status(pid: int, key: str) -> list[str]:
    """Return the words behind ``key`` in /proc/PID/status, of a thread too; none where there is no such line."""
    wanted = key.encode() + b":"
    for line in _read(pid, "status").split(b"\n"):
        if line.startswith(wanted):
            return line.decode("ascii").split()[1:]
    return []


def stat(pid: int, tid: int | None = None) -> list[str]:
    """Return the fields of /proc/PID/stat, or of one thread's, from its state on: that is behind the name."""
    content = _read(pid, "stat" if tid is None else f"task/{tid}/stat")
    return content.rpartition(b")")[2].decode("ascii").split()


def maps(pid: int) -> list[bytes]:
    """Return the lines of /proc/PID/maps."""
    return _read(pid, "maps").split(b"\n")[:-1]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""

"""The files of groups: a directory each in the daemon's runtime directory, with MPS's sockets and logs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qgpu.errors import RefusedError, UnknownNameError, unusable
from qgpu.groups.mps_server import MpsServer
from qgpu.linux import atomic_file, cgroup, mounts, proc
from qgpu.model.member_limits import MemberLimits

_TAIL_BYTES = 1 << 14


class GroupFiles:
    """The directory of one group."""

    def __init__(self, runtime_dir: Path, name: str) -> None:
        """Take the name of a group, which must be valid for a pod. Raises InvalidValueError."""
        self.name, self.runtime_dir = cgroup.check_name(name), runtime_dir
        self.directory = runtime_dir / "groups" / name
        self.server = MpsServer(self.directory)

    def claim(self, pid: int, pod_ident: int) -> None:
        """Record the process that keeps the group, and the id of its pod's cgroup. Raises QgpuError."""
        with self._errors():
            self.server.pipe.mkdir(parents=True, exist_ok=True)
            atomic_file.replace(self.directory / "pod", f"{pod_ident}\n", 0o644)
            atomic_file.replace(self.directory / "keeper.pid", f"{pid} {proc.start_time(pid)}\n", 0o644)
            (self.directory / "problem").unlink(missing_ok=True)

    def keeper(self) -> int | None:
        """Return the process that keeps the group; None if there is none."""
        try:
            pid, since = (self.directory / "keeper.pid").read_text().split()
            return int(pid) if proc.start_time(int(pid)) == since else None
        except (OSError, ValueError):
            return None

    def has_begun(self) -> None:
        """Record that the group takes members while its keeper lives. Raises QgpuError."""
        with self._errors():
            atomic_file.replace(self.directory / "begun", (self.directory / "keeper.pid").read_text(), 0o644)

    @property
    def begun(self) -> bool:
        """Tell whether the group has taken members since its keeper began."""
        try:
            same = (self.directory / "begun").read_text() == (self.directory / "keeper.pid").read_text()
        except OSError:
            return False
        return same and self.keeper() is not None

    @property
    def pod_ident(self) -> int | None:
        """The id of the cgroup of the group's pod; None if it was not recorded."""
        try:
            return int((self.directory / "pod").read_text())
        except (OSError, ValueError):
            return None

    @property
    def part(self) -> MemberLimits:
        """A member's default limits. Only the group's owner can set them. Raises QgpuError."""
        try:
            return MemberLimits(**json.loads((self.directory / "part.json").read_text()))
        except (OSError, ValueError, TypeError):
            return MemberLimits()

    @part.setter
    def part(self, part: MemberLimits) -> None:
        with self._errors():
            atomic_file.replace(self.directory / "part.json", json.dumps(asdict(part)) + "\n", 0o644)

    @property
    def problem(self) -> str:
        """Why its keeper could not begin; empty if it did, or has not tried."""
        return "\n".join(_last_lines(self.directory / "problem"))

    @problem.setter
    def problem(self, line: str) -> None:
        with self._errors():
            self.directory.mkdir(parents=True, exist_ok=True)
            atomic_file.replace(self.directory / "problem", f"{line}\n", 0o644)

    def last_words(self) -> str:
        """Return the last line in the logs of the control daemon and of its launcher; empty if there is none."""
        lines = [line for name in ("control.log", "keeper.log") for line in _last_lines(self.directory / "log" / name)]
        return lines[-1] if lines else ""

    def need_keeper(self) -> int:
        """Return the process that keeps the group. Raises UnknownNameError."""
        if (pid := self.keeper()) is None:
            raise UnknownNameError(f"group {self.name}: there is no such group; 'qgpuctl group list' shows them")
        return pid

    def is_server(self, command: Sequence[str]) -> bool:
        """Tell whether a command is the group's own MPS control daemon."""
        return tuple(command) == self.server.command

    def remove(self) -> None:
        """Remove the directory, and the members' shared memory in it."""
        with suppress(OSError):
            mounts.unmount(self.server.memory)
        shutil.rmtree(self.directory, ignore_errors=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unusable(self.directory, "groups are made as qgpud's user", error) from error


def names(runtime_dir: Path) -> list[str]:
    """List the groups that have a keeper; only root sees those of claims."""
    found = sorted(each.name for each in (runtime_dir / "groups").glob("*"))
    return [name for name in found if GroupFiles(runtime_dir, name).keeper() is not None]


def check_not_claims(grants: Iterable[Mapping[str, Any]], name: str, why: str) -> None:
    """Raise RefusedError if a group is a Kubernetes claim's; ``grants`` are the prepared ones."""
    for grant in grants:
        if grant.get("group") == name:
            raise RefusedError(f"group {name}: it is of claim {grant['namespace']}/{grant['name']}; {why}")


def _last_lines(path: Path) -> list[str]:
    """Return the last lines of a file, in printable characters. A member can make the file very long."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return [proc.printable(line) for line in file.read(_TAIL_BYTES).splitlines()]
    except OSError:
        return []

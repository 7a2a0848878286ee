"""The files of groups: a directory each in the daemon's runtime directory, with MPS's sockets and logs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from qgpu.errors import PermissionDeniedError, UnknownNameError
from qgpu.groups.mps_server import MpsServer
from qgpu.linux import atomic_file, cgroup, proc


@dataclass(frozen=True, slots=True)
class MemberPart:
    """What a member gets that does not ask for another part: per cent of the SMs, and bytes; None: no limit."""

    sm: int | None = None
    memory: int | None = None


class GroupFiles:
    """The directory of one group."""

    def __init__(self, runtime_dir: Path, name: str) -> None:
        """Take a name that a pod can have, and no path. Raises InvalidValueError."""
        self.name, self.runtime_dir = cgroup.check_name(name), runtime_dir
        self.directory = runtime_dir / "groups" / name
        self.server = MpsServer(self.directory)

    def claim(self, pid: int, pod_ident: int) -> None:
        """Record the process that keeps the group, and the id of its pod's cgroup. Raises PermissionDeniedError."""
        with self._errors():
            self.server.pipe.mkdir(parents=True, exist_ok=True)
            atomic_file.replace(self.directory / "pod", f"{pod_ident}\n", 0o644)
            atomic_file.replace(self.directory / "keeper.pid", f"{pid} {proc.start_time(pid)}\n", 0o644)

    def keeper(self) -> int | None:
        """Return the process that keeps the group; None if there is none."""
        try:
            pid, since = (self.directory / "keeper.pid").read_text().split()
            return int(pid) if proc.start_time(int(pid)) == since else None
        except (OSError, ValueError):
            return None

    @property
    def pod_ident(self) -> int | None:
        """The id of the cgroup of the group's pod; None if it was not recorded."""
        try:
            return int((self.directory / "pod").read_text())
        except (OSError, ValueError):
            return None

    @property
    def part(self) -> MemberPart:
        """What a member gets that does not ask for another part. Only its owner can set it. PermissionDeniedError."""
        try:
            return MemberPart(**json.loads((self.directory / "part.json").read_text()))
        except (OSError, ValueError, TypeError):
            return MemberPart()

    @part.setter
    def part(self, part: MemberPart) -> None:
        with self._errors():
            atomic_file.replace(self.directory / "part.json", json.dumps(asdict(part)) + "\n", 0o644)

    def last_words(self) -> str:
        """Return the last line that the control daemon or what started it wrote; empty if there is none."""
        lines = [line for name in ("control.log", "keeper.log") for line in _lines(self.directory / "log" / name)]
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
        """Remove the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PermissionDeniedError(
                f"{self.directory}: {error.strerror}; groups are made as qgpud's user"
            ) from error


def names(runtime_dir: Path) -> list[str]:
    """List the groups that have a keeper."""
    directory = runtime_dir / "groups"
    found = sorted(each.parent.name for each in directory.glob("*/keeper.pid"))
    return [name for name in found if GroupFiles(runtime_dir, name).keeper() is not None]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []

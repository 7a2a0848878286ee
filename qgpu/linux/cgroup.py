"""Pods are told apart by cgroup: version 2, or the version 2 tree of a hybrid host.

A pod that ``qgpuctl run`` starts gets a cgroup of its own in its launcher's, whose limits and whose end stay its own:
``qgpu-NAME``, or ``/qgpu/NAME`` where that is the top. Its children, whatever they exec, stay in it. A container is a
pod in the cgroup that its runtime made for it. No controller is enabled and nothing else in the tree is touched.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from qgpu.errors import InvalidValueError, NotSupportedError, PermissionDeniedError, RefusedError

_PARENT, _PREFIX = "qgpu", "qgpu-"
#: Where guardians are, and those in reserve.
GUARDIANS = "/qgpu-guardian"
#: Whoever has locked this one shares the cards of this host.
LOCK = "/qgpu-lock"
#: Errors of a cgroup that is gone, or goes while we look at it.
_GONE = (errno.ENOENT, errno.ENODEV)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_name(name: str) -> str:
    """Return ``name`` if it can name a pod. Raises InvalidValueError."""
    if not _NAME.fullmatch(name):
        raise InvalidValueError(
            f"pod name {name!r}: use up to 63 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        )
    return name


@cache
def mount() -> Path:
    """Find where the version 2 tree is mounted, which is looked up once. Raises NotSupportedError."""
    return mounted(os.fsdecode(Path("/proc/self/mountinfo").read_bytes()))


def mounted(mountinfo: str) -> Path:
    """Find the version 2 tree in the text of /proc/PID/mountinfo. Raises NotSupportedError."""
    for line in mountinfo.split("\n"):
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            return Path(before.split()[4])
    raise NotSupportedError("cgroup v2: not mounted here; pods cannot be told apart; mount cgroup2 and try again")


def of(pid: int) -> str:
    """Return the version 2 cgroup of a process, such as "/qgpu/web". Raises OSError when it is gone."""
    return placed(os.fsdecode(Path(f"/proc/{pid}/cgroup").read_bytes()))


def is_frozen(pid: int) -> bool:
    """Tell whether a process is in a cgroup that somebody has frozen: it does not run, and nothing else tells why."""
    try:
        return "frozen 1" in (mount() / of(pid).removeprefix("/") / "cgroup.events").read_text()
    except (OSError, NotSupportedError):  # at the top of the tree there is no such file
        return False


def placed(text: str) -> str:
    """Find the version 2 cgroup in the text of /proc/PID/cgroup; the names in it may hold anything but a newline."""
    return next((line[3:] for line in text.split("\n") if line.startswith("0::")), "/")


def path_of(name: str) -> str:
    """Return the cgroup of a pod that qgpu starts."""
    return f"/{_PARENT}/{check_name(name)}"


def home(pid: int) -> str:
    """Return in which cgroup a pod of a launcher is made: its own, or the nearest above that is root's alone.

    A user to whom a cgroup is delegated may move processes about in it, and so out of a pod. Raises OSError.
    """
    parts = of(pid).split("/")[1:]
    found = ""
    for part in parts if ".." not in parts else ():  # what lies beside our part of the tree cannot be reached
        directory = mount() / f"{found}/{part}".lstrip("/")
        if not part or not all(_is_roots(file) for file in (directory, directory / "cgroup.procs")):
            break
        found += f"/{part}"
    return found or "/"


def _is_roots(file: Path) -> bool:
    status = file.stat()
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def create(name: str, parent: str = "/") -> str:
    """Make a pod's cgroup in another one and return it; no harm if it is there.

    Raises PermissionDeniedError, RefusedError, NotSupportedError.
    """
    path = path_of(name) if parent == "/" else f"{parent}/{_PREFIX}{check_name(name)}"
    directory = mount() / path.lstrip("/")
    try:
        directory.mkdir(parents=parent == "/", exist_ok=True)
        if parent != "/" and (directory / "cgroup.type").read_text().split() != ["domain"]:
            directory.rmdir()
            raise RefusedError(f"pod {name}: cgroup {parent} is for threads only; start it in another")
    except OSError as error:
        if error.errno in (errno.EAGAIN, *_GONE):
            raise RefusedError(
                f"pod {name}: no cgroup can be made in {parent}, its launcher's: {error.strerror}; "
                "raise cgroup.max.descendants and cgroup.max.depth there, or start it in another"
            ) from error
        raise PermissionDeniedError(f"{directory}: {error.strerror}; cannot make the pod's cgroup") from error
    return path


def is_made_for(name: str, path: str) -> bool:
    """Tell whether a cgroup is one that qgpu makes for a pod, and not a container's."""
    return path == path_of(name) or path.rpartition("/")[2] == _PREFIX + name


def enter(name: str, pid: int, path: str = "") -> None:
    """Move a process, with the children it will have, into a pod's cgroup. Raises NotSupportedError."""
    try:
        (mount() / (path or path_of(name)).lstrip("/") / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise NotSupportedError(f"pod {name}: process {pid} cannot enter its cgroup: {error.strerror}") from error


def bring(name: str, pid: int, path: str) -> None:
    """Move a process into a pod's own cgroup; see that it is in a container's. Raises as enter, RefusedError."""
    if is_made_for(name, path):
        enter(name, pid, path)
    elif not within(of(pid), path):
        raise RefusedError(f"pod {name}: process {pid} is not in its cgroup {path}")


def within(path: str, above: str) -> bool:
    """Tell whether a cgroup is another one or lies below it."""
    return (path + "/").startswith(above + "/")


def names(path: str, container: str) -> bool:
    """Tell whether a cgroup is one that runtimes make for a container of an id, or lies below it.

    They call it by the whole id, some with a word before it, and systemd's with ".scope" behind it.
    """
    ends = (f"-{container}", f":{container}")
    parts = [part.removesuffix(".scope") for part in path.split("/")]
    return bool(container) and any(part == container or part.endswith(ends) for part in parts)


def find(ident: int, likely: str) -> str | None:
    """Return the cgroup with an id (the kernel's, which it never gives out again); ``likely`` is looked at first.

    None when it is gone. Raises OSError where it cannot be looked for.
    """
    top = mount()
    if _ident(top / likely.lstrip("/")) == ident:
        return likely
    for directory in _below("/"):
        if _ident(directory) == ident:
            return "/" + str(directory.relative_to(top))
    return None


def _ident(directory: Path) -> int:
    """Return a cgroup's id; 0 of one that is gone. Raises OSError."""
    try:
        return directory.stat().st_ino
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return 0


@dataclass(frozen=True, slots=True)
class CgroupMembers:
    """Who is in a cgroup, and whether anybody may be: where we could not look, somebody may."""

    pids: tuple[int, ...] = ()
    alive: bool = False


def inside(path: str) -> CgroupMembers:
    """Look into a cgroup: what it is not possible to know is not taken for nobody."""
    try:
        found = pids(path)
    except OSError:
        found = ()
    return CgroupMembers(found, bool(found) or populated(path))


def populated(path: str) -> bool:
    """Tell whether a process may live in a cgroup or below it; False only where the kernel says so, or it is gone."""
    try:
        return "populated 0" not in (mount() / path.lstrip("/") / "cgroup.events").read_text().split("\n")
    except OSError as error:
        return error.errno not in _GONE


def pids(path: str) -> tuple[int, ...]:
    """List the processes in a cgroup, those of sub-cgroups too; none in one that is gone.

    Raises OSError where it cannot be looked at: nobody is not to be concluded from that.
    """
    found: list[int] = []
    for directory in _below(path):
        try:
            found += map(int, (directory / "cgroup.procs").read_text().split())
        except OSError as error:
            threaded = error.errno == errno.EOPNOTSUPP and found  # its domain, further up, has listed them
            if error.errno not in _GONE and not threaded:
                raise
    return tuple(found)


def _below(path: str) -> Iterator[Path]:
    """Yield the directories of a cgroup and those below it, from the top. Raises OSError but for those that go."""
    left = [mount() / path.lstrip("/")]
    while left:
        directory = left.pop()
        yield directory
        try:
            with os.scandir(directory) as entries:
                left += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            if error.errno not in _GONE:
                raise


def note(path: str, key: str, value: str) -> None:
    """Note something at a cgroup for as long as that is there; nothing if ``value`` is empty. Raises RefusedError."""
    directory, name = mount() / path.lstrip("/"), f"trusted.qgpu.{key}"
    try:
        if value:
            os.setxattr(directory, name, value.encode())
        else:
            os.removexattr(directory, name)
    except OSError as error:
        if value or error.errno not in (errno.ENODATA, errno.ENOTSUP, errno.EPERM, *_GONE):
            raise RefusedError(
                f"cgroup {path}: {value or key} cannot be noted there: {error.strerror}; run qgpud as root"
            ) from error


def noted(path: str, key: str) -> str | None:
    """Return what was noted at a cgroup; None for nothing."""
    try:
        return os.fsdecode(os.getxattr(mount() / path.lstrip("/"), f"trusted.qgpu.{key}"))
    except OSError:
        return None


def remove(name: str, path: str = "") -> None:
    """Remove a pod's empty cgroup; one that still has processes stays."""
    for directory, _, _ in os.walk(mount() / (path or path_of(name)).lstrip("/"), topdown=False):
        try:
            os.rmdir(directory)
        except OSError:
            return

"""A cgroup identifies a pod: version 2, or the version 2 tree of a hybrid host.

A pod that ``qgpuctl run`` starts gets its own cgroup inside its launcher's: ``qgpu-NAME``, or ``/qgpu/NAME`` at the top
of the tree. The launcher's limits apply to it, and it ends with its launcher's cgroup. Its children stay in it,
whatever they exec. A container is a pod in the cgroup that its runtime made. qgpu enables no controller and changes
nothing else in the tree.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from qgpu.errors import InvalidValueError, NotSupportedError, PermissionDeniedError, RefusedError

_PARENT, _PREFIX = "qgpu", "qgpu-"
#: The cgroup of the guardian and the standby guardian.
GUARDIANS = "/qgpu-guardian"
#: The daemon that holds the lock on this cgroup shares this host's cards.
LOCK = "/qgpu-lock"
#: Errors for a cgroup that is gone, or is removed during the access.
_GONE = (errno.ENOENT, errno.ENODEV)
#: A handle of open_by_handle_at(2), as cgroups have: its size, its type (FILEID_KERNFS) and the id.
_HANDLE, _HANDLE_BYTES, _HANDLE_TYPE = struct.Struct("=IiQ"), 8, 0xFE
_libc = ctypes.CDLL(None, use_errno=True)
#: The most cgroups below one that are read. A container that may write to its own can make any number.
_MOST_BELOW = 512
#: How the names of our notes at cgroups begin.
_NOTES = "trusted.qgpu."
#: The cgroups whose times the kernel is known to keep, by inode number, which is never used again; and how many.
_with_times: set[int] = set()
_MOST_WITH_TIMES = 1 << 16
#: A change of a cgroup's times after this long cannot restore them: chmod(2) sets them to the kernel's last clock tick.
_SETTLED_NS = 50_000_000
#: The links of a cgroup's directory that has none below it: one for each of those comes on top.
_UNDIVIDED_LINKS = 2
#: What /proc/self/cgroup has alone where no version 1 hierarchy is mounted.
_ONE_HIERARCHY = b"0::"
#: Where runtimes look for cgroups.
_USUAL_PLACE = Path("/sys/fs/cgroup")
_READ_BYTES = 1 << 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_name(name: str) -> str:
    """Return ``name`` if it is a valid pod name. Raises InvalidValueError."""
    if not _NAME.fullmatch(name):
        raise InvalidValueError(
            f"pod name {name!r}: use up to 63 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        )
    return name


@cache
def mount() -> Path:
    """Find the mount point of the version 2 tree, once. Raises NotSupportedError."""
    return parse_mountinfo(_mountinfo())


def parse_mountinfo(mountinfo: str) -> Path:
    """Find the version 2 tree in the text of /proc/PID/mountinfo. Raises NotSupportedError."""
    for at, _ in _trees(mountinfo):
        return at
    raise NotSupportedError("cgroup v2: not mounted here; pods cannot be told apart; mount cgroup2 and try again")


def _trees(mountinfo: str) -> Iterator[tuple[Path, str]]:
    """Yield where the version 2 tree is mounted, with its options, from the text of /proc/PID/mountinfo."""
    for line in mountinfo.split("\n"):
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            yield Path(before.split()[4]), after.split()[-1]


def shows_tree(directory: str) -> bool:
    """Tell whether a directory, an absolute path without links, has the version 2 tree in it or lies in that."""
    path = Path(directory)
    return any(path.is_relative_to(at) or at.is_relative_to(path) for at, _ in _trees(_mountinfo()))


def bounds_namespaces() -> bool:
    """Tell whether the kernel moves no process out of its cgroup namespace: the tree is mounted with nsdelegate."""
    return any("nsdelegate" in options.split(",") for _, options in _trees(_mountinfo()))


def is_hybrid() -> bool:
    """Tell whether version 1 hierarchies are where runtimes look for cgroups: then containers get those."""
    return all(at != _USUAL_PLACE for at, _ in _trees(_mountinfo()))


def _mountinfo() -> str:
    return os.fsdecode(_content("/proc/self/mountinfo"))


def directory_of(path: str) -> Path:
    """Return the directory of a cgroup. Raises NotSupportedError."""
    return mount() / path.lstrip("/")


def of(pid: int) -> str:
    """Return the version 2 cgroup of a process, such as "/qgpu/web". Raises OSError when it has ended."""
    return parse_membership(os.fsdecode(_content(f"/proc/{pid}/cgroup")))


def _content(file: str) -> bytes:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)  # every process of a host may be asked: pathlib takes thrice as long
    try:
        text = part = os.read(fd, _READ_BYTES)
        while part:
            text += (part := os.read(fd, _READ_BYTES))
        return text
    finally:
        os.close(fd)


def is_frozen(pid: int) -> bool:
    """Tell whether a process's cgroup is frozen: it does not run, and nothing else shows why."""
    try:
        return "frozen 1" in (directory_of(of(pid)) / "cgroup.events").read_text()
    except (OSError, NotSupportedError):  # the top of the tree has no such file
        return False


def parse_membership(text: str) -> str:
    """Find the version 2 cgroup in the text of /proc/PID/cgroup; names in it may contain anything but a newline."""
    return next((line[3:] for line in text.split("\n") if line.startswith("0::")), "/")


def path_of(name: str) -> str:
    """Return the cgroup of a pod that qgpu starts."""
    return f"/{_PARENT}/{check_name(name)}"


def pod_parent(pid: int) -> str:
    """Return the cgroup in which a launcher's pod is made: its own, or the nearest above that only root may change.

    A user with a delegated cgroup may move processes within it, and so out of a pod. Raises OSError.
    """
    parts = of(pid).split("/")[1:]
    found = ""
    for part in parts if ".." not in parts else ():  # a path outside our cgroup namespace cannot be reached
        directory = directory_of(f"{found}/{part}")
        if not part or not all(_is_roots(file) for file in (directory, directory / "cgroup.procs")):
            break
        found += f"/{part}"
    return found or "/"


def _is_roots(file: Path) -> bool:
    status = file.stat()
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def create(name: str, parent: str = "/") -> str:
    """Make a pod's cgroup inside another one, unless it exists, and return it.

    Raises PermissionDeniedError, RefusedError, NotSupportedError.
    """
    path = path_of(name) if parent == "/" else f"{parent}/{_PREFIX}{check_name(name)}"
    directory = directory_of(path)
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
    with suppress(RefusedError):  # undivided_threads() then takes longer
        set_xattr(path, "pod", name)
    return path


def is_made_for(name: str, path: str) -> bool:
    """Tell whether qgpu made a cgroup for this pod; otherwise it is a container's."""
    return path == path_of(name) or path.rpartition("/")[2] == _PREFIX + name


def enter(name: str, pid: int, path: str = "") -> None:
    """Move a process, with its future children, into a pod's cgroup. Raises NotSupportedError."""
    try:
        (directory_of(path or path_of(name)) / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise NotSupportedError(f"pod {name}: process {pid} cannot enter its cgroup: {error.strerror}") from error


def ensure_in(name: str, pid: int, path: str, joined: Iterable[str]) -> None:
    """Move a process into a pod's own cgroup, or check that it is in a container's. Raises as enter, RefusedError.

    ``joined`` are cgroups of containers that count to the pod as well: a process in one of them stays there.
    """
    if any(within(of(pid), each) for each in joined):
        return
    if is_made_for(name, path):
        enter(name, pid, path)
    elif not within(of(pid), path):
        raise RefusedError(f"pod {name}: process {pid} is not in its cgroup {path}")


def within(path: str, above: str) -> bool:
    """Tell whether a cgroup is another one or lies below it."""
    return (path + "/").startswith(above + "/")


def is_of_container(path: str, container: str) -> bool:
    """Tell whether a cgroup is, or lies below, one that a runtime made for a container with this id.

    Runtimes use the whole id, some with a word before it, and with systemd ".scope" after it.
    """
    ends = (f"-{container}", f":{container}")
    parts = [part.removesuffix(".scope") for part in path.split("/")]
    return bool(container) and any(part == container or part.endswith(ends) for part in parts)


def find(ident: int, likely: str) -> str | None:
    """Return the cgroup with an id, after a look at ``likely``; None if it is gone.

    The kernel never reuses an id. Raises OSError if it does not tell.
    """
    if id_of(likely) == ident:
        return likely
    top = mount()
    tree = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = _libc.open_by_handle_at(tree, _HANDLE.pack(_HANDLE_BYTES, _HANDLE_TYPE, ident), os.O_PATH | os.O_CLOEXEC)
        error = ctypes.get_errno()
    finally:
        os.close(tree)
    if fd < 0:
        if error == errno.ESTALE:
            return None
        raise OSError(error, os.strerror(error))
    try:
        path = os.readlink(f"/proc/self/fd/{fd}").removeprefix(str(top)) or "/"
    finally:
        os.close(fd)
    return path if id_of(path) == ident else None  # it may have gone since, or lie outside of the tree that we see


def id_of(path: str) -> int:
    """Return a cgroup's id, which the kernel never reuses; 0 if it is gone. Raises OSError."""
    try:
        return directory_of(path).stat().st_ino
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return 0


@dataclass(frozen=True, slots=True)
class CgroupMembers:
    """The processes of a cgroup, and whether it may have any; it may if it could not be read."""

    pids: tuple[int, ...] = ()
    alive: bool = False


def members(*paths: str) -> CgroupMembers:
    """List the processes of cgroups. A cgroup that cannot be read, or not all of it, may have some."""
    found: list[int] = []
    for path in paths:
        with suppress(OSError):
            found.extend(_pids(path))
    return CgroupMembers(tuple(found), bool(found) or any(map(populated, paths)))


def populated(path: str) -> bool:
    """Tell whether a cgroup or one below it may have a process; False only if the kernel says so, or it is gone."""
    try:
        return "populated 0" not in (directory_of(path) / "cgroup.events").read_text().split("\n")
    except OSError as error:
        return error.errno not in _GONE


def exists(path: str) -> bool:
    """Tell whether a cgroup is there."""
    return directory_of(path).is_dir()


def pids(*paths: str) -> tuple[int, ...]:
    """List the processes of cgroups and those below them; none of one that is gone.

    Raises OSError if it cannot be read, or if there are too many below it; that does not mean it is empty.
    """
    return tuple(itertools.chain.from_iterable(map(_pids, paths)))


def undivided_pids(*paths: str) -> set[int] | None:
    """Do as undivided_threads, for processes. Raises OSError, NotSupportedError."""
    return undivided_threads(*paths, file="cgroup.procs")


def undivided_threads(*paths: str, file: str = "cgroup.threads") -> set[int] | None:
    """List the threads of cgroups that have none below them; None if they have, or may have had meanwhile.

    The kernel lists one cgroup whole, but not several: a thread that is moved from one that was not read to one that
    was is missed. The same holds for one that is moved in a version 1 hierarchy, by which the kernel groups threads,
    too. A cgroup's change time tells of cgroups made in it or removed once there is a note at it, and if it is not the
    present: then nobody can set it back. Raises OSError if a cgroup cannot be read.
    """
    if paths and not _is_only_hierarchy():
        return None
    directories = [directory_of(path) for path in paths]
    before = [_undivided_since(each) for each in directories]
    if any(since is None or time.time_ns() - since < _SETTLED_NS for since in before if since != 0):
        return None
    found: set[int] = set()
    for directory in directories:
        try:
            found.update(map(int, _content(f"{directory}/{file}").split()))
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                return None
            if error.errno not in _GONE:
                raise
    return found if before == [_undivided_since(each) for each in directories] else None


def _is_only_hierarchy() -> bool:
    text = _content("/proc/self/cgroup")
    return text.startswith(_ONE_HIERARCHY) and text.count(b"\n") == 1


def keeps_times(path: str) -> bool:
    """Tell whether the kernel keeps a cgroup's times, as it does once there is a note at it.

    Notes are seen with CAP_SYS_ADMIN alone. So the answer is remembered for threads without it. Raises OSError.
    """
    directory = directory_of(path)
    return _keeps_times(directory, os.stat(directory).st_ino)


def _keeps_times(directory: Path, inode: int) -> bool:
    if inode not in _with_times and any(name.startswith(_NOTES) for name in os.listxattr(directory)):
        if len(_with_times) >= _MOST_WITH_TIMES:
            _with_times.clear()
        _with_times.add(inode)
    return inode in _with_times


def _undivided_since(directory: Path) -> int | None:
    """Return the change time of a cgroup with none below it, in ns, 0 if it is gone; None if it tells nothing.

    It tells nothing where the kernel keeps no times.
    """
    try:
        status = os.stat(directory)
        if not _keeps_times(directory, status.st_ino):
            return None
    except OSError as error:
        return 0 if error.errno in _GONE else None
    return status.st_ctime_ns if status.st_nlink == _UNDIVIDED_LINKS else None


def _pids(path: str) -> Iterator[int]:
    """Yield the processes of a cgroup and of those below it. Raises OSError as ``pids``."""
    for number, directory in enumerate(_below(path)):
        try:
            yield from map(int, (directory / "cgroup.procs").read_text().split())
        except OSError as error:
            # one for threads, whose processes its domain above has listed, or one that can have none
            unlisted = error.errno == errno.EOPNOTSUPP and number
            if error.errno not in _GONE and not unlisted:
                raise


def _below(path: str) -> Iterator[Path]:
    """Yield a cgroup's directory and those below it, from the top. Skips those that go.

    Raises OSError, also if too many are below it, or one whose path is longer than system calls take.
    """
    left, seen = [directory_of(path)], 0
    while left:
        directory = left.pop()
        yield directory
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        seen += 1
                        if seen > _MOST_BELOW:
                            raise OSError(errno.E2BIG, f"cgroup {path}: more than {_MOST_BELOW} cgroups are below it")
                        left.append(Path(entry.path))
        except OSError as error:
            if error.errno not in _GONE:
                raise


def set_xattr(path: str, key: str, value: str) -> None:
    """Attach a note to a cgroup for its lifetime; an empty ``value`` removes it. Raises RefusedError."""
    directory, name = directory_of(path), f"{_NOTES}{key}"
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


def get_xattr(path: str, key: str) -> str | None:
    """Return a note attached to a cgroup; None without one."""
    try:
        return os.fsdecode(os.getxattr(directory_of(path), f"{_NOTES}{key}"))
    except OSError:
        return None


def remove(name: str, path: str = "") -> None:
    """Remove a pod's cgroup if it has no process."""
    for directory, _, _ in os.walk(directory_of(path or path_of(name)), topdown=False):
        try:
            os.rmdir(directory)
        except OSError:
            return

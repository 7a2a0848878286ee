"""The record of changes: who changed which policy or grant when, from what to what. It outlives the daemon.

A file of JSON lines in the state directory, and the log. A change of settings is recorded before it is made, and is not
made if it cannot be. Events of pods wait until the disk has room. A full file replaces its predecessor, and a new one
begins. Numbers order the events, because clocks may be set back.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from qgpu.daemon import caller
from qgpu.daemon.request_args import Arguments
from qgpu.errors import InvalidValueError, QgpuError, full
from qgpu.ipc.control_socket import Session
from qgpu.linux.repeated_error import RepeatedError

_log = structlog.get_logger("events")

#: How many events a file takes, and so how many of its kind are known at least, once there were as many.
FULL = 1000
#: The records: of settings, and of pods and claims, which come and go so often that they would displace the others.
_SETTINGS, _PODS = "events", "events-of-pods"

#: What becomes of pods that stay where they are: a container or task joins one.
_STAYS = {"container bound", "job bound"}


@dataclass(frozen=True, slots=True)
class Origin:
    """When a pod was started, and by whom; None where that is not recorded."""

    at: str | None = None
    by: Mapping[str, Any] | None = None
    #: When it began, in seconds since the epoch, if it was not told to move since, and did not do so by itself.
    untouched_since_s: float | None = None


UNKNOWN = Origin()


class Events:
    """The record of one state directory; without a directory it ends with the daemon."""

    def __init__(self, directory: Path | None) -> None:
        self._settings, self._pods = (
            _Record(directory, name, lambda: next(self._numbers)) for name in (_SETTINGS, _PODS)
        )
        known = (*self._settings.latest(), *self._pods.latest())
        self._numbers = itertools.count(1 + max(map(_number, known), default=0))
        self._kept = directory is not None

    @contextmanager
    def changing(
        self, by: Mapping[str, Any], what: str, on: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any]
    ) -> Iterator[None]:
        """Record a change of settings before the block makes it; if the block fails, record that, too.

        Raises QgpuError, before the block, if the change cannot be recorded. What changes nothing is no event.
        """
        if old == new:
            yield
            return
        event = {"what": what, **on, "by": dict(by), "old": dict(old), "new": dict(new)}
        try:
            self._settings.append(event)
        except OSError as error:
            raise QgpuError(
                f"{self._settings.file}: {error.strerror}; nothing was changed, because it could not be recorded; "
                f"{'free some space' if full(error) else 'qgpud must be able to write'} there"
            ) from error
        try:
            yield
        except BaseException as error:
            self._settings.note(event | {"failed": str(error)})
            raise

    def switched(self, session: Session, what: str) -> None:
        """Record a change of settings that was made elsewhere."""
        self._settings.note({"what": what, "by": caller.of(session)})

    def noted(
        self, what: str, on: Mapping[str, Any], by: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any]
    ) -> None:
        """Record a temporary policy, which is no setting; on a full disk, as soon as there is room."""
        if old != new:
            self._settings.note({"what": what, **on, "by": dict(by), "old": dict(old), "new": dict(new)})

    def happened(self, session: Session, what: str, on: Mapping[str, Any]) -> None:
        """Record what became of a pod or claim; on a full disk, as soon as there is room: pods must run anyway."""
        self._pods.note({"what": what, **on, "by": caller.of(session)})

    def decided(self, what: str, on: Mapping[str, Any]) -> None:
        """Record what the daemon itself did with a pod."""
        self._pods.note({"what": what, **on, "by": {"uid": os.getuid(), "pid": os.getpid(), "program": "qgpud"}})

    def origins(self) -> dict[str, Origin]:
        """Return when and by whom pods were started, by name, as far as recorded; the last pod of each name."""
        found: dict[str, Origin] = {}
        for event in self._pods.latest():
            name = event.get("name")
            if not isinstance(name, str) or "uid" in event:  # a claim's
                continue
            if event.get("made") is True:
                found[name] = _origin(event)
            elif name in found and event["what"] not in _STAYS:
                found[name] = replace(found[name], untouched_since_s=None)
        return found

    def listed(self, _session: Session, arguments: Arguments, _fds: list[int]) -> dict[str, Any]:
        """Return the last events, the latest last: ``count`` of them at most, or only those of ``settings``."""
        count = arguments.get("count", int) or FULL
        if not 1 <= count <= FULL:
            raise InvalidValueError(f"events: count {count}: 1 to {FULL} at a time")
        records = (self._settings,) if arguments.get("settings", bool) else (self._settings, self._pods)
        found = heapq.merge(
            *(record.latest() for record in records), key=lambda event: (_number(event), str(event.get("at")))
        )
        return {"events": list(found)[-count:], "kept": self._kept}

    def close(self) -> None:
        """Write what had to wait for room on the disk."""
        self._settings.settle()
        self._pods.settle()


def _number(event: Mapping[str, Any]) -> int:
    """Return an event's place in the order of all; 0 if a version without numbers recorded it."""
    found = event.get("number")
    return found if isinstance(found, int) else 0


def _origin(event: Mapping[str, Any]) -> Origin:
    try:
        at = str(event.get("at"))
        return Origin(at, event["by"], datetime.fromisoformat(at).timestamp())
    except (KeyError, ValueError):
        return UNKNOWN


class _Record:
    """Events of one kind: the latest ones, and their files."""

    def __init__(self, directory: Path | None, name: str, number: Callable[[], int]) -> None:
        """Read the files there are; ``number`` returns the next event's."""
        self._lock, self._number = threading.Lock(), number
        #: Lines that the disk did not take; they go there before the next one.
        self._waiting: deque[str] = deque(maxlen=FULL)
        self._failure = RepeatedError(_log, "events not written, trying again with the next")
        self._events: deque[dict[str, Any]] = deque(maxlen=2 * FULL)
        self._lines = 0
        self.file = None if directory is None else directory / f"{name}.jsonl"
        self._before = None if directory is None else directory / f"{name}.1.jsonl"
        for file in (self._before, self.file):
            if file is not None:
                found = _read(file)
                self._events.extend(found)
                self._lines = len(found)

    def latest(self) -> list[dict[str, Any]]:
        """Return the events that are known."""
        with self._lock:
            return list(self._events)

    def note(self, event: dict[str, Any]) -> None:
        """Append an event; if the disk does not take it, it waits."""
        with self._lock:
            event = self._enter(event)
            with self._failure.logged(OSError, file=str(self.file)):
                self._write(safely=False)
            self._events.append(event)
        _say(event)

    def append(self, event: dict[str, Any]) -> None:
        """Write an event so that it survives a crash of the host. Raises OSError; the file is then as before."""
        with self._lock:
            waiting = self._waiting.copy()
            event = self._enter(event)
            try:
                self._write(safely=True)
            except OSError:
                self._waiting = waiting
                raise
            self._events.append(event)
        _say(event)

    def settle(self) -> None:
        """Write what waits."""
        with self._lock, self._failure.logged(OSError, file=str(self.file)):
            self._write(safely=False)

    def _enter(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return an event with its time and number, which waits to be written."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        event = {"at": at, "number": self._number(), **event}
        self._waiting.append(json.dumps(event) + "\n")
        return event

    def _write(self, *, safely: bool) -> None:
        """Write what waits. Raises OSError; the file is then as before."""
        if self.file is not None and self._before is not None and self._waiting:
            if self._lines >= FULL:
                with suppress(FileNotFoundError):  # somebody removed it
                    os.replace(self.file, self._before)
                self._lines = 0
            _write(self.file, "".join(self._waiting), safely=safely)
            self._lines += len(self._waiting)
        self._waiting.clear()


def _say(event: Mapping[str, Any]) -> None:
    _log.info(event["what"], **{key: value for key, value in event.items() if key not in ("at", "number", "what")})


def _write(path: Path, lines: str, *, safely: bool) -> None:
    """Append lines, or leave the file as it is. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size, data = os.fstat(fd).st_size, lines.encode()
        if size and os.pread(fd, 1, size - 1) != b"\n":  # a crash left half a line
            data = b"\n" + data
        try:
            if os.write(fd, data) < len(data):  # the disk took a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if safely:
                os.fsync(fd)
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file. Lines that are no events, as after a crash, are left out."""
    try:
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    except OSError as error:
        _log.error("events not read", file=str(path), reason=error.strerror)
        return []
    found = []
    for line in lines[-FULL:]:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("what"), str) and isinstance(event.get("by"), dict):
            found.append(event)
    return found

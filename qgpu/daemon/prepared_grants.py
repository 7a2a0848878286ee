"""Keeps prepared grants: one file a claim in the state directory, and one CDI file for container runtimes.

A claim is on disk before its preparation is answered, and removed from it before its end is answered. A daemon that is
killed in between finds at its next start what it had promised, and makes the CDI files agree with it. It does not judge
whether a grant fits (``qgpu/admission.py``) or which containers use it (``qgpu/daemon/claim_requests.py``).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from qgpu.admission import Reservation
from qgpu.daemon.request_args import Arguments
from qgpu.errors import InvalidValueError, PermissionDeniedError, QgpuError, RefusedError, UnknownNameError
from qgpu.ipc.codec import prepared_to_json
from qgpu.linux import atomic_file
from qgpu.linux.repeated_error import RepeatedError
from qgpu.model import Grant
from qgpu.model.member_limits import MemberLimits
from qgpu.model.plane_api import Pgpu
from qgpu.model.prepared_grant import ANY_POD, PreparedDevice, PreparedGrant
from qgpu.runtime.claim_cdi import ClaimCdiFiles, qualified

_log = structlog.get_logger("grants")

VERSION = 1
#: The folder of the state directory with one file a claim.
FOLDER = "claims"

#: The most devices and consumers of one claim; Kubernetes allows 32 and 256.
MAX_DEVICES, MAX_CONSUMERS = 64, 1024

_UID = re.compile(r"[A-Za-z0-9-]{1,63}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_REQUEST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,126}")


class PreparedGrants:
    """The prepared grants of this host by the claim's UID."""

    def __init__(self, directory: Path | None, pgpus: Iterable[Pgpu], files: ClaimCdiFiles | None) -> None:
        #: Where claims are kept; None: nowhere, so nothing can be prepared.
        self._directory = directory / FOLDER if directory else None
        self._indices = {pgpu.uuid: pgpu.index for pgpu in pgpus}
        self._files = files
        #: Held while CDI files are written: the daemon looks after them while requests change them.
        self._lock = threading.Lock()
        self._failure = RepeatedError(_log, "CDI files of claims are out of date, trying again")
        self.by_uid: Mapping[str, PreparedGrant] = {}
        #: The prepared devices by name, with their claims.
        self.by_name: Mapping[str, tuple[PreparedGrant, PreparedDevice]] = {}
        #: The claims with a share group, by its name.
        self.by_group: Mapping[str, PreparedGrant] = {}
        self._set(self._load())
        self.refresh()

    def index(self, device: PreparedDevice) -> int | None:
        """Return the number of a device's card; None if the card is gone."""
        return self._indices.get(device.gpu)

    def held(self, besides: str = "") -> list[Reservation]:
        """Return what all claims hold, or all but the one with this UID."""
        return [each for uid, grant in self.by_uid.items() if uid != besides for each in self.wanted(grant)]

    def wanted(self, grant: PreparedGrant) -> list[Reservation]:
        """Return what one claim holds of the cards that are there."""
        return [
            Reservation(str(grant), index, device.grant)
            for device in grant.devices
            if (index := self.index(device)) is not None
        ]

    def parse(self, arguments: Arguments) -> PreparedGrant:
        """Read the arguments of ``grant.prepare``. Raises InvalidValueError; UnknownNameError for an unknown card."""
        grant = _grant(arguments)
        for device in grant.devices:
            if device.gpu not in self._indices:
                raise UnknownNameError(f"{grant}: there is no pGPU {device.gpu} here; see: qgpuctl gpu list")
        return grant

    @contextmanager
    def written(self, grant: PreparedGrant) -> Iterator[Path | None]:
        """Write a claim's grant to disk for the block to ``keep`` it; None if nothing is to be written.

        This takes longest, so it comes before the pods' lock: claims that are prepared at once are written at once.
        Raises PermissionDeniedError.
        """
        if self._directory is None or self.by_uid.get(grant.uid) == grant:
            yield None
            return
        path = self._path(grant.uid)
        with ExitStack() as stack:
            try:
                path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                new = stack.enter_context(atomic_file.beside(path, _text(grant), 0o644))
            except OSError as error:
                raise PermissionDeniedError(f"{path}: {error.strerror}; the claim is not prepared") from error
            yield new

    def keep(self, grant: PreparedGrant, new: Path | None) -> None:
        """Keep a claim's grant in place of an earlier one, as it was ``written``; the caller flushes.

        Raises PermissionDeniedError, RefusedError.
        """
        if self.by_uid.get(grant.uid) == grant:
            self._write_file(grant)
            return
        if self._directory is None:
            raise RefusedError(f"{grant}: qgpud has no state directory to keep it in; start it with --state-dir")
        for device in grant.devices:
            other = self.by_name.get(device.name)
            if other is not None and other[0].uid != grant.uid:
                raise RefusedError(f"{grant}: {other[0]} has a device {device.name}; give one of them another UID")
        path, before = self._path(grant.uid), self.by_uid
        try:
            if new is not None:
                new.rename(path)
            else:  # it was dropped since
                atomic_file.replace(path, _text(grant), 0o644)
        except OSError as error:
            raise PermissionDeniedError(f"{path}: {error.strerror}; the claim is not prepared") from error
        self._set({**before, grant.uid: grant})
        try:
            self._write_file(grant)
        except QgpuError:
            if grant.uid not in before:  # nobody was told of it
                self.remove(grant.uid)
            raise

    def remove(self, uid: str) -> None:
        """Forget a claim; the caller flushes. Raises PermissionDeniedError."""
        path = self._path(uid)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise PermissionDeniedError(f"{path}: {error.strerror}; the claim stays prepared") from error
        self._set({other: grant for other, grant in self.by_uid.items() if other != uid})
        self.refresh()

    def flush(self) -> None:
        """Have what was kept or removed survive a power failure, without the pods' lock. Raises PermissionDeniedError.

        A request that fails here is repeated by whoever made it.
        """
        if self._directory is not None and self._directory.is_dir():
            try:
                atomic_file.flush(self._directory)
            except OSError as error:
                raise PermissionDeniedError(f"{self._directory}: {error.strerror}; try again") from error

    def refresh(self) -> None:
        """Bring the CDI files up to date. A failure is logged once and retried at the next call."""
        if self._files is not None:
            with self._failure.logged(QgpuError):
                self._files.look()
                with self._lock:
                    self._files.refresh(self.by_uid)

    def _set(self, by_uid: Mapping[str, PreparedGrant]) -> None:
        self.by_uid = by_uid
        self.by_name = {device.name: (grant, device) for grant in by_uid.values() for device in grant.devices}
        self.by_group = {grant.group: grant for grant in by_uid.values() if grant.group}

    def _write_file(self, grant: PreparedGrant) -> None:
        if self._files is not None:
            self._files.look()
            with self._lock:
                self._files.write(grant)

    def _path(self, uid: str) -> Path:
        assert self._directory is not None
        return self._directory / f"{uid}.json"

    def _load(self) -> dict[str, PreparedGrant]:
        """Read all claims. One that cannot be read is reported; its containers are refused until it is prepared."""
        found: dict[str, PreparedGrant] = {}
        if self._directory is None or not self._directory.is_dir():
            return found
        for path in self._directory.glob(".*.json.*"):  # of a daemon that was killed while it wrote
            with suppress(OSError):
                path.unlink()
        for path in sorted(self._directory.glob("*.json")):
            try:
                content = json.loads(path.read_text())
                if not isinstance(content, dict) or content.get("version") != VERSION:
                    raise InvalidValueError(f"it is not of version {VERSION}")
                grant = _grant(Arguments(content))
                if grant.uid != path.stem:
                    raise InvalidValueError(f"it is of claim {grant.uid}")
            except OSError as error:
                raise PermissionDeniedError(f"{path}: {error.strerror}; choose another --state-dir") from error
            except (ValueError, RecursionError) as error:
                _log.error("claim unusable, its containers are refused", file=str(path), reason=str(error))
                continue
            found[grant.uid] = grant
            for device in grant.devices:
                if device.gpu not in self._indices:
                    _log.error("card of a claim is gone", claim=str(grant), gpu=device.gpu)
        return found


def shown(grant: PreparedGrant) -> dict[str, Any]:
    """Return a grant in JSON types, as ``grant.list`` shows it and the state directory keeps it."""
    content = prepared_to_json(grant)
    for device, entry in zip(grant.devices, content["devices"], strict=True):
        entry["cdi"] = qualified(device.name)
    return content


def _text(grant: PreparedGrant) -> str:
    return json.dumps({"version": VERSION} | shown(grant), indent=2) + "\n"


def prepared_devices(grant: PreparedGrant) -> list[dict[str, Any]]:
    """Return the answer to ``grant.prepare``: which CDI device answers which request."""
    keys = ("request", "gpu", "share", "cdi")
    return [{key: device[key] for key in keys} for device in shown(grant)["devices"]]


def claim_uid(arguments: Arguments) -> str:
    """Return the argument ``uid``, of a claim. Raises InvalidValueError."""
    return _matched("uid", arguments.need("uid", str), _UID)


def _grant(arguments: Arguments) -> PreparedGrant:
    uid = claim_uid(arguments)
    devices = [Arguments(_table(raw)) for raw in _bounded(arguments, "devices", MAX_DEVICES)]
    if not devices:
        raise InvalidValueError(f"claim {uid}: it has no device; give at least one")
    made: list[PreparedDevice] = []
    for each in devices:
        request = _matched("request", each.need("request", str), _REQUEST)
        share = _matched("share", each.get("share", str) or "-", _UID).removeprefix("-")
        wanted = f"{uid}-{re.sub(r'[^A-Za-z0-9-]', '-', share or request)}".strip("-")
        name = _unused(wanted, [other.name for other in made])
        grant = replace(each.amended(Grant()), profiling=False, graphics=False)  # its user writes a claim
        made.append(PreparedDevice(request, share, each.need("gpu", str), grant, name))
    part = None if (raw := arguments.get("part", dict)) is None else Arguments(raw)
    return PreparedGrant(
        uid,
        _matched("namespace", arguments.need("namespace", str), _NAME),
        _matched("name", arguments.need("name", str), _NAME),
        tuple(_consumer(each) for each in _bounded(arguments, "consumers", MAX_CONSUMERS)),
        tuple(made),
        None if part is None else MemberLimits(part.get("sm", int), part.get("memory", int)),
    )


def _bounded(arguments: Arguments, name: str, most: int) -> list[Any]:
    found = arguments.need(name, list)
    if len(found) > most:
        raise InvalidValueError(f"request: {len(found)} {name}; a claim has at most {most}")
    return found


def _table(raw: Any) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise InvalidValueError(f"request: device {raw!r}: wants a table")
    return raw


def _consumer(text: Any) -> str:
    return ANY_POD if text == ANY_POD else _matched("consumer", text, _UID)


def _matched(what: str, text: Any, pattern: re.Pattern[str]) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise InvalidValueError(f"request: {what} {str(text)[:80]!r}: wants {pattern.pattern}")
    return text


def _unused(name: str, taken: Iterable[str]) -> str:
    """Return a name that no device of its claim has: two may answer one request without a share."""
    numbered = (f"{name}-{n}" for n in range(2, MAX_DEVICES + 2))
    return next(each for each in (name, *numbered) if each not in taken)

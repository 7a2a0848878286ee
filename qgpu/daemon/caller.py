"""Who made a request, as the kernel says. Nothing that the request itself says counts."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from qgpu.ipc.control_socket import Session
from qgpu.ipc.wire import has_ended
from qgpu.linux import cgroup, proc

#: The id of a container in its cgroup's name, and how many of its digits are shown.
_CONTAINER = re.compile(r"[0-9a-f]{64}")
_SHORT = 12
#: In place of a login user: the process belongs to no login (audit(7), AUDIT_UID_UNSET).
_NO_LOGIN = str(2**32 - 1)


def of(session: Session) -> dict[str, Any]:
    """Return user and process of a client: ``uid``, ``pid``, and, if known, ``program``, ``login_uid``, ``container``.

    ``login_uid`` is the user who logged in, also behind sudo. Of a process that has ended, only the first two are
    known. Its command line is left out: everybody may read the record, and command lines hold secrets.
    """
    pid = session.peer.pid
    caller: dict[str, Any] = {"uid": session.peer.uid, "pid": pid}
    found = {"program": proc.name(pid), "login_uid": _login(pid), "container": _container(pid)}
    if session.process is None or has_ended(session.process):  # checked last: another may have got its pid meanwhile
        return caller
    return caller | {key: value for key, value in found.items() if value not in (None, "")}


def _login(pid: int) -> int | None:
    with suppress(OSError):
        text = Path(f"/proc/{pid}/loginuid").read_text()
        return int(text) if text.isdecimal() and text != _NO_LOGIN else None
    return None


def _container(pid: int) -> str:
    with suppress(OSError):
        found = _CONTAINER.findall(cgroup.of(pid))
        return str(found[-1][:_SHORT]) if found else ""
    return ""

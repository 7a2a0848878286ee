"""Who made a request, as the kernel says. Nothing that the request itself says counts."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from qgpu.ipc.control_socket import Session, is_own_user
from qgpu.ipc.wire import has_ended
from qgpu.linux import cgroup, proc

#: The id of a container in its cgroup's name, and how many of its digits are shown.
_CONTAINER = re.compile(r"[0-9a-f]{64}")
_SHORT = 12
#: A Python's name; its options without a value; what a module is called, and how long its name may be.
_PYTHON = re.compile(r"python[0-9.]*")
_FLAGS = re.compile(rb"-[bBdEiIOPqRsSuvx]+")
_MODULE, _LONGEST = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"), 80
#: In place of a login user: the process belongs to no login (audit(7), AUDIT_UID_UNSET).
_NO_LOGIN = str(2**32 - 1)


def is_own(session: Session) -> bool:
    """Tell whether a client is root or the daemon's own user."""
    return is_own_user(session.peer.uid)


def of(session: Session) -> dict[str, Any]:
    """Return user and process of a client: ``uid``, ``pid``, and, if known, ``program``, ``login_uid``, ``container``.

    ``login_uid`` is the user who logged in, also behind sudo. Of a process that has ended, only the first two are
    known. ``module`` is the module that a Python process says it runs. The rest of its command line is left out:
    everybody may read the record, and command lines hold secrets.
    """
    pid = session.peer.pid
    caller: dict[str, Any] = {"uid": session.peer.uid, "pid": pid}
    program = proc.name(pid)
    found = {
        "program": program,
        "module": _module(pid, program),
        "login_uid": _login(pid),
        "container": _container(pid),
    }
    if session.process is None or has_ended(session.process):  # checked last: another may have got its pid meanwhile
        return caller
    return caller | {key: value for key, value in found.items() if value not in (None, "")}


def _module(pid: int, program: str) -> str:
    """Return the module that a Python was started with (``python -m MODULE``); empty if that is not plainly so.

    A process writes its own command line, so this is only its claim, as its name is.
    """
    if not _PYTHON.fullmatch(program):
        return ""
    with suppress(OSError):
        first, *words = proc.cmdline(pid) or [b""]
        while words and _FLAGS.fullmatch(words[0]):
            del words[0]
        plain = _PYTHON.fullmatch(proc.printable(first).rpartition("/")[2]) and words[:1] == [b"-m"]
        if plain and len(words) > 1 and len(words[1]) <= _LONGEST and _MODULE.fullmatch(words[1]):
            return words[1].decode("ascii")
    return ""


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

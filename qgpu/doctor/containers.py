"""Checks the CDI file, and that all files that it names exist."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qgpu.doctor.report import Check, Verdict
from qgpu.runtime import cdi

_NAME = "containers"


def check_containers(directory: Path = cdi.DIRECTORY) -> Check:
    """Check the CDI file in a directory."""
    path = directory / cdi.FILE
    try:
        found = json.loads(path.read_text())
        missing = [name for name in _named(found) if not Path(name).exists()]
    except OSError as error:
        return Check(_NAME, Verdict.WARN, f"{path}: {error.strerror}", "qgpud writes it; see [containers] cdi")
    except (ValueError, KeyError, TypeError) as error:
        return Check(_NAME, Verdict.FAIL, f"{path}: {error!r}", "remove it; qgpud writes a new one")
    if missing:
        return Check(_NAME, Verdict.FAIL, f"{path}: {missing[0]} is not there", "remove it; qgpud writes a new one")
    return Check(_NAME, Verdict.OK, f"{path}: {', '.join(device['name'] for device in found['devices'])}")


def _named(found: dict[str, Any]) -> Iterator[str]:
    """Yield every host file that a CDI file names."""
    for edits in (found["containerEdits"], *(device["containerEdits"] for device in found["devices"])):
        for node in edits.get("deviceNodes", ()):
            yield node["path"]
        for mount in edits.get("mounts", ()):
            yield mount["hostPath"]
        for hook in edits.get("hooks", ()):
            yield from (hook["path"], hook["args"][-2])

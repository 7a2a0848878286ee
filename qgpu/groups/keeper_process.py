"""Starts a group's keeper as a process of its own, which outlives the process that started it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qgpu import errors
from qgpu.errors import RefusedError
from qgpu.groups.group_files import GroupFiles
from qgpu.linux.interpreter import python
from qgpu.model.member_limits import MemberLimits

#: The command that runs a keeper, without its arguments.
PROGRAM = tuple(python("-m", "qgpu.groups.keeper"))


def start(
    runtime_dir: Path,
    name: str,
    grants: Mapping[str, Any],
    part: MemberLimits,
    *,
    of_claim: bool = False,
    program: tuple[str, ...] = PROGRAM,
) -> subprocess.Popen[bytes]:
    """Start a group's keeper, and return its process when the group takes members. Raises the keeper's QgpuError.

    ``grants`` are by pGPU, as in requests; for a claim's group they are empty, because it gets what its claim holds.
    """
    ready, told = os.pipe()
    try:
        keeper = subprocess.Popen(
            [*program, name, str(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"QGPU_RUNTIME_DIR": str(runtime_dir.absolute())},
            pass_fds=(told,),
            cwd="/",
            start_new_session=True,
        )
    finally:
        os.close(told)
    assert keeper.stdin is not None
    with keeper.stdin as wanted, os.fdopen(ready) as answer:
        wanted.write(json.dumps({"grants": grants, "part": asdict(part), "of_claim": of_claim}).encode())
        wanted.close()
        said = answer.read().strip()
    if said:
        keeper.wait()
        code, _, line = said.partition(" ")
        raise errors.from_code(int(code), line)
    if GroupFiles(runtime_dir, name).keeper() is None:
        raise RefusedError(f"group {name}: its keeper has ended; this is a defect")
    return keeper

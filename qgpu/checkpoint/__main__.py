"""The helper process: makes the driver's checkpoint calls that its parent asks for, one after the other.

A request is a line of JSON, ``{"call": "lock", "pid": 17, "timeout_ms": 10000}``; so is its answer, ``{"ok": true}`` or
``{"ok": false, "code": 1, "error": "…"}``. The helper ends with its parent. A call that it has begun goes on in the
process that it suspends or resumes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from qgpu.checkpoint.cuda_checkpoint import CudaCheckpoint
from qgpu.errors import QgpuError
from qgpu.linux.parent_death import end_with_parent


def main() -> None:
    """Answer requests until the parent closes our input or ends."""
    end_with_parent(os.getppid(), signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library may print to standard output
    driver: CudaCheckpoint | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            driver = driver or CudaCheckpoint()
            answer = {"ok": True, **_answered(driver, request.pop("call"), request)}
        except QgpuError as error:
            answer = {"ok": False, "code": int(error.code), "error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


def _answered(driver: CudaCheckpoint, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
    result = getattr(driver, call)(**arguments)
    return {} if result is None else {"state": result.value}


if __name__ == "__main__":
    main()

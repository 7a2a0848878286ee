"""A daemon in a process of its own, which may be killed at any line of a request."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
#: Exit codes of such a process; UNCHANGED is for tests that find nothing done.
DONE, FAILED, KILLED, UNCHANGED = range(4)


def in_process(start: Callable[[], T], call: Callable[[T], int | None]) -> int:
    """Start a daemon in a process that ends like one that is killed, and return the exit code: what the call says."""
    child = os.fork()
    if child == 0:
        code = FAILED
        try:
            code = call(start()) or DONE
        except BaseException:  # noqa: BLE001 - the process is not to run the test again
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_after(lines: int, call: Callable[[T], None], counts: Callable[[str], bool]) -> Callable[[T], None]:
    """Have the process killed after so many lines of a request, of the files that ``counts`` says."""

    def run(daemon: T) -> None:
        left = [lines]

        def at_line(_frame: FrameType, event: str, _argument: Any) -> Any:
            left[0] -= event == "line"
            if left[0] < 0:
                os._exit(KILLED)
            return at_line

        sys.settrace(lambda frame, *_: at_line if counts(frame.f_code.co_filename) else None)
        call(daemon)

    return run

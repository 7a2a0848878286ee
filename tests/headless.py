"""A process whose first thread has ended before its two others: /proc shows nothing of its memory and files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from qgpu.linux import proc

_FIRST_ENDS = """
import ctypes, threading, time
for _ in range(2): threading.Thread(target=time.sleep, args=(600,)).start()
print(flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit: of this thread alone
"""


@contextmanager
def headless() -> Iterator[int]:
    """Run one; give its pid."""
    process = subprocess.Popen([sys.executable, "-c", _FIRST_ENDS], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    while proc.stat(process.pid)[0] != "Z":
        assert process.poll() is None
    yield process.pid
    process.kill()
    process.communicate()

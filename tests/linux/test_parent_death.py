"""Children that end with their parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

from qgpu.linux import parent_death

_PARENT = """
import subprocess, sys, time
from qgpu.linux.parent_death import terminated_with_parent
child = subprocess.Popen([*terminated_with_parent(), "sh", "-c", "echo $$; exec sleep 60"], stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode(), flush=True)
time.sleep(60)
"""


def test_child_gets_sigterm_when_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        started, pid = map(int, parent.stdout.readline().split())
        child = os.pidfd_open(pid)
        parent.kill()
    try:
        assert started == pid  # what is executed is the child itself
        assert select.select([child], [], [], 20)[0]  # a pidfd is readable when its process has ended
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)


def test_child_of_another_parent_ends_at_once():
    command = [sys.executable, "-m", parent_death.__name__, "1", "true"]
    assert subprocess.run(command, check=False).returncode == 128 + signal.SIGTERM

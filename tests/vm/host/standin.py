"""A stand-in for the guardian, which the simulated driver can't carry: leaves the service as it does, and waits.

Started once by the service (ExecStartPost=), in its cgroup and sandbox; its process id is in /run/qgpu/standin.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from qgpu.guardian.__main__ import leave_service

PLACE = Path("/run/qgpu/standin")

if not PLACE.exists() and os.fork() == 0:
    os.setsid()
    leave_service()
    PLACE.write_text(str(os.getpid()))
    signal.pause()

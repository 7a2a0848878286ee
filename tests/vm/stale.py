"""In a guest: whether the emulator runs code as it is now. No module, only a probe of the kernel's own.

    lane.py [--single] --script tests/vm/stale.py [SECONDS]

A probe on a function goes on and off while a process on the other CPU calls that function all the time. An emulator
that goes on running the breakpoint by which the kernel exchanges the code ends the guest (docs/decisions/0047).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

DEBUG = Path("/sys/kernel/debug")
EVENTS = DEBUG / "tracing"
FIGURES = Path("/run/share/figures.json")
CALLER = ("dd", "if=/dev/zero", "of=/dev/null", "bs=1")


def main() -> None:
    end = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else 60)
    os.sched_setaffinity(0, {1})
    caller = subprocess.Popen(CALLER)
    os.sched_setaffinity(0, {0})
    (EVENTS / "kprobe_events").write_text("p:stale write_null")
    (EVENTS / "events/kprobes/stale/enable").write_text("1")
    times = 0
    while time.monotonic() < end:
        (DEBUG / "kprobes/enabled").write_text("0")
        (DEBUG / "kprobes/enabled").write_text("1")
        times += 1
        FIGURES.write_text(json.dumps({"probe_on_and_off": times}))
    (EVENTS / "events/kprobes/stale/enable").write_text("0")
    caller.kill()
    print(f"{times} times off and on")


if __name__ == "__main__":
    main()

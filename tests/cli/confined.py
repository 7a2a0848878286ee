"""Run a command as confined as the service is, as far as that goes without systemd: confined.py COMMAND...

Its capabilities, no new privileges, and no memory that is written and then executed, as in packaging/systemd.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

UNIT = Path(__file__).parents[2] / "packaging/systemd/qgpud.service"
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_MDWE = 24, 38, 65
_NUMBERS = {"CHOWN": 0, "DAC_READ_SEARCH": 2, "SYS_PTRACE": 19, "SYS_ADMIN": 21, "SYS_NICE": 23}


def main() -> None:
    """Give up what the unit does not have and become the command."""
    libc = ctypes.CDLL(None, use_errno=True)
    unit = UNIT.read_text()
    (allowed,) = re.findall(r"^CapabilityBoundingSet=(.*)$", unit, re.MULTILINE)
    kept = {_NUMBERS[name.removeprefix("CAP_")] for name in allowed.split()}
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for number in set(range(last + 1)) - kept:
        if libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0):
            print(f"confined: capability {number}: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
    assert "NoNewPrivileges=yes" in unit
    assert "MemoryDenyWriteExecute=yes" in unit
    for option in (_PR_SET_NO_NEW_PRIVS, _PR_SET_MDWE):
        if libc.prctl(option, 1, 0, 0, 0):
            print(f"confined: prctl {option}: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()

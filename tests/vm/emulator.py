"""The emulator of the VM lanes: the host's QEMU where it keeps up with code that changes, else Debian's backport.

Before 8.1 QEMU reads guest code before it takes the lock under which it notes that the page holds code. A store from
the other CPU in between is missed, and both CPUs go on running what was there before. Linux replaces the breakpoint
of a probe in just that way: a breakpoint that memory no longer holds is taken for ever, and each time Linux sees that
it is none of its own and tries again. So the guest hangs, sooner or later, where the module comes and goes under load
(docs/decisions/0006).

Later versions drop the translations of code that is about to be written to, release the page, and only then write. A
CPU that translates in between goes on running what was there before, too. Where that is a breakpoint at a probe by
ftrace, Linux jumps to address 0. So where probes come and go under load both CPUs share a thread, which has neither
race and takes longer (docs/decisions/0047).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import kernels

NEEDED = (8, 1)
BACKPORTS = kernels.Suite(kernels.MIRROR, "bookworm-backports")
PACKAGES = ("qemu-system-x86", "qemu-system-data", "seabios")


def version_of(command: Sequence[str]) -> tuple[int, ...]:
    """Return a QEMU's version; fails where it does not run."""
    text = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"version (\d+)\.(\d+)", text)
    assert found, text
    return tuple(int(number) for number in found.groups())


def get(cache: Path) -> list[str]:
    """Return the command of a QEMU to be run with a thread for each CPU, fetched if need be.

    The backport uses the libraries and firmware that the host's own package brought.
    """
    if version_of(["qemu-system-x86_64"]) >= NEEDED:
        return ["qemu-system-x86_64"]
    root = cache / "qemu"
    with kernels.alone(cache):
        if not (root / "done").exists():
            for package in PACKAGES:
                kernels.unpack(package, BACKPORTS, cache, root)
            (root / "done").touch()
    data = [option for name in ("qemu", "seabios") for option in ("-L", str(root / "usr/share" / name))]
    command = [str(root / "usr/bin/qemu-system-x86_64"), *data]
    assert version_of(command) >= NEEDED
    return command

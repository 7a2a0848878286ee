"""The module and its glue, in and out, over the real driver; UVM and its device file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import qg

VERSION = os.environ["QGPU_VM_REAL"]
#: Before 565.57.01 the driver's kernel interface is no GPL-only export, so the glue must come too (kmod/rm_glue.c).
PLAIN = int(VERSION.partition(".")[0]) < 565
UVM = "/dev/nvidia-uvm"


def load() -> None:
    """Load the module, with its glue where the branch needs it."""
    qg.insmod("qgpu.ko", f"accept_driver={VERSION}")
    if PLAIN:
        qg.insmod("qgpu_rm.ko")


def unload() -> None:
    """Unload both."""
    if PLAIN:
        qg.rmmod("qgpu_rm")
    qg.rmmod("qgpu")


def load_uvm() -> None:
    """Load UVM and make its node, as nvidia-modprobe does: its major number is any."""
    qg.insmod("nvidia-uvm.ko")
    rows = (line.split() for line in Path("/proc/devices").read_text().splitlines())
    major = next(int(row[0]) for row in rows if row[1:] == ["nvidia-uvm"])
    with contextlib.suppress(FileNotFoundError):
        os.unlink(UVM)
    os.mknod(UVM, 0o020666, os.makedev(major, 0))


@contextlib.contextmanager
def uvm() -> Iterator[None]:
    """UVM, for as long as this lasts."""
    load_uvm()
    try:
        yield
    finally:
        qg.rmmod("nvidia_uvm")


def enforce(on: bool) -> None:
    """Switch enforcement on or off, as ``qgpuctl module`` does."""
    Path("/sys/module/qgpu/parameters/enforce").write_text(str(int(on)))


def flags(qgpu: qg.Qgpu, *names: str) -> set[str]:
    """Tell which of these flags the module shows."""
    found = qgpu.info().flags
    return {name for name in names if found & qg.uapi.NUMBERS[f"QGPU_INFO_{name}"]}

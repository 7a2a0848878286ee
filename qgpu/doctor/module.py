"""Check of the kernel module: is it built for this kernel, is it loaded, does it enforce. It changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

from qgpu.doctor.report import Check, Verdict
from qgpu.errors import QgpuError
from qgpu.planes.kmod import DEVICE
from qgpu.planes.kmod.device import Device, missing_for_limits, problem_of, stalled_of, text_of
from qgpu.planes.kmod.uapi import NUMBERS

_NAME = "kernel module"
_SOURCES = Path("/usr/src")
_MODULES = Path("/lib/modules")


def check_module() -> Check:
    """Check the module. Its absence is no fault, because the user-space plane works without it."""
    if not Path(DEVICE).exists():
        return absent(_SOURCES, _MODULES / os.uname().release)
    try:
        device = Device()
    except QgpuError as error:
        return Check(_NAME, Verdict.WARN, f"loaded; {error}", "ask as root")
    try:
        info = device.info()
        stalled = stalled_of(device, info)
    except QgpuError as error:
        return Check(_NAME, Verdict.FAIL, f"loaded; {error}", _SAME_VERSION)
    finally:
        device.close()
    if info.abi != NUMBERS["QGPU_ABI_VERSION"]:
        return Check(_NAME, Verdict.FAIL, f"loaded; it speaks ABI {info.abi}", _SAME_VERSION)
    if problem := problem_of(info):
        return Check(_NAME, Verdict.WARN, f"loaded; {problem}", "until it enforces, the user-space plane is used")
    if stalled:
        return Check(_NAME, Verdict.FAIL, f"loaded; the driver does not answer for {', '.join(stalled)}", _STALLED)
    if missing := missing_for_limits(info):
        what, _, fix = missing.partition("; ")
        return Check(_NAME, Verdict.FAIL, f"loaded; limits are refused, those of pods may be passed: {what}", fix)
    return Check(_NAME, Verdict.OK, f"loaded, enforcing on driver {text_of(info.driver)}; calls sealed")


_STALLED = "dmesg says since when, and of an Xid what the card did; gates open when the driver answers again"
_SAME_VERSION = "module and qgpu must be of one version: without pods, modprobe -r qgpu && modprobe qgpu"


def absent(sources: Path, modules: Path) -> Check:
    """Check a host on which the module is not loaded, by DKMS' sources and the running kernel's modules."""
    release = modules.name
    if any(modules.rglob("qgpu.ko*")):
        return Check(_NAME, Verdict.OK, f"not loaded; built for this kernel ({release}): modprobe qgpu loads it")
    if installed := sorted(path.name for path in sources.glob("qgpu-*") if path.is_dir()):
        return Check(
            _NAME,
            Verdict.WARN,
            f"not built for this kernel ({release}), though {installed[-1]} is installed",
            f"install its headers, then dkms autoinstall -k {release}; the user-space plane is used meanwhile",
        )
    return Check(_NAME, Verdict.OK, "not installed; the user-space plane does without")

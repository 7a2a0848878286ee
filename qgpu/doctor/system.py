"""Checks of the host: kernel, privileges, and what the planes need of them. They change nothing."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from qgpu.doctor.report import Check, Verdict
from qgpu.errors import QgpuError
from qgpu.linux import cgroup
from qgpu.planes.seccomp.preflight import check_kernel

_SECCOMP_ACTIONS = Path("/proc/sys/kernel/seccomp/actions_avail")

#: The seccomp plane needs pidfd_getfd and SECCOMP_USER_NOTIF_FLAG_CONTINUE: Linux 5.6 has both.
_OLDEST_KERNEL = (5, 10)


def check_system(*, needed: bool) -> list[Check]:
    """Check the host. Missing parts are failures if ``needed`` to share a real GPU, else warnings."""
    bad = Verdict.FAIL if needed else Verdict.WARN
    return [_kernel(bad), _root(bad), _notification(bad), _tracing(bad), _cgroup(bad)]


def _kernel(bad: Verdict) -> Check:
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdecimal())
    if numbers >= _OLDEST_KERNEL:
        return Check("kernel", Verdict.OK, release)
    return Check("kernel", bad, release, "Linux 5.10 or newer is needed")


def _root(bad: Verdict) -> Check:
    if os.geteuid() == 0:
        return Check("root", Verdict.OK, "running as root")
    return Check("root", bad, f"running as uid {os.geteuid()}", "real GPUs are shared by root; run qgpud as root")


def _notification(bad: Verdict) -> Check:
    actions = _SECCOMP_ACTIONS.read_text().split() if _SECCOMP_ACTIONS.exists() else []
    if "user_notif" in actions:
        return Check("seccomp", Verdict.OK, "user notification available")
    return Check("seccomp", bad, "no user notification", "a kernel with CONFIG_SECCOMP_FILTER is needed")


def _tracing(bad: Verdict) -> Check:
    try:
        check_kernel()
    except QgpuError as error:
        return Check("ptrace", bad, str(error), "the user-space plane must reach into pods; boot with 2 or less")
    return Check("ptrace", Verdict.OK, "root may trace processes")


def _cgroup(bad: Verdict) -> Check:
    try:
        mount = cgroup.mount()
    except QgpuError as error:
        return Check("cgroup", bad, str(error), "mount cgroup2")
    hybrid = " (hybrid)" if mount != Path("/sys/fs/cgroup") else ""
    if os.access(mount, os.W_OK):
        return Check("cgroup", Verdict.OK, f"version 2 at {mount}{hybrid}")
    return Check("cgroup", bad, f"version 2 at {mount}{hybrid}, not writable", "run qgpud where it may make cgroups")

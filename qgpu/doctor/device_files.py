"""Check of the BPF program that isolates pods' device files. It changes nothing."""

from __future__ import annotations

import os

from qgpu.doctor.report import Check, Verdict
from qgpu.errors import QgpuError
from qgpu.lsm import device_files, libbpf, pins

_NAME = "device files"
_GAP = "until then a process outside a pod can use a device file that the pod gives it (docs/security.md)"


def check_device_files() -> Check:
    """Check whether the program is loaded or could be."""
    if os.geteuid() != 0:
        return Check(_NAME, Verdict.WARN, "only root can see whether they are isolated", "ask as root")
    if pins.links():
        return Check(_NAME, Verdict.OK, "isolated by a BPF program")
    try:
        device_files.check_kernel()
        device_files.compiled()
        libbpf.library()
    except (OSError, QgpuError) as error:
        return Check(_NAME, Verdict.WARN, f"not isolated: {error}", _GAP)
    return Check(_NAME, Verdict.OK, "can be isolated: qgpud loads a BPF program")

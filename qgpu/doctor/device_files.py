"""Check of the BPF program that keeps pods' device files to the pods. It only looks."""

from __future__ import annotations

import os

from qgpu.doctor.report import Check, Verdict
from qgpu.errors import QgpuError
from qgpu.lsm import device_files, libbpf, pins

_NAME = "device files"
_GAP = "until then a process outside a pod can use what the pod hands it (docs/security.md)"


def check_device_files() -> Check:
    """Check whether the program is loaded, or could be."""
    if os.geteuid() != 0:
        return Check(_NAME, Verdict.WARN, "whether they are kept to their pods only root can see", "ask as root")
    if pins.links():
        return Check(_NAME, Verdict.OK, "kept to their pods by a BPF program")
    try:
        device_files.check_kernel()
        device_files.compiled()
        libbpf.library()
    except (OSError, QgpuError) as error:
        return Check(_NAME, Verdict.WARN, f"not kept to their pods: {error}", _GAP)
    return Check(_NAME, Verdict.OK, "can be kept to their pods: qgpud loads a BPF program")

"""Checks of the GPU's side: driver, device nodes, firmware, NVML, libcuda, kernel module. They change nothing."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pynvml

from qgpu.doctor.module import check_module
from qgpu.doctor.report import Check, Verdict
from qgpu.errors import QgpuError
from qgpu.nvidia import versions

_DRIVER_REMEDY = "install NVIDIA's driver, or use the simulator (qgpud --plane sim)"
_GPUS = Path("/proc/driver/nvidia/gpus")
_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm")


def driver_loaded() -> bool:
    """Tell whether an NVIDIA driver is loaded."""
    return versions.VERSION_FILE.exists()


def check_gpu() -> list[Check]:
    """Check the GPU's side. A missing driver is only a warning, because the simulator works without it."""
    if not driver_loaded():
        return [Check("driver", Verdict.WARN, "no NVIDIA driver is loaded", _DRIVER_REMEDY), check_module()]
    return [_driver(), _nodes(), _firmware(), _nvml(), _libcuda(), check_module()]


def _driver() -> Check:
    try:
        version = versions.installed()
        branch = versions.find(version)
    except QgpuError as error:
        return Check("driver", Verdict.FAIL, str(error), "install a driver of a branch that qgpu knows")
    return Check("driver", Verdict.OK, f"{version}, branch {branch.major} is known")


def _nodes() -> Check:
    missing = [node for node in _NODES if not Path(node).exists()]
    if not missing:
        return Check("device nodes", Verdict.OK, ", ".join(_NODES))
    return Check("device nodes", Verdict.FAIL, f"missing: {', '.join(missing)}", "run nvidia-modprobe -u -c 0")


def _firmware() -> Check:
    lines = [line for path in _GPUS.glob("*/information") for line in path.read_text().splitlines()]
    versions_found = {line.partition(":")[2].strip() for line in lines if line.startswith("GPU Firmware")}
    if versions_found and "N/A" not in versions_found:
        return Check("GSP firmware", Verdict.OK, ", ".join(sorted(versions_found)))
    return Check("GSP firmware", Verdict.WARN, "not in use", "qgpu was measured with GSP firmware only")


def _nvml() -> Check:
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return Check("NVML", Verdict.FAIL, str(error), "install the driver's user-space part (libnvidia-ml)")
    return Check("NVML", Verdict.OK if count else Verdict.FAIL, f"{count} GPUs")


def _libcuda() -> Check:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Check("libcuda", Verdict.WARN, "not found", "qgpu-load and the self-test need libcuda.so.1")
    return Check("libcuda", Verdict.OK, "libcuda.so.1")

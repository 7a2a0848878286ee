"""The real NVIDIA driver for a VM lane: Debian's package of the open kernel modules, built in the cache.

Nothing of it is committed. Without hardware it loads on a made-up PCI device (fakepci/).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import kernels

#: Branches that Debian packages, and where.
DRIVERS = {
    "535": kernels.Suite(kernels.MIRROR, "bookworm", "contrib"),
    "550": kernels.Suite(kernels.MIRROR, "trixie", "contrib"),
}
PACKAGE = "nvidia-open-kernel-source"
#: Stable kernels got pci_resize_resource()'s fourth argument after these drivers were released.
_RESIZE = re.compile(r"(pci_resize_resource\([^()]*requested_size)\)")


def build(branch: str, kernel: kernels.Source, cache: Path) -> tuple[Path, str]:
    """Return nvidia.ko of a branch for a kernel, and its full version."""
    root = cache / "nvidia" / branch
    if not (root / "done").exists():
        kernels.unpack(PACKAGE, DRIVERS[branch], cache, root / "package")
        (root / "source").mkdir(exist_ok=True)
        archive = root / "package/usr/src/nvidia-open-kernel.tar.xz"
        subprocess.run(["tar", "-xf", str(archive), "-C", str(root / "source")], check=True)
        (root / "done").touch()
    source = root / "source/modules/nvidia-open-kernel"
    if not (source / "nvidia.ko").exists():
        prototype = (
            kernel.headers.parent / kernel.headers.name.replace("-cloud-amd64", "-common")
        ) / "include/linux/pci.h"
        takes_four = re.search(r"pci_resize_resource\([^)]*,[^)]*,[^)]*,", prototype.read_text())
        if takes_four:
            pci = source / "nvidia/nv-pci.c"
            pci.write_text(_RESIZE.sub(r"\1, 0)", pci.read_text()))
        folders = [f"SYSOUT={kernel.headers}", f"SYSSRC={prototype.parents[2]}"]
        command = [
            "make",
            "-s",
            "-j2",
            *folders,
            "NV_KERNEL_MODULES=nvidia",
            "CONFIG_DEBUG_INFO_BTF_MODULES=",
            "modules",
        ]
        subprocess.run(command, cwd=source, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    info = subprocess.run(
        ["modinfo", "-F", "version", str(source / "nvidia.ko")], check=True, capture_output=True, text=True
    )
    return source / "nvidia.ko", info.stdout.strip()

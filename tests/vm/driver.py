"""NVIDIA's real driver for a VM lane: distributions' packages of its open kernel modules, built in the cache.

Nothing of it is committed. Without hardware it loads on a made-up PCI device (fakepci/).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import kernels
from debian import MIRROR, UBUNTU, Suite, ubuntu_keyring, unpack

#: What is built, in the order in which they load.
MODULES = ("nvidia", "nvidia-uvm")


@dataclass(frozen=True, slots=True)
class Package:
    """A package with the source of a branch's open modules, RM's own part of it compiled."""

    name: str
    suite: Suite


def _debian(suite: str) -> Package:
    return Package("nvidia-open-kernel-source", Suite(MIRROR, suite, "contrib"))


def _ubuntu(branch: str, suite: str) -> Package:
    return Package(f"nvidia-kernel-source-{branch}-open", Suite(UBUNTU, suite, "restricted"))


#: The branches that a distribution packages. What no archive has: 560, 565, 575, 590 (docs/kmod-tests.md).
DRIVERS = {
    "535": _debian("bookworm"),
    "545": _ubuntu("545", "jammy-updates"),
    "550": _debian("trixie"),
    "555": _debian("experimental"),
    "570": _ubuntu("570", "plucky-updates"),
    "580": _ubuntu("580", "noble-updates"),
    "595": _ubuntu("595", "noble-updates"),
}
#: Where the made-up card has its registers and memory: RAM of the guest that its kernel leaves alone.
CARD_AT = 0x5C000000
APPEND = f"memmap=32M${CARD_AT:#x}"
#: Stable kernels got pci_resize_resource()'s fourth argument after some of these drivers were released.
_RESIZE = re.compile(r"(pci_resize_resource\([^()]*requested_size)\)")


def both(nvidia: Path) -> list[Path]:
    """Return nvidia.ko and UVM, which is built beside it."""
    return [nvidia.with_name(f"{name}.ko") for name in MODULES]


def build(branch: str, kernel: kernels.Source, cache: Path) -> tuple[Path, str]:
    """Return nvidia.ko of a branch, built for a kernel with UVM beside it, and the driver's full version.

    Raises CalledProcessError if the package cannot be had or does not build.
    """
    with kernels.alone(cache):
        unpacked = _unpacked(branch, cache)
    source = cache / "nvidia" / f"{branch}-{kernel.release}"
    nvidia = source / "nvidia.ko"
    if not all(path.exists() for path in both(nvidia)):
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(unpacked, source, symlinks=True)
        _make(source, kernel)
    info = subprocess.run(["modinfo", "-F", "version", str(nvidia)], check=True, capture_output=True, text=True)
    return nvidia, info.stdout.strip()


def _unpacked(branch: str, cache: Path) -> Path:
    """Fetch and unpack a branch's package; the folder with the modules' Makefile."""
    package = DRIVERS[branch]
    root = cache / "nvidia" / branch
    if not (root / "done").exists():
        suite = package.suite if package.suite.archive != UBUNTU else ubuntu_keyring(package.suite, cache)
        unpack(package.name, suite, cache, root)
        for archive in root.glob("usr/src/*.tar.xz"):
            subprocess.run(["tar", "-xf", str(archive), "-C", str(root)], check=True)
        (root / "done").touch()
    (conftest,) = root.glob("*/*/conftest.sh") if (root / "modules").exists() else root.glob("usr/src/*/conftest.sh")
    return conftest.parent


def _make(source: Path, kernel: kernels.Source) -> None:
    common = kernel.headers.parent / kernel.headers.name.replace("-cloud-amd64", "-common")
    prototype = (common / "include/linux/pci.h").read_text()
    if re.search(r"pci_resize_resource\([^)]*,[^)]*,[^)]*,", prototype):
        pci = source / "nvidia/nv-pci.c"
        pci.write_text(_RESIZE.sub(r"\1, 0)", pci.read_text()))
    variables = (
        f"SYSOUT={kernel.headers}",
        f"SYSSRC={common}",
        f"NV_KERNEL_MODULES={' '.join(MODULES)}",
        "CONFIG_DEBUG_INFO_BTF_MODULES=",
    )
    log = source / "build.log"
    with log.open("w") as out:
        subprocess.run(
            ["make", "-s", "-j2", *variables, "modules"], cwd=source, check=True, stdout=out, stderr=subprocess.STDOUT
        )

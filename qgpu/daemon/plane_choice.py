"""Chooses the plane: kmod if the module is loaded, else seccomp if an NVIDIA driver is, else the simulator."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from qgpu.errors import NoGpuError, PermissionDeniedError
from qgpu.model.plane_api import Host
from qgpu.model.plane_names import Plane
from qgpu.nvidia.versions import VERSION_FILE
from qgpu.planes import kmod
from qgpu.planes.seccomp.restored_fds import RestoredFds

DEVICE = Path(kmod.DEVICE)
DRIVER = VERSION_FILE
_MODULE_VERSION = Path("/sys/module/nvidia/version")


@dataclass(frozen=True, slots=True)
class PlaneChoice:
    """A plane, and the reason for the choice."""

    plane: Plane
    why: str


def choose(wanted: Plane) -> PlaneChoice:
    """Choose a plane by what this host has.

    Raises PermissionDeniedError if it has GPUs but we are not root. Falling back to the simulator would leave the real
    GPUs unguarded.
    """
    if wanted is not Plane.AUTO:
        return PlaneChoice(wanted, "asked for")
    if DEVICE.exists():
        return PlaneChoice(Plane.KMOD, f"{DEVICE} is there")
    if not DRIVER.exists():
        return PlaneChoice(Plane.SIM, "no NVIDIA driver is loaded")
    if os.geteuid() != 0:
        raise PermissionDeniedError(
            "plane auto: an NVIDIA driver is loaded, and only root can share its GPUs; run qgpud as root, "
            "or simulate one with --plane sim"
        )
    return PlaneChoice(Plane.SECCOMP, f"an NVIDIA driver is loaded and there is no {DEVICE}")


def open_host(
    plane: Plane,
    kept: RestoredFds,
    simulated: tuple[int, int],
    runtime_dir: Path,
    divided: Collection[int | str] = (),
) -> Host:
    """Open the plane; ``simulated`` is how many cards the simulator has, and how many MIG instances each.

    ``divided`` are the cards in MIG mode whose instances are to be shared, by number or UUID. Raises NoGpuError,
    PermissionDeniedError, NotSupportedError.
    """
    if plane is not Plane.SECCOMP:
        kept.close()
    if plane is Plane.SIM:
        from qgpu.planes.sim.host import Clock, SimHost
        from qgpu.planes.sim.pods_file import FILE, PodsFile

        gpus, instances = simulated
        return SimHost(gpus, Clock.REAL, pods_file=PodsFile(runtime_dir / FILE), mig=instances)
    if os.geteuid() != 0:
        raise PermissionDeniedError(f"plane {plane}: only root can share a GPU; run qgpud as root or with --plane sim")
    if plane is Plane.KMOD:
        if not DEVICE.exists():
            raise NoGpuError(f"plane kmod: there is no {DEVICE}; load qgpu.ko, or use --plane auto")
        from qgpu.daemon import kmod_plane

        return kmod_plane.open_host()
    if not DRIVER.exists():
        raise NoGpuError("plane seccomp: no NVIDIA driver is loaded here; load it, or use --plane sim")
    from qgpu.planes.seccomp.host import SeccompHost

    return SeccompHost(kept, divided)


def driver_version(plane: Plane) -> str | None:
    """Return the version of the NVIDIA driver in use; None on the simulator."""
    if plane is Plane.SIM or not _MODULE_VERSION.exists():
        return None
    return _MODULE_VERSION.read_text().strip()

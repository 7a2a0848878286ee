"""MIG instances of a card: their numbers, and the capability files that let a process onto one.

A process needs a file of /dev/nvidia-caps for the GPU instance and one for the compute instance in it. The driver lists
both in procfs, below the card's minor (KO/nvidia/nv-caps.c, osRmCapRegisterSmcPartition and ...SmcExecPartition).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from qgpu.model.plane_api import MigInstance

CAPABILITIES = Path("/proc/driver/nvidia/capabilities")
DEVICES = Path("/proc/devices")

#: The file of a runtime directory that names the cards whose instances are shared.
_SHARED = "mig-cards"

#: How a GPU instance's and a compute instance's number lie above RM's device instance in a place.
_GPU_INSTANCE_AT, _COMPUTE_INSTANCE_AT, _BITS = 8, 16, 0xFF


def on_card(card: int, minor: int) -> list[MigInstance]:
    """List the compute instances of a card, in order; none if it is not in MIG mode."""
    found = []
    for path in (CAPABILITIES / f"gpu{minor}" / "mig").glob("gi*/ci*/access"):
        numbers = [re.fullmatch(r"[gc]i(\d+)", part) for part in path.parts[-3:-1]]
        if numbers[0] and numbers[1]:
            found.append(MigInstance(card, int(numbers[0][1]), int(numbers[1][1])))
    return sorted(found, key=lambda each: (each.gpu_instance, each.compute_instance))


def capabilities(minor: int, instance: MigInstance) -> tuple[int, int] | None:
    """Return the minors of an instance's two files in /dev/nvidia-caps; None if there is no such instance."""
    of_gpu = CAPABILITIES / f"gpu{minor}" / "mig" / f"gi{instance.gpu_instance}"
    found = _minor(of_gpu / "access"), _minor(of_gpu / f"ci{instance.compute_instance}" / "access")
    return (found[0], found[1]) if found[0] is not None and found[1] is not None else None


def major() -> int | None:
    """Return the major number of the files in /dev/nvidia-caps; None without any."""
    found = re.search(r"^\s*(\d+) nvidia-caps$", DEVICES.read_text(), re.MULTILINE)
    return int(found[1]) if found else None


def node(minor: int) -> str:
    """Return the path of a capability file."""
    return f"/dev/nvidia-caps/nvidia-cap{minor}"


def keep_shared(runtime_dir: Path, cards: Iterable[int]) -> None:
    """Tell the guardians of a runtime directory of which cards the instances are shared. Raises OSError."""
    (runtime_dir / _SHARED).write_text(" ".join(map(str, cards)))


def shared(runtime_dir: Path) -> frozenset[int]:
    """Return the cards whose instances are shared; none where nobody has said so."""
    try:
        return frozenset(map(int, (runtime_dir / _SHARED).read_text().split()))
    except (OSError, ValueError):
        return frozenset()


def place_of(device_instance: int, instance: MigInstance) -> int:
    """Return one number for a card, by RM's device instance, and an instance of it. A whole card's is the former."""
    return (
        device_instance
        | (instance.gpu_instance + 1) << _GPU_INSTANCE_AT
        | (instance.compute_instance + 1) << _COMPUTE_INSTANCE_AT
    )


def card_of(place: int) -> int:
    """Return RM's device instance of the card that a place is on."""
    return place & _BITS


def numbers_at(place: int) -> tuple[int, int] | None:
    """Return the numbers of the GPU instance and the compute instance at a place; None for a whole card."""
    gpu, compute = place >> _GPU_INSTANCE_AT & _BITS, place >> _COMPUTE_INSTANCE_AT & _BITS
    return (gpu - 1, compute - 1) if gpu and compute else None


def _minor(path: Path) -> int | None:
    try:
        found = re.search(r"^DeviceFileMinor:\s*(\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None

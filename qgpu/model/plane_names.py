"""The data planes by their names."""

from __future__ import annotations

from enum import StrEnum


class Plane(StrEnum):
    """The means by which a pGPU is shared; ``auto`` takes the best that is available."""

    AUTO = "auto"
    KMOD = "kmod"
    SECCOMP = "seccomp"
    SIM = "sim"

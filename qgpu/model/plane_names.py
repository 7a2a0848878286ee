"""The data planes by their names."""

from __future__ import annotations

from enum import StrEnum


class Plane(StrEnum):
    """By what means a pGPU is shared; ``auto`` takes the best there is."""

    AUTO = "auto"
    KMOD = "kmod"
    SECCOMP = "seccomp"
    SIM = "sim"

"""Grants that are prepared before their containers start: the devices of one Kubernetes resource claim.

Values only: the daemon keeps them (``qgpu/daemon/prepared_grants.py``) and admission counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from qgpu.model import Grant

#: A consumer that stands for every Kubernetes pod: a device plugin is not told which pod its units are for.
ANY_POD = "*"


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """One device of a claim: a part of one card, for whoever is given the CDI device ``name``."""

    #: The request of the claim that it answers, and the share of the card that the scheduler gave it; "" for none.
    request: str
    share: str
    #: The card's UUID.
    gpu: str
    grant: Grant
    #: The daemon chooses it; "" before.
    name: str = ""


@dataclass(frozen=True, slots=True)
class PreparedGrant:
    """The devices of one claim, and the Kubernetes pods, by UID or ``ANY_POD``, whose containers may use them."""

    uid: str
    namespace: str
    name: str
    consumers: tuple[str, ...]
    devices: tuple[PreparedDevice, ...]

    def __str__(self) -> str:
        """Name the claim as messages do."""
        return f"claim {self.namespace}/{self.name}"

"""Grants that are prepared before their containers start: the devices of one Kubernetes resource claim.

Values only: the daemon keeps them (``qgpu/daemon/prepared_grants.py``) and admission counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from qgpu.errors import InvalidValueError
from qgpu.model import Grant
from qgpu.model.member_limits import MemberLimits

#: A consumer that stands for every Kubernetes pod: a device plugin is not told which pod its units are for.
ANY_POD = "*"
#: How the name of a claim's share group begins; the claim's UID follows.
GROUP_PREFIX = "claim-"
#: The least memory limit of a member, in bytes: MPS counts MiB.
_LEAST_PART = 1 << 20


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
    #: What each container of the claim gets of its share group; None: they divide the claim.
    part: MemberLimits | None = None

    def __post_init__(self) -> None:
        """Raise InvalidValueError for a group that there cannot be."""
        if self.part is None:
            return
        if len(self.devices) != 1:
            raise InvalidValueError(
                f"{self}: sharing MPS: a group has one device, not {len(self.devices)}; make a claim for each"
            )
        if self.part.sm is not None and not 1 <= self.part.sm <= 100:
            raise InvalidValueError(f"{self}: a member's part of the SMs is {self.part.sm} %; give 1 to 100")
        if self.part.memory is not None and self.part.memory < _LEAST_PART:
            raise InvalidValueError(f"{self}: a member's memory is {self.part.memory} bytes; give 1 MiB or more")

    @property
    def group(self) -> str:
        """The name of its share group, which is a pod; "" for none."""
        return "" if self.part is None else GROUP_PREFIX + self.uid

    def __str__(self) -> str:
        """Name the claim as messages do."""
        return f"claim {self.namespace}/{self.name}"

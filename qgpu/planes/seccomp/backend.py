"""One pGPU on the seccomp plane, as the daemon's loop sees it; the guardian enforces its plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from qgpu.errors import BackendGoneError
from qgpu.ipc.codec import grant_from_json, plan_to_json, sample_from_json
from qgpu.model import NS_PER_MS, Grant, Plan, Sample
from qgpu.nvidia.nvml import Utilization
from qgpu.planes.seccomp.guardian_link import GuardianLink

#: The events of the guardian that matter here.
_CHANGED = "changed"
#: How often the guardian must answer, however long a period is.
_HEARTBEAT_NS = 100 * NS_PER_MS


class SeccompBackend:
    """Samples and plans for one pGPU, through the guardian."""

    def __init__(
        self, socket: Path, revive: Callable[[GuardianLink], None], pgpu: int, utilization: Utilization | None = None
    ) -> None:
        self.detailed = False
        self.lost = 0
        self._socket = socket
        #: Connects to a guardian again, or starts one, after this link was lost.
        self._revive = revive
        self._pgpu = pgpu
        self._link: GuardianLink | None = GuardianLink(socket, watch=_CHANGED)
        self._applied: Plan | None = None
        self._utilization = utilization
        #: The pods' grants, and the guardian's revision of them; it sends them again once they changed.
        self._grants: dict[str, Grant] = {}
        self._grants_revision: int | None = None

    def sample(self) -> Sample:
        """Report what happened since the last call."""
        answer = self._call("sample", pgpu=self._pgpu, detailed=self.detailed, grants_revision=self._grants_revision)
        self.lost = answer["lost"]
        if "grants" in answer:
            self._grants = {pod: grant_from_json(grant) for pod, grant in answer["grants"].items()}
            self._grants_revision = answer["grants_revision"]
        sample = sample_from_json(answer, self._grants)
        if self._utilization is None or not sample.pods:
            return sample
        return replace(sample, utilization=self._utilization.read())

    def apply(self, plan: Plan) -> None:
        """Install a plan, or renew it if it is in force."""
        if plan == self._applied and self._call("renew", pgpu=self._pgpu)["held"]:
            return
        self._call("apply", plan=plan_to_json(plan))
        self._applied = plan

    def wait(self, timeout_ns: int) -> None:
        """Wait for a change among the pods, and check meanwhile that the guardian answers."""
        until_ns = time.monotonic_ns() + timeout_ns
        while self._link is not None and (left_ns := until_ns - time.monotonic_ns()) > 0:
            self._link.wait(min(left_ns, _HEARTBEAT_NS))
            changed = bool(self._link.events)
            self._link.events.clear()
            if changed or self._link.over:
                return
            if left_ns > _HEARTBEAT_NS and not self._call("renew", pgpu=self._pgpu)["held"]:
                return

    def close(self) -> None:
        """Close the link; the guardian opens every gate."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._utilization is not None:
            self._utilization.close()

    def _call(self, op: str, **arguments: Any) -> dict[str, Any]:
        if self._link is None:
            raise BackendGoneError(f"pGPU {self._pgpu}: backend is closed")
        try:
            return self._link.call(op, **arguments)[0]
        except BackendGoneError:
            self._applied = None
            self._revive(self._link)
            self._link.close()
            self._link = GuardianLink(self._socket, watch=_CHANGED)
            return self._link.call(op, **arguments)[0]

"""Pods' device files, kept to the pods by a BPF program that the daemon loads and keeps informed.

The program is the kernel's once it is loaded: it goes on when daemon and guardian have died. It is taken away when
the daemon ends and there are no pods. Where it cannot be loaded, pods run as they would without it, and we say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import structlog

from qgpu.config import DeviceFiles
from qgpu.errors import NotSupportedError, QgpuError
from qgpu.linux import cgroup
from qgpu.lsm import device_files, pins
from qgpu.lsm.device_files import Refusal
from qgpu.model.plane_api import PodInfo
from qgpu.model.plane_names import Plane

_log = structlog.get_logger("fence")


class DeviceIsolation:
    """What keeps a pod's device files from processes outside it."""

    def __init__(self, plane: Plane, wanted: DeviceFiles, pods: Sequence[PodInfo]) -> None:
        self._files: device_files.DeviceFiles | None = None
        #: Why they are not kept; empty while they are.
        self.why = ""
        #: What keeps it from being told of every pod, if anything.
        self._trouble = ""
        #: How often each was refused whom we have listed.
        self._listed: dict[tuple[int, str, int], int] = {}
        if plane is Plane.SIM:
            self.why = "simulated cards have no device files"
        elif wanted is DeviceFiles.OFF:
            with suppress(OSError):
                pins.remove()
            self.why = "switched off in the configuration"
        else:
            self._load(plane, pods)

    def _load(self, plane: Plane, pods: Sequence[PodInfo]) -> None:
        try:
            if not device_files.majors():
                raise NotSupportedError("no NVIDIA device is registered; load the driver")
            if plane is Plane.SECCOMP and not cgroup.pids(cgroup.GUARDIANS):
                raise NotSupportedError(f"the guardian is not in {cgroup.GUARDIANS}, by which it is known; see its log")
            self._files = device_files.load([pod.cgroup for pod in pods if pod.cgroup])
        except (OSError, QgpuError) as error:
            self.why = str(error)
            _log.warning("pods' device files are not kept to the pods", reason=self.why)
            return
        before = [pod.name for pod in pods if pod.pids]
        _log.info("pods' device files are kept to the pods", by="BPF LSM", already_running=before)

    @property
    def enforced(self) -> bool:
        """Tell whether anything keeps them."""
        return not self.why

    def tell(self, pods: Sequence[PodInfo]) -> None:
        """Say which pods there are."""
        if self._files is None:
            return
        trouble = ""
        try:
            self._files.tell([pod.cgroup for pod in pods if pod.cgroup])
        except OSError as error:
            trouble = str(error)
        if trouble and trouble != self._trouble:
            _log.error("the BPF program was not told of every pod, trying again", error=trouble)
        self._trouble = trouble

    def refused(self) -> dict[str, int]:
        """Count by call what was refused since the program was loaded."""
        return self._files.refused() if self._files is not None else {}

    def refusals(self) -> list[Refusal]:
        """List who was refused since the last time."""
        news = []
        listed, self._listed = self._listed, {}
        for each in self._files.refusals() if self._files is not None else ():
            key = (each.pid, each.call, each.cgroup)
            self._listed[key] = each.times
            if each.times != listed.get(key):
                news.append(each)
        return news

    def shown(self) -> dict[str, Any]:
        """Describe it for whoever looks, in JSON's types."""
        return {"enforced": self.enforced, "why": self.why or self._trouble, "refused": self.refused()}

    def close(self, pods: Sequence[PodInfo] | None) -> None:
        """Let go; take it out of the kernel where it is known that there are no pods."""
        if self._files is not None:
            self._files.close()
            self._files = None
            if pods is not None and not pods:
                with suppress(OSError):
                    pins.remove()

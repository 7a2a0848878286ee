"""Isolation of pods' device files: a BPF LSM program, loaded and updated by the daemon, refuses their use elsewhere.

The loaded program stays in the kernel if daemon and guardian die. The daemon removes it when it ends and no pods are
left. If it cannot be loaded, pods run without this isolation and the log says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import structlog

from qgpu.config import DeviceFiles
from qgpu.daemon import slurm_steps
from qgpu.errors import NotSupportedError, QgpuError
from qgpu.linux import cgroup
from qgpu.linux.repeated_error import RepeatedError
from qgpu.lsm import device_files, pins
from qgpu.lsm.device_files import Refusal
from qgpu.model.plane_api import PodInfo
from qgpu.model.plane_names import Plane

_log = structlog.get_logger("device_isolation")


class DeviceIsolation:
    """Keeps processes outside a pod from using the pod's device files."""

    def __init__(self, plane: Plane, wanted: DeviceFiles, pods: Sequence[PodInfo]) -> None:
        self._files: device_files.DeviceFiles | None = None
        #: Why there is no isolation; empty while there is.
        self.why = ""
        self._failure = RepeatedError(_log, "the BPF program does not know every pod, trying again")
        #: How many refusals of each (pid, call, cgroup) were listed already.
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
            self._files = device_files.load(_places(pods))
        except (OSError, QgpuError) as error:
            self.why = str(error)
            _log.warning("device files of pods are not isolated", reason=self.why)
            return
        before = [pod.name for pod in pods if pod.pids]
        _log.info("device files of pods are isolated", by="BPF LSM", already_running=before)

    @property
    def enforced(self) -> bool:
        """Tell whether device files of all pods are isolated."""
        return not self.why and not self._failure.text

    def set_pods(self, pods: Sequence[PodInfo]) -> None:
        """Tell the program which pods exist."""
        if self._files is not None:
            with self._failure.logged(OSError):
                self._files.set_pods(_places(pods))

    def refused(self) -> dict[str, int]:
        """Return how many uses were refused since the program was loaded, by call."""
        return self._files.refused() if self._files is not None else {}

    def refusals(self) -> list[Refusal]:
        """Return the refusals since the last call."""
        news = []
        listed, self._listed = self._listed, {}
        for each in self._files.refusals() if self._files is not None else ():
            key = (each.pid, each.call, each.cgroup)
            self._listed[key] = each.times
            if each.times != listed.get(key):
                news.append(each)
        return news

    def shown(self) -> dict[str, Any]:
        """Return the state of the isolation in JSON types."""
        failed = self._failure.text and f"the BPF program does not know every pod: {self._failure.text}"
        return {"enforced": self.enforced, "why": self.why or failed, "refused": self.refused()}

    def close(self, pods: Sequence[PodInfo] | None) -> None:
        """Release the program; remove it from the kernel if ``pods`` is empty. None means unknown."""
        if self._files is not None:
            self._files.close()
            self._files = None
            if pods is not None and not pods:
                with suppress(OSError):
                    pins.remove()


def _places(pods: Sequence[PodInfo]) -> list[str]:
    """Return the cgroups that device files of these pods belong to."""
    return [place for pod in pods for at in pod.cgroups for place in slurm_steps.places(at)]

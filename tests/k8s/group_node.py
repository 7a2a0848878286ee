"""A node whose claims may have share groups: what keeps those can fail too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from qgpu.groups.group_files import GroupFiles
from qgpu.linux import cgroup
from tests.cli import programs
from tests.k8s.guarded import GuardedWorld
from tests.k8s.world import World, parameters, result

#: What runs the supervisor.
_SUPERVISOR = sys.executable, "-m", "qgpu.cli.main"
MPS = parameters("FromClaim", sharing="MPS", defaultActiveThreadPercentage=50, defaultPinnedDeviceMemoryLimit="4Gi")


class GroupWorld(World):
    """One node with a supervisor of claims' groups. On simulated cards a group has no MPS, and its keeper a pod."""

    supervisor: subprocess.Popen[bytes] | None = None

    def start(self) -> GroupWorld:
        """Start all parts."""
        super().start()
        self.start_supervisor()
        return self

    def start_supervisor(self) -> None:
        """Start it; does not wait."""
        with (self.directory / "groups.log").open("ab") as log:
            self.supervisor = subprocess.Popen(
                [*_SUPERVISOR, "--runtime-dir", str(self.runtime_dir), "group", "serve"],
                stderr=log,
                env=programs.environment(),
            )

    def kill_supervisor(self) -> None:
        """Kill it; keepers go on."""
        supervisor, self.supervisor = self.supervisor, None
        if supervisor is not None:
            supervisor.kill()
            supervisor.wait()

    def keepers(self) -> dict[str, int]:
        """The keepers of groups, by the group's name."""
        found = {each.name: GroupFiles(self.runtime_dir, each.name).keeper() for each in self._groups()}
        return {name: pid for name, pid in found.items() if pid is not None}

    def kill_keepers(self) -> None:
        """Kill all keepers."""
        for pid in self.keepers().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def groups(self) -> set[str]:
        """What there is of groups: pods, files and keepers, by name."""
        pods = {pod["name"] for pod in self.ask("pod.list")["pods"]}
        return {name for name in pods if name.startswith("claim-")} | {each.name for each in self._groups()}

    def members(self, group: str) -> list[str]:
        """The cgroups of a group's members."""
        assert self.daemon is not None
        return [each["cgroup"] for each in self.daemon.json("group", "show", group)["group"]["members"]]

    @property
    def parts(self) -> tuple[str, ...]:
        """The supervisor too."""
        return (*super().parts, "groups")

    @property
    def perils(self) -> tuple[str, ...]:
        """Keepers too."""
        return (*super().perils, "keepers")

    def runs(self, *parts: str) -> bool:
        """Whether all of these parts are there."""
        others = [part for part in parts if part != "groups"]
        return super().runs(*others) and ("groups" not in parts or self.supervisor is not None)

    def start_part(self, part: str) -> None:
        """Start what is away."""
        self.start_supervisor() if part == "groups" else super().start_part(part)

    def fail(self, part: str) -> None:
        """Kill a part, or switch the node off."""
        own = {"groups": self.kill_supervisor, "keepers": self.kill_keepers}
        own[part]() if part in own else super().fail(part)

    def switch_off(self) -> None:
        """End what runs on the node."""
        self._end_groups()
        super().switch_off()
        self._remove_cgroups()

    def close(self) -> None:
        """End everything."""
        self._end_groups()
        super().close()
        self._remove_cgroups()

    def group_claim(self, *pods: str, gpu: int = 0, mps: dict[str, Any] = MPS, **consumed: str) -> dict[str, Any]:
        """Create a claim that several pods share through MPS."""
        return self.claim(result(gpu, **consumed), pods=pods, configurations=(mps,), shared=True)

    def _end_groups(self) -> None:
        self.kill_supervisor()
        self.kill_keepers()
        for each in self._groups():
            GroupFiles(self.runtime_dir, each.name).remove()

    def _remove_cgroups(self) -> None:
        for each in (cgroup.mount() / "qgpu").glob("claim-*"):
            with suppress(OSError):  # another node's
                each.rmdir()

    def _groups(self) -> list[Any]:
        directory = self.runtime_dir / "groups"
        return list(directory.iterdir()) if directory.is_dir() else []


class GuardedGroupWorld(GroupWorld, GuardedWorld):
    """One on plane seccomp, where groups have MPS: real guardian and keepers, stand-ins for NVIDIA's programs."""

    volatile_at = Path("/run")  # MPS sees something else at /dev/shm
    _over: threading.Event | None = None

    def start_daemon(self) -> None:
        """Have the service manager hear what qgpud says while nobody else does: keepers make requests by themselves."""
        super().start_daemon()
        self._over = over = threading.Event()

        def hear() -> None:
            while not over.wait(0.05):
                self._manager.listen()

        threading.Thread(target=hear, daemon=True).start()

    def kill_daemon(self) -> None:
        """Kill qgpud."""
        if self._over is not None:
            self._over.set()
        super().kill_daemon()

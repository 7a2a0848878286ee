"""A container as a runtime starts it: a process in a cgroup of its own, and the hooks of its CDI devices."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

from qgpu.linux import cgroup

if TYPE_CHECKING:
    from tests.k8s.world import World

_numbers = itertools.count(1)


class Container:
    """One container of a Kubernetes pod, with prepared devices."""

    def __init__(self, world: World, pod: str, devices: list[str]) -> None:
        self._number = next(_numbers)
        self._home = cgroup.mount() / f"qgpu-k8s-{os.getpid()}-{self._number}"
        self._home.mkdir()
        self._process = subprocess.Popen(["sleep", "600"])
        (self._home / "cgroup.procs").write_text(str(self._process.pid))
        self._bundle = world.directory / f"bundle-{self._number}"
        self._bundle.mkdir()
        self._edits = [self._edits_of(world, device) for device in devices]
        annotations = {
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.sandbox-uid": pod,
            "io.kubernetes.cri.sandbox-namespace": "team",
            "io.kubernetes.cri.sandbox-name": pod,
            "io.kubernetes.cri.container-name": "main",
        }
        environment = [each for edits in self._edits for each in edits.get("env", ())]
        hooks = [hook for edits in self._edits for hook in edits["hooks"]]
        self._hooks = hooks
        content = {
            "annotations": annotations,
            "linux": {"resources": {"devices": [{"allow": False, "access": "rwm"}]}},
            "process": {"env": environment},
            "hooks": {"createRuntime": [{key: hook[key] for key in ("path", "args")} for hook in hooks]},
        }
        (self._bundle / "config.json").write_text(json.dumps(content))
        self._annotations = annotations

    def bind(self) -> None:
        """Run the hooks, which must succeed."""
        state = {
            "id": f"container-{self._number}",
            "pid": self._process.pid,
            "bundle": str(self._bundle),
            "annotations": self._annotations,
        }
        for hook in self._hooks:
            done = subprocess.run(
                hook["args"],
                executable=hook["path"],
                input=json.dumps(state),
                text=True,
                capture_output=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr

    def kill(self) -> None:
        """End it, and remove its cgroup as a runtime does."""
        self._process.kill()
        self._process.wait()
        self._home.rmdir()

    @staticmethod
    def _edits_of(world: World, device: str) -> dict[str, Any]:
        kind, _, name = device.partition("=")
        for path in world.cdi.glob("*.json"):
            content = json.loads(path.read_text())
            for each in content["devices"]:
                if content["kind"] == kind and each["name"] == name:
                    edits: dict[str, Any] = each["containerEdits"]
                    return edits
        raise AssertionError(f"unresolvable CDI device {device}")

"""A container as a runtime starts it: a process in a cgroup of its own, and the hooks of its CDI devices."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from typing import TYPE_CHECKING, Any, Protocol

from qgpu.linux import cgroup

if TYPE_CHECKING:
    from tests.k8s.world import World

#: Of NVIDIA's device nodes.
_MAJOR = 195
_numbers = itertools.count(1)


class UnresolvableDeviceError(AssertionError):
    """A runtime finds no CDI device of this name."""


class ContainerLike(Protocol):
    """What restart orders do with a container, whatever runs it."""

    @property
    def cgroup(self) -> str:
        """Its cgroup, as qgpud calls it."""
        ...

    def bind(self, may_be_refused: bool = False) -> str:
        """Start it; return what is said against it, which must be nothing unless it may be refused."""
        ...

    def lacks(self) -> str:
        """Say what it lacks of its card; "" if nothing."""
        ...

    def exceeds(self, memory: int) -> str:
        """Say whether it gets more memory than this many bytes, or less; "" if not."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


class Container:
    """One container of a Kubernetes pod, with prepared devices."""

    def __init__(self, world: World, pod: str, devices: list[str], name: str = "main") -> None:
        """Make it; nothing is left of one whose devices a runtime does not find."""
        self._edits = [self._edits_of(world, device) for device in devices]
        self._number = next(_numbers)
        self.id = f"container-{self._number}"
        self._home = cgroup.mount() / f"qgpu-k8s-{os.getpid()}-{self._number}"
        self._home.mkdir()
        self.process = self.start_process()
        (self._home / "cgroup.procs").write_text(str(self.process.pid))
        self._bundle = world.directory / f"bundle-{self._number}"
        self._bundle.mkdir()
        annotations = {
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.sandbox-uid": pod,
            "io.kubernetes.cri.sandbox-namespace": "team",
            "io.kubernetes.cri.sandbox-name": pod,
            "io.kubernetes.cri.container-name": name,
        }
        environment = [each for edits in self._edits for each in edits.get("env", ())]
        hooks = [hook for edits in self._edits for hook in edits["hooks"]]
        self._hooks = hooks
        content = {
            "annotations": annotations,
            "linux": self.linux(),
            "process": {"env": environment},
            "hooks": {"createRuntime": [{key: hook[key] for key in ("path", "args")} for hook in hooks]},
        }
        (self._bundle / "config.json").write_text(json.dumps(content))
        self._annotations = annotations

    @property
    def cgroup(self) -> str:
        """Its cgroup, as qgpud calls it."""
        return f"/{self._home.name}"

    def start_process(self) -> subprocess.Popen[bytes]:
        """Start what runs in it."""
        return subprocess.Popen(["sleep", "600"])

    def linux(self) -> dict[str, Any]:
        """Return that section of its configuration, with the nodes of its cards as a runtime finds them."""
        paths = {node["path"] for edits in self._edits for node in edits.get("deviceNodes", ())}
        nodes = [
            {"path": path, "type": "c", "major": _MAJOR, "minor": int(found[1])}
            for path in sorted(paths)
            if (found := re.fullmatch(r"/dev/nvidia(\d+)", path))
        ]
        return {"devices": nodes, "resources": {"devices": [{"allow": False, "access": "rwm"}]}}

    def bind(self, may_be_refused: bool = False) -> str:
        """Start it, as its runtime does; return what is said against it, which must be nothing unless it may be."""
        return self.run_hooks(may_be_refused)

    def run_hooks(self, may_be_refused: bool = False, status: str = "creating") -> str:
        """Run the hooks; return what they say against it, which must be nothing unless it may be refused."""
        state = {
            "id": self.id,
            "status": status,
            "pid": self.process.pid,
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
            if done.returncode:
                assert may_be_refused, done.stderr
                return done.stderr
        return ""

    def lacks(self) -> str:
        """Say what it lacks of its card; "" if nothing."""
        return ""

    def exceeds(self, _memory: int) -> str:
        """Say whether it gets more memory than this many bytes, or less; "" if not. On a simulated card it has none."""
        return ""

    def kill(self) -> None:
        """End it, and remove its cgroup as a runtime does."""
        self.process.kill()
        self.process.wait()
        self._home.rmdir()

    @staticmethod
    def _edits_of(world: World, device: str) -> dict[str, Any]:
        kind, _, name = device.partition("=")
        for path in world.cdi.glob("*.json"):
            try:
                content = json.loads(path.read_text())
            except FileNotFoundError:  # it has just been removed
                continue
            for each in content["devices"]:
                if content["kind"] == kind and each["name"] == name:
                    edits: dict[str, Any] = each["containerEdits"]
                    return edits
        raise UnresolvableDeviceError(f"unresolvable CDI device {device}")

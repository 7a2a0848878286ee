"""Real containers for tests: an OCI bundle around busybox, started by a real runtime."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from qgpu.linux import cgroup
from qgpu.paths import socket_path
from qgpu.runtime import cdi

BUSYBOX = shutil.which("busybox")
TIMEOUT_S = 60


def missing(runtime: str) -> str:
    """Say what a test of real containers lacks here; empty if nothing."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in (runtime, "busybox"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    if runtime == "crun" and cgroup.mount() != Path("/sys/fs/cgroup"):
        return "crun needs a host with cgroup v2 alone"
    return ""


#: The runtimes that tests are run on, each where it works.
RUNTIMES = [
    pytest.param(name, marks=pytest.mark.skipif(bool(missing(name)), reason=missing(name) or "all there"))
    for name in ("runc", "crun")
]


def rootfs(directory: Path) -> Path:
    """Make a file tree with busybox in it."""
    assert BUSYBOX is not None
    for name in ("bin", "dev", "etc", "proc", "sys", "tmp"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(BUSYBOX, directory / "bin")
    for name in ("sh", "sleep", "true", "cat"):
        (directory / "bin" / name).symlink_to("busybox")
    return directory


class Container:
    """A container of an OCI runtime, not started yet."""

    def __init__(self, runtime: str, directory: Path, runtime_dir: Path, *command: str) -> None:
        self.id = f"{uuid.uuid4().hex[:12]}-qgpu-test"  # its first characters become the pod's name
        self.runtime = runtime
        self.bundle = directory / self.id
        self.root = directory / "state"
        rootfs(self.bundle / "rootfs")
        subprocess.run([runtime, "spec"], cwd=self.bundle, check=True)
        self.config: dict[str, Any] = json.loads((self.bundle / "config.json").read_text())
        self.config["process"] |= {"args": list(command), "terminal": False}
        self.config["annotations"] = {}
        entry = cdi.hook_entry(socket_path(runtime_dir))
        self.config["hooks"] = {entry.pop("hookName"): [entry]}
        self._given: list[str] = []

    def ask(self, annotations: Mapping[str, str] = {}, **variables: str) -> Container:
        """Give it annotations and environment variables."""
        self.config["annotations"] |= annotations
        self.config["process"]["env"] += [f"{name}={value}" for name, value in variables.items()]
        return self

    def give(self, specification: Mapping[str, Any], *names: str) -> Container:
        """Give it devices of a CDI file, as engines do: a variable replaces one of its name, hooks are added."""
        edits = [each["containerEdits"] for each in specification["devices"] if each["name"] in names]
        for entry in (entry for each in edits for entry in each["env"]):
            others = [old for old in self.config["process"]["env"] if old.split("=")[0] != entry.split("=")[0]]
            self.config["process"]["env"] = [*others, entry]
        if not self._given:  # instead of the device that it would have otherwise
            self.config["hooks"] = {}
        self._given.extend(names)
        for hook in (dict(hook) for each in edits for hook in each["hooks"]):
            self.config["hooks"].setdefault(hook.pop("hookName"), []).append(hook)
        return self

    def do(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the runtime on it and return how that ended."""
        if verb == "run":
            (self.bundle / "config.json").write_text(json.dumps(self.config | {"hooks": self._heard_hooks()}))
        # Files and not pipes: a container that stays in the background holds them open.
        with (self.bundle / "out").open("w+") as out:
            result = subprocess.run(
                [self.runtime, "--root", str(self.root), verb, *arguments],
                cwd=self.bundle,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            out.seek(0)
            said = self.bundle / "hook"
            text = out.read() + (said.read_text() if verb == "run" and said.exists() else "")
            return subprocess.CompletedProcess(result.args, result.returncode, text)

    def _heard_hooks(self) -> dict[str, Any]:
        """Return its hooks with their stderr in a file: crun throws away what hooks say; runc shows it."""
        if self.runtime != "crun":
            return dict(self.config["hooks"])
        heard = ["sh", "-c", f'exec "$@" 2>>{shlex.quote(str(self.bundle / "hook"))}']
        return {
            name: [entry | {"path": "/bin/sh", "args": [*heard, entry["path"], *entry["args"]]} for entry in entries]
            for name, entries in self.config["hooks"].items()
        }

    def start(self) -> subprocess.CompletedProcess[str]:
        """Start it in the background."""
        return self.do("run", "-d", self.id)

    def exec(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it."""
        return self.do("exec", self.id, *command)

    def state(self) -> dict[str, Any]:
        """Return what the runtime says of it."""
        found: dict[str, Any] = json.loads(self.do("state", self.id).stdout)
        return found

    def end(self) -> None:
        """Kill and delete it, if it is there."""
        self.do("delete", "-f", self.id)

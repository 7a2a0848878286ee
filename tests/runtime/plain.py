"""The least of an OCI runtime, for GPU hosts without one: a cgroup, our hook, our filter in libseccomp's place.

In order, as the runtime specification has it: the process is made and put into its cgroup, createRuntime hooks run,
the filter is installed and its listener sent to ``listenerPath``, the command is executed. As a program it is the
container's first process: ``python -m tests.runtime.plain SOCKET COMMAND...``, told to go on through stdin.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from qgpu.guardian.proxy import seccomp_filter as pod_filter
from qgpu.linux import cgroup
from qgpu.paths import socket_path
from qgpu.runtime import cdi, seccomp_profile

NVIDIA0 = {"type": "c", "path": "/dev/nvidia0", "major": 195, "minor": 0}


class Plain:
    """A container of pGPU 0 whose files are the host's."""

    def __init__(self, name: str, directory: Path, runtime_dir: Path, annotations: Mapping[str, str]) -> None:
        self.name = name
        self.bundle = directory / name
        self.bundle.mkdir()
        self._runtime_dir = runtime_dir
        self._listener = seccomp_profile.listener(runtime_dir)
        self.config = {
            "annotations": {"qgpu.io/name": name, **annotations},
            "process": {"env": []},
            "linux": {
                "devices": [NVIDIA0],
                "resources": {"devices": [{"allow": False, "access": "rwm"}]},
                "seccomp": seccomp_profile.profile(seccomp_profile.UNCONFINED, self._listener),
            },
        }
        self._cgroup = cgroup.mount() / f"test-{os.getpid()}-{name}"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *command: str) -> str:
        """Start the command in it; what the hook said against it, empty if it runs."""
        self._cgroup.mkdir()
        (self.bundle / "config.json").write_text(json.dumps(self.config))
        process = self._process(*command)
        state = {"id": self.name, "pid": process.pid, "bundle": str(self.bundle), "status": "creating"}
        entry = cdi.hook_entry(socket_path(self._runtime_dir))
        hook = subprocess.run(entry["args"], input=json.dumps(state), capture_output=True, text=True, check=False)
        if hook.returncode == 0:
            self._go(process)
        return hook.stderr

    def exec(self, *command: str) -> subprocess.Popen[str]:
        """Start another command in it."""
        process = self._process(*command)
        self._go(process)
        return process

    def end(self) -> None:
        """Kill it, and remove its cgroup."""
        for process in self.processes:
            process.kill()
            process.wait()
        if self._cgroup.exists():
            self._cgroup.rmdir()
        shutil.rmtree(self.bundle)

    def _process(self, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.plain", str(self._listener), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        (self._cgroup / "cgroup.procs").write_text(str(process.pid))
        self.processes.append(process)
        return process

    @staticmethod
    def _go(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.close()
        process.stdin = None  # so that communicate() lets it be


def main() -> None:
    path, *command = sys.argv[1:]
    if not sys.stdin.readline():
        sys.exit("no container")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        state = {"ociVersion": "1.0.2", "fds": ["seccompFd"], "pid": os.getpid(), "state": {"id": "plain"}}
        listener = pod_filter.install()
        socket.send_fds(sock, [json.dumps(state).encode()], [listener])
        os.close(listener)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()

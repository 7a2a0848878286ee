"""A container that CRIU restores on another host is a pod there: runc, CRIU and two daemons, on the simulator."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli import programs
from tests.cli.programs import Daemon
from tests.runtime import oci
from tests.runtime.oci import TIMEOUT_S, Container
from tests.runtime.test_bind import until

_MISSING = oci.missing("runc") or ("" if shutil.which("criu") else "needs criu, which Debian 13 has")
pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "all there")]


class Host:
    """A daemon with a container of its own, which may have come from elsewhere."""

    def __init__(self, directory: Path, ends: ExitStack) -> None:
        directory.mkdir()
        self.daemon: Daemon = ends.enter_context(programs.daemon(directory / "run"))
        # CRIU ends a sleep early, so this sleeps again
        self.container = Container(
            "runc", directory, self.daemon.runtime_dir, "sh", "-c", "while :; do sleep 600; done"
        )
        self.container.ask({"qgpu.io/name": "web", "qgpu.io/cores": "40"}, QGPU_GPU_0="")
        self.state = directory / "hook-state"
        note = {"path": "/bin/sh", "args": ["sh", "-c", f"cat > {self.state}"]}
        self.container.config["hooks"]["createRuntime"].append(note)
        ends.callback(self.container.end)

    def runc(self, *arguments: str) -> None:
        """Run runc with no file of the host's in the container: CRIU could not find that on another host."""
        container, log = self.container, self.container.bundle / "log"
        (container.bundle / "config.json").write_text(json.dumps(container.config))
        command = ["runc", "--log", str(log), "--root", str(container.root), *arguments, container.id]
        null = subprocess.DEVNULL
        ended = subprocess.run(
            command, cwd=container.bundle, stdin=null, stdout=null, stderr=null, timeout=TIMEOUT_S, check=False
        )
        assert ended.returncode == 0, log.read_text()

    def pods(self) -> dict[str, int | None]:
        """Return the quota of each pod."""
        return {pod["name"]: pod["grants"][0]["cores"] for pod in self.daemon.json("pod", "list")["pods"]}

    def status(self) -> str:
        """Return the container's status as its hooks were told."""
        return str(json.loads(self.state.read_text())["status"])


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with ExitStack() as ends:
        yield Host(tmp_path / "here", ends), Host(tmp_path / "there", ends)


def test_a_restored_container_has_its_grant_on_the_other_host(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    here, there = hosts
    there.container.id = here.container.id
    images = ("--image-path", str(tmp_path / "images"), "--work-path", str(tmp_path / "work"))
    here.runc("run", "-d")
    here.runc("checkpoint", *images)
    until(lambda: not here.pods())  # both hosts' cgroups are this machine's
    there.runc("restore", "-d", *images)

    assert there.container.state()["status"] == "running"
    assert (here.pods(), there.pods()) == ({}, {"web": 40})
    assert (here.status(), there.status()) == ("creating", "stopped")

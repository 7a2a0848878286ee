"""What pods on a real GPU live through: a daemon that is restarted, or killed together with the guardian."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qgpu.linux import cgroup
from qgpu.planes.seccomp.guardian_link import GuardianLink
from tests.cli.manager import Manager
from tests.cli.programs import TIMEOUT_S, environment, qgpuctl

pytestmark = pytest.mark.gpu
POD = [sys.executable, str(Path(__file__).parent / "cuda_pod.py")]


class Service:
    """A confined daemon under a service manager, with two pods at 60 and 30 per cent."""

    def __init__(self, directory: Path) -> None:
        for name in ("qgpu", "qgpu-guardian"):  # the unit's ExecStartPre=
            (cgroup.mount() / name).mkdir(exist_ok=True)
        prefix = (sys.executable, str(Path(__file__).parent / "confined.py"))
        self.manager = Manager(directory, "seccomp", prefix)
        self.daemon = self.manager.start()
        self.steps = {name: directory / f"{name}.steps" for name in ("two", "one")}
        self.pods = [self._pod(name, cores) for name, cores in (("two", "60"), ("one", "30"))]
        self.until(lambda: all(len(self.times(name)) > 10 for name in self.steps))

    def _pod(self, name: str, cores: str) -> subprocess.Popen[bytes]:
        at = ("--runtime-dir", str(self.manager.runtime_dir))
        command = [sys.executable, "-m", "qgpu.cli.main", *at, "run", "--name", name, "--cores", cores, "--", *POD]
        return subprocess.Popen([*command, str(self.steps[name])], env=environment())

    def until(self, condition: Any) -> None:
        """Wait; the test's timeout is the bound."""
        while not condition():
            assert all(pod.poll() is None for pod in self.pods), "a pod has ended"
            time.sleep(0.02)

    def times(self, name: str) -> list[float]:
        """Return when the pod was done with its steps so far."""
        path = self.steps[name]
        return [float(line) for line in path.read_text().splitlines()[:-1]] if path.exists() else []

    def go_on(self) -> None:
        """Wait until both pods have made many steps after now."""
        now = time.monotonic()
        self.until(lambda: all(sum(at > now for at in self.times(name)) > 100 for name in self.steps))

    def say_gaps(self, what: str, since: float) -> None:
        """Print the longest gaps, for those who run this to know them."""
        gaps = {
            name: round(1000 * max(b - a for a, b in itertools.pairwise(t for t in self.times(name) if t >= since)), 1)
            for name in self.steps
        }
        print(f"\nlongest gap between steps in ms, {what}: {json.dumps(gaps)}")

    def grants(self) -> dict[str, Any]:
        """Return every pod's grants."""
        answer = json.loads(qgpuctl(self.manager.runtime_dir, "pod", "list", "-o", "json").stdout)
        return {pod["name"]: pod["grants"] for pod in answer["pods"]}

    def guardian(self) -> int:
        """Return the guardian's process."""
        link = GuardianLink(self.manager.runtime_dir / "guardian.sock")
        link.close()
        return int(link.hello["pid"])

    def close(self) -> None:
        """End everything."""
        for name in self.steps:
            for pid in Path("/proc").iterdir():
                if pid.name.isdecimal() and str(self.steps[name]) in _cmdline(pid):
                    os.kill(int(pid.name), signal.SIGKILL)
        for pod in self.pods:
            pod.wait(TIMEOUT_S)
        self.daemon.terminate()
        self.daemon.wait(TIMEOUT_S)
        self.manager.close()


def _cmdline(pid: Path) -> list[str]:
    try:
        return (pid / "cmdline").read_text().split("\0")
    except OSError:
        return []


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.close()


def test_pods_go_on_with_their_grants_over_a_restart(service: Service) -> None:
    before, quiet = service.grants(), time.monotonic()
    time.sleep(2)
    service.say_gaps("quiet", quiet)
    restarted = time.monotonic()
    service.daemon.terminate()
    service.daemon.wait(TIMEOUT_S)
    service.daemon = service.manager.start()
    print(f"\ndaemon ready again after {time.monotonic() - restarted:.2f} s")
    service.go_on()
    service.say_gaps("over a restart", restarted)

    assert service.grants() == before


def test_pods_go_on_when_daemon_and_guardian_are_killed_together(service: Service) -> None:
    before, guardian, killed = service.grants(), service.guardian(), time.monotonic()
    service.daemon.kill()
    os.kill(guardian, signal.SIGKILL)
    service.daemon.wait(TIMEOUT_S)
    service.daemon = service.manager.start()
    print(f"\ndaemon ready again after {time.monotonic() - killed:.2f} s")
    service.go_on()
    service.say_gaps("daemon and guardian killed", killed)

    assert service.guardian() != guardian
    assert service.grants() == before

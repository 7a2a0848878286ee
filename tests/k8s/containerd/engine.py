"""A containerd of a test's own: Debian's package unpacked, with a root, a state, a socket and CDI files to itself.

Nothing of the host's containerd, if it has one, is used or changed. Images are made here; no registry is asked.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from qgpu.linux import cgroup
from tests import debian
from tests.k8s.containerd import image

FORKY = debian.Suite(debian.MIRROR, "forky", expires=False)
TRIXIE = debian.Suite(debian.MIRROR, "trixie")
#: The suite that has each release.
RELEASES = {"2.1": FORKY, "1.7": TRIXIE}
#: The one that tests run on.
RELEASE = os.environ.get("QGPU_CONTAINERD", "2.1")
_START_S = 60

#: Every annotation of pods and containers reaches the hook: the most that an operator can allow them.
_PASSED_ON = 'pod_annotations = ["*", "*/*"]\n  container_annotations = ["*", "*/*"]'
_CONFIG = {
    "2.1": """version = 3
root = "{home}/root"
state = "{home}/state"
[grpc]
  address = "{socket}"
[plugins.'io.containerd.internal.v1.opt']
  path = "{home}/opt"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{pause}"
[plugins.'io.containerd.cri.v1.runtime']
  disable_apparmor = true
  restrict_oom_score_adj = true
  enable_unprivileged_ports = false
  enable_unprivileged_icmp = false
  cdi_spec_dirs = ["{cdi}"]
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  {passed_on}
""",
    "1.7": """version = 2
root = "{home}/root"
state = "{home}/state"
[grpc]
  address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{home}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  enable_cdi = true
  cdi_spec_dirs = ["{cdi}"]
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  {passed_on}
""",
}


def missing() -> str:
    """Say what a containerd lacks here; empty if nothing."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("runc", "busybox", "dpkg", "apt-get"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    return "" if Path(debian.KEYRING).exists() else f"needs {debian.KEYRING}"


def programs(release: str) -> Path:
    """Return the folder with a release's programs, fetched if need be. Raises CalledProcessError."""
    root = debian.CACHE / "containerd" / release
    with debian.alone(debian.CACHE):
        if not (root / "done").exists():
            debian.unpack("containerd", RELEASES[release], debian.CACHE, root)
            (root / "done").touch()
    return root / "usr/bin"


@dataclass(slots=True)
class Containerd:
    """A containerd whose files are in ``home``. Its containers outlive it, as long as nobody ends them."""

    release: str
    home: Path
    cdi: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        """Where it serves."""
        return self.home / "containerd.sock"

    @property
    def log(self) -> Path:
        """What it says."""
        return self.home / "containerd.log"

    @property
    def state(self) -> Path:
        """What it loses when its host is switched off."""
        return self.home / "state"

    def start(self) -> None:
        """Start it, and wait until it answers. Raises CalledProcessError if it cannot be fetched."""
        found = programs(self.release)
        self.home.mkdir(parents=True, exist_ok=True)
        configuration = self.home / "config.toml"
        configuration.write_text(
            _CONFIG[self.release].format(
                home=self.home, socket=self.socket, cdi=self.cdi, pause=image.NAME, passed_on=_PASSED_ON
            )
        )
        with self.log.open("a") as out:
            self.process = subprocess.Popen(
                [str(found / "containerd"), "--config", str(configuration)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | {"PATH": f"{found}:{os.environ['PATH']}"},
            )
        end = time.monotonic() + _START_S
        while self._ctr("version").returncode:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < end, self.log.read_text()[-2000:]
            time.sleep(0.1)

    def load_image(self) -> None:
        """Give it the tests' image."""
        archive = image.make(self.home / "image.tar")
        self._ctr("images", "import", str(archive)).check_returncode()
        archive.unlink()

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it."""
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(how)
            process.wait()

    def switch_off(self, cgroup_parent: str) -> None:
        """Kill it and all that it has started below a cgroup, and lose its state, as when its host is switched off."""
        self.end(signal.SIGKILL)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.name().startswith("containerd-shim") and str(self.socket) in process.cmdline():
                    process.kill()
                    process.wait()
        kill_below(cgroup_parent)
        mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for path in reversed([path for path in mounted if path.startswith(f"{self.state}/")]):
            subprocess.run(["umount", "--lazy", path], check=True)
        shutil.rmtree(self.state, ignore_errors=not self.state.exists())

    def _ctr(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        command = [str(programs(self.release) / "ctr"), "--address", str(self.socket), "--namespace", "k8s.io"]
        return subprocess.run([*command, *words], capture_output=True, check=False)


@contextmanager
def running(release: str, home: Path, cdi: Path) -> Iterator[Containerd]:
    """Run a containerd whose files are in ``home``, and end it."""
    found = Containerd(release, home, cdi)
    try:
        found.start()
        found.load_image()
        yield found
    finally:
        found.end()


def kill_below(parent: str) -> None:
    """Kill the processes of a cgroup and of those below it, and wait until they are gone."""
    while pids := cgroup.pids(parent):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def remove_cgroups(parent: str) -> None:
    """Remove a cgroup and those below it from all trees; runtimes leave the ones that a kubelet would remove."""
    tops = {cgroup.mount(), *(path for path in Path("/sys/fs/cgroup").iterdir() if path.is_dir())}
    for top in tops:
        home = top / parent.lstrip("/")
        for path in [*sorted(home.rglob("*/"), reverse=True), home]:
            with suppress(OSError):  # not there, or one that still has processes
                path.rmdir()

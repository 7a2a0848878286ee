"""A containerd of a test's own: Debian's package unpacked, with a root, a state, a socket and CDI files to itself.

Nothing of the host's containerd, if it has one, is used or changed. Images are made here; no registry is asked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import debian
from tests.k8s.containerd import image

FORKY = debian.Suite(debian.MIRROR, "forky", expires=False)
TRIXIE = debian.Suite(debian.MIRROR, "trixie")
#: The suite that has each release.
RELEASES = {"2.1": FORKY, "1.7": TRIXIE}
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


@dataclass(frozen=True, slots=True)
class Containerd:
    """A running containerd."""

    socket: Path
    cdi: Path
    log: Path


@contextmanager
def running(release: str, home: Path, cdi: Path) -> Iterator[Containerd]:
    """Run a containerd whose files are in ``home``, and end it with all that it has started."""
    found = programs(release)
    home.mkdir(parents=True, exist_ok=True)
    socket, log = home / "containerd.sock", home / "containerd.log"
    (home / "config.toml").write_text(
        _CONFIG[release].format(home=home, socket=socket, cdi=cdi, pause=image.NAME, passed_on=_PASSED_ON)
    )
    environment = os.environ | {"PATH": f"{found}:{os.environ['PATH']}"}
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(found / "containerd"), "--config", str(home / "config.toml")],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
        )
    ctr = [str(found / "ctr"), "--address", str(socket), "--namespace", "k8s.io"]
    try:
        _until_it_answers([*ctr, "version"], process, log)
        archive = image.make(home / "image.tar")
        subprocess.run([*ctr, "images", "import", str(archive)], check=True, capture_output=True)
        archive.unlink()
        yield Containerd(socket, cdi, log)
    finally:
        process.terminate()
        process.wait()


def _until_it_answers(command: list[str], process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_S
    while subprocess.run(command, capture_output=True, check=False).returncode:
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < end, log.read_text()[-2000:]
        time.sleep(0.1)

"""The bundle's lane: it is installed, used and removed on a host without Python, and runs beside busybox alone.

    bundle_lane.py [--dist dist]

The host is a container over a Debian without Python, as in distributions_lane.py; what happens inside is
bundle_guest.py's. Then its programs run in a root that holds nothing but busybox. As root; nothing of this machine is
changed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import image
from archives import DISTRIBUTIONS
from distributions_lane import GUEST, HERE, ROOT, contained

_READY = "until qgpuctl status >/dev/null 2>/tmp/said; do sleep 1; done;"
#: What runs beside busybox alone.
_RUNS = {
    "qgpuctl": "qgpuctl --version",
    "qgpu-k8s": "qgpu-k8s --help",
    "a pod": f"qgpud --plane sim 2>/dev/null & {_READY} qgpuctl run --cores 30 -- qgpu-load --duration 1s",
    "libbpf": "/opt/qgpu/bin/python -I -c 'import ctypes; ctypes.CDLL(\"libbpf.so.1\")'",
}


def without_python(bundle: Path) -> dict[str, Any]:
    """Install, use and remove the bundle on a host without Python; what was found."""
    root = image.build(python=False, distribution=DISTRIBUTIONS["debian-13"])
    with tempfile.TemporaryDirectory(prefix="qgpu-share.") as share:
        shutil.copy(bundle, Path(share, "bundle.tar.gz"))
        for file in (*GUEST, "bundle_guest.py"):
            shutil.copy(HERE / file, share)
        _unpack(bundle, Path(share))
        # its own Python runs the test from another place, so that /opt is as it was before
        own = "/run/share/qgpu"
        python = f"{own}/lib/ld-linux-x86-64.so.2 --library-path {own}/lib {own}/bin/python"
        return contained(root, Path(share), f"{python} /run/share/bundle_guest.py")


def beside_busybox(bundle: Path) -> list[str]:
    """Run the bundle's programs in a root with busybox and nothing else; list what failed."""
    with tempfile.TemporaryDirectory(prefix="qgpu-root.") as name:
        root = Path(name)
        for folder in ("bin", "dev", "opt", "proc", "tmp"):
            (root / folder).mkdir()
        os.mknod(root / "dev/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        shutil.copy("/bin/busybox", root / "bin")
        for applet in ("mount", "sh", "sleep"):
            (root / "bin" / applet).symlink_to("busybox")
        _unpack(bundle, root / "opt")
        return [what for what, command in _RUNS.items() if not _runs(root, what, command)]


def _runs(root: Path, what: str, command: str) -> bool:
    own_pids = ["timeout", "--signal=KILL", "60", "unshare", "--mount", "--pid", "--fork", "--kill-child"]
    script = f"export PATH=/opt/qgpu/bin:/bin QGPU_RUNTIME_DIR=/tmp/run; mount -t proc none /proc; {command}"
    chroot = ["chroot", str(root), "/bin/sh", "-c", script]
    done = subprocess.run([*own_pids, *chroot], capture_output=True, text=True, check=False)
    print(f"{what}: {done.returncode} {done.stdout[:200]}{done.stderr[-300:]}", flush=True)
    return done.returncode == 0


def _unpack(bundle: Path, into: Path) -> None:
    with tarfile.open(bundle) as archive:
        archive.extractall(into, filter="tar")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the bundle lies (make bundle)")
    (bundle,) = parser.parse_args().dist.resolve().glob("qgpu-*-x86_64.tar.gz")
    found = without_python(bundle)
    found["failed"] += [f"beside busybox: {each}" for each in beside_busybox(bundle)]
    print(json.dumps(found, indent=2))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

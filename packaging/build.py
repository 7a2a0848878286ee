"""Build all packages: wheel, sdist, the Debian packages qgpu, qgpu-k8s and qgpu-dkms, and RPMs of the first two.

    build.py [--version 0.1.0+next1]... [--out dist]

The wheel and sdist come from ``python -m build``. The Debian packages are built from a copy of the tracked files with
packaging/debian as ``debian``. They contain the packages that the wheel needs from PyPI (site_packages.py), because the
versions of the distributions are too old for qgpu. Needs debhelper, dh-dkms and dpkg-dev (``make packages`` installs
them). The RPMs (rpm.py) are built where rpmbuild is installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from email.utils import formatdate
from pathlib import Path

import rpm
import site_packages

import qgpu

ROOT = Path(__file__).resolve().parent.parent
COPYRIGHT = """qgpu is GPL-2.0-only: /usr/share/common-licenses/GPL-2

The Python packages that come along in /usr/lib/qgpu have licences of their own, beside them in *.dist-info.
"""


def build_python(out: Path) -> Path:
    """Build wheel and sdist; return the wheel."""
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], check=True, stdout=subprocess.DEVNULL
    )
    return out / f"qgpu-{qgpu.__version__}-py3-none-any.whl"


def build_debian(out: Path, home: Path, version: str) -> list[Path]:
    """Build the Debian packages of a version from the result of ``gather``; return them."""
    with tempfile.TemporaryDirectory(prefix="qgpu-debian.") as work:
        tree = Path(work) / "qgpu"
        copy_tracked(tree)
        shutil.copytree(ROOT / "packaging/debian", tree / "debian")
        units = [(f"{name}.service", f"qgpu.{name}.service") for name in ("qgpud", "qgpu-groups")]
        for name, place in (*units, ("qgpu.sysusers",) * 2, ("qgpu.tmpfiles",) * 2):
            shutil.copy(ROOT / "packaging/systemd" / name, tree / "debian" / place)
        shutil.copy(ROOT / "deploy/systemd/qgpu-k8s.service", tree / "debian")
        (tree / "debian/copyright").write_text(COPYRIGHT)
        (tree / "debian/changelog").write_text(
            f"qgpu ({version}) unstable; urgency=medium\n\n  * See CHANGELOG.md.\n\n"
            f" -- The qgpu maintainers <maintainers@qgpu.invalid>  {formatdate()}\n"
        )
        places = {"QGPU_HOME": "home", "QGPU_SITE": "base", "QGPU_SITE_K8S": "k8s"}
        environment = os.environ | {variable: str(home.parent / name) for variable, name in places.items()}
        environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
        command = ["dpkg-buildpackage", "--build=binary", "--unsigned-changes", "--no-check-builddeps"]
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
        return [Path(shutil.copy(deb, out)) for deb in sorted(Path(work).glob("*.deb"))]


def gather(wheel: Path, work: Path) -> Path:
    """Collect the Python packages, once for all versions of the Debian packages; return the environment's frame."""
    site_packages.fill(wheel, work / "base", work / "k8s")
    site_packages.make_home(work / "home")
    lines = [f"{name}={value}\n" for name, value in site_packages.dependencies().items()]
    (work / "home.substvars").write_text("".join(lines))
    return work / "home"


def copy_tracked(into: Path) -> None:
    """Copy the files that git tracks or, without git, all files except build output."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        shutil.copytree(ROOT, into, ignore=shutil.ignore_patterns(".*", "build", "dist", "debian", "__pycache__"))
        return
    for name in filter(None, listed.stdout.split("\0")):
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)


def main() -> None:
    """Build, and list the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="append", help="of the Debian packages; several are built one by one")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    wheel = build_python(out)
    with tempfile.TemporaryDirectory(prefix="qgpu-site.") as work:
        home = gather(wheel, Path(work))
        debs = [deb for version in arguments.version or [qgpu.__version__] for deb in build_debian(out, home, version)]
    shared = [deb for deb in debs if "dkms" not in deb.name and shutil.which("rpmbuild")]
    rpms = [rpm.build(deb, out) for deb in shared]
    for path in (*sorted(out.glob("*.tar.gz")), wheel, *debs, *rpms):
        print(f"{path.name} {path.stat().st_size / 1e6:.1f} MB")
    print(f"built in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()

"""The RPM of a Debian package: its files, its scriptlets, and a life from installation to removal.

The life is one on this host's own files, below an overlay: RPM's order of steps is real, the distribution is not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "packaging"))

import rpm
import site_packages

PACKAGING = Path(__file__).parents[2] / "packaging"
pytestmark = pytest.mark.skipif(
    not (shutil.which("rpmbuild") and shutil.which("dpkg-deb")), reason="needs rpmbuild (apt install rpm) and dpkg-deb"
)

LIFE = """
set -eu
mount -t tmpfs none "$1" && mkdir "$1/upper" "$1/work" "$1/root" || exit 99
mount -t overlay overlay -o lowerdir=/,upperdir="$1/upper",workdir="$1/work" "$1/root" 2>/dev/null || exit 99
mount --rbind /dev "$1/root/dev"
mount -t tmpfs none "$1/root/tmp"
cp "$2" "$1/root/tmp/old.rpm"
cp "$3" "$1/root/tmp/new.rpm"
chroot "$1/root" sh -euc '
rpm() { command rpm --dbpath /tmp/rpmdb "$@"; }
seen() { echo "$1: $(qgpuctl), byte code $(find /usr/lib/qgpu -name "*.pyc" | wc -l)"; }
rpm -i --nodeps /tmp/old.rpm; seen installed; getent group qgpu >/dev/null && echo "group made"
echo "# mine" >> /etc/qgpu/qgpud.toml
rpm -U --nodeps /tmp/new.rpm; seen upgraded; tail -n1 /etc/qgpu/qgpud.toml
rpm -e qgpu; echo "left: $(ls -d /usr/lib/qgpu /usr/bin/qgpuctl 2>/dev/null)"
' 2>/dev/null
"""


def deb(work: Path, version: str) -> Path:
    """Build a Debian package that has one of everything, in the folders that qgpu's has."""
    tree = work / version
    home = tree / site_packages.SITE.lstrip("/")
    site_packages.make_home(home)
    site = home / "lib/python3/site-packages/qgpu"
    for folder in (site, tree / "etc/qgpu", tree / "lib/systemd/system", tree / "usr/lib/sysusers.d", tree / "DEBIAN"):
        folder.mkdir(parents=True)
    (site / "__init__.py").touch()
    shutil.copy(PACKAGING.parent / "qgpu/start.py", site)
    (site / "shown.py").write_text(f"def main():\n    print('version {version}, 100 %')\n")
    (site / "with space.txt").touch()
    (tree / "etc/qgpu/qgpud.toml").touch()
    (tree / "lib/systemd/system/qgpud.service").write_text("[Service]\nExecStart=/usr/bin/qgpud\n")
    (tree / "usr/lib/sysusers.d/qgpu.conf").write_text("g qgpu -\n")
    subprocess.run(
        [PACKAGING / "launchers.sh", "/usr/lib/qgpu/bin/python", tree / "usr/bin", "qgpuctl=qgpu.shown"], check=True
    )
    (tree / "DEBIAN/control").write_text(
        f"Package: qgpu\nVersion: {version}\nArchitecture: amd64\nMaintainer: nobody\n"
        "Description: share GPUs\n A paragraph.\n .\n Another, of 100 % text.\n"
    )
    path = work / f"qgpu_{version}.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", str(tree), str(path)], check=True, capture_output=True)
    return path


def query(package: Path, *what: str) -> str:
    return subprocess.run(["rpm", "-qp", *what, str(package)], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rpm")


@pytest.fixture(scope="module")
def old(work: Path) -> Path:
    return rpm.build(deb(work, "1.0"), work)


def test_an_rpm_has_the_files_of_its_deb(work: Path, old: Path) -> None:
    rpm.unpack(work / "qgpu_1.0.deb", work / "unpacked")
    files = {f"/{path.relative_to(work / 'unpacked')}" for path in (work / "unpacked").rglob("*")}
    packed = set(query(old, "--list").splitlines())

    assert "/usr/lib/systemd/system/qgpud.service" in packed
    assert packed <= files
    left_out = {name for name in files - packed if not (work / f"unpacked{name}").is_dir()}
    assert left_out == set()
    assert query(old, "--configfiles").split() == ["/etc/qgpu/qgpud.toml"]
    assert {"/usr/lib", "/usr/bin", "/etc"}.isdisjoint(packed)


def test_an_rpm_needs_a_python_that_it_has_packages_for(old: Path) -> None:
    needs = query(old, "--requires")

    assert all(f"python{version}" in needs for version in site_packages.PYTHONS)


@pytest.mark.parametrize("package", ["qgpu", "qgpu-k8s"])
def test_scriptlets_are_shell(package: str) -> None:
    for begin, body in rpm.scripts(package).items():
        assert "#DEBHELPER#" not in body, begin
        assert "dpkg" not in body, begin
        subprocess.run(["sh", "-n"], input=body, text=True, check=True)


def test_an_rpm_carries_its_scriptlets_unchanged(old: Path) -> None:
    carried = query(old, "--scripts") + query(old, "--filetriggers")

    for begin, body in rpm.scripts("qgpu").items():
        assert body.strip() in carried, begin


@pytest.mark.root
def test_an_rpm_installs_upgrades_and_goes(work: Path, old: Path) -> None:
    new = rpm.build(deb(work, "2.0"), work)
    (work / "life").mkdir()
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", LIFE, "-", str(work / "life"), str(old), str(new)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )
    if result.returncode == 99:
        pytest.skip("no overlay file system here")

    assert [re.sub(r"[1-9]\d*$", "some", line) for line in result.stdout.splitlines()] == [
        "installed: version 1.0, 100 %, byte code some",
        "group made",
        "upgraded: version 2.0, 100 %, byte code some",
        "# mine",
        "left: ",
    ]
    assert result.returncode == 0, result.stderr

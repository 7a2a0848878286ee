"""The bundle's scripts and libraries, where they lie. That it installs and runs is for tests/vm/host to show."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "packaging"))

import bundle

PACKAGING = Path(__file__).parents[2] / "packaging"


def test_remove_does_what_a_purge_of_the_package_does(tmp_path: Path) -> None:
    script = tmp_path / "remove"
    script.write_text(bundle.remove_script())

    subprocess.run(["sh", "-n", script], check=True)
    text = script.read_text()
    assert not [mark for mark in ("#PRERM#", "#POSTRM#", "#DEBHELPER#") if mark in text]
    for name in ("prerm", "postrm"):
        lines = (PACKAGING / f"debian/qgpu.{name}").read_text().splitlines()[1:]
        assert [line for line in lines if line != "#DEBHELPER#" and line not in text.splitlines()] == []
    assert text.index("pods are running") < text.index("systemctl --quiet disable")


def test_install_elsewhere_says_where_it_must_lie(tmp_path: Path) -> None:
    shutil.copy(PACKAGING / "bundle/install", tmp_path)

    done = subprocess.run([tmp_path / "install"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "unpack the archive in /opt" in done.stderr


def test_a_library_that_no_package_has_is_named(tmp_path: Path) -> None:
    """The programs of this machine need a C library, which an empty root lacks."""
    root, tree = tmp_path / "root", tmp_path / "tree"
    (root / bundle._LIBRARIES).mkdir(parents=True)
    shutil.copy("/bin/true", root / bundle._LIBRARIES / bundle.LOADER)
    for folder in ("bin", "lib"):
        (tree / folder).mkdir(parents=True)
    shutil.copy("/bin/true", tree / "bin/python")

    with pytest.raises(SystemExit, match=r"no package of .* has lib"):
        bundle._copy_libraries(root, tree)


def test_every_unit_of_the_packages_is_installed() -> None:
    units = [*(PACKAGING / "systemd").glob("*.service"), *(PACKAGING.parent / "deploy/systemd").glob("*.service")]

    for script in ("install", "remove"):
        assert all(unit.stem in (PACKAGING / "bundle" / script).read_text() for unit in units)

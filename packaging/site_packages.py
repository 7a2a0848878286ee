"""The Python packages in the Debian packages: qgpu's wheel and what it needs from PyPI, for several Pythons.

One folder serves every Python in PYTHONS. Compiled modules have their Python's version in their names, so they lie
side by side, as in Debian's own dist-packages; all other files must be equal. docs/decisions/0016-packages.md says why.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

#: The supported Pythons. Add the next one when all packages have wheels for it.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
#: The oldest C library that the wheels may need: 2.28, older than that of any distribution with one of these Pythons.
GLIBC_MINOR = 28
#: Where the virtual environment lies on a host.
SITE = "/usr/lib/qgpu"
#: What pip writes about an installation: different for each Python, and never read.
_NOT_SHIPPED = ("RECORD", "WHEEL", "INSTALLER", "REQUESTED", "direct_url.json")


def fill(wheel: Path, base: Path, k8s: Path) -> None:
    """Install a wheel into the new folder ``base``, and the further packages of its extra k8s into ``k8s``.

    Raises SystemExit if packages differ between Pythons, CalledProcessError if one cannot be installed.
    """
    with tempfile.TemporaryDirectory(prefix="qgpu-site.") as name:
        work = Path(name)
        constraints = work / "constraints.txt"
        constraints.touch()
        for python in PYTHONS:
            install(f"{wheel}[k8s]", python, work / f"all-{python}", constraints)
            if python == PYTHONS[0]:
                constraints.write_text("\n".join(_versions(work / f"all-{python}")))
            install(str(wheel), python, work / f"base-{python}", constraints)
        merge([work / f"base-{python}" for python in PYTHONS], base)
        merge([work / f"all-{python}" for python in PYTHONS], k8s)
    for path in _files(base):
        same(base / path, k8s / path)
        (k8s / path).unlink()
    for folder in sorted((path for path in k8s.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()


def install(what: str, python: str, target: Path, constraints: Path | None = None) -> None:
    """Install a package and what it needs for one Python into a folder, from wheels. Raises CalledProcessError."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(GLIBC_MINOR, 4, -1)]
    platforms += [f"--platform=manylinux{year}_x86_64" for year in ("2014", "2010", "1")]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:", *platforms]
    command += [f"--python-version={python}", "--implementation=cp"]
    command += [f"--constraint={constraints}"] if constraints is not None else []
    subprocess.run([*command, f"--target={target}", what], check=True)


def merge(folders: Sequence[Path], into: Path) -> None:
    """Put the files of several installations into one folder. Raises SystemExit where they differ."""
    for folder in folders:
        for path in _files(folder):
            if path.parts[0] == "bin" or path.name in _NOT_SHIPPED:
                continue
            if (into / path).exists():
                same(into / path, folder / path)
                continue
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folder / path, into / path)


def same(one: Path, other: Path) -> None:
    """Check that two files are equal. Raises SystemExit."""
    if not other.exists() or one.read_bytes() != other.read_bytes():
        raise SystemExit(f"{other} differs from {one}: one folder cannot serve both")


def make_home(home: Path) -> None:
    """Make a virtual environment's frame, in which ``lib/python3/site-packages`` serves every Python.

    The package's postinst adds ``bin/python``, a link to the Python that it finds.
    """
    (home / "bin").mkdir(parents=True)
    (home / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    (home / "lib/python3/site-packages").mkdir(parents=True)
    for python in PYTHONS:
        (home / "lib" / f"python{python}").symlink_to("python3")


def dependencies() -> dict[str, str]:
    """Return the variables that debian/control gets its dependencies from."""
    newest = int(PYTHONS[-1].partition(".")[2])
    return {
        "qgpu:Python": f"python3 (>= {PYTHONS[0]}~) | python{PYTHONS[0]}, python3 (<< 3.{newest + 1}~)",
        "qgpu:Libc": f"libc6 (>= 2.{GLIBC_MINOR})",
    }


def _versions(folder: Path) -> list[str]:
    """List what is installed in a folder, as constraints for pip, without qgpu itself."""
    found = [path.name.removesuffix(".dist-info").rpartition("-") for path in folder.glob("*.dist-info")]
    return [f"{name}=={version}" for name, _, version in found if name != "qgpu"]


def _files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())

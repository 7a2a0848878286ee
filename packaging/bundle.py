"""Build the bundle: qgpu with a Python and a C library of its own, for hosts that lack suitable ones.

    bundle.py [--out dist] [--mirror http://deb.debian.org/debian]

The archive unpacks to /opt/qgpu, where ``install`` and ``remove`` (in bundle/) do what the packages' maintainer
scripts do. Python and the libraries are Debian's binaries, with their licences. Each program names its interpreter
below /opt/qgpu, so nothing of the host's is loaded but NVIDIA's libraries, and no variable leaks into pods. Needs
mmdebstrap, patchelf and Debian's keys (``make bundle`` installs them). docs/decisions/0055-bundle.md says why.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

import build
import rpm
import site_packages

import qgpu

PACKAGING = Path(__file__).resolve().parent
SCRIPTS = PACKAGING / "bundle"
#: Where the bundle lies on a host: interpreters are named by absolute paths.
HOME = Path("/opt/qgpu")
SUITE, PYTHON = "trixie", "3.13"
PACKAGES = ("python3-minimal", "libpython3-stdlib", "libbpf1", "libstdc++6", "base-files")
LOADER = "ld-linux-x86-64.so.2"
PROGRAMS = {"qgpud": "daemon", "qgpuctl": "cli", "qgpu-load": "load", "qgpu-k8s": "k8s"}
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_NEEDED = re.compile(r"\(NEEDED\).*\[(.*)\]")
#: Libraries that qgpu opens by name, and parts of the C library that NVIDIA's libraries need: all must be of one build.
_OPENED = ("libbpf.so.1", "libdl.so.2", "libm.so.6", "libpthread.so.0", "libresolv.so.2", "librt.so.1", "libutil.so.1")


def build_bundle(wheel: Path, out: Path, mirror: str) -> Path:
    """Build the archive around a wheel; return it. Raises CalledProcessError; SystemExit if a library is missing."""
    with tempfile.TemporaryDirectory(prefix="qgpu-bundle.") as name:
        root, tree = Path(name) / "root", Path(name) / HOME.name
        command = ["mmdebstrap", "--quiet", "--variant=extract", f"--include={','.join(PACKAGES)}", SUITE, str(root)]
        lines = f"deb {mirror} {SUITE} main", f"deb {mirror}-security {SUITE}-security main"
        subprocess.run([*command, *lines], check=True)
        _copy_python(root, tree)
        site_packages.install(f"{wheel}[k8s]", PYTHON, tree / f"lib/python{PYTHON}/dist-packages")
        _copy_libraries(root, tree)
        _copy_rest(root, tree)
        loader = [str(tree / "lib" / LOADER), "--library-path", str(tree / "lib"), str(tree / "bin/python")]
        compiled = ["-I", "-m", "compileall", "-q", "--invalidation-mode=unchecked-hash"]
        subprocess.run([*loader, *compiled, "-s", str(tree), "-p", str(HOME), str(tree / "lib")], check=True)
        bundle = out / f"qgpu-{qgpu.__version__}-x86_64.tar.gz"
        with tarfile.open(bundle, "w:gz", compresslevel=6) as archive:
            archive.add(tree, HOME.name, filter=_owned_by_root)
        return bundle


def _copy_python(root: Path, tree: Path) -> None:
    """Copy the interpreter and its library, and set the path of its C library below HOME."""
    (tree / "bin").mkdir(parents=True)
    shutil.copy2(root / f"usr/bin/python{PYTHON}", tree / "bin/python")
    shutil.copytree(root / f"usr/lib/python{PYTHON}", tree / f"lib/python{PYTHON}", symlinks=True)
    libraries = str(HOME / "lib")
    patch = ["patchelf", "--set-interpreter", f"{libraries}/{LOADER}", "--force-rpath", "--set-rpath", libraries]
    subprocess.run([*patch, str(tree / "bin/python")], check=True)


def _copy_libraries(root: Path, tree: Path) -> None:
    """Copy the C libraries that anything in the bundle needs. Raises SystemExit if one is not there."""
    there = root / _LIBRARIES
    shutil.copy2(there / LOADER, tree / "lib")
    waiting = {*_OPENED, *_needed([tree / "bin/python", *tree.rglob("*.so"), *tree.rglob("*.so.*")])}
    while waiting:
        name = waiting.pop()
        if (tree / "lib" / name).exists():
            continue
        if not (there / name).exists():
            if any(path.name == name for path in tree.rglob(name)):
                continue  # a wheel contains it
            raise SystemExit(f"no package of {', '.join(PACKAGES)} has {name}")
        shutil.copy2((there / name).resolve(), tree / "lib" / name)
        waiting |= _needed([tree / "lib" / name])


def _needed(files: Iterable[Path]) -> set[str]:
    command = ["readelf", "--dynamic", *map(str, files)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return set(_NEEDED.findall(said))


def _copy_rest(root: Path, tree: Path) -> None:
    """Add the programs, the files for systemd, the scripts, and the licences of Debian's files."""
    programs = [f"{program}=qgpu.{module}.main" for program, module in PROGRAMS.items()]
    subprocess.run([PACKAGING / "launchers.sh", str(HOME / "bin/python"), str(tree / "bin"), *programs], check=True)
    share = tree / "share"
    share.mkdir()
    units = [*(PACKAGING / "systemd").glob("*.service"), *(PACKAGING.parent / "deploy/systemd").glob("*.service")]
    for unit in units:
        (share / unit.name).write_text(unit.read_text().replace("/usr/bin/qgpu", f"{HOME}/bin/qgpu"))
    for file in ("qgpud.toml", "systemd/qgpu.sysusers", "systemd/qgpu.tmpfiles"):
        shutil.copy(PACKAGING / file, share)
    shutil.copy(PACKAGING.parent / "LICENSE", share)
    shutil.copy2(SCRIPTS / "install", tree)
    (tree / "remove").write_text(remove_script())
    (tree / "remove").chmod(0o755)
    for licence in sorted((root / "usr/share/doc").glob("*/copyright")):
        target = share / "licenses" / licence.parent.name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(licence, target)
    shutil.copytree(root / "usr/share/common-licenses", share / "licenses/common-licenses")


def remove_script() -> str:
    """Return the script that removes the bundle: the Debian package's steps for a purge, and the bundle's own."""
    script = (SCRIPTS / "remove").read_text().replace("#PRERM#\n", rpm.maintainer("prerm", "remove", ""))
    return script.replace("#POSTRM#\n", rpm.maintainer("postrm", "purge", ""))


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def main() -> None:
    """Build, and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PACKAGING.parent / "dist")
    parser.add_argument("--mirror", default="http://deb.debian.org/debian")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="qgpu-wheel.") as work:
        bundle = build_bundle(build.build_python(Path(work)), out, arguments.mirror)
    print(f"{bundle.name} {bundle.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

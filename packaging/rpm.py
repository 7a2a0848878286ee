"""RPMs of the Debian packages qgpu and qgpu-k8s: the same files, and the same maintainer scripts in RPM's order.

    rpm.py DEB... [--out dist]

RPM runs the new package's %post before the old one's %preun, so the installing steps run last, in %posttrans. The
host's presets decide which services are enabled. Needs rpmbuild and dpkg-deb. docs/install.md says where this was
tried.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import site_packages

DEBIAN = Path(__file__).parent / "debian"
SITE = f"{site_packages.SITE}/lib"
#: Folders that hold nothing but qgpu's files.
OWN = ("/etc/qgpu", "/usr/lib/qgpu", "/usr/share/qgpu", "/usr/share/doc/qgpu", "/usr/share/doc/qgpu-k8s")

PYTHONS = " or ".join(f"python{version}" for version in site_packages.PYTHONS)
NEWER = f"3.{int(site_packages.PYTHONS[-1].partition('.')[2]) + 1}"
REQUIRES = {
    "qgpu": f"""\
Requires: ((python3 >= {site_packages.PYTHONS[0]} with python3 < {NEWER}) or {PYTHONS})
Requires: glibc >= 2.{site_packages.GLIBC_MINOR}, systemd
Recommends: libbpf
""",
    "qgpu-k8s": "Requires: qgpu = %{version}-%{release}\n",
}

#: Begins a scriptlet that has nothing to do on an upgrade.
_ERASE = "[ $1 -eq 0 ] || exit 0\n"
_RELOAD = "[ ! -d /run/systemd/system ] || systemctl daemon-reload || true\n"
_NO_BYTE_CODE = f"find {SITE} -type d -name __pycache__ -prune -exec rm -rf {{}} + 2>/dev/null || true\n"


def scripts(package: str) -> dict[str, str]:
    """Return the scriptlets of a package by the line that begins each."""
    unit = {"qgpu": "qgpud.service", "qgpu-k8s": "qgpu-k8s.service"}[package]
    first = f"[ $1 -ne 1 ] || systemctl preset {unit} >/dev/null 2>&1 || true\n"
    restart = f"[ ! -d /run/systemd/system ] || systemctl try-restart {unit} || true\n"
    if package == "qgpu-k8s":
        python = f"{site_packages.SITE}/bin/python"
        compiled = f"[ ! -x {python} ] || {python} -I -m compileall -q {SITE}\n"
        return {
            "%post": first,
            "%posttrans": f"{compiled}{_RELOAD}{restart}",
            "%preun": f"{_ERASE}{_disable(unit)}{_NO_BYTE_CODE}",
            "%postun": f"{_ERASE}{compiled}{_RELOAD}",
        }
    accounts = "systemd-sysusers qgpu.conf || true\nsystemd-tmpfiles --create qgpu.conf || true\n"
    return {
        "%post": first,
        "%posttrans": _NO_BYTE_CODE + maintainer("postinst", "configure", accounts + _RELOAD + restart),
        "%preun": _ERASE + maintainer("prerm", "remove", _disable(f"{unit} qgpu-groups.service")),
        "%postun": _ERASE + maintainer("postrm", "remove", _RELOAD),
        "%transfiletriggerin -- /usr/bin/python3": maintainer("postinst", "triggered", ""),
    }


def _disable(units: str) -> str:
    return f"systemctl --no-reload disable --now {units} >/dev/null 2>&1 || true\n"


def maintainer(name: str, what: str, generated: str) -> str:
    """Return qgpu's maintainer script ``name`` with arguments ``what`` and ``generated`` as debhelper's part."""
    text = (DEBIAN / f"qgpu.{name}").read_text().removeprefix("#!/bin/sh\n")
    return f"set -- {what}\n{text.replace('#DEBHELPER#', generated.rstrip())}"


def spec(deb: Path, tree: Path) -> str:
    """Return the specification that packs the tree of an unpacked Debian package."""
    package, version = _field(deb, "Package"), _field(deb, "Version")
    summary, _, description = _field(deb, "Description").partition("\n")
    paragraphs = description.replace("\n .", "\n")
    scriptlets = "".join(f"\n{begin}\n{_literal(body)}" for begin, body in scripts(package).items())
    files = "\n".join(_files(tree))
    return f"""\
Name: {package}
Version: {version}
Release: 1
Summary: {summary}
License: GPL-2.0-only
AutoReqProv: no
{REQUIRES[package]}
# The files are packed as they are.
%global debug_package %{{nil}}
%global __os_install_post %{{nil}}
%global _build_id_links none
%global _binary_payload w3.zstdio

%description
{paragraphs}

%install
cp -a "{tree}/." %{{buildroot}}
{scriptlets}
%files
%defattr(-,root,root)
{files}
"""


def _files(tree: Path) -> Iterator[str]:
    """Yield the lines of %files: every file, and the folders that are ours alone."""
    for path in sorted(tree.rglob("*")):
        name = f"/{path.relative_to(tree)}"
        if path.is_symlink() or not path.is_dir():
            yield f'{"%config(noreplace) " if name.startswith("/etc/") else ""}"{_literal(name)}"'
        elif any(f"{name}/".startswith(f"{own}/") for own in OWN):
            yield f'%dir "{_literal(name)}"'


def _literal(text: str) -> str:
    """Return text in which rpmbuild finds no macros."""
    return text.replace("%", "%%")


def unpack(deb: Path, tree: Path) -> None:
    """Unpack a Debian package, with its units below /usr/lib, where hosts with a merged /usr have them."""
    subprocess.run(["dpkg-deb", "--extract", str(deb), str(tree)], check=True)
    if (tree / "lib").is_dir():
        shutil.copytree(tree / "lib", tree / "usr/lib", dirs_exist_ok=True, symlinks=True)
        shutil.rmtree(tree / "lib")


def build(deb: Path, out: Path) -> Path:
    """Build the RPM of a Debian package and return it."""
    with tempfile.TemporaryDirectory(prefix="qgpu-rpm.") as name:
        work = Path(name)
        unpack(deb, work / "tree")
        (work / "package.spec").write_text(spec(deb, work / "tree"))
        command = ["rpmbuild", "-bb", "--target=x86_64-linux", f"--define=_topdir {work}"]
        command += [f"--define=_rpmdir {work}/made", str(work / "package.spec")]
        subprocess.run(command, check=True, capture_output=True)
        (made,) = (work / "made").rglob("*.rpm")
        return Path(shutil.copy(made, out))


def _field(deb: Path, name: str) -> str:
    command = ["dpkg-deb", "--field", str(deb), name]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Build, and list the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("debs", nargs="+", type=Path, metavar="DEB")
    parser.add_argument("--out", type=Path, default=DEBIAN.parents[1] / "dist")
    arguments = parser.parse_args()
    for deb in arguments.debs:
        path = build(deb, arguments.out.resolve())
        print(f"{path.name} {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

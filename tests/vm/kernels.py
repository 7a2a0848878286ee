"""The kernels of the VM lanes: where Debian keeps each, fetched into the cache when first asked for.

Packages are unpacked, never installed. Headers name the compiler they want; the newest kernel's lives in a chroot
of its own suite.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import vm

sys.path.append(str(Path(__file__).resolve().parent.parent))

from debian import MIRROR, SECURITY, Suite, alone, package_names, unpack


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel's headers, and how to get something bootable of it."""

    name: str
    release: str
    headers: Path
    boot: Callable[[], vm.Kernel]
    wrap: Sequence[str] = ()
    variables: Sequence[str] = ()
    #: How the module is built and checked: its Makefile's target, and what that needs here.
    check: Sequence[str] = ("check",)
    append: str = ""


@dataclass(frozen=True, slots=True)
class Flavour:
    """Where a kernel's packages are, and what their release looks like."""

    suite: Suite
    pattern: str


KERNELS = {
    "5.10": Flavour(Suite(SECURITY, "bullseye-security"), r"5\.10\.0-\d+-cloud-amd64"),
    "6.1": Flavour(Suite(SECURITY, "bookworm-security"), r"6\.1\.0-\d+-cloud-amd64"),
    "6.12": Flavour(Suite(SECURITY, "bookworm-security"), r"6\.12\.\d+\+deb12-cloud-amd64"),
    "newest": Flavour(Suite(MIRROR, "trixie-backports"), r"\d+\.\d+\.\d+\+deb13-cloud-amd64"),
    "sanitizer": Flavour(Suite(SECURITY, "bookworm-security"), r"6\.1\.0-\d+-cloud-amd64"),
}


#: Its headers come without the script that finds sparse, and ask for two things that Debian's sparse (0.6.4) does not
#: know: __typeof_unqual__, and __builtin_strlen of a literal as a constant.
_NEWEST_CHECK = (
    "check",
    "KBUILD_CHECKSRC=2",
    "CHECK=sparse -D__typeof_unqual__=__typeof__ -D__builtin_strlen=-1+sizeof",
)


def get(name: str, cache: Path) -> Source:
    """Return a kernel, fetched if need be."""
    with alone(cache):
        return _get(name, cache)


def _get(name: str, cache: Path) -> Source:
    if name == "sanitizer":
        return _sanitizer(cache)
    suite, pattern = KERNELS[name].suite, KERNELS[name].pattern
    releases = sorted(
        (
            match.group(1)
            for package in package_names("linux-headers-", suite, cache)
            if (match := re.fullmatch(rf"linux-headers-({pattern})", package))
        ),
        key=lambda release: [int(number) for number in re.findall(r"\d+", release)],
    )
    release = releases[-1]
    return _newest(release, suite, cache) if name == "newest" else _old(name, release, suite, cache)


def _image(release: str, suite: Suite, cache: Path, packages: Sequence[str]) -> vm.Kernel:
    root = cache / "kernels" / release
    if not (root / "done").exists():
        for package in packages:
            unpack(package, suite, cache, root)
        lib = root / "lib" if (root / "lib" / "modules").exists() else root / "usr" / "lib"
        subprocess.run(["depmod", "-b", str(lib.parent), release], check=True)
        (root / "done").touch()
    folders = (root / "lib/modules" / release, root / "usr/lib/modules" / release)
    modules = next(folder for folder in folders if folder.exists())
    images = (root / "boot" / f"vmlinuz-{release}", modules / "vmlinuz", modules / "vmlinuz.unsigned")
    image = next(path for path in images if path.exists())
    return vm.Kernel(image, modules)


def _old(name: str, release: str, suite: Suite, cache: Path) -> Source:
    """5.10, 6.1, 6.12: Debian 12's own compiler builds for them."""
    root = cache / "headers" / release
    headers = root / "usr/src" / f"linux-headers-{release}"
    if not (root / "done").exists():
        common = release.replace("-cloud-amd64", "-common")
        series = re.match(r"(\d+\.\d+)", release)
        assert series
        named = (f"linux-kbuild-{series.group(1)}", f"linux-kbuild-{release.removesuffix('-cloud-amd64')}")
        kbuild = [package for package in package_names("linux-kbuild-", suite, cache) if package in named]
        for package in (f"linux-headers-{release}", f"linux-headers-{common}", *kbuild):
            unpack(package, suite, cache, root)
        _relocate(root, headers)
        (root / "done").touch()

    def boot() -> vm.Kernel:
        with alone(cache):
            return _image(release, suite, cache, [_image_package(release, suite, cache)])

    # 5.10's headers ask for a compiler that Debian 12 no longer has; its own builds them without a warning
    return Source(name, release, headers, boot, variables=("CC=gcc",) if name == "5.10" else ())


def _image_package(release: str, suite: Suite, cache: Path) -> str:
    names = package_names("linux-image-", suite, cache)
    return next(name for name in (f"linux-image-{release}", f"linux-image-{release}-unsigned") if name in names)


def _relocate(root: Path, headers: Path) -> None:
    """Make the headers' absolute paths and links point into the cache."""
    makefile = headers / "Makefile"
    makefile.write_text(makefile.read_text().replace("/usr/src/", f"{root}/usr/src/"))
    for link in (*headers.iterdir(), *(root / "usr/src").glob("*-common/*")):
        if link.is_symlink() and str(link.readlink()).startswith("/usr/"):
            target = root / str(link.readlink()).lstrip("/")
            link.unlink()
            link.symlink_to(target)


def _newest(release: str, suite: Suite, cache: Path) -> Source:
    """The newest kernel names a compiler of its own suite: headers and compiler live in a chroot."""
    chroot = cache / "chroot-trixie"
    if not all((chroot / path).exists() for path in (f"usr/src/linux-headers-{release}", "usr/bin/sparse")):
        shutil.rmtree(chroot, ignore_errors=True)
        script = [
            "mmdebstrap",
            "--variant=apt",
            f"--include=make,binutils,gcc-14,sparse,linux-headers-{release}",
            "trixie",
            str(chroot),
        ]
        lists = [f"deb {MIRROR} trixie main", f"deb {MIRROR} {suite.suite} main"]
        subprocess.run([*script, *lists], check=True)
    for folder in ("proc", str(cache).lstrip("/")):
        (chroot / folder).mkdir(parents=True, exist_ok=True)
    mounts = f"mount -t proc proc {chroot}/proc; mount --bind {cache} {chroot}{cache};"
    wrap = ["unshare", "-m", "sh", "-ec", f'{mounts} exec chroot {chroot} "$@"', "-"]
    base = release.removesuffix("-cloud-amd64")
    wanted = (
        f"linux-binary-{release}",
        f"linux-binary-unsigned-{release}",
        f"linux-modules-{release}",
        f"linux-base-{release}",
        f"linux-image-{release}",
    )

    def boot() -> vm.Kernel:
        with alone(cache):
            there = package_names("linux-", suite, cache)
            return _image(release, suite, cache, [p for p in wanted if p in there] or [f"linux-image-{base}"])

    return Source("newest", release, Path("/usr/src") / f"linux-headers-{release}", boot, wrap, check=_NEWEST_CHECK)


def _sanitizer(cache: Path) -> Source:
    """Debian's 6.1 source built with KASAN, lockdep and kmemleak; see sanitizer.config."""
    tree = cache / "sanitizer" / "linux"
    if not (tree / "arch/x86/boot/bzImage").exists():
        suite = Suite(SECURITY, "bookworm-security")
        unpacked = cache / "sanitizer" / "package"
        unpack("linux-source-6.1", suite, cache, unpacked)
        tree.mkdir(parents=True, exist_ok=True)
        archive = unpacked / "usr/src/linux-source-6.1.tar.xz"
        subprocess.run(["tar", "-xf", str(archive), "-C", str(tree), "--strip-components=1"], check=True)
        config = Path(__file__).resolve().parent / "sanitizer.config"
        (tree / "arch/x86/configs/qgpu.config").write_text(config.read_text())
        for target in (["allnoconfig"], ["qgpu.config"], ["-j2", "bzImage", "modules"]):
            subprocess.run(["make", "-s", "-C", str(tree), *target], check=True)
    release = (tree / "include/config/kernel.release").read_text().strip()
    image = tree / "arch/x86/boot/bzImage"
    return Source(
        "sanitizer",
        release,
        tree,
        lambda: vm.Kernel(image, None),
        check=("modules",),
        append="kmemleak=on kasan.fault=report kasan_multi_shot",
    )

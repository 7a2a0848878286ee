"""Debian packages of any suite, fetched into a cache and unpacked there, never installed.

Each suite has package lists of its own, checked with the host's archive keys. One process at a time may fetch.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

MIRROR = os.environ.get("QGPU_DEBIAN_MIRROR", "http://deb.debian.org/debian")
SECURITY = os.environ.get("QGPU_DEBIAN_SECURITY", "http://deb.debian.org/debian-security")
UBUNTU = os.environ.get("QGPU_UBUNTU_MIRROR", "http://archive.ubuntu.com/ubuntu")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
#: Where tests keep what they fetch and build.
CACHE = Path(os.environ.get("QGPU_CACHE", Path.home() / ".cache" / "qgpu"))


@dataclass(frozen=True, slots=True)
class Suite:
    """A part of an archive."""

    archive: str
    suite: str
    component: str = "main"
    #: Whether its lists may be too old to use. Those of a suite in the making are sometimes.
    expires: bool = True
    #: Source packages instead of binary ones.
    source: bool = False
    #: Whose keys its lists are signed with.
    keyring: str = KEYRING


@contextmanager
def alone(cache: Path) -> Iterator[None]:
    """Let no other process fetch into the cache meanwhile."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def package_names(prefix: str, suite: Suite, cache: Path) -> list[str]:
    """Return the names of a suite's packages that begin so."""
    return _apt(suite, cache, cache, "apt-cache", "pkgnames", prefix).split()


def unpack(name: str, suite: Suite, cache: Path, into: Path) -> None:
    """Unpack a binary package into a folder. Raises CalledProcessError if it cannot be had."""
    into.mkdir(parents=True, exist_ok=True)
    deb = _fetch("download", name, suite, cache)[0]
    subprocess.run(["dpkg", "-x", str(deb), str(into)], check=True)


def ubuntu_keyring(suite: Suite, cache: Path) -> Suite:
    """Return a suite of Ubuntu's with the keys to check it, out of Debian's package of them."""
    root = cache / "keys"
    if not (root / "usr").exists():
        unpack("ubuntu-keyring", Suite(MIRROR, "trixie"), cache, root)
    return replace(suite, keyring=str(root / "usr/share/keyrings/ubuntu-archive-keyring.gpg"))


def unpack_source(name: str, suite: Suite, cache: Path, into: Path) -> None:
    """Unpack a source package, with Debian's patches, as a new folder. Raises CalledProcessError likewise."""
    (description,) = (path for path in _fetch("source", name, suite, cache) if path.suffix == ".dsc")
    into.parent.mkdir(parents=True, exist_ok=True)
    command = ["dpkg-source", "--no-check", "--extract", str(description), str(into)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _fetch(verb: str, name: str, suite: Suite, cache: Path) -> list[Path]:
    """Return the files of a package, fetched if they are not there. Lists that have become stale are renewed once."""
    packages = cache / "packages"
    packages.mkdir(exist_ok=True)
    for last in (False, True):
        # apt names no address for what lies in the folder it is run in
        lines = _apt(suite, cache, cache, "apt-get", "-qq", "--print-uris", verb, name).splitlines()
        files = [packages / line.split()[1] for line in lines]
        if files and all(path.exists() for path in files):
            break
        try:
            _apt(suite, cache, packages, "apt-get", "-qq", *(["--download-only"] if suite.source else []), verb, name)
        except subprocess.CalledProcessError:
            if last:
                raise
            _apt(suite, cache, cache, "apt-get", "-qq", "update")
    return files


def _apt(suite: Suite, cache: Path, where: Path, tool: str, *arguments: str) -> str:
    """Run apt-get or apt-cache on one suite alone, in the folder ``where``."""
    kind = "deb-src" if suite.source else "deb"
    home = cache / "apt" / f"{suite.suite}-{suite.component}{'-source' if suite.source else ''}"
    fresh = not home.exists()
    for folder in ("lists/partial", "archives/partial"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    sources = home / "sources.list"
    sources.write_text(f"{kind} [signed-by={suite.keyring}] {suite.archive} {suite.suite} {suite.component}\n")
    options = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": home / "lists",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": home,
        "APT::Sandbox::User": "root",
    } | ({} if suite.expires else {"Acquire::Check-Valid-Until": "false"})
    base = [f"-o{name}={value}" for name, value in options.items()]
    if fresh:
        subprocess.run(["apt-get", *base, "-qq", "update"], check=True)
    return subprocess.run([tool, *base, *arguments], cwd=where, check=True, stdout=subprocess.PIPE, text=True).stdout

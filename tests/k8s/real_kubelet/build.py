"""A real kubelet: Debian's source package of Kubernetes 1.20.2, compiled once and kept in the cache.

No newer kubelet is packaged. The build takes six minutes of CPU time and leaves one file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests import debian

VERSION = "1.20.2"
_BINARIES = debian.Suite(debian.MIRROR, "bookworm")
_SOURCES = debian.Suite(debian.MIRROR, "bookworm", source=True)
_GO = "1.19"
_PACKAGE = "k8s.io/kubernetes"
#: Where the version is kept that the kubelet states: a build from a package has no git to ask.
_STAMP = f"{_PACKAGE}/vendor/k8s.io/component-base/version"


def kubelet() -> Path:
    """Return the kubelet, built if need be. Raises CalledProcessError if the packages cannot be had."""
    built = debian.CACHE / "kubelet" / VERSION
    with debian.alone(debian.CACHE):
        if not built.exists():
            built.parent.mkdir(exist_ok=True)
            _build(built)
    return built


def _build(into: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=into.parent) as directory:
        root = Path(directory)
        source = root / "path/src" / _PACKAGE
        debian.unpack_source("kubernetes", _SOURCES, debian.CACHE, source)
        for package in (f"golang-{_GO}-go", f"golang-{_GO}-src"):
            debian.unpack(package, _BINARIES, debian.CACHE, root / "go")
        go = root / "go/usr/lib" / f"go-{_GO}"
        environment = os.environ | {
            "GOROOT": str(go),
            "GOPATH": str(root / "path"),
            "GOCACHE": str(root / "cache"),
            "GOTMPDIR": str(root),
            "GO111MODULE": "off",
            "CGO_ENABLED": "0",
        }
        major, minor, _ = VERSION.split(".")
        stamps = {"gitVersion": f"v{VERSION}", "gitMajor": major, "gitMinor": minor}
        flags = " ".join(("-s -w", *(f"-X {_STAMP}.{name}={value}" for name, value in stamps.items())))
        command = [str(go / "bin/go"), "build", "-o", str(root / "kubelet"), "-ldflags", flags]
        subprocess.run([*command, f"{_PACKAGE}/cmd/kubelet"], cwd=source, env=environment, check=True)
        shutil.move(root / "kubelet", into)

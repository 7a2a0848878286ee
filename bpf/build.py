"""Compile the BPF programs: ``python bpf/build.py [OUT]``; and, as hatchling's hook, put them into a wheel.

Needs clang and libbpf's headers (Debian: clang libbpf-dev). A wheel is built without them too: what it lacks then, qgpu
says where it is missed. The object is the same for every little-endian machine and every kernel.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by itself
    BuildHookInterface = object

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "device_files.bpf.c"
OBJECT = "device_files.bpf.o"


def includes() -> list[str]:
    """Return the directory of the host's own headers for its processor, which clang does not search for BPF."""
    multiarch = sysconfig.get_config_var("MULTIARCH")
    return ["-idirafter", f"/usr/include/{multiarch}"] if multiarch else []


def compile_to(out: Path) -> None:
    """Compile; warnings are errors. Raises OSError, subprocess.CalledProcessError."""
    options = ["-target", "bpf", "-mcpu=v3", "-g", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"]
    subprocess.run(["clang", *options, *includes(), "-c", str(SOURCE), "-o", str(out)], check=True)


class Hook(BuildHookInterface):  # type: ignore[misc, valid-type]
    """Put the object into the package where clang is installed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile for a wheel; an editable install reads this folder instead."""
        if self.target_name != "wheel" or version == "editable":
            return
        out = Path(tempfile.mkdtemp(prefix="qgpu-bpf.")) / OBJECT
        try:
            compile_to(out)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"built without BPF programs (they need clang and libbpf-dev): {error}", file=sys.stderr)
        else:
            build_data["force_include"][str(out)] = f"qgpu/data/{OBJECT}"

    def finalize(self, _version: str, build_data: dict[str, Any], _artifact: str) -> None:
        """Remove what was compiled for the wheel."""
        for path in build_data["force_include"]:
            if path.endswith(OBJECT):
                shutil.rmtree(Path(path).parent, ignore_errors=True)


if __name__ == "__main__":
    compile_to(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / OBJECT)

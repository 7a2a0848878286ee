"""What of the host's NVIDIA driver a container needs to see: device nodes, user-space libraries, nvidia-smi.

Libraries are taken from the loader's cache, by the names programs ask for. They appear in a container under those
names in the folders that loaders look into unasked, Debian's and Red Hat's, so that nothing has to be run inside it
and its own cache does not matter (docs/decisions/0018-no-code-in-the-image.md). Graphics are left out.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from qgpu.errors import NotSupportedError

#: How long to wait for the loader's cache to be read.
_PATIENCE_S = 10.0

#: Stems of the driver's libraries for compute, management and video.
LIBRARIES = (
    "libcuda",
    "libcudadebugger",
    "libnvcuvid",
    "libnvidia-allocator",
    "libnvidia-cfg",
    "libnvidia-encode",
    "libnvidia-gpucomp",
    "libnvidia-ml",
    "libnvidia-nvvm",
    "libnvidia-nvvm70",
    "libnvidia-opencl",
    "libnvidia-opticalflow",
    "libnvidia-pkcs11",
    "libnvidia-pkcs11-openssl3",
    "libnvidia-ptxjitcompiler",
    "libnvidia-sandboxutils",
    "libnvidia-tileiras",
)
_CACHED = re.compile(r"\s*(\S+) \(([^)]*)\) => (\S+)")
_LIBCS = {"x86_64": "libc6,x86-64", "aarch64": "libc6,AArch64"}

#: Nodes that every program needs, beside that of its card.
SHARED_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


@dataclass(frozen=True, slots=True)
class Mount:
    """A file of the host and where it appears in a container."""

    host: str
    container: str


def shared_nodes() -> list[str]:
    """List the nodes every program needs, as far as they are there."""
    return [node for node in SHARED_NODES if Path(node).is_char_device()]


def card_node(minor: int) -> str:
    """Name the device node of a card."""
    return f"/dev/nvidia{minor}"


def mounts() -> list[Mount]:
    """Find the driver's files on this host. Raises NotSupportedError."""
    found = library_mounts(libraries(_cache()))
    if (smi := shutil.which("nvidia-smi")) is not None:
        found.append(Mount(smi, "/usr/bin/nvidia-smi"))
    return found


def libraries(cache: str) -> dict[str, str]:
    """Pick the driver's libraries from the loader's cache, as ldconfig -p prints it: file by name."""
    kind = _LIBCS.get(platform.machine())
    found: dict[str, str] = {}
    for line in cache.split("\n"):
        if (match := _CACHED.fullmatch(line)) and match[1].partition(".so")[0] in LIBRARIES and match[2] == kind:
            found.setdefault(match[1], match[3])
    if "libcuda.so.1" in found:  # many programs ask for it so, and only development packages have the link
        found.setdefault("libcuda.so", found["libcuda.so.1"])
    return found


def library_mounts(found: Mapping[str, str], folders: Iterable[str] = ()) -> list[Mount]:
    """Say where libraries appear in a container."""
    folders = tuple(folders) or (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64")
    return [Mount(file, f"{folder}/{name}") for name, file in sorted(found.items()) for folder in folders]


def _cache() -> str:
    """Read the loader's cache. Raises NotSupportedError."""
    tool = shutil.which("ldconfig", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, "-p"], capture_output=True, check=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotSupportedError(f"{tool} -p: {error}; the driver's libraries cannot be found") from error
    return os.fsdecode(done.stdout)

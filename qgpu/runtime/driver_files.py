"""The files of the host's NVIDIA driver that a container needs: device nodes, user-space libraries, nvidia-smi.

The libraries come from the loader's cache, by the names that programs ask for. In a container they appear under those
names in the loader's default directories of Debian and Red Hat. So nothing has to run inside the container, and its
own cache does not matter (docs/decisions/0018-no-code-in-the-image.md). Graphics libraries are left out.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qgpu.errors import NotSupportedError
from qgpu.model.plane_api import Pgpu
from qgpu.nvidia import abi, mig

#: The numbers of a device node: (major, minor).
Number = tuple[int, int]

#: How long ``ldconfig -p`` may take.
_TIMEOUT_S = 10.0

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

#: Device nodes that every program needs besides its card's.
SHARED_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


@dataclass(frozen=True, slots=True)
class Mount:
    """A file of the host, and its path in a container."""

    host: str
    container: str


def shared_nodes() -> list[str]:
    """Return those device nodes that every program needs and that exist."""
    return [node for node in SHARED_NODES if Path(node).is_char_device()]


def nodes(pgpu: Pgpu) -> dict[Number, str]:
    """Return a pGPU's own device nodes, path by (major, minor); none on the simulator.

    A MIG instance has its card's node and its two capability files. Raises NotSupportedError if it is gone.
    """
    if pgpu.minor is None:
        return {}
    found = {(abi.NV_MAJOR, pgpu.minor): f"/dev/nvidia{pgpu.minor}"}
    if pgpu.mig is not None:
        major, minors = mig.major(), mig.capabilities(pgpu.minor, pgpu.mig)
        if major is None or minors is None:
            raise NotSupportedError(f"pGPU {pgpu.index}: there is no such MIG instance any more; restart qgpud")
        found |= {(major, minor): mig.node(minor) for minor in minors}
    return found


def nodes_by_pgpu(pgpus: Iterable[Pgpu]) -> dict[int, dict[Number, str]]:
    """Return the device nodes of each pGPU that is there."""
    found = {}
    for pgpu in pgpus:
        with suppress(NotSupportedError):
            found[pgpu.index] = nodes(pgpu)
    return found


def mounts() -> list[Mount]:
    """Return the driver's files on this host. Raises NotSupportedError."""
    found = library_mounts(libraries(_cache()))
    if (smi := shutil.which("nvidia-smi")) is not None:
        found.append(Mount(smi, "/usr/bin/nvidia-smi"))
    return found


def libraries(cache: str) -> dict[str, str]:
    """Return the driver's libraries in the loader's cache, as ``ldconfig -p`` prints it: path by name."""
    kind = _LIBCS.get(platform.machine())
    found: dict[str, str] = {}
    for line in cache.split("\n"):
        if (match := _CACHED.fullmatch(line)) and match[1].partition(".so")[0] in LIBRARIES and match[2] == kind:
            found.setdefault(match[1], match[3])
    if "libcuda.so.1" in found:  # many programs load libcuda.so, a link that only development packages contain
        found.setdefault("libcuda.so", found["libcuda.so.1"])
    return found


def library_mounts(found: Mapping[str, str]) -> list[Mount]:
    """Return where libraries appear in a container."""
    folders = (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64")
    return [Mount(file, f"{folder}/{name}") for name, file in sorted(found.items()) for folder in folders]


def _cache() -> str:
    """Return the output of ``ldconfig -p``. Raises NotSupportedError."""
    tool = shutil.which("ldconfig", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, "-p"], capture_output=True, check=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotSupportedError(f"{tool} -p: {error}; the driver's libraries cannot be found") from error
    return os.fsdecode(done.stdout)

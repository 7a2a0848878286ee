"""The lane's pods: two podman containers at 2:1, and what their program wrote down.

What containers may and may not is for tests/vm/containers; here it is that the packages bring all that is needed.
Podman is as Debian sets it up (crun, cgroups by systemd). The containers' files are the VM's own, so that there is no
image to fetch.
"""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

ROOTFS = Path("/run/rootfs")
STEPS = Path("/run/steps")
#: Podman's own, which the machine's owner would remove with podman.
_PODMANS = ("/run/libpod", "/run/crun", "/run/runc", "/run/containers", "/etc/cni/net.d/cni.lock")
_STORAGE = "/var/lib/containers"
LIMITS = {"web": ("--annotation", "qgpu.io/cores=60"), "job": ("--env", "QGPU_CORES=30")}


def prepare() -> None:
    """Make what podman needs on a root that is an overlay itself."""
    Path(_STORAGE).mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", _STORAGE], check=True)
    for folder in (ROOTFS, STEPS):
        folder.mkdir()
    subprocess.run(["mount", "--bind", "/", str(ROOTFS)], check=True)


def start(share: Path, tell: Callable[..., None]) -> bool:
    """Start both containers; each one's program is pod.py."""
    running = 0
    for name, limit in LIMITS.items():
        options = ("--name", name, "--annotation", f"qgpu.io/name={name}", "--device", "qgpu.io/gpu=0", *limit)
        options += ("-d", "--network", "none", "--volume", f"{share}:{share}", "--volume", f"{STEPS}:/mnt")
        options += ("--cap-add", "SYS_NICE")  # see pod.py
        command = ("/usr/bin/python3", f"{share}/pod.py", f"/mnt/{name}")
        done = podman("run", *options, "--rootfs", str(ROOTFS), *command)
        tell(f"container {name} starts", done.returncode == 0, done.stdout)
        running += done.returncode == 0
    return running == len(LIMITS)


def end() -> None:
    """End the containers."""
    podman("rm", "-f", "-t", "20", *LIMITS)


def clean() -> None:
    """Remove what is podman's and the lane's."""
    podman("rm", "-f", "-t", "0", "--all")
    for mount in (str(ROOTFS), f"{_STORAGE}/storage/overlay", _STORAGE):
        subprocess.run(["umount", "-l", mount], check=False, stderr=subprocess.DEVNULL)
    ROOTFS.rmdir()
    subprocess.run(["rm", "-rf", str(STEPS), *_PODMANS], check=True)


def podman(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run podman; what it and its runtime said."""
    # a file and not a pipe: what stays in the background holds it open
    with Path("/run/podman.out").open("w+") as out:
        done = subprocess.run(["podman", *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False)
        out.seek(0)
        said = out.read()
    Path("/run/podman.out").unlink()
    return subprocess.CompletedProcess(done.args, done.returncode, said)


def steps(name: str) -> list[tuple[int, int]]:
    """Return the lines of a pod's file: time in ns, kernels so far."""
    path = STEPS / name
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines if len(line.split()) == 2]


def gap_ms(name: str, from_s: float, to_s: float) -> float:
    """Return the longest time between two moments at which the pod's counter was seen to have grown."""
    times = [at / 1e6 for at, _ in steps(name) if from_s <= at / 1e9 <= to_s]
    return round(max(b - a for a, b in itertools.pairwise(times)), 1)


def ratio(seconds: float) -> float:
    """Return kernels done by the one pod over those of the other, in the seconds to come."""
    start = time.monotonic_ns()
    time.sleep(seconds)
    done = {name: [count for at, count in steps(name) if at >= start] for name in LIMITS}
    web, job = (done[name][-1] - done[name][0] for name in LIMITS)
    return round(web / job, 3)

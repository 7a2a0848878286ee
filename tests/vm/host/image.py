"""A clean Debian or Ubuntu with systemd to boot in the VM: its root is made once and cached, each boot starts afresh.

Two calls:

    root = image.build(["podman", "crun"])  # Debian bookworm with BASE and these; a minute or two, then cached
    outcome = image.boot(root, ["python3", "/run/share/test.py"], share=folder)

``boot`` starts systemd as init under cgroup v2 (only v2), waits for multi-user.target, runs the command as root in a
service of its own, and brings back its exit code, output and the kernel log (vm.Outcome). ``share`` is a folder of
yours, read-write at /run/share in the guest: put in what the guest shall see (packages, modules, tests), find there
what it wrote, and the journal (file ``journal``). The root itself is read-only under a tmpfs overlay: nothing that a
boot does is left in the cache, and overlayfs on top of it needs a tmpfs of its own (podman: mount one on
/var/lib/containers). There is no network but loopback. The kernel is Debian's 6.1 for clouds with its modules, and
its headers if ``headers`` is set. A boot takes about half a minute of emulation.

To look around by hand: python tests/vm/host/image.py [--distribution NAME] [--packages A,B] -- COMMAND...
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import emulator
import kernels
import vm
from archives import DISTRIBUTIONS, Distribution
from debian import CACHE

KERNEL = "6.1"
#: What every image has: systemd as init, udev, and the Python that Debian packages run on.
BASE = ("systemd-sysv", "dbus", "udev", "kmod", "procps", "iproute2", "python3", "ca-certificates")
#: What of that a host without Python lacks.
PYTHON = "python3"
#: Of the kernel's drivers, those for what a virtual machine has. All are read whenever a package brings a module, over
#: and over in the emulator, which takes longer than anything else that DKMS does.
DRIVERS = ("block", "char", "net", "virtio")
#: What else a root is made of than its packages: counted up where that changes.
MADE = "2"


def build(
    packages: Sequence[str] = (),
    *,
    headers: bool = False,
    python: bool = True,
    distribution: Distribution = DISTRIBUTIONS["debian-12"],
) -> Path:
    """Return the root with BASE and ``packages``, made if it is not in the cache; without ``python`` it has none."""
    release = kernels.get(KERNEL, CACHE).release
    wanted = sorted(
        {*BASE, *packages, *((f"linux-headers-{release}",) if headers else ())} - {"" if python else PYTHON}
    )
    suite = distribution.suite
    key = hashlib.sha256(" ".join((MADE, suite, release, *wanted)).encode()).hexdigest()[:12]
    root = CACHE / "roots" / f"{suite}-{key}"
    if not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix="making.", dir=root.parent))
        _debootstrap(making, distribution, wanted)
        modules = kernels.get(KERNEL, CACHE).boot().modules
        assert modules is not None
        there = making / "usr/lib/modules" / release
        shutil.copytree(modules, there, symlinks=True, dirs_exist_ok=True, ignore=_drivers_of_others)
        subprocess.run(["depmod", "-b", str(making), release], check=True)
        _settle(making)
        making.chmod(0o755)
        making.rename(root)
    return root


def boot(
    root: Path,
    command: Sequence[str],
    *,
    share: Path,
    environment: dict[str, str] | None = None,
    timeout_s: float = 600,
    memory: str = "2G",
    mask: Sequence[str] = (),
) -> vm.Outcome:
    """Boot a root with systemd and run ``command`` in it; the units of ``mask`` are not started."""
    return vm.boot(
        kernels.get(KERNEL, CACHE).boot(),
        command,
        share=share,
        cwd=Path("/root"),
        root=root,
        environment=environment,
        timeout_s=timeout_s,
        memory=memory,
        append=" ".join(("systemd.show_status=0", *(f"systemd.mask={unit}" for unit in mask))),
        qemu=emulator.get(CACHE),
    )


def _debootstrap(root: Path, distribution: Distribution, packages: Sequence[str]) -> None:
    command = [
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        f"--include={','.join(packages)}",
        f"--keyring={distribution.keyring()}",
        distribution.suite,
        str(root),
        *distribution.lines,
    ]
    subprocess.run(command, check=True)


def _drivers_of_others(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name not in DRIVERS] if folder.endswith("/kernel/drivers") else []


def _settle(root: Path) -> None:
    """Say what a machine's owner would have said: no console logins, no clock to set, a name, the lane's service."""
    for unit in ("getty@tty1.service", "serial-getty@ttyS0.service", "systemd-timesyncd.service", "apt-daily.timer"):
        (root / "etc/systemd/system" / unit).unlink(missing_ok=True)
        (root / "etc/systemd/system" / unit).symlink_to("/dev/null")
    (root / "etc/hostname").write_text("qgpu-vm\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost qgpu-vm\n")
    (root / "etc/machine-id").write_text("uninitialized\n")
    for folder in ("etc", "var"):  # as systemd's own update leaves them: nothing is out of date
        (root / folder / ".updated").touch()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distribution", choices=DISTRIBUTIONS, default="debian-12")
    parser.add_argument("--packages", default="", help="beside the base, with commas between them")
    parser.add_argument("--headers", action="store_true", help="with the kernel's headers")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    packages = [name for name in arguments.packages.split(",") if name]
    root = build(packages, headers=arguments.headers, distribution=DISTRIBUTIONS[arguments.distribution])
    print(root)
    with tempfile.TemporaryDirectory(prefix="qgpu-share.") as share:
        outcome = boot(root, arguments.command, share=Path(share))
    print(outcome.output or outcome.dmesg)
    print(f"status {outcome.status}, {outcome.seconds:.0f} s in the VM")
    return 0 if outcome.status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())

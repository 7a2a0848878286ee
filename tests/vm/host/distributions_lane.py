"""The distributions lane: the packages are installed, used and removed on each distribution of archives.py.

    distributions_lane.py [--only ubuntu-22.04,...] [--debs FOLDER] [--paste]
    distributions_lane.py --tools

Each is a container (systemd-nspawn) over a clean root, in which the distribution's own systemd starts and its own apt
fetches what the packages depend on. What happens inside is distributions_guest.py's. Such a container starts in
seconds, where a VM without KVM takes minutes; the kernel is this machine's. The service's upgrade, real pods and the
module are the host lane's (lane.py). As root; nothing of this machine is changed.

``--paste`` pastes there instead what README and docs/install.md tell a reader to type (pasting_guest.py).

``--tools`` installs on Debian 12 what ``make check`` installs, and finds the services and the browser as they were
(tools_guest.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import image
from archives import DISTRIBUTIONS
from debian import CACHE, MIRROR, Suite, alone, unpack

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
GUEST = ("distributions_guest.py", "trace_of.py")
PACKAGES = ("qgpu", "qgpu-k8s")
PASTING = ("tests/vm/host/pasting_guest.py", "tests/documents.py", "tests/pasting.py")
#: Where Debian keeps the certificates that pip trusts; a proxy's own may be among this machine's.
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")

#: Runs when the boot is done, and ends the container. The folder of {share} is there under the same name as in the VMs.
_UNIT = """
[Unit]
After=multi-user.target
[Service]
Type=oneshot
Environment=LC_ALL=C.UTF-8
ExecStart={program}
ExecStopPost=-/bin/systemctl --quiet poweroff --force --force
StandardOutput=append:/run/share/output
StandardError=append:/run/share/output
"""
_CONTAINER = """
mount -t tmpfs none {work}
mkdir {work}/upper {work}/work {work}/root
mount -t overlay -o lowerdir={root},upperdir={work}/upper,workdir={work}/work none {work}/root
cp {share}/command.service {work}/root/etc/systemd/system
ln -s ../command.service {work}/root/etc/systemd/system/multi-user.target.wants
ln -s /dev/null {work}/root/etc/systemd/system/console-getty.service
export SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 LD_LIBRARY_PATH={nspawn}/usr/lib/x86_64-linux-gnu/systemd
exec {nspawn}/usr/bin/systemd-nspawn --quiet --register=no --keep-unit --machine={name} \
	--directory={work}/root --bind={share}:/run/share --resolv-conf=replace-host --timezone=off --boot
"""


def nspawn() -> Path:
    """Return the folder of Debian's systemd-nspawn, unpacked: to install it would change this machine's systemd."""
    place = CACHE / "systemd-container"
    if not (place / "done").exists():
        with alone(CACHE):
            for package in ("systemd-container", "libsystemd-shared"):
                unpack(package, Suite(MIRROR, "bookworm"), CACHE, place)
        (place / "done").touch()
    return place


def contained(root: Path, share: Path, program: str, timeout_s: float = 600) -> dict[str, Any]:
    """Start a container over a root and run a program in it; what the program left as found.json in ``share``."""
    with tempfile.TemporaryDirectory() as work:
        (share / "command.service").write_text(_UNIT.format(program=program))
        script = _CONTAINER.format(work=work, root=root, share=share, nspawn=nspawn(), name=f"qgpu-{os.getpid()}")
        command = ["unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-ec", script]
        started = time.monotonic()
        try:
            console = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
            ).stderr
        except subprocess.TimeoutExpired:
            console = f"not done after {timeout_s:.0f} s"
    found, output = share / "found.json", share / "output"
    print(output.read_text() if output.exists() else console, flush=True)
    result: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {"failed": ["it did not end well"]}
    return result | {"seconds": round(time.monotonic() - started)}


def tried(name: str, debs: Path) -> dict[str, Any]:
    """Install, use and remove the packages on a distribution; what was found."""
    print(f"== {name}", flush=True)
    root = image.build(("apt",), distribution=DISTRIBUTIONS[name])
    with tempfile.TemporaryDirectory(prefix="qgpu-share.") as share:
        for package in PACKAGES:
            (deb,) = debs.glob(f"{package}_*_amd64.deb")
            shutil.copy(deb, share)
        for file in GUEST:
            shutil.copy(HERE / file, share)
        return contained(root, Path(share), "/usr/bin/python3 /run/share/distributions_guest.py")


def pasted(name: str, dist: Path) -> dict[str, Any]:
    """Paste the documents' blocks on a distribution; how many, and which failed."""
    print(f"== {name}", flush=True)
    root = image.build(("apt",), distribution=DISTRIBUTIONS[name])
    with tempfile.TemporaryDirectory(prefix="qgpu-share.") as share:
        for file in PASTING:
            shutil.copy(ROOT / file, share)
        shutil.copy(CERTIFICATES, Path(share, "certificates"))
        with tarfile.open(_tree(share), "a") as archive:
            for package in [*dist.glob("qgpu*_amd64.deb"), *dist.glob("*.whl")]:
                archive.add(package, f"dist/{package.name}")
        return contained(root, Path(share), "/usr/bin/python3 /run/share/pasting_guest.py", 3600)


def tools() -> dict[str, Any]:
    """Install what ``make check`` does as root; what that changed of services and browser."""
    print("== what make check installs", flush=True)
    with tempfile.TemporaryDirectory(prefix="qgpu-share.") as share:
        shutil.copy(HERE / "tools_guest.py", share)
        _tree(share)
        return contained(image.build(("apt",)), Path(share), "/usr/bin/python3 /run/share/tools_guest.py", 1200)


def _tree(share: str) -> Path:
    """Put what is committed into a folder, as one archive."""
    tree = Path(share, "tree.tar")
    subprocess.run(["git", "-C", str(ROOT), "archive", "--output", str(tree), "HEAD"], check=True)
    return tree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(DISTRIBUTIONS), help="distributions, with commas between them")
    parser.add_argument("--debs", type=Path, default=ROOT / "dist", help="where the packages lie (make packages)")
    parser.add_argument("--paste", action="store_true", help="what the documents say, instead")
    parser.add_argument("--tools", action="store_true", help="what make check installs, instead")
    arguments = parser.parse_args()
    if arguments.tools:
        found = tools()
        return 1 if found["failed"] or found.get("changed") else 0
    if unknown := set(arguments.only.split(",")) - DISTRIBUTIONS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(DISTRIBUTIONS)}")
    lane = pasted if arguments.paste else tried
    found = {name: lane(name, arguments.debs.resolve()) for name in arguments.only.split(",")}
    failed = {name: each["failed"] for name, each in found.items() if each["failed"]}
    print(json.dumps(found, indent=2))
    if arguments.paste:
        print(f"{sum(each.get('pasted', 0) for each in found.values())} blocks pasted; failed: {failed or 'none'}")
        return 1 if failed else 0
    left = sum(len(each.get("left", ())) for each in found.values())
    print(f"{len(found) - len(failed)} of {len(found)} distributions: installed, used and removed; {left} things left")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

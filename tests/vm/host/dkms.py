"""DKMS outside the emulator: builds qgpu-dkms for the VM's kernel in the VM's own root, on the host's CPUs.

What comes back is DKMS's own archive of a built module (``dkms mktarball``), which the package's installation takes
from /usr/share/qgpu-dkms where it lies there. Everything but the compiler then runs in the VM as on any host.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

_SCRIPT = """
mount -t tmpfs none {work}
mkdir {work}/upper {work}/work {work}/root
mount -t overlay -o lowerdir={root},upperdir={work}/upper,workdir={work}/work none {work}/root
mount -t proc proc {work}/root/proc
mount --bind /dev {work}/root/dev
cp {deb} {work}/root/tmp/module.deb
chroot {work}/root /bin/sh -ec '
	export PATH=/usr/sbin:/usr/bin:/sbin:/bin
	dpkg --unpack /tmp/module.deb
	dkms add qgpu/{version}
	dkms build qgpu/{version} -k {release} || {{ cat /var/lib/dkms/qgpu/{version}/build/make.log; exit 1; }}
	dkms mktarball qgpu/{version} -k {release} --archive qgpu-{version}.dkms.tar.gz'
cp {work}/root/var/lib/dkms/qgpu/{version}/tarball/* {out}
"""


def build(root: Path, deb: Path, version: str, release: str, out: Path) -> None:
    """Build the module of a package for a kernel of ``root``; DKMS's archive of it goes into ``out``."""
    with tempfile.TemporaryDirectory(prefix="qgpu-dkms.") as work:
        script = _SCRIPT.format(work=work, root=root, deb=deb, version=version, release=release, out=out)
        result = subprocess.run(["unshare", "-m", "sh", "-ec", script], capture_output=True, text=True, check=False)
        if result.returncode:
            raise SystemExit(f"DKMS: {result.stdout}{result.stderr}")

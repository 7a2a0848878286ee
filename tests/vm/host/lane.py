"""The host lane: a clean Debian with systemd, the packages installed, used, upgraded under load and removed in it.

    lane.py [--results FILE] [--keep-packages] [--compile-inside] [--short]

Builds the packages in two versions (packaging/build.py), the simulated driver for the VM's kernel, and the VM's root
(image.py); what happens inside is guest.py's. The module is built by DKMS in that root, but outside the emulator,
where a compiler takes ten seconds and not ten minutes (dkms.py); --compile-inside has the VM do it. Python needs
``build``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import dkms
import image
import kernels

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
sys.path += [str(ROOT / "bench"), str(ROOT / "tests")]
GUEST = ("vm/host/guest.py", "vm/host/trace_of.py", "vm/host/pod.py", "vm/host/standin.py", "vm/host/contained.py")
GUEST += ("vm/host/seen.py", "vm/host/browse.py", "vm/guest/nv.py", "vm/guest/qg.py", "vm/guest/simcard.py")
GUEST += ("documents.py",)
WITH = ("dkms", "man-db", "podman", "crun", "runc", "prometheus", "chromium-headless-shell")
#: What Debian's own packages would start, besides what the lane does; podman's would find out too early, on a root that
#: is an overlay itself, that it cannot have overlays, and remember it.
MASK = ("prometheus.service", "podman.service", "podman.socket", "podman-restart.service", "podman-auto-update.timer")
MASK += ("podman-auto-update.service", "podman-clean-transient.service", "dpkg-db-backup.timer")  # at midnight
VERSIONS = ("0.1.0", "0.1.0+next")


def packages(keep: bool) -> Path:
    """Build the packages in both versions; their folder."""
    out = image.CACHE / "host-packages"
    if not (keep and list(out.glob("*.deb"))):
        shutil.rmtree(out, ignore_errors=True)
        versions = [word for version in VERSIONS for word in ("--version", version)]
        subprocess.run([sys.executable, str(ROOT / "packaging/build.py"), *versions, "--out", str(out)], check=True)
    return out


def compile_modules(debs: Path, root: Path) -> list[Path]:
    """Have DKMS compile the module of each version, beside its package; its archives."""
    release = kernels.get(image.KERNEL, image.CACHE).release
    for version in VERSIONS:
        if not (debs / f"qgpu-{version}.dkms.tar.gz").exists():
            dkms.build(root, debs / f"qgpu-dkms_{version}_all.deb", version, release, debs)
    return sorted(debs.glob("*.dkms.tar.gz"))


def driver() -> Path:
    """Build the simulated driver for the VM's kernel; its file."""
    source, work = kernels.get(image.KERNEL, image.CACHE), image.CACHE / "build" / "host"
    for name in ("kmod", "tests/vm/simnv"):
        ignore = shutil.ignore_patterns("*.o", "*.ko", ".*")
        shutil.copytree(ROOT / name, work / Path(name).name, dirs_exist_ok=True, ignore=ignore)
    options = ["CONFIG_DEBUG_INFO_BTF_MODULES=", *source.variables]
    command = ["make", "-s", "-C", str(source.headers), f"M={work / 'simnv'}", *options, "modules"]
    subprocess.run(command, check=True)
    return work / "simnv" / "nvidia.ko"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="JSON file the figures go to")
    parser.add_argument("--keep-packages", action="store_true", help="those of the last run, if there are any")
    parser.add_argument("--compile-inside", action="store_true", help="no module built outside the VM")
    parser.add_argument("--short", action="store_true", help="no Prometheus, no browser, no upgrade of the module")
    parser.add_argument("--timeout", type=float, default=2700, help="seconds the guest may take")
    arguments = parser.parse_args()
    import documents

    started = time.monotonic()
    debs, module = packages(arguments.keep_packages), driver()
    root = image.build(WITH, headers=True)
    with tempfile.TemporaryDirectory(prefix="qgpu-share.") as folder:
        share = Path(folder)
        archives = [] if arguments.compile_inside else compile_modules(debs, root)
        for file in (*debs.glob("*.deb"), *archives, module, *(ROOT / "tests" / name for name in GUEST)):
            shutil.copy(file, share)
        for file in documents.files(ROOT):
            copy = share / "tree" / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
        outcome = image.boot(
            root,
            ["python3", "/run/share/guest.py", *(["--short"] if arguments.short else [])],
            share=share,
            timeout_s=arguments.timeout,
            memory="3G",
            mask=MASK,
        )
        found = share / "figures.json"
        figures = json.loads(found.read_text()) if found.exists() else {}
        journal = (share / "journal").read_text(errors="replace") if (share / "journal").exists() else ""
    print(outcome.output)
    if outcome.status != 0:
        print("\n".join(line for line in journal.splitlines() if "qgpu" in line)[-6000:] or outcome.dmesg[-6000:])
    figures["hosttest_s"] = round(time.monotonic() - started)
    print(json.dumps(figures, indent=2))
    print(f"status {outcome.status}, {outcome.seconds:.0f} s in the VM")
    if arguments.results:
        import host_figures

        device = "simulated driver, Debian 12 under QEMU (TCG)"
        counted = figures | {"failed": len(figures.get("failed", ["all"]))}
        host_figures.keep("make hosttest", device, counted, arguments.results)
    return 0 if outcome.status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())

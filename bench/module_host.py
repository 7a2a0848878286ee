"""Examine a host, and build, sign, load and in any case unload the kernel module, for the length of a test.

gputest_kmod.py uses the loaded module. ``examine`` finds out whether the host can load the module before anything is
changed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from harness import ROOT

from qgpu.errors import NotSupportedError, PermissionDeniedError
from qgpu.linux import cgroup
from qgpu.nvidia import versions
from qgpu.planes.kmod.device import Device, problem_of, text_of

_SYS = Path("/sys/module")
_DISABLED = Path("/proc/sys/kernel/modules_disabled")
_SECURE_BOOT = Path("/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c")
#: Where distributions keep the key that a machine's owner enrolled (mokutil), and its certificate.
_KEYS = (
    ("/var/lib/shim-signed/mok/MOK.priv", "/var/lib/shim-signed/mok/MOK.der"),
    ("/var/lib/dkms/mok.key", "/var/lib/dkms/mok.pub"),
    ("/etc/pki/akmods/private/private_key.priv", "/etc/pki/akmods/certs/public_key.der"),
)
_CAP_SYS_MODULE = 16
#: How long killed programs may take to close the module's device.
_UNLOAD_S = 60.0


@dataclass(frozen=True, slots=True)
class Host:
    """The properties of this host that matter to a module."""

    kernel: str
    driver: str
    headers: str
    secure_boot: str
    #: Why the kernel refuses modules without a signature; empty if it does not.
    signature_needed: str
    #: The key and its certificate, or nothing.
    key: tuple[str, str] | None


def examine(
    headers: Path | None, key: tuple[str, str] | None, *, build: bool = True, driver: str | None = None
) -> Host:
    """Find out whether the module can be built and loaded here, for the driver that is loaded or is named.

    Raises QgpuError with what to do about it.
    """
    release = os.uname().release
    if os.geteuid() or not _may_load():
        raise PermissionDeniedError("only root with CAP_SYS_MODULE can load modules; run it as root, in no container")
    if not _DISABLED.exists():
        raise NotSupportedError(f"this kernel takes no modules: there is no {_DISABLED}")
    if _DISABLED.read_text().strip() == "1":
        raise PermissionDeniedError(f"{_DISABLED} is 1: no module can be loaded before the next boot")
    if (_SYS / "qgpu").exists():
        raise NotSupportedError("qgpu is loaded already; this test unloads what it tests: first rmmod qgpu")
    driver = driver or versions.installed()
    versions.find(driver)
    cgroup.mount()
    headers = headers or Path("/lib/modules", release, "build")
    if build:
        if not (headers / "Makefile").exists():
            raise NotSupportedError(
                f"{headers}: no kernel headers; install those of kernel {release}, or say --headers"
            )
        for tool in ("make", "gcc"):
            if shutil.which(tool) is None:
                raise NotSupportedError(f"{tool} is not installed; the module is built with it")
    needed = _signature_needed()
    key = key or next((pair for pair in _KEYS if all(os.access(path, os.R_OK) for path in pair)), None)
    if needed and not key:
        raise NotSupportedError(
            f"the kernel takes only signed modules ({needed}), and there is no key in {_KEYS[0][0]} or {_KEYS[1][0]}; "
            "enrol one with mokutil, and name it by --key and --cert"
        )
    return Host(release, driver, str(headers), _secure_boot(), needed, key)


def _may_load() -> bool:
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> _CAP_SYS_MODULE & 1)


def _secure_boot() -> str:
    try:
        return "on" if _SECURE_BOOT.read_bytes()[-1] else "off"
    except OSError:
        return "off (no EFI variable says otherwise)"


def _signature_needed() -> str:
    """Return why the kernel refuses unsigned modules; empty if it accepts them."""
    with suppress(OSError):
        if (_SYS / "module/parameters/sig_enforce").read_text().strip() == "Y":
            return "module.sig_enforce"
    with suppress(OSError):
        if "[none]" not in (found := Path("/sys/kernel/security/lockdown").read_text().strip()):
            return f"lockdown: {found}"
    return ""


def build(host: Host, into: Path, log: IO[str]) -> list[Path]:
    """Build the module and, where the branch needs it, its glue; return them in the order in which they load.

    Raises QgpuError if they do not build.
    """
    tree = into / "kmod"
    shutil.copytree(ROOT / "kmod", tree, ignore=shutil.ignore_patterns("*.o", "*.ko", "*.mod*", ".*"))
    nvidia = subprocess.run(["modinfo", "-n", "nvidia"], capture_output=True, text=True, check=False).stdout.strip()
    command = ["make", "-C", str(tree), f"-j{os.cpu_count()}", f"KDIR={host.headers}", "CONFIG_DEBUG_INFO_BTF_MODULES="]
    command += [f"NVIDIA_KO={nvidia}"] if Path(nvidia).is_file() else []
    if subprocess.run([*command, "modules"], stdout=log, stderr=log, check=False).returncode:
        raise NotSupportedError(f"the module does not build for {host.kernel} with {host.headers}; see build.log")
    return modules_in(tree)


def modules_in(folder: Path) -> list[Path]:
    """Find the module, and the glue if it is there. Raises QgpuError without a module."""
    if not (folder / "qgpu.ko").exists():
        raise NotSupportedError(f"{folder}: no qgpu.ko in it")
    return [path for path in (folder / "qgpu.ko", folder / "qgpu_rm.ko") if path.exists()]


def sign(host: Host, modules: list[Path]) -> str:
    """Sign the modules if there is a key; return what was done. Raises QgpuError if it fails where it must not."""
    if host.key is None:
        return "not signed: no key"
    tool = Path(host.headers, "scripts/sign-file")
    for module in modules:
        command = [str(tool), "sha256", *host.key, str(module)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            said = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        except OSError as error:
            said = [f"{tool}: {error.strerror}"]
        if said and host.signature_needed:
            raise NotSupportedError(f"the module cannot be signed: {said[0]}")
        if said:
            return f"not signed: {said[0]}"
    return f"signed with {host.key[0]}"


class Loaded:
    """A loaded module, and the process that unloads it."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        #: The version of the driver that the module enforces on.
        self.driver = ""

    def end_with(self, group: int) -> None:
        """Have a process group killed before the module is unloaded, if it still runs then."""
        os.write(self._pipe, f"{group}\n".encode())


@contextmanager
def loaded(modules: list[Path], ended: Path, options: Sequence[str] = ()) -> Iterator[Loaded]:
    """Load the modules, the first with these options (NAME=VALUE), and unload them in the end.

    A process of its own unloads them, also if this process is killed. It writes its result to the file ``ended`` (JSON,
    see ``Ended``). Raises QgpuError if the module does not load or does not enforce.
    """
    theirs, ours = os.pipe()
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, __file__, str(theirs), str(ended)]
    with subprocess.Popen(command, pass_fds=[theirs], start_new_session=True, env=environment) as unloader:
        os.close(theirs)
        try:
            found = Loaded(ours)
            _insmod(modules[0], *options)
            for module in modules[1:]:
                _insmod(module)
            found.driver = _enforces()
            yield found
        finally:
            os.close(ours)
            if unloader.wait() or not ended.exists():  # it was killed itself
                unload(ended)


def _insmod(module: Path, *options: str) -> None:
    done = subprocess.run(["insmod", str(module), *options], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip()
        why = (
            "its key is not enrolled here (mokutil --test-key)" if os.strerror(errno.EKEYREJECTED) in said else "dmesg"
        )
        raise NotSupportedError(f"the kernel refuses {module.name}: {said.rpartition(': ')[2]}; see {why}")


def _enforces() -> str:
    """Wait until the module has attached; return the driver's version. Raises QgpuError if it has not."""
    until = time.monotonic() + 10
    device = Device()
    try:
        while problem := problem_of(device.info()):
            if time.monotonic() > until:
                raise NotSupportedError(f"the module is loaded but does not enforce: {problem}")
            time.sleep(0.1)
        return text_of(device.info().driver)
    finally:
        device.close()


@dataclass(slots=True)
class Ended:
    """The result of unloading the module."""

    unloaded: bool
    seconds: float
    killed: list[str]
    trouble: str = ""


def unload(ended: Path, groups: Iterable[int] = ()) -> None:
    """Switch the module off, kill its users, unload it, and write the result. Never raises."""
    began = time.monotonic()
    found = Ended(False, 0.0, [])
    with suppress(OSError):  # from here on every gate is open, even if nothing else works
        (_SYS / "qgpu/parameters/enforce").write_text("0")
    for group in groups:
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    while not found.unloaded and time.monotonic() < began + _UNLOAD_S:
        found.killed += _kill_holders()
        found.trouble = _rmmod("qgpu_rm") or _rmmod("qgpu")
        found.unloaded = not found.trouble  # not looked up again: another module may be loaded by now
        time.sleep(0 if found.unloaded else 0.1)
    found.seconds = round(time.monotonic() - began, 2)
    with suppress(OSError):
        ended.write_text(json.dumps(asdict(found)))


def _rmmod(name: str) -> str:
    """Unload a module if it is loaded; return the error, empty on success."""
    if not (_SYS / name).exists():
        return ""
    done = subprocess.run(["rmmod", name], capture_output=True, text=True, check=False)
    return done.stderr.strip() or "rmmod failed" if done.returncode else ""


def _kill_holders() -> list[str]:
    """Kill all processes that have the module's device open; none had it open before this test."""
    killed = []
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):
            if int(folder.parent.name) != os.getpid() and any(
                os.readlink(fd) == "/dev/qgpu" for fd in folder.iterdir()
            ):
                killed.append((folder.parent / "comm").read_text().strip())
                os.kill(int(folder.parent.name), signal.SIGKILL)
    return killed


def _unload_at_end() -> None:
    """Wait until the test has ended or was killed, and unload."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(int(sys.argv[1])) as told:
        groups = {int(line) for line in told}
    unload(Path(sys.argv[2]), groups)


if __name__ == "__main__":
    _unload_at_end()

"""Boot a kernel under QEMU over a file tree, this machine's own or a given one, and run one command in it.

The guest sees that tree read-only under a tmpfs overlay, and one shared folder read-write at /run/share. On this
machine's own tree the command is all that runs; on a given one it is a service that systemd starts at the end of
the boot. What the command prints, its exit code and the kernel log come back through that folder. Emulation only
(TCG): nested KVM is not to be had everywhere. This file knows nothing of qgpu.
"""

from __future__ import annotations

import contextlib
import gzip
import lzma
import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import tsc

VIRTIOFSD = ("/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd")
NEEDED = ("virtio_pci", "fuse", "virtiofs", "overlay")

_INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t devtmpfs none /dev; mount -t proc none /proc
for m in {modules}; do insmod /m/$m || echo "insmod $m failed"; done
mount -t virtiofs -o ro root /ro || poweroff -f
mount -t tmpfs none /rw; mkdir /rw/upper /rw/work
mount -t overlay -o lowerdir=/ro,upperdir=/rw/upper,workdir=/rw/work none /new || poweroff -f
mount -t proc none /new/proc; mount -t sysfs none /new/sys; mount -t devtmpfs none /new/dev
mount -t cgroup2 none /new/sys/fs/cgroup; mount -t debugfs none /new/sys/kernel/debug
mount -t tmpfs none /new/run; mkdir -p /new/run/share /new/dev/shm
mount -t virtiofs share /new/run/share || poweroff -f
{start}
"""

_ALONE = "exec switch_root /new /bin/sh /run/share/command"

_WITH_SYSTEMD = """cat >/new/run/command.service <<END
[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/bin/sh /run/share/command
END
mkdir -p /new/run/systemd/system/default.target.wants
mv /new/run/command.service /new/run/systemd/system/
ln -s ../command.service /new/run/systemd/system/default.target.wants/
exec switch_root /new /sbin/init"""

_COMMAND = """export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TMPDIR=/tmp PYTHONDONTWRITEBYTECODE=1 {environment}
ip link set lo up 2>/dev/null
cd {cwd}
( while echo >/run/share/alive; do sleep 2; done ) &
( {command} ) </dev/null >/run/share/output 2>&1
echo $? >/run/share/status
dmesg >/run/share/dmesg
[ ! -d /run/systemd/system ] || journalctl -b -o short-monotonic >/run/share/journal
sync
if [ -e /proc/sysrq-trigger ]; then echo o >/proc/sysrq-trigger; else /bin/busybox reboot -f; fi
sleep 60
"""


#: Everything that is emulated, but no fifth level of page tables: each level costs time wherever an address is new.
_CPU = "max,la57=off"
#: What every guest's kernel is told. On a busy host its boot panics if it checks that timer interrupts come in time.
_APPEND = "console=ttyS0 no_console_suspend loglevel=5 tsc=reliable no_timer_check mitigations=off"
#: What ends a guest by itself, its kernel having said on the console what is wrong and where.
_PANICS = (
    "panic=-1 panic_print=0x40 oops=panic unknown_nmi_panic softlockup_panic=1 softlockup_all_cpu_backtrace=1 "
    "sysctl.kernel.hung_task_panic=1"
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel to boot: its image, and the folder of its modules (None: all it needs is built in)."""

    image: Path
    modules: Path | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a command; status is None when the guest did not get to its end.

    ``stuck`` says why a guest was ended that did not end by itself, and where its CPUs were.
    """

    status: int | None
    output: str
    dmesg: str
    seconds: float
    stuck: str = ""


def _clock(counted: bool) -> str:
    khz = 1_000_000 if counted else tsc.khz()  # an instruction is 1 ns
    return f"tsc_early_khz={khz}" if khz else ""


def _unpacked(module: Path) -> bytes:
    if module.suffix == ".xz":
        return lzma.decompress(module.read_bytes())
    if module.suffix == ".zst":
        return subprocess.run(["zstd", "-dcq", str(module)], check=True, capture_output=True).stdout
    return module.read_bytes()


def _module_files(folder: Path) -> list[Path]:
    """Return what NEEDED needs, in an order in which it loads, by modules.dep."""
    needs: dict[str, list[str]] = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[path] = others.split()
    by_name = {Path(path).name.partition(".ko")[0].replace("-", "_"): path for path in needs}
    order: list[str] = []
    for name in NEEDED:
        if name in by_name:
            path = by_name[name]
            order += [item for item in (*reversed(needs[path]), path) if item not in order]
    return [folder / path for path in order]


def _initramfs(kernel: Kernel, folder: Path, start: str) -> Path:
    tree = folder / "initramfs"
    for name in ("bin", "dev", "proc", "m", "ro", "rw", "new"):
        (tree / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", tree / "bin")
    names = []
    for module in _module_files(kernel.modules) if kernel.modules else ():
        names.append(module.name.partition(".ko")[0] + ".ko")
        (tree / "m" / names[-1]).write_bytes(_unpacked(module))
    init = tree / "init"
    init.write_text(_INIT.format(modules=" ".join(names), start=start))
    init.chmod(0o755)
    listing = "\n".join(str(path.relative_to(tree)) for path in tree.rglob("*"))
    archive = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet"], cwd=tree, input=listing.encode(), check=True, capture_output=True
    ).stdout
    packed = folder / "initramfs.gz"
    packed.write_bytes(gzip.compress(archive, 1))
    return packed


@contextmanager
def _served(tag: str, path: Path, folder: Path, cache: str) -> Iterator[list[str]]:
    """Serve a folder by virtiofsd; the QEMU arguments that attach it."""
    socket = folder / f"{tag}.sock"
    daemon = next(name for name in VIRTIOFSD if os.path.exists(name))
    arguments = [
        daemon,
        f"--socket-path={socket}",
        "-o",
        f"source={path}",
        "-o",
        f"cache={cache}",
        "-o",
        "sandbox=chroot",
    ]
    with (folder / f"{tag}.log").open("wb") as log, subprocess.Popen(arguments, stdout=log, stderr=log) as process:
        while not socket.exists() and process.poll() is None:
            time.sleep(0.01)
        yield [
            *("-chardev", f"socket,id={tag},path={socket}"),
            *("-device", f"vhost-user-fs-pci,queue-size=1024,chardev={tag},tag={tag}"),
        ]
        process.terminate()


def _answer(connection: socket.socket) -> str:
    said = b""
    while not said.endswith(b"(qemu) "):
        more = connection.recv(65536)
        if not more:
            raise OSError("gone")
        said += more
    return said.decode(errors="replace")


def _ask(monitor: Path, command: str) -> str:
    """Give QEMU's monitor a command; its answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(monitor))
        _answer(connection)
        connection.sendall(f"{command}\n".encode())
        return _answer(connection)


def _where(monitor: Path) -> str:
    """Say where the CPUs are, a few times; then make the kernel say it on its console, if it still can."""
    try:
        seen = [_ask(monitor, "info registers -a") for _ in range(3)]
        _ask(monitor, "nmi")
    except OSError as error:
        return f"QEMU does not answer: {error}"
    return "\n".join(line.strip() for text in seen for line in re.findall(r"CPU#\d+|[ER]IP=.*", text))


def _watch(process: subprocess.Popen[bytes], alive: Path, monitor: Path, timeout_s: float, silence_s: float) -> str:
    """Wait for the guest's end; what is to be said of one that does not come."""
    end = heard = time.monotonic()
    end += timeout_s
    last = 0.0
    while process.poll() is None:
        now = time.monotonic()
        beat = alive.stat().st_mtime if alive.exists() else 0.0
        if beat != last:
            heard, last = now, beat
        patience_s = silence_s if last else 3 * silence_s  # it has to boot first
        if now > end or now > heard + patience_s:
            why = f"not done after {timeout_s:.0f} s" if now > end else f"silent for {patience_s:.0f} s"
            where = _where(monitor)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            return f"the guest is {why}; its CPUs, three times:\n{where}"
        time.sleep(0.25)
    return ""


def boot(
    kernel: Kernel,
    command: Sequence[str],
    *,
    share: Path,
    cwd: Path,
    root: Path = Path("/"),
    environment: dict[str, str] | None = None,
    timeout_s: float = 600,
    memory: str = "1536M",
    append: str = "",
    single: bool = False,
    counted: bool = False,
    qemu: Sequence[str] = ("qemu-system-x86_64",),
    silence_s: float = 120,
) -> Outcome:
    """Run ``command`` in ``cwd`` on ``kernel``; ``share`` is /run/share in the guest, ``root`` the tree it sees.

    ``single`` runs both CPUs in one thread (see emulator.py). ``counted`` starts one CPU, and the guest's clocks count
    its instructions, 1 ns each; with two the kernel was not up after minutes. A guest that is silent for ``silence_s``
    has hung; a kernel that finds a CPU or a task stuck panics.
    """
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in (environment or {}).items())
    (share / "command").write_text(
        _COMMAND.format(environment=exports, cwd=shlex.quote(str(cwd)), command=shlex.join(command))
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qgpu-vm.")))
        arguments = [
            *(
                *qemu,
                "-M",
                "q35",
                "-accel",
                f"tcg,thread={'single' if single or counted else 'multi'},tb-size=512",
                *("-cpu", _CPU),
            ),
            *("-smp", "2", "-m", memory, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-chardev", f"file,id=console,path={share / 'console'}", "-serial", "chardev:console"),
            *("-object", f"memory-backend-memfd,id=mem,size={memory},share=on", "-numa", "node,memdev=mem"),
            *(
                "-kernel",
                str(kernel.image),
                "-initrd",
                str(_initramfs(kernel, folder, _ALONE if root == Path("/") else _WITH_SYSTEMD)),
            ),
            *("-monitor", f"unix:{folder / 'monitor'},server,nowait"),
            *("-append", f"{_APPEND} {_clock(counted)} {_PANICS} {append} {'maxcpus=1' * counted}"),
            *(("-icount", "shift=0") if counted else ()),
            *stack.enter_context(_served("root", root, folder, "always")),
            *stack.enter_context(_served("share", share, folder, "none")),
        ]
        started = time.monotonic()
        with subprocess.Popen(arguments, stdin=subprocess.DEVNULL) as process:
            stuck = _watch(process, share / "alive", folder / "monitor", timeout_s, silence_s)
            process.kill()
        seconds = time.monotonic() - started
    read = {name: _text(share / name) for name in ("status", "output", "dmesg", "console")}
    status = int(read["status"]) if read["status"].strip() else None
    return Outcome(status, read["output"], read["dmesg"] or read["console"], seconds, stuck)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""

"""What the lane does inside the VM: install, use, look, upgrade under load, remove; each step checked, figures kept.

It lies in the share's folder beside the packages in two versions and the documents, and runs on Debian's own Python as
root. Whatever the documents say is for a host (tests/documents.py) is run as it stands there, at its stage.
``--short`` leaves out the look and the second module.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contained
import documents
import seen
import trace_of

SHARE = Path(__file__).resolve().parent
DROP_IN = Path("/etc/systemd/system/qgpud.service.d/simulated.conf")
BUILT = Path("/usr/share/qgpu-dkms")
OLD, NEW = "0.1.0", "0.1.0+next"
SETTLE_S, MEASURE_S, WINDOWS = 3, 10, 6
#: Where who follows the documents is, and what differs here from what is written there.
PLACE, APT = Path("/run/place"), Path("/run/apt.conf")
AS_HERE = {
    r"\bpodman run ": "podman run --network none ",
    r"\bIMAGE\b": f"--rootfs {contained.ROOTFS} sleep 1",
}
ENVIRONMENT = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "APT_CONFIG": str(APT)}
#: Where the BPF program is held.
PINS = Path("/sys/fs/bpf/qgpu")
figures: dict[str, Any] = {}
ran: list[str] = []


def say(what: str) -> None:
    print(f"[{time.monotonic():7.1f}] {what}", flush=True)


def sh(*command: str, check: bool = True) -> str:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if check and result.returncode:
        raise SystemExit(f"{' '.join(command)}: {result.returncode}\n{result.stdout}")
    return result.stdout


def ctl(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(sh("qgpuctl", "--timeout", "120", *arguments, "-o", "json"))
    return answer


def until(condition: Callable[[], Any], what: str, seconds: float = 300) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise SystemExit(f"did not come: {what}\n" + sh("journalctl", "-b", "-u", "qgpud", "-n", "40", check=False))
        time.sleep(0.2)
    return value


def check(what: str, held: bool, found: object = "") -> None:
    say(f"{'ok' if held else 'FAILED'}: {what} {found}")
    if not held:
        figures["failed"].append(what)


def install(version: str, *names: str) -> float:
    started = time.monotonic()
    debs = [str(next(SHARE.glob(f"{name}_{version}_*.deb"))) for name in names]
    command = ["apt-get", "install", *debs]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    print(result.stdout, flush=True)
    if result.returncode:
        for log in Path("/var/lib/dkms").rglob("make.log"):
            print(log.read_text()[-3000:])
        raise SystemExit(f"install failed: {result.returncode}")
    return time.monotonic() - started


def active() -> bool:
    return sh("systemctl", "is-active", "qgpud", check=False).strip() == "active"


def main_pid() -> str:
    return sh("systemctl", "show", "-P", "MainPID", "qgpud").strip()


def measure(what: str) -> None:
    """Measure the ratio until it is as asked, a few times at most, for a starved emulator misses leases; note all."""
    figures[f"ratio_{what}"] = found = []
    for _ in range(WINDOWS):
        time.sleep(SETTLE_S)
        found.append(contained.ratio(MEASURE_S))
        if abs(found[-1] / 2 - 1) < 0.1:
            break
    check(f"two containers at 2:1 {what}", abs(found[-1] / 2 - 1) < 0.1, found)


def documented(stage: str) -> None:
    """Run what the documents say of a stage; a line that fails is told, and the lane goes on."""
    for block in documents.blocks(SHARE / "tree"):
        if block.runner == f"host {stage}":
            started = time.monotonic()
            try:
                documents.run(block, PLACE, ENVIRONMENT, AS_HERE)
                check(f"as documented: {block.place}", True, f"{time.monotonic() - started:.0f} s")
            except documents.Failed as error:
                check(f"as documented: {block.place}", False, error)
            ran.append(block.place)


def grants() -> Any:
    return {pod["name"]: pod["grants"] for pod in ctl("pod", "list")["pods"]}


def driver() -> None:
    """The simulated driver in NVIDIA's place, and the daemon's source for it."""
    sh("insmod", str(SHARE / "nvidia.ko"))
    for name, minor in (("nvidiactl", 255), ("nvidia0", 0)):
        os.mknod(f"/dev/{name}", 0o020666, os.makedev(195, minor))
    DROP_IN.parent.mkdir(parents=True)
    program = f"/usr/lib/qgpu/bin/python -I {SHARE}/simcard.py --config /etc/qgpu/qgpud.toml"
    beside = f"/usr/lib/qgpu/bin/python -I {SHARE}/standin.py"
    DROP_IN.write_text(f"[Service]\nExecStart=\nExecStart={program}\nExecStartPost={beside}\n")
    for archive in SHARE.glob("*.dkms.tar.gz"):  # see dkms.py
        BUILT.mkdir(parents=True, exist_ok=True)
        shutil.copy(archive, BUILT)


def place() -> None:
    """A folder as who follows the documents has it: the packages, the old ones in dist/."""
    (PLACE / "dist").mkdir(parents=True)
    for name in ("qgpu", "qgpu-dkms"):
        shutil.copy(next(SHARE.glob(f"{name}_{OLD}_*.deb")), PLACE / "dist")
    shutil.copy(next(SHARE.glob(f"qgpu_{NEW}_*.deb")), PLACE / "qgpu_NEW.deb")
    # no network, nobody to answer
    APT.write_text('APT::Install-Recommends "false";\nAPT::Get::Assume-Yes "true";\n')


def installed() -> None:
    say("install")
    started = time.monotonic()
    documented("install")
    figures["install_s"] = round(time.monotonic() - started, 1)
    figures["install_steps"] = 1
    check("service active", active(), sh("systemctl", "status", "--no-pager", "qgpud", check=False))
    check("module loaded", Path("/sys/module/qgpu").exists() and Path("/dev/qgpu").exists())
    status = ctl("status")
    check("plane kmod", status["plane"] == "kmod", status)
    check("device files are kept to their pods", status["device_files"]["enforced"], status["device_files"])
    check("/dev/qgpu is root's", Path("/dev/qgpu").stat().st_mode & 0o777 == 0o600)
    check("group qgpu", "qgpu:" in Path("/etc/group").read_text())
    check("it has not failed", "qgpud" not in sh("systemctl", "--failed"), sh("systemctl", "--failed"))
    check("journal has the daemon's lines", "ready" in sh("journalctl", "-b", "-u", "qgpud"))
    check("no log files", not list(Path("/run/qgpu").glob("*.log")) and not list(Path("/var/log").glob("*qgpu*")))
    security = sh("systemd-analyze", "security", "--no-pager", "qgpud").splitlines()[-1]
    figures["security_exposure"] = float(security.split("qgpud.service:")[1].split()[0])
    check("exposure below 4", figures["security_exposure"] < 4, security)


def used() -> None:
    say("as documented")
    contained.prepare()
    documented("use")
    say("two containers")
    if not contained.start(SHARE, check):
        raise SystemExit("there are no containers to go on with")
    until(lambda: all(contained.steps(name) for name in contained.LIMITS), "pods' steps")
    measure("after install")
    sh("qgpuctl", "gpu", "policy", "set", "0", "burst-share", "--period", "60ms")
    before = grants()
    say("daemon killed")
    old, socket = main_pid(), Path("/run/qgpu/qgpud.sock").stat().st_ino
    sh("systemctl", "kill", "-s", "KILL", "qgpud")
    check("the BPF program outlives a kill", len(list(PINS.glob("*/links-*/*"))) >= 5)
    check("who asks meanwhile waits", ctl("status")["plane"] == "kmod")
    check("the control socket outlives a kill", Path("/run/qgpu/qgpud.sock").stat().st_ino == socket)
    until(lambda: active() and main_pid() not in ("0", old), "the daemon again")
    check("grants after a kill", grants() == before, before)
    check("settings after a kill", ctl("gpu", "list")["gpus"][0]["period_ns"] == 60_000_000)
    measure("after a kill")


def looked_at() -> None:
    """See the pods as Prometheus and a browser do; what goes wrong is told and does not end the lane."""
    for what, look in (("Prometheus", prometheus), ("the page", page)):
        say(what)
        try:
            look()
        except (OSError, KeyError, subprocess.SubprocessError) as error:
            check(what, False, repr(error))


def prometheus() -> None:
    queries = [
        line for block in documents.blocks(SHARE / "tree") if block.language == "promql" for line in block.commands
    ]
    seen.scraped([line.partition("#")[0] for line in queries], check, figures)


def page() -> None:
    try:
        seen.driven(lambda: str(ctl("gpu", "show", "0")["gpu"]["policy"]), check, figures)
    finally:
        sh("qgpuctl", "gpu", "policy", "set", "0", "burst-share")


def upgraded(*, module: bool) -> None:
    """Upgrade the package under its pods; and ``module``, which stays while they run."""
    quiet_since, before = time.monotonic(), grants()
    measure("before the upgrade")
    say("upgrade with pods running")
    old, started, socket = main_pid(), time.monotonic(), Path("/run/qgpu/qgpud.sock").stat().st_ino
    quiet = {name: contained.gap_ms(name, quiet_since, started) for name in contained.LIMITS}
    documented("upgrade")
    figures["upgrade_s"] = round(time.monotonic() - started, 1)
    until(lambda: active() and main_pid() not in ("0", old), "the new daemon")
    check("it is the new version", NEW in sh("dpkg-query", "-W", "qgpu"))
    check("the control socket outlives the upgrade", Path("/run/qgpu/qgpud.sock").stat().st_ino == socket)
    check("grants after the upgrade", grants() == before, before)
    check("settings after the upgrade", ctl("gpu", "list")["gpus"][0]["period_ns"] == 60_000_000)
    until(lambda: time.monotonic() > started + MEASURE_S, "as long as the quiet time")
    stalls = {name: contained.gap_ms(name, started, time.monotonic()) for name in contained.LIMITS}
    figures.update(quiet_stall_ms=max(quiet.values()), upgrade_pod_stall_ms=max(stalls.values()))
    say(f"longest standstills: {quiet} before, {stalls} over the restart and the upgrade")
    measure("after the upgrade")
    if module:
        figures["upgrade_dkms_s"] = round(install(NEW, "qgpu-dkms"), 1)
    check("the module stays while pods run", Path("/sys/module/qgpu").exists() and grants() == before)


def removed(before: dict[str, str]) -> None:
    say("switch off")
    contained.end()
    until(lambda: not ctl("pod", "list")["pods"], "no pods")
    guardian = Path("/run/qgpu/standin").read_text()
    documented("off")
    check("without pods the BPF program goes with the daemon", not list(PINS.glob("*/links-*")))
    check("it is off", not active() and not Path("/sys/module/qgpu").exists())
    check("stopping leaves the guardian", Path("/proc", guardian, "cgroup").read_text() == "0::/qgpu-guardian\n")
    os.kill(int(guardian), signal.SIGKILL)
    sh("modprobe", "qgpu")
    sh("systemctl", "enable", "--now", "qgpud")
    say("remove")
    documented("remove")
    shutil.rmtree(BUILT, ignore_errors=True)
    DROP_IN.unlink()
    DROP_IN.parent.rmdir()
    sh("systemctl", "daemon-reload")
    for name in ("nvidiactl", "nvidia0"):
        Path("/dev", name).unlink()
    sh("rmmod", "nvidia")
    contained.clean()
    shutil.rmtree(PLACE)
    APT.unlink()
    left = trace_of.difference(before, trace_of.snapshot())
    figures["left_behind"] = left
    check("no BPF program is left", not PINS.exists())
    check("removed without a trace", not left, "\n" + "\n".join(left))


def main() -> None:
    sh("udevadm", "settle")
    before = trace_of.snapshot()
    figures["failed"] = []
    short = "--short" in sys.argv
    started = time.monotonic()
    try:
        place()
        driver()
        installed()
        used()
        if not short:
            looked_at()
        upgraded(module=not short)
        removed(before)
        figures["seconds"] = round(time.monotonic() - started)
    except BaseException as error:
        figures["failed"].append(f"ended: {error!r}"[:300])
        raise
    finally:
        figures["documented"] = len(ran)
        (SHARE / "figures.json").write_text(json.dumps(figures, indent=2))
    sys.exit(1 if figures["failed"] else 0)


if __name__ == "__main__":
    main()

"""What the lane does inside the VM: install, use, upgrade under load, remove; each step checked, figures kept.

It lies in the share's folder beside the packages in two versions, and runs on Debian's own Python as root.
"""

from __future__ import annotations

import itertools
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
import trace_of

SHARE = Path(__file__).resolve().parent
DROP_IN = Path("/etc/systemd/system/qgpud.service.d/simulated.conf")
BUILT = Path("/usr/share/qgpu-dkms")
OLD, NEW = "0.1.0", "0.1.0+next"
QUOTAS = {"two": 60, "one": 30}
SETTLE_S, MEASURE_S, WINDOWS = 5, 15, 4
figures: dict[str, Any] = {}


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
        figures.setdefault("failed", []).append(what)


def install(version: str, *names: str) -> float:
    started = time.monotonic()
    debs = [str(next(SHARE.glob(f"{name}_{version}_*.deb"))) for name in names]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "--no-install-recommends", *debs]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
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


def start_pod(name: str) -> subprocess.Popen[bytes]:
    command = ["qgpuctl", "run", "--name", name, "--cores", str(QUOTAS[name]), "--"]
    return subprocess.Popen([*command, "/usr/bin/python3", str(SHARE / "pod.py"), f"/run/{name}.steps"])


def steps(name: str) -> list[tuple[int, int]]:
    lines = Path(f"/run/{name}.steps").read_text().splitlines()
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines if len(line.split()) == 2]


def gap_ms(name: str, from_s: float, to_s: float) -> float:
    """Return the longest time between two moments at which the pod's counter was seen to have grown."""
    times = [at / 1e6 for at, _ in steps(name) if from_s <= at / 1e9 <= to_s]
    return round(max(b - a for a, b in itertools.pairwise(times)), 1)


def ratio(from_s: float, to_s: float) -> float:
    """Return kernels done by the one pod over those of the other."""
    done = {}
    for name in QUOTAS:
        counts = [count for at, count in steps(name) if from_s <= at / 1e9 <= to_s]
        done[name] = counts[-1] - counts[0]
    return round(done["two"] / done["one"], 3)


def measure(what: str) -> float:
    """Measure the ratio until it is as asked, a few times at most, for a starved emulator misses leases; note all."""
    figures[f"ratio_{what}"] = found = []
    for _ in range(WINDOWS):
        time.sleep(SETTLE_S)
        start = time.monotonic()
        time.sleep(MEASURE_S)
        found.append(ratio(start, time.monotonic()))
        if abs(found[-1] / 2 - 1) < 0.1:
            break
    check(f"two pods at 2:1 {what}", abs(found[-1] / 2 - 1) < 0.1, found)
    return start


def grants() -> Any:
    return {pod["name"]: pod["grants"] for pod in ctl("pod", "list")["pods"]}


def driver() -> None:
    """The simulated driver in NVIDIA's place, and the daemon's meter for it."""
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


def installed() -> None:
    say("install")
    figures["install_s"] = round(install(OLD, "qgpu", "qgpu-dkms"), 1)
    figures["install_steps"] = 1
    check("service active", active(), sh("systemctl", "status", "--no-pager", "qgpud", check=False))
    check("module loaded", Path("/sys/module/qgpu").exists() and Path("/dev/qgpu").exists())
    status = ctl("status")
    check("plane kmod", status["plane"] == "kmod", status)
    check("/dev/qgpu is root's", Path("/dev/qgpu").stat().st_mode & 0o777 == 0o600)
    check("group qgpu", "qgpu:" in Path("/etc/group").read_text())
    check("it has not failed", "qgpud" not in sh("systemctl", "--failed"), sh("systemctl", "--failed"))
    check("journal has the daemon's lines", "ready" in sh("journalctl", "-b", "-u", "qgpud"))
    check("no log files", not list(Path("/run/qgpu").glob("*.log")) and not list(Path("/var/log").glob("*qgpu*")))
    security = sh("systemd-analyze", "security", "--no-pager", "qgpud").splitlines()[-1]
    figures["security_exposure"] = float(security.split("qgpud.service:")[1].split()[0])
    check("exposure below 4", figures["security_exposure"] < 4, security)


def used() -> None:
    say("main job")
    pods = [start_pod(name) for name in QUOTAS]
    until(lambda: all(Path(f"/run/{name}.steps").exists() for name in QUOTAS), "pods' steps")
    measure("after install")
    sh("qgpuctl", "gpu", "policy", "set", "0", "burst-share", "--period", "60ms")
    before = grants()
    say("daemon killed")
    old, socket = main_pid(), Path("/run/qgpu/qgpud.sock").stat().st_ino
    sh("systemctl", "kill", "-s", "KILL", "qgpud")
    check("who asks meanwhile waits", ctl("status")["plane"] == "kmod")
    check("the control socket outlives a kill", Path("/run/qgpu/qgpud.sock").stat().st_ino == socket)
    until(lambda: active() and main_pid() not in ("0", old), "the daemon again")
    check("grants after a kill", grants() == before, before)
    check("settings after a kill", ctl("gpu", "list")["gpus"][0]["period_ns"] == 60_000_000)
    start = measure("after a kill")
    upgraded(start, before)
    for pod in pods:
        pod.send_signal(signal.SIGTERM)
        pod.wait(60)


def upgraded(quiet_since: float, before: Any) -> None:
    say("upgrade with pods running")
    old, started, socket = main_pid(), time.monotonic(), Path("/run/qgpu/qgpud.sock").stat().st_ino
    for name in QUOTAS:
        figures[f"quiet_stall_ms_{name}"] = gap_ms(name, quiet_since, started)
    figures["upgrade_s"] = round(install(NEW, "qgpu"), 1)
    until(lambda: active() and main_pid() not in ("0", old), "the new daemon")
    check("the control socket outlives the upgrade", Path("/run/qgpu/qgpud.sock").stat().st_ino == socket)
    check("grants after the upgrade", grants() == before, before)
    check("settings after the upgrade", ctl("gpu", "list")["gpus"][0]["period_ns"] == 60_000_000)
    until(lambda: time.monotonic() > started + MEASURE_S, "as long as the quiet time")
    ended = time.monotonic()
    for name in QUOTAS:
        figures[f"upgrade_pod_stall_ms_{name}"] = gap_ms(name, started, ended)
    figures["upgrade_pod_stall_ms"] = max(figures[f"upgrade_pod_stall_ms_{name}"] for name in QUOTAS)
    say(f"longest standstill over the upgrade: {figures['upgrade_pod_stall_ms']} ms")
    measure("after the upgrade")
    figures["upgrade_dkms_s"] = round(install(NEW, "qgpu-dkms"), 1)
    check("the module stays while pods run", Path("/sys/module/qgpu").exists() and grants() == before)


def removed(before: dict[str, str]) -> None:
    say("remove")
    until(lambda: not ctl("pod", "list")["pods"], "no pods")
    sh("systemctl", "stop", "qgpud")
    guardian = Path("/run/qgpu/standin").read_text()
    check("stopping leaves the guardian", Path("/proc", guardian, "cgroup").read_text() == "0::/qgpu-guardian\n")
    os.kill(int(guardian), signal.SIGKILL)
    sh("systemctl", "start", "qgpud")
    print(sh("apt-get", "purge", "-y", "qgpu", "qgpu-dkms"))
    shutil.rmtree(BUILT, ignore_errors=True)
    DROP_IN.unlink()
    DROP_IN.parent.rmdir()
    sh("systemctl", "daemon-reload")
    for name in ("nvidiactl", "nvidia0"):
        Path("/dev", name).unlink()
    sh("rmmod", "nvidia")
    for path in Path("/run").glob("*.steps"):
        path.unlink()
    left = trace_of.difference(before, trace_of.snapshot())
    figures["left_behind"] = left
    check("removed without a trace", not left, "\n" + "\n".join(left))


def main() -> None:
    sh("udevadm", "settle")
    before = trace_of.snapshot()
    Path("/proc/sys/vm/drop_caches").write_text("2")  # whoever serves our files has a descriptor for each we know
    try:
        driver()
        installed()
        used()
        if os.environ.get("CONTAINERS"):
            contained.check(SHARE, ctl, check, figures)
        removed(before)
    finally:
        (SHARE / "figures.json").write_text(json.dumps(figures, indent=2))
    sys.exit(1 if figures.get("failed") else 0)


if __name__ == "__main__":
    main()

"""What the distributions lane does inside, on the distribution's own Python (3.10 or newer), as root."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trace_of

SHARE = Path(__file__).resolve().parent
HOME = Path("/usr/lib/qgpu")
APT = ("-o", "APT::Sandbox::User=root", "-o", "APT::Install-Recommends=false", "-o", "Dpkg::Use-Pty=0")
ENVIRONMENT = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
#: What a node that has joined a cluster has.
NODE = ("/etc/kubernetes", "/var/lib/kubelet/plugins", "/var/lib/kubelet/plugins_registry")
_PATIENCE_S = 120
found: dict[str, Any] = {"failed": []}


def sh(*command: str) -> tuple[int, str]:
    """Run a command; its exit code, and what it said."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    )
    return done.returncode, done.stdout


def check(what: str, held: bool, seen: object = "") -> None:
    print(f"[{time.monotonic():7.1f}] {'ok' if held else 'FAILED'}: {what} {'' if held else seen}", flush=True)
    if not held:
        found["failed"].append(what)


def until(condition: Callable[[], Any]) -> bool:
    end = time.monotonic() + _PATIENCE_S
    while not (held := bool(condition())) and time.monotonic() < end:
        time.sleep(0.5)
    return held


def apt(verb: str, *names: str) -> None:
    code, said = sh("apt-get", "--yes", *APT, verb, *names)
    check(f"apt {verb} {' '.join(names)}", code == 0, said)


def package(name: str) -> str:
    (deb,) = SHARE.glob(f"{name}_*.deb")
    return str(deb)


def ctl(*arguments: str) -> dict[str, Any]:
    code, said = sh("qgpuctl", "--timeout", "60", *arguments, "-o", "json")
    answer: dict[str, Any] = json.loads(said) if code == 0 else {"code": code, "said": said}
    return answer


def unit(name: str) -> dict[str, str]:
    """Return what systemd says of a unit."""
    _, said = sh("systemctl", "show", "-p", "ActiveState,ConditionResult,NRestarts,MainPID,UnitFileState", name)
    return dict(line.split("=", 1) for line in said.splitlines())


def journal(name: str) -> str:
    return sh("journalctl", "-b", "-u", name)[1]


def answers() -> bool:
    return ctl("status").get("plane") == "sim"


def main() -> None:
    apt("update")
    before = trace_of.snapshot()
    started = time.monotonic()
    apt("install", package("qgpu"))
    found["install_s"] = round(time.monotonic() - started, 1)
    found["distribution"] = platform.freedesktop_os_release()["PRETTY_NAME"]
    found["python"] = sh(str(HOME / "bin/python"), "-V")[1].split()[-1]
    check("it is compiled", any((HOME / "lib/python3/site-packages/qgpu/__pycache__").iterdir()))
    check("the daemon answers", until(answers), ctl("status"))
    service_runs()
    check("manual pages are there", bool(list(Path("/usr/share/man/man1").glob("qgpuctl.1*"))))
    used()
    another_python()
    apt("install", package("qgpu-k8s"))
    code, said = sh("qgpu-k8s", "dra", "--kubeconfig", "/nowhere", "--kubelet-dir", "/run/kubelet")
    check("the driver refuses in one line", code == 2 and said.count("\n") == 1 and "kubeconfig" in said, (code, said))
    node_joins()
    apt("purge", "qgpu-k8s", "qgpu")
    apt("autoremove", "--purge")
    no_trace_since(before)


def no_trace_since(before: dict[str, Any]) -> None:
    # systemd lets go of a unit and its cgroup somewhat later than of its file
    until(lambda: not sh("systemctl", "list-units", "--all", "--plain", "--no-legend", "qgpu*")[1])
    found["left"] = trace_of.difference(before, trace_of.snapshot())
    check("removed without a trace", not found["left"], found["left"][:20])


def service_runs() -> None:
    found["systemd"] = sh("systemctl", "--version")[1].split()[1]
    state = unit("qgpud")
    good = state["ActiveState"] == "active" and state["NRestarts"] == "0" and state["UnitFileState"] == "enabled"
    check("the service runs and is enabled", good, state)
    ignored = [line for line in sh("journalctl", "-b")[1].splitlines() if "/qgpud.service:" in line]
    check("this systemd knows all of the unit file", not ignored, ignored)


def used() -> None:
    code, said = sh("qgpuctl", "doctor")
    check("doctor finds nothing that fails", code == 0, said)
    loads = []
    for name, cores in (("two", "60"), ("one", "30")):
        command = ["qgpuctl", "run", "--cores", cores, "--name", name, "--", "qgpu-load", "--duration", "0s"]
        loads.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT))
    check("both pods get GPU time", until(lambda: have_run({"two", "one"})), ctl("pod", "list"))
    for load in loads:
        load.terminate()
        load.wait(_PATIENCE_S)
    check("they end", until(lambda: ctl("pod", "list").get("pods") == []))


def have_run(names: set[str]) -> bool:
    """Tell whether just these pods are there, and have all had GPU time."""
    pods = {pod["name"]: pod["usage"] for pod in ctl("pod", "list").get("pods", ())}
    return pods.keys() == names and all(each["used_ns"] for usage in pods.values() for each in usage)


def another_python() -> None:
    """The Python that qgpu runs on is gone, and dpkg tells of another: qgpu takes that, and the service goes on."""
    link = HOME / "bin/python"
    pid = unit("qgpud")["MainPID"]
    link.unlink()
    link.symlink_to("/usr/bin/python3.0")
    sh("dpkg-trigger", "--by-package=python3-minimal", "/usr/bin/python3")
    code, said = sh("dpkg", "--triggers-only", "qgpu")
    check("the package finds Python again", code == 0 and sh(str(link), "-V")[0] == 0, said)
    state = unit("qgpud")
    check("the service runs on it", state["ActiveState"] == "active" and state["MainPID"] != pid, state)
    check("the daemon answers again", until(answers), ctl("status"))


def node_joins() -> None:
    """The driver's service waits until a kubelet has joined a cluster, and then starts."""
    state = unit("qgpu-k8s")
    waits = (state["ActiveState"], state["ConditionResult"], state["UnitFileState"]) == ("inactive", "no", "enabled")
    check("without a cluster the driver's service waits", waits, state)
    for folder in NODE:
        Path(folder).mkdir(parents=True)
    Path(NODE[0], "kubelet.conf").write_text("clusters: []\n")
    sh("systemctl", "start", "qgpu-k8s")
    says = until(lambda: "give --kubeconfig" in journal("qgpu-k8s"))
    check("on a node it starts", says, journal("qgpu-k8s")[-1000:])
    sh("systemctl", "stop", "qgpu-k8s")
    sh("systemctl", "reset-failed", "qgpu-k8s")  # it may end by its error first; systemd keeps units that failed
    for folder in (NODE[0], Path(NODE[1]).parent):
        shutil.rmtree(folder)


def run(program: Callable[[], None]) -> None:
    """Run a test to its end, and leave what it found."""
    try:
        program()
    except BaseException as error:
        found["failed"].append(f"ended: {error!r}"[:300])
        raise
    finally:
        (SHARE / "found.json").write_text(json.dumps(found, indent=2))
    sys.exit(1 if found["failed"] else 0)


if __name__ == "__main__":
    run(main)

"""What the bundle's lane does inside a host without Python, on a copy of the bundle's own, as root."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import distributions_guest as guest
import trace_of
from distributions_guest import SHARE, check, found, sh

HOME = Path("/opt/qgpu")


def main() -> None:
    check("the host has no Python", not any(shutil.which(name) for name in ("python", "python3")))
    found["distribution"] = platform.freedesktop_os_release()["PRETTY_NAME"]
    before = trace_of.snapshot()
    check("elsewhere it refuses", sh(str(SHARE / "qgpu/install"))[0] == 2)
    install()
    found["python"] = sh(str(HOME / "bin/python"), "-V")[1].split()[-1]
    check("the daemon answers", guest.until(guest.answers), guest.ctl("status"))
    guest.service_runs()
    guest.used()
    upgraded()
    Path("/etc/systemd/system/multi-user.target.wants/qgpu-k8s.service").symlink_to("../qgpu-k8s.service")
    guest.node_joins()
    code, said = sh(str(HOME / "remove"))
    check("it removes itself", code == 0, said)
    guest.no_trace_since(before)


def install() -> None:
    code, said = sh("tar", "-C", "/opt", "-xzf", str(SHARE / "bundle.tar.gz"))
    check("it unpacks", code == 0, said)
    code, said = sh(str(HOME / "install"))
    check("it installs", code == 0, said)


def upgraded() -> None:
    """Install it once more beside a pod: its program goes on, and the configuration stays."""

    def is_there() -> bool:
        return [pod["name"] for pod in guest.ctl("pod", "list").get("pods", ())] == ["stays"]

    command = ["qgpuctl", "run", "--cores", "30", "--name", "stays", "--", "sleep", "600"]
    pod = subprocess.Popen(command, env=os.environ)
    check("a pod runs", guest.until(is_there))
    settings = Path("/etc/qgpu/qgpud.toml")
    settings.write_text(settings.read_text() + "# mine\n")
    install()
    check("the daemon answers again", guest.until(guest.answers), guest.ctl("status"))
    check("the pod's program goes on", pod.poll() is None)  # plane sim itself forgets pods
    check("the configuration stays", settings.read_text().endswith("# mine\n"))
    pod.terminate()
    pod.wait()
    check("it ends", guest.until(lambda: guest.ctl("pod", "list").get("pods") == []))


if __name__ == "__main__":
    guest.run(main)

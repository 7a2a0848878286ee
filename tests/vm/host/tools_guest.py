"""What ``make check`` installs as root, in a clean Debian: the machine's services and its browser stay as they were.

Runs the Makefile's own targets in a container of distributions_lane.py, and writes what has changed to found.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

SHARE = Path(__file__).resolve().parent
TREE = Path("/root/qgpu")
TARGETS = ("system", "test-system")
#: Programs of which some would start a service, and one would become the machine's browser.
TOOLS = ("prometheus", "podman", "crun", "chromium", "man", "rpmbuild", "cc")
#: The lane's own unit.
_OURS = "command.service"
_UNITS = ("--type=service,socket,timer", "--state=active", "--no-legend", "--plain")


def said(*command: str) -> list[str]:
    """Return the lines that a command prints."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def state() -> set[str]:
    """Return what is enabled, what runs, what starts at boot, and which browsers there are."""
    enabled = said("systemctl", "list-unit-files", "--state=enabled", "--no-legend", "--plain")
    active = said("systemctl", "list-units", *_UNITS)
    return {
        *(f"enabled: {line.split()[0]}" for line in enabled),
        *(f"active: {line.split()[0]}" for line in active if line.split()[0] != _OURS),
        *(f"starts at boot: {path}" for path in Path("/etc").glob("rc[2-5].d/S*")),
        *(f"browser: {path.name} is {os.readlink(path)}" for path in Path("/etc/alternatives").glob("*www-browser")),
    }


def main() -> None:
    """Install, and compare."""
    found: dict[str, Any] = {"failed": ["it did not end well"], "changed": []}
    try:
        Path("/etc/apt/apt.conf.d/00root").write_text('APT::Sandbox::User "root";\n')
        with tarfile.open(SHARE / "tree.tar") as archive:
            archive.extractall(TREE)
        for words in (("update",), ("install", "--yes", "--no-install-recommends", "make")):
            subprocess.run(["apt-get", "-qq", *words], check=True)
        before = state()
        subprocess.run(["make", "-C", str(TREE), *TARGETS], check=True)
        subprocess.run(["systemctl", "daemon-reload"], check=True)
        found["changed"] = sorted(before ^ state())
        found["watched"] = len(before)
        found["failed"] = [tool for tool in TOOLS if subprocess.run(["sh", "-c", f"command -v {tool}"]).returncode]
    finally:
        print(json.dumps(found, indent=2), flush=True)
        (SHARE / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

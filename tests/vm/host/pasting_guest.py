"""Paste the documents into a distribution: the blocks of README and docs/install.md, whole, into a shell, as root.

A clean root of the distribution, with what the README asks for (make, Python 3.11) and the tree in a folder. apt's
question is answered yes. Programs that stand there as a reader's own are loads. What it leaves out says why.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SHARE = Path(__file__).resolve().parent
sys.path += [str(SHARE), str(SHARE.parent.parent)]  # in the guest all lie in one folder

import documents  # noqa: E402
import pasting  # noqa: E402

TREE = Path("/root/qgpu")
README, INSTALL = "README.md", "docs/install.md"
#: bash draws its prompt with this.
_PROMPT = "\x1b[?2004h"
#: Printed by the shell when a line fails; in two parts, so that what is typed does not look like it.
_TRAP = """trap 'printf "%s %s\\n" FAI""LED: "$BASH_COMMAND"' ERR\n"""
_FAILED = "FAILED:"
Lines = Sequence[str]


def plain(terminal: pasting.Terminal, lines: Lines) -> None:
    """Paste lines that end by themselves; none of them may fail. Raises NotSeenError."""
    at = len(terminal.shown)
    terminal.paste(lines)
    terminal.until(_PROMPT, since=at)
    if _FAILED in terminal.shown[at:]:
        raise pasting.NotSeenError(terminal.shown[at:][-3000:])


def demo(terminal: pasting.Terminal, lines: Lines) -> None:
    """Paste ``make demo`` of the block; the other line is the tests'."""
    plain(terminal, lines[:1])


def readme(terminal: pasting.Terminal, lines: Lines) -> None:
    """Paste the README's three commands, look at ``top``, and end them as the README says."""
    pasting.readme(terminal, lines, "kill %3 %2 %1")


def wheel(terminal: pasting.Terminal, lines: Lines) -> None:
    """Paste the wheel's block, with the Python that the page names for this distribution."""
    pasting.status(terminal, [line.replace("python3 -m", f"{python()} -m") for line in lines])


def first_pods(terminal: pasting.Terminal, lines: Lines) -> None:
    """Paste the page's first pods; the programs are loads. Look at ``top``, and end them."""
    for name in ("train.py", "batch.py"):
        (TREE / name).write_text("import os\nos.execvp('qgpu-load', ['qgpu-load', '--duration', '0s'])\n")
    pasting.readme(terminal, lines, "kill %2 %1")


#: In the order of a reader's day: in the tree, from a wheel, from packages. Document, first line, and how it is pasted.
PASTED: tuple[tuple[str, str, Callable[[pasting.Terminal, Lines], None]], ...] = (
    (README, "make demo", demo),
    (README, "export PATH=", readme),
    (INSTALL, "stat -fc", plain),
    (INSTALL, "python3 -m venv", wheel),
    (README, "apt install", plain),
    (INSTALL, "apt install ./dist/qgpu_*.deb  ", plain),
    (INSTALL, "systemctl", plain),
    (INSTALL, "qgpuctl doctor", plain),
    (INSTALL, "qgpuctl run", first_pods),
    (INSTALL, "apt purge", plain),
)
#: Blocks that no container can run, and what checks each instead.
LEFT_OUT = {
    (README, "podman run"): "hosttest, in a VM, where podman can run",
    (INSTALL, "nvidia-smi"): "needs a GPU",
    (INSTALL, "make packages                               # on"): "CI, on a fresh Debian 12",
    (INSTALL, "apt install ./dist/qgpu_*.deb ./dist/qgpu-dkms"): "hosttest, in a VM, where a module can be loaded",
    (INSTALL, "make bundle"): "bundletest, on a host without Python",
    (INSTALL, "make packages                               # builds RPMs"): "needs a distribution that uses RPM",
}


def python() -> str:
    """Return what starts a Python that qgpu runs on here."""
    return "python3.11" if platform.freedesktop_os_release().get("VERSION_ID") == "22.04" else "python3"


def block(root: Path, document: str, first: str) -> documents.Block:
    """Return the one block of a document whose first line begins so."""
    (found,) = (
        each
        for each in documents.blocks(root)
        if each.document == document and not each.language and each.commands[0].startswith(first)
    )
    return found


def prepare() -> None:
    """Install what the README asks for and what a terminal has, and unpack the tree."""
    wanted = ["make", "less"] + ([python()] if python() != "python3" else [])
    for words in (["update"], ["install", *wanted]):
        subprocess.run(["apt-get", "--yes", "-qq", *words], check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(SHARE / "tree.tar") as archive:
        archive.extractall(TREE)


def main() -> None:
    """Paste all; what failed goes to found.json."""
    found: dict[str, Any] = {"failed": [], "pasted": 0}
    settings = Path("/etc/apt/apt.conf.d/00yes")
    settings.write_text('APT::Get::Assume-Yes "true";\nAPT::Sandbox::User "root";\nDpkg::Use-Pty "0";\n')
    os.environ |= {"DEBIAN_FRONTEND": "noninteractive", "PIP_CERT": str(SHARE / "certificates")}
    prepare()
    for document, first, play in PASTED:
        each = block(TREE, document, first)
        started, found["pasted"] = time.monotonic(), found["pasted"] + 1
        terminal = pasting.Terminal(TREE, os.environ, patience_s=900)
        terminal.keys(_TRAP)
        terminal.until(_PROMPT, since=terminal.until("ERR"))
        try:
            play(terminal, each.commands)
            how = "ok"
        except pasting.NotSeenError as error:
            found["failed"].append(each.place)
            how = f"FAILED: {error}"
        finally:
            terminal.close()
        print(f"[{time.monotonic() - started:5.0f} s] {each.place}: {how}", flush=True)
    (SHARE / "found.json").write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

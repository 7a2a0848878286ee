"""Build the attackers with the compiler at hand; nothing built is kept."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from attacks.abi_header import header

_HERE = Path(__file__).resolve().parent
_STATIC = ("-static", "-pthread")
_DYNAMIC = ("-pthread", "-rdynamic")
_PROGRAMS = {
    **dict.fromkeys(("raw", "race"), _STATIC),
    **dict.fromkeys(("cuda", "fault", "control", "profile", "monitors"), _DYNAMIC),
}


def build(folder: Path) -> None:
    """Build every attacker into ``folder``; ``raw-musl`` too where musl-gcc is installed."""
    (folder / "abi.h").write_text(header())
    for name, options in _PROGRAMS.items():
        _compile("cc", name, folder / name, options)
    if shutil.which("musl-gcc"):
        _compile("musl-gcc", "raw", folder / "raw-musl", ("-static", "-idirafter", "/usr/include"))


def _compile(compiler: str, name: str, out: Path, options: tuple[str, ...]) -> None:
    source, includes = str(_HERE / f"{name}.c"), (f"-I{out.parent}", f"-I{_HERE}")
    subprocess.run([compiler, "-O2", "-Wall", *includes, *options, "-o", str(out), source, "-ldl"], check=True)

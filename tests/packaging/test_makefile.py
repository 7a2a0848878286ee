"""The Makefile finds the Python and the packages that it needs, or says what to install; nothing is made here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD, NEW = "#!/bin/sh\nexit 1\n", "#!/bin/sh\nexit 0\n"


def make(folder: Path, pythons: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    for name, text in pythons.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for tool in ("make", "sh"):
        (folder / tool).symlink_to(f"/usr/bin/{tool}")
    return subprocess.run(
        ["make", *options], cwd=ROOT, env={"PATH": str(folder)}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("pythons", "found"),
    [
        ({"python3": NEW, "python3.12": NEW}, "python3"),
        ({"python3": OLD, "python3.11": NEW}, "python3.11"),
        ({"python3": OLD, "python3.12": OLD, "python3.11": NEW}, "python3.11"),
        ({"python3.13": NEW, "python3.11": NEW}, "python3.13"),
    ],
)
def test_make_takes_a_python_that_is_new_enough(tmp_path: Path, pythons: dict[str, str], found: str) -> None:
    said = make(tmp_path, pythons, "--dry-run", "demo", f"VENV={tmp_path}/venv").stdout

    assert f"\n{found} -m venv " in said


def test_without_such_a_python_make_says_what_to_install(tmp_path: Path) -> None:
    result = make(tmp_path, {"python3": OLD}, "demo", f"VENV={tmp_path}/venv")

    assert result.returncode == 2
    assert result.stderr.startswith("please install Python 3.11 or newer")
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        (("dh-dkms", "libbpf1"), "please build on Debian 12, Ubuntu 24.04 or newer"),
        (("apt-get",), "please install: "),
    ],
)
def test_without_packages_to_build_make_says_so(tmp_path: Path, lacks: tuple[str, ...], says: str) -> None:
    tools = {
        "python3": NEW,
        "id": "#!/bin/sh\necho 0\n",
        "apt-get": "#!/bin/sh\n[ $1 = update ]\n",
        "apt-cache": f"#!/bin/sh\ncase $2 in {'|'.join(lacks)}) exit 100;; esac\n",
    }
    result = make(tmp_path, {name: text for name, text in tools.items() if name not in lacks}, "packages-system")

    assert result.returncode == 2
    assert says in result.stderr.splitlines()[0]
    assert len(result.stderr.splitlines()) == 2  # and make's own

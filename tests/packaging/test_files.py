"""What packages are made of, checked where it lies. That they install, upgrade and go is for tests/vm/host to show."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest

import qgpu
from qgpu import config
from qgpu.cli.main import command as qgpuctl
from qgpu.config import Config

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
UNIT = PACKAGING / "systemd/qgpud.service"
MAINTAINERS = (".preinst", ".postinst", ".prerm", ".postrm")
SCRIPTS = sorted(
    [
        *(path for path in PACKAGING.rglob("*.*") if path.suffix in (".sh", *MAINTAINERS)),
        *(PACKAGING / "bundle").iterdir(),
    ]
)


def commands(group: click.Group, words: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return every command below a group."""
    context = click.Context(group)
    found = []
    for word in group.list_commands(context):
        below = group.get_command(context, word)
        found.append((*words, word))
        if isinstance(below, click.Group):
            found += commands(below, (*words, word))
    return found


@pytest.fixture(scope="module")
def manual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("man")
    subprocess.run([sys.executable, str(PACKAGING / "manpages.py"), "1.2", str(out)], check=True)
    return out


def test_every_command_has_a_manual_page(manual: Path) -> None:
    pages = {path.name for path in manual.iterdir()}

    assert pages == {
        "qgpud.8",
        "qgpuctl.1",
        "qgpu-load.1",
        *("-".join(words) + ".1" for words in commands(qgpuctl, ("qgpuctl",))),
    }


def test_a_manual_page_says_what_help_says(manual: Path) -> None:
    page = (manual / "qgpuctl-run.1").read_text().replace("\\", "")

    assert "Run a command as a pod" in page
    assert ".SH EXAMPLES" in page
    assert all(option in page for option in ("--gpu", "--cores", "--memory", "--class", "--name"))


@pytest.mark.skipif(not shutil.which("man"), reason="no man here")
def test_manual_pages_are_what_man_takes(manual: Path) -> None:
    for page in manual.iterdir():
        result = subprocess.run(["man", "--warnings", "-l", str(page)], capture_output=True, text=True, check=True)
        assert result.stderr == "", page.name


def test_completion_is_there_for_each_shell(tmp_path: Path) -> None:
    subprocess.run([PACKAGING / "completions.sh", sys.executable, tmp_path], check=True, cwd=ROOT)

    found = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert found.keys() == {"qgpuctl", "_qgpuctl", "qgpuctl.fish"}
    assert all("_QGPUCTL_COMPLETE=" in text for text in found.values())


def test_completion_leaves_no_byte_code_in_the_package(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n')
    (tmp_path / "python").chmod(0o755)
    subprocess.run([PACKAGING / "completions.sh", tmp_path / "python", tmp_path / "share"], check=True)

    # -I makes Python ignore PYTHONDONTWRITEBYTECODE
    assert all(line.startswith("-B -I ") for line in (tmp_path / "asked").read_text().splitlines())


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_the_service_is_confined() -> None:
    result = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=40", "--no-pager", str(UNIT)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stdout


def test_the_service_does_not_try_again_what_cannot_help() -> None:
    (codes,) = re.findall(r"^RestartPreventExitStatus=(.*)$", UNIT.read_text(), re.MULTILINE)

    assert codes.split() == [
        "2",
        "3",
        "4",
        "23",
    ]  # docs/exit-codes.md: usage, not supported, no permission, already running


def read(text: str, path: Path) -> Config:
    path.write_text(text.replace('group = "qgpu"', 'group = "root"'))  # that group comes with the package
    return config.load(path)


def test_installed_configuration_is_the_default_except_group(tmp_path: Path) -> None:
    text = (PACKAGING / "qgpud.toml").read_text()

    assert read(text, tmp_path / "a.toml") == replace(Config(), socket_gid=0)


def test_what_is_commented_out_in_it_is_the_default_indeed(tmp_path: Path) -> None:
    text = (PACKAGING / "qgpud.toml").read_text().partition("#[gpu.0]")[0]

    assert read(re.sub(r"^#(\w+ =)", r"\1", text, flags=re.MULTILINE), tmp_path / "a.toml") == replace(
        Config(), socket_gid=0
    )


def test_package_module_and_program_are_of_one_version() -> None:
    (dkms,) = re.findall(r'^PACKAGE_VERSION="(.*)"$', (ROOT / "kmod/dkms.conf").read_text(), re.MULTILINE)
    (module,) = re.findall(r'MODULE_VERSION\("(.*)"\)', (ROOT / "kmod/main.c").read_text())

    assert dkms == module == qgpu.__version__


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_maintainers_scripts_are_shell(script: Path) -> None:
    subprocess.run(["sh", "-n", str(script)], check=True)


def test_c_and_build_files_have_spdx_line_and_license_exists() -> None:
    """Python says nothing file by file: LICENSE holds for the tree."""
    kinds = ("*.c", "*.h", "Kbuild", "Makefile", "*.sh")
    folders = ("kmod", "tests", "bench", "packaging/slurm")
    files = [path for folder in folders for kind in kinds for path in (ROOT / folder).rglob(kind)]
    ours = [path for path in files if not path.name.endswith(".mod.c")]  # a build's

    assert ours
    assert [path for path in ours if "SPDX-License-Identifier: GPL-2.0" not in path.read_text()[:200]] == []
    assert "Version 2, June 1991" in (ROOT / "LICENSE").read_text()[:200]

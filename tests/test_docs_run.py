"""The documents' marked blocks run on the simulator, and files they link to are there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import programs
from tests.cli.programs import TIMEOUT_S, environment

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_RUN = re.compile(r"^<!-- run on the simulator -->\n```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RELATIVE = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def blocks() -> Iterator[tuple[str, str]]:
    for document in DOCUMENTS:
        for number, found in enumerate(_RUN.findall(document.read_text())):
            yield f"{document.name} {number + 1}", found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder as the repository's root looks, with a daemon and a pod, and programs under their own names."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "bin").mkdir()
    for name, module in (("qgpuctl", "qgpu.cli.main"), ("qgpud", "qgpu.daemon.main"), ("qgpu-load", "qgpu.load.main")):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        program.chmod(0o755)
    for name in ("examples", "docs", "dashboards"):
        (folder / name).symlink_to(ROOT / name)
    surroundings = environment() | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "QGPU_RUNTIME_DIR": str(folder / "run"),
    }
    with programs.daemon(folder / "run") as running:
        pod = running.start("run", "--name", "train", "--cores", "60", "--", sys.executable, "-m", "qgpu.load.main",
                            "--duration", "0s")  # fmt: skip
        while not running.json("pod", "list")["pods"]:
            pass
        yield folder, surroundings
        pod.send_signal(signal.SIGTERM)
        pod.communicate(timeout=TIMEOUT_S)


@pytest.mark.parametrize("block", [pytest.param(text, id=name) for name, text in blocks()])
def test_a_marked_block_runs(place: tuple[Path, dict[str, str]], block: str) -> None:
    folder, surroundings = place
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder,
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=4 * TIMEOUT_S,
        check=False,
    )

    assert result.returncode == 0, result.stdout + result.stderr


def test_some_blocks_are_marked() -> None:
    assert len(list(blocks())) >= 2


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_linked_are_there(document: Path) -> None:
    missing = [link for link in _RELATIVE.findall(document.read_text()) if not (document.parent / link).exists()]

    assert missing == []

"""What the documents tell to do is done: their blocks for the simulator here, and nobody's block is forgotten."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import documents
from tests.cli import programs
from tests.cli.programs import TIMEOUT_S, environment
from tests.documents import Block

ROOT = Path(__file__).parent.parent
BLOCKS = list(documents.blocks(ROOT))
COMMANDS = [block for block in BLOCKS if block.language in ("", "sh", "bash", "console", "?")]
#: Programs that stand in documents as examples of a reader's own.
OWN = {name: [] for name in ("train.py", "batch.py")} | {
    name: ["--kernel", "100us", "--period", "10ms"] for name in ("serve", "api")
}
#: What is different here: a second of something shows as well what a command does, beside other tests shares may come
#: out as they like (exit code 22), ports and folders of the host's are others', and so is the usual runtime directory.
AS_HERE = {
    r"--seconds \d+": "--seconds 1",
    r"^qgpud --plane sim": 'qgpud --plane sim --runtime-dir "$PWD/another"',
    r"doctor --self-test": "doctor --self-test || [ $? = 22 ]",
    r"qgpuctl web(?! --listen)": "qgpuctl web --listen 127.0.0.1:0",
    r"unix:/run/": 'unix:"$PWD"/',
}
_RELATIVE = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder as the repository's root looks, with a daemon and a pod, and programs under their own names."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "bin").mkdir()
    modules = {"qgpuctl": "-m qgpu.cli.main", "qgpud": "-m qgpu.daemon.main", "qgpu-load": "-m qgpu.load.main"}
    for name, words in (modules | {"python": ""}).items():
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        program.chmod(0o755)
    for name, how in OWN.items():
        load = [sys.executable, "-m", "qgpu.load.main", "--duration", "0s", *how]
        (folder / name).write_text(f"#!{sys.executable}\nimport os\nos.execv({sys.executable!r}, {load})\n")
        (folder / name).chmod(0o755)
    for name in ("examples", "docs", "dashboards", "bench"):
        (folder / name).symlink_to(ROOT / name)
    surroundings = environment() | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "QGPU_RUNTIME_DIR": str(folder / "run"),
    }
    with programs.daemon(folder / "run") as running:
        pod = running.start("run", "--name", "there", "--cores", "5", "--", str(folder / "serve"))
        while not running.json("pod", "list")["pods"]:
            pass
        yield folder, surroundings
        pod.send_signal(signal.SIGTERM)
        pod.communicate(timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    "block", [pytest.param(each, id=each.place) for each in COMMANDS if each.runner == "simulator"]
)
def test_a_block_for_the_simulator_runs(place: tuple[Path, dict[str, str]], block: Block) -> None:
    folder, surroundings = place
    documents.run(block, folder, surroundings, AS_HERE, TIMEOUT_S)


def test_every_block_of_commands_says_who_runs_it() -> None:
    silent = [block.place for block in COMMANDS if not (block.runner in documents.RUNNERS or block.by_hand)]

    assert silent == [], "see tests/documents.py"


def test_every_runner_has_something_to_run() -> None:
    assert {block.runner for block in COMMANDS if not block.by_hand} == set(documents.RUNNERS)


def _words(block: Block) -> list[str]:
    return [line.partition("#")[0].strip() for line in block.commands]


def test_what_is_said_to_run_in_ci_runs_there() -> None:
    does = [line.strip().removeprefix("lane ") for line in (ROOT / ".ci/run").read_text().splitlines()]
    said = [words for block in COMMANDS if block.runner == "CI" for words in _words(block)]

    assert [words for words in said if not any(f"{line} ".startswith(f"{words} ") for line in does)] == []


def test_what_is_said_to_run_nightly_is_part_of_it() -> None:
    (recipe,) = re.findall(r"^nightly:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    does = [line.strip().replace("$(MAKE)", "make") for line in recipe.splitlines()]
    said = [words for block in COMMANDS if block.runner == "nightly" for words in _words(block)]

    assert [words for words in said if not any(f"{line} ".startswith(f"{words} ") for line in does)] == []


def test_targets_and_scripts_that_nobody_runs_are_there() -> None:
    targets = {
        folder: set(re.findall(r"^([\w -]+):", (ROOT / folder / "Makefile").read_text(), re.MULTILINE))
        for folder in (".", "tests/vm", "kmod")
    }
    for block in COMMANDS:
        for words in (line.split() for line in _words(block) if block.by_hand or block.runner in ("CI", "nightly")):
            if words[0] == "make":
                folder, target = (words[2], words[3]) if words[1] == "-C" else (".", words[1])
                assert any(target in names.split() for names in targets[folder]), f"{block.place}: {words}"
            elif words[0] == "python" and words[1] != "-m":
                assert (ROOT / words[1]).is_file(), f"{block.place}: {words}"


def test_a_language_and_a_runner_do_not_go_together() -> None:
    assert [block.place for block in BLOCKS if block not in COMMANDS and block.runner] == []


DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))


def test_decisions_are_listed_by_number_and_none_is_missing() -> None:
    index = (ROOT / "docs/decisions/README.md").read_text()
    listed = re.findall(r"^(\d+)\. \[.+\]\((\d{4})-.+\.md\)$", index, re.MULTILINE)

    assert all(int(number) == int(name) for number, name in listed)
    assert [name for _, name in listed] == [path.name[:4] for path in DECISIONS if path.name != "README.md"]


@pytest.mark.parametrize("document", [*documents.files(ROOT), *DECISIONS], ids=lambda path: path.name)
def test_files_that_are_linked_are_there(document: Path) -> None:
    missing = [link for link in _RELATIVE.findall(document.read_text()) if not (document.parent / link).exists()]

    assert missing == []

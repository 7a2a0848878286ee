"""The commands that the documentation shows are commands that the programs take."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from qgpu.cli.main import command as qgpuctl
from qgpu.daemon.main import command as qgpud
from qgpu.k8s.main import command as qgpu_k8s
from qgpu.load.main import command as qgpu_load
from tests import documents

ROOT = Path(__file__).parent.parent
PROGRAMS = {"qgpuctl": qgpuctl, "qgpud": qgpud, "qgpu-k8s": qgpu_k8s, "qgpu-load": qgpu_load}


def shown() -> Iterator[tuple[str, str]]:
    """Yield every command line of ours that stands in a block of code, with its place."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "bench/README.md"):
        fenced = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            fenced ^= line.startswith("```")
            if (fenced or line.startswith("    ")) and "──" not in line:
                bare = re.sub(r"[][]|(\s#|\s&|\s\|\s|\s>).*", "", line)  # what may be left out is there, too
                for part in bare.split("&&"):
                    if part.split()[:1] and part.split()[0] in PROGRAMS:
                        yield f"{path.name}:{number}", part.strip()


def take(command: click.Command, name: str, words: list[str], parent: click.Context | None = None) -> None:
    """Have click parse a command line down to its last subcommand, and run nothing. Raises click.ClickException."""
    context = command.make_context(name, words, parent)
    if isinstance(command, click.Group):
        rest = [*context._protected_args, *context.args]
        below, found, left = command.resolve_command(context, rest)
        assert found is not None
        take(found, str(below), left, context)


@pytest.mark.parametrize(("place", "line"), list(shown()), ids=[place for place, _ in shown()])
def test_a_command_that_is_shown_is_one_that_there_is(place: str, line: str) -> None:
    program, *words = shlex.split(line)
    try:
        take(PROGRAMS[program], program, words)
    except click.ClickException as error:
        pytest.fail(f"{place}: {line}: {error.format_message()}")
    except click.exceptions.Exit:
        pass  # --help, --version


def in_passing() -> Iterator[tuple[str, str]]:
    """Yield every command that stands within a sentence, with its document."""
    for path in documents.files(ROOT):
        prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        for span in re.findall(r"`([^`]+)`", prose):
            for part in re.split(r" && | \| ", " ".join(span.split())):
                yield path.name, part


def test_commands_named_in_passing_are_ones_that_there_are() -> None:
    """A name may stand for the command as a whole, without what it needs; N is a number."""
    wrong = []
    for place, line in in_passing():
        if line.split(" ")[0] not in PROGRAMS:
            continue
        program, *words = shlex.split(line)
        if not words:
            continue
        try:
            take(PROGRAMS[program], program, ["0" if word == "N" else word for word in words])
        except click.MissingParameter:
            pass
        except click.ClickException as error:
            wrong.append(f"{place}: {line}: {error.format_message()}")
        except click.exceptions.Exit:
            pass
    assert wrong == []


def test_scripts_and_targets_named_in_passing_are_there() -> None:
    wrong = []
    for place, line in in_passing():
        if (script := re.match(r"python3? ([\w/]+\.py)", line)) and not (ROOT / script[1]).is_file():
            wrong.append(f"{place}: {line}")
        if target := re.match(r"make (?:-C (\S+) )?([a-z-]+)", line):
            makefile = (ROOT / (target[1] or ".") / "Makefile").read_text()
            if not re.search(rf"^[\w -]*\b{target[2]}\b[\w -]*:", makefile, re.MULTILINE):
                wrong.append(f"{place}: {line}")
    assert wrong == []


def test_files_named_in_passing_are_there() -> None:
    rooms = "qgpu|kmod|bpf|tests|bench|docs|deploy|packaging|examples|dashboards"
    named = [
        (place, path)
        for place, line in in_passing()
        for path in re.findall(rf"(?<![\w./])(?:{rooms})/[\w./-]+\.[a-z]+", line)
    ]
    assert len(named) > 100
    assert [(place, path) for place, path in named if not (ROOT / path).exists()] == []


def test_utilization_is_spelled_as_the_glossary_spells_it() -> None:
    """Figures say what their benchmark said when it ran, and the changes say what was renamed."""
    spoken = {path for path in documents.files(ROOT) if path.name not in ("CHANGELOG.md", "measurements.md")}
    spoken -= set((ROOT / "docs/results").glob("*"))
    wrong = [
        str(path.relative_to(ROOT))
        for path in sorted({*spoken, *(ROOT / "dashboards").glob("*.*")})
        if "utilisation" in path.read_text().lower()
    ]

    assert "**utilization**" in (ROOT / "docs/glossary.md").read_text()
    assert wrong == []

"""What the command line says about itself: help, examples, manual pages, completion."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from qgpu import manual
from qgpu.cli.examples import EXAMPLES, FIRST_STEPS
from qgpu.cli.main import command as qgpuctl
from qgpu.daemon.main import command as qgpud
from qgpu.errors import ExitCode
from qgpu.load.main import command as qgpu_load
from tests.cli import programs
from tests.cli.programs import Daemon, completed
from tests.test_docs import PROGRAMS, ROOT, take


def leaves(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Yield every command that does something, with its words."""
    context = click.Context(group)
    for word in group.list_commands(context):
        below = group.get_command(context, word)
        if isinstance(below, click.Group):
            yield from leaves(below, (*path, word))
        elif below is not None:
            yield " ".join((*path, word)), below


def test_the_summaries_of_commands_are_those_of_the_commands() -> None:
    context = click.Context(qgpuctl)
    formatter = click.HelpFormatter(width=200)
    qgpuctl.format_commands(context, formatter)

    for name in qgpuctl.list_commands(context):
        found = qgpuctl.get_command(context, name)
        assert found is not None
        assert f"{name} " in formatter.getvalue()
        assert found.get_short_help_str(200) in formatter.getvalue()


def test_every_command_has_an_example() -> None:
    assert EXAMPLES.keys() == dict(leaves(qgpuctl)).keys()


PAGES = dict(manual.every("1.2"))


def sections(page: str) -> dict[str, str]:
    """Return the sections of a manual page by heading, as read."""
    parts = page.replace("\\-", "-").replace("\\e", "\\").replace("\\&", "").split("\n.SH ")
    return {heading: text for part in parts[1:] for heading, _, text in [part.partition("\n")]}


@pytest.mark.parametrize("file", PAGES)
def test_every_manual_page_has_examples_of_its_command(file: str) -> None:
    words = file.rpartition(".")[0].replace("qgpu-load", "qgpu_load").replace("-", " ").replace("_", "-")
    lines = sections(PAGES[file])["EXAMPLES"].splitlines()[1:-1]

    assert any(words in line for line in lines)


@pytest.mark.parametrize("file", PAGES)
def test_every_manual_page_says_what_each_parameter_means(file: str) -> None:
    for heading in ("ARGUMENTS", "OPTIONS", "COMMANDS", "EXIT STATUS"):
        for entry in sections(PAGES[file]).get(heading, "").split(".TP\n")[1:]:
            name, _, meaning = entry.partition("\n")
            assert len(meaning.split()) > 1 or heading == "EXIT STATUS", name
            assert meaning.strip(), name


def test_every_argument_has_a_manual_page_that_tells_it() -> None:
    asked = {path for path, each in leaves(qgpuctl) if any(isinstance(param, click.Argument) for param in each.params)}
    told = {file for file, page in PAGES.items() if "ARGUMENTS" in sections(page)}

    assert told == {f"qgpuctl-{path.replace(' ', '-')}.1" for path in asked}


def test_exit_codes_mean_the_same_in_the_manual_and_documents() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) ?\|$", (ROOT / "docs/exit-codes.md").read_text(), re.MULTILINE)
    written = {int(code): ": ".join(filter(None, (means, more))).replace("`", "") for code, means, more in rows}

    assert written == {int(code): text for code, text in manual.EXIT_CODES.items()}
    assert written.keys() == {int(code) for code in ExitCode}


@pytest.mark.parametrize("line", [*FIRST_STEPS, *(line for lines in EXAMPLES.values() for line in lines)])
def test_an_example_is_a_command_that_there_is(line: str) -> None:
    bare = line.partition(" > ")[0].removeprefix('eval "$(').removesuffix(')"')
    program, *words = shlex.split(bare)
    take(PROGRAMS[program], program, words)


@pytest.mark.parametrize("program", [qgpud, qgpu_load])
def test_the_other_programs_have_examples_too(program: click.Command) -> None:
    assert "Examples:" in program.get_help(click.Context(program, info_name="x"))


@pytest.mark.parametrize(("words", "found"), list(leaves(qgpuctl)), ids=lambda each: str(each))
def test_paragraphs_of_a_help_text_are_whole(words: str, found: click.Command) -> None:
    text = found.get_help(click.Context(found, info_name=words))
    written = text[: text.index("Examples:")].splitlines()

    assert not [line for line in written[1:] if re.search(r"^ {3,}|\S {2,}\S", line)]


@pytest.mark.parametrize(("words", "found"), [each for each in leaves(qgpuctl) if " " in each[0]], ids=str)
def test_a_commands_summary_fits_a_line_of_80(words: str, found: click.Command) -> None:
    assert not found.get_short_help_str(70).endswith("..."), words


def test_help_loads_only_what_it_needs() -> None:
    script = (
        "import sys; from qgpu.cli.main import command; slow = {'structlog', 'json', 'socket', 'cffi', 'psutil'}\n"
        "try: command.main(['--help'], prog_name='qgpuctl')\n"
        "finally: print(sorted(slow & sys.modules.keys()), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert result.stderr.strip() == "[]"


def test_pods_pgpus_and_policies_are_completed(shared: Daemon) -> None:
    pod = shared.start("run", "--name", "train-me", "--", "sleep", "60")
    while not shared.json("pod", "list")["pods"]:
        pass
    try:
        assert completed(shared, "qgpuctl pod show tr") == ["train-me"]
        assert completed(shared, "qgpuctl gpu show ") == ["0", "1"]
        assert completed(shared, "qgpuctl gpu policy set 0 b") == ["best-effort", "burst-share"]
        assert completed(shared, "qgpuctl ev") == ["events"]
        assert completed(shared, "qgpuctl man pod s") == ["set", "show", "suspend"]
        assert "pod" in completed(shared, "qgpuctl frobnicate ")
    finally:
        pod.terminate()
        pod.communicate(timeout=programs.TIMEOUT_S)


def test_every_name_of_something_there_is_is_completed() -> None:
    named = {"gpu", "gpus", "index", "source", "target", "name", "group", "uid", "policy_name", "online_policy"}
    latency = {("group create", "target"), ("group set", "target"), ("pod set", "target")}
    new = {("run", "name"), ("group create", "name"), *latency}
    missing = [
        (path, param.name)
        for path, each in leaves(qgpuctl)
        for param in each.params
        if param.name in named and (path, param.name) not in new and param._custom_shell_complete is None
    ]

    assert missing == []


def test_groups_are_completed(shared: Daemon) -> None:
    assert shared.ctl("group", "create", "llm").returncode == 0
    try:
        assert completed(shared, "qgpuctl group remove l") == ["llm"]
        assert completed(shared, "qgpuctl run --group ") == ["llm"]
    finally:
        shared.ctl("group", "remove", "llm")


def test_tables_call_a_quota_and_a_limit_by_one_name(shared: Daemon) -> None:
    headers = [
        shared.ctl(*words, "list").stdout.splitlines()[0].split() for words in (("pod",), ("grant",), ("group",))
    ]

    assert all({"QUOTA", "LIMIT"} <= set(each) for each in headers)
    assert all(not {"CORES", "MEMORY"} & set(each) for each in headers)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_each_shell(shared: Daemon, shell: str) -> None:
    assert "_QGPUCTL_COMPLETE=" in shared.ctl("completion", shell).stdout


@pytest.mark.parametrize(
    ("words", "title"),
    [(("man",), "QGPUCTL 1"), (("man", "pod", "set"), "QGPUCTL\\-POD\\-SET 1"), (("man", "qgpud"), "QGPUD 8")],
)
def test_man_prints_a_page_with_examples(shared: Daemon, words: tuple[str, ...], title: str) -> None:
    page = shared.ctl(*words).stdout

    assert page.startswith(f".TH {title}")
    assert ".SH EXAMPLES" in page


def test_man_of_no_command_says_so(shared: Daemon) -> None:
    result = shared.ctl("man", "frobnicate")

    assert (result.returncode, result.stdout) == (6, "")
    assert "frobnicate: there is no such command" in result.stderr

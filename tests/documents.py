"""The code blocks in the documents: where each stands, what runs it, and how to run it as a reader would.

Every block of commands has a line before it that says where it runs, so that none is left out by mistake:

    <!-- run: simulator -->       tests/test_docs_run.py, beside a daemon with a simulated pGPU
    <!-- run: host STAGE -->      tests/vm/host, on a clean Debian with systemd; STAGE is one of STAGES
    <!-- run: wheel -->           packaging/check.py, in a new virtual environment
    <!-- run: CI -->              .ci/run, as they stand
    <!-- run: nightly -->         make nightly, likewise
    <!-- by hand: WHY -->         only readers run it; the tests check it as far as they can without running it

Other blocks are fenced with their language (text, toml, ...). This file needs only Python, because it runs in the VM.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STAGES = ("install", "use", "upgrade", "off", "remove")
RUNNERS = ("simulator", "wheel", "CI", "nightly", *(f"host {stage}" for stage in STAGES))
_MARK = re.compile(r"<!-- (run|by hand): (.+) -->")
#: Commands that run until they are told to end; a reader runs them in another terminal.
_STAYS = re.compile(r"^\S*(qgpuctl (run|web|top(?! -1))|qgpud)\b")
_PATIENCE_S = 120


@dataclass(frozen=True, slots=True)
class Block:
    """One block of code; ``runner`` is empty if no line before it says what runs it."""

    document: str
    line: int
    language: str
    runner: str
    commands: tuple[str, ...]

    @property
    def place(self) -> str:
        """Return where it stands."""
        return f"{self.document}:{self.line}"

    @property
    def by_hand(self) -> bool:
        """Tell whether only readers run it."""
        return self.runner.startswith("by hand: ")


def files(root: Path) -> list[Path]:
    """Return the documents whose commands are checked."""
    names = ("README.md", "CONTRIBUTING.md", "bench/README.md")
    return [*(root / name for name in names), *sorted((root / "docs").glob("*.md"))]


def blocks(root: Path) -> Iterator[Block]:
    """Yield every block of code, fenced or indented, in order."""
    for file in files(root):
        runner, language, start = "", None, 0
        lines: list[str] = []
        for number, line in enumerate((*file.read_text().splitlines(), "end"), 1):
            mark = _MARK.fullmatch(line)
            fence = line.startswith("```")
            indented = language is None and line.startswith("    ") and bool(line.strip())
            if indented or (language is not None and not fence):
                start = start or number
                lines.append(line)
                continue
            if lines and (fence or line.strip()):  # the block is over
                yield Block(str(file.relative_to(root)), start, language or "", runner, tuple(_plain(lines, language)))
                runner, start, lines = "", 0, []
            elif lines:
                lines.append("")
            if fence:
                language = (line[3:].strip() or "?") if language is None else None
            elif mark:
                runner = mark.group(2) if mark.group(1) == "run" else f"by hand: {mark.group(2)}"


def _plain(lines: list[str], language: str | None) -> Iterator[str]:
    for line in lines:
        text = line if language else line[4:]
        if text.strip():
            yield text


class Failed(Exception):  # noqa: N818
    """A line of a document did not do what it should."""


def run(
    block: Block,
    folder: Path,
    environment: Mapping[str, str],
    changes: Mapping[str, str] | None = None,
    timeout_s: float = 4 * _PATIENCE_S,
) -> None:
    """Run a block line by line in ``folder``. Raises Failed.

    ``changes`` maps regular expressions to what they stand for here (an image's name, fewer seconds). Commands that
    stay keep running until the end of the block, and are then told to end, as by Ctrl-C.
    """
    staying: list[tuple[str, subprocess.Popen[bytes], Path]] = []
    pods: int | None = None
    with tempfile.TemporaryDirectory(prefix="qgpu-docs.") as scratch:
        try:
            for number, line in enumerate(block.commands):
                command = line
                for pattern, there in (changes or {}).items():
                    command = re.sub(pattern, there, command)
                stays = _STAYS.match(command)
                if stays:
                    command = re.sub(r"\s&(?=\s|$)", "", command)  # it is not this shell's but ours to leave it running
                said = Path(scratch, str(number))
                before = _pods(environment) if stays and stays.group().endswith(" run") else None
                pods = before if pods is None else pods
                with said.open("wb") as out:
                    process = subprocess.Popen(
                        ["bash", "-euo", "pipefail", "-c", command],
                        cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                        start_new_session=True,
                    )  # fmt: skip
                if stays:
                    staying.append((line, process, said))
                    _until_up(block, line, process, said, environment, before)
                    continue
                try:
                    code = process.wait(timeout_s)
                except subprocess.TimeoutExpired:
                    _signal(process, signal.SIGKILL)
                    raise Failed(f"{block.place}: {line}: not done after {timeout_s} s\n{_text(said)}") from None
                if code:
                    raise Failed(f"{block.place}: {line}: {code}\n{_text(said)}")
            while staying:
                if pods is not None and not any(" run " in each[0] for each in staying):
                    _until_gone(block, environment, pods)
                    pods = None
                _end(block, *staying[-1])
                staying.pop()
            if pods is not None:
                _until_gone(block, environment, pods)
        finally:
            for _, process, _said in staying:
                _signal(process, signal.SIGKILL)


def _until_up(
    block: Block,
    line: str,
    process: subprocess.Popen[bytes],
    said: Path,
    environment: Mapping[str, str],
    before: int | None,
) -> None:
    """Wait until a pod is there, or until the other command that stays has printed something."""
    end = time.monotonic() + _PATIENCE_S
    while not (_pods(environment) > before if before is not None else said.stat().st_size):
        if process.poll() is not None and (process.returncode or before is not None):
            raise Failed(f"{block.place}: {line}: {process.returncode}\n{_text(said)}")
        if time.monotonic() > end:
            raise Failed(f"{block.place}: {line}: nothing came of it\n{_text(said)}")
        time.sleep(0.1)


def _until_gone(block: Block, environment: Mapping[str, str], pods: int) -> None:
    """Wait until the block's pods are gone, while their daemon still runs."""
    end = time.monotonic() + _PATIENCE_S
    while _pods(environment) > pods:
        if time.monotonic() > end:
            raise Failed(f"{block.place}: its pods do not go")
        time.sleep(0.1)


def _end(block: Block, line: str, process: subprocess.Popen[bytes], said: Path) -> None:
    _signal(process, signal.SIGINT)
    try:
        code = process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"{block.place}: {line}: does not end\n{_text(said)}") from None
    early = " run " in line and "KeyboardInterrupt" in _text(said)  # the reader's own program had hardly begun
    if code not in (0, -signal.SIGINT, 128 + signal.SIGINT) and not early:
        raise Failed(f"{block.place}: {line}: {code} at its end\n{_text(said)}")


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _pods(environment: Mapping[str, str]) -> int:
    command = ["qgpuctl", "pod", "list", "-o", "json"]
    result = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
    if result.returncode:
        raise Failed(f"qgpuctl pod list: {result.stderr}")
    return len(json.loads(result.stdout)["pods"])


def _text(said: Path) -> str:
    return said.read_text(errors="replace")[-4000:]

"""A fake libcuda, and processes that it can suspend."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile it."""
    library = tmp_path_factory.mktemp("fake") / "libcuda.so.1"
    source = Path(__file__).parent / "fake_cuda.c"
    subprocess.run(["gcc", "-Wall", "-Werror", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.fixture
def libcuda(fake_cuda: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this process and its children load it."""
    monkeypatch.setenv("QGPU_LIBCUDA", str(fake_cuda))
    return fake_cuda


@pytest.fixture
def start() -> Iterator[Start]:
    """Start processes that can be suspended, with what they are told of each call."""
    running: list[subprocess.Popen[str]] = []

    def begin(*how: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.fake_process", *how], stdout=subprocess.PIPE, text=True
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()

"""Sources in a build folder: make sees what changed, whatever the dates (tests/vm/sources.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vm"))

import sources

_OLD, _NEW = 1_000_000_000, 2_000_000_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "Makefile").write_text("built.o: text.c\n\tcp text.c built.o\n")
    (folder / "text.c").write_text("first")
    return folder


def build(source: Path, into: Path) -> str:
    sources.mirror(source, into)
    subprocess.run(["make", "-s", "-C", str(into), "built.o"], check=True)
    return (into / "built.o").read_text()


def test_a_source_with_an_older_date_is_built_again(source: Path, tmp_path: Path) -> None:
    into = tmp_path / "into"
    assert build(source, into) == "first"
    (source / "text.c").write_text("second")
    os.utime(source / "text.c", (_OLD, _OLD))

    assert build(source, into) == "second"


def test_a_source_with_other_bytes_and_the_same_date_is_built(source: Path, tmp_path: Path) -> None:
    into = tmp_path / "into"
    os.utime(source / "text.c", (_NEW, _NEW))
    assert build(source, into) == "first"
    (source / "text.c").write_text("other")
    os.utime(source / "text.c", (_NEW, _NEW))

    assert build(source, into) == "other"


def test_what_did_not_change_is_not_built_again(source: Path, tmp_path: Path) -> None:
    into = tmp_path / "into"
    build(source, into)
    (into / "built.o").write_text("as it was")

    assert build(source, into) == "as it was"


def test_a_source_that_is_gone_goes_but_outputs_stay(source: Path, tmp_path: Path) -> None:
    into = tmp_path / "into"
    (source / "other.h").write_text("")
    (source / "left.ko").write_text("of a build in place")
    build(source, into)
    (source / "other.h").unlink()
    sources.mirror(source, into)

    assert sorted(path.name for path in into.iterdir() if path.name[0] != ".") == ["Makefile", "built.o", "text.c"]


def test_a_mutated_source_is_built_and_its_original_afterwards(source: Path, tmp_path: Path) -> None:
    into = tmp_path / "into"
    build(source, into)
    sources.mirror(source, into, lambda name, data: b"changed" if name == "text.c" else data)
    subprocess.run(["make", "-s", "-C", str(into), "built.o"], check=True)

    assert (into / "built.o").read_text() == "changed"
    assert build(source, into) == "first"


def test_each_checkout_builds_in_a_folder_of_its_own(tmp_path: Path) -> None:
    assert len({sources.folder(tmp_path, tmp_path / name, "6.1") for name in ("a", "b", "deep/a")}) == 3

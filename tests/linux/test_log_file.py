"""The log: lines are lost rather than a process, and a file does not grow for ever."""

from __future__ import annotations

import os
from contextlib import suppress

from qgpu.linux.log_file import LogFile


def test_a_log_longer_than_its_bound_is_emptied(tmp_path):
    path = tmp_path / "log"
    with path.open("a", buffering=1) as file:
        log = LogFile(file, 100)
        for number in range(30):
            log.write(f"line {number:04}\n")

    assert path.read_text().endswith("line 0029\n")
    assert path.stat().st_size <= 110


def test_a_pipe_is_written_whatever_the_bound(tmp_path):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", buffering=1) as file:
        LogFile(file, 1).write("line\n")

    assert os.read(reading, 10) == b"line\n"
    os.close(reading)


def test_a_log_whose_reader_is_gone_loses_lines_only():
    reading, writing = os.pipe()
    os.close(reading)
    file = os.fdopen(writing, "w", buffering=1)

    assert LogFile(file).write("line\n") == 5
    with suppress(BrokenPipeError):
        file.close()

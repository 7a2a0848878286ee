"""The daemon's log: text for people, JSON for programs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import structlog

from qgpu import log
from qgpu.config import LogFormat, LogLevel

BY = {"uid": os.getuid(), "pid": 7, "program": "qgpuctl"}


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    """Leave no format to the next test."""
    yield
    structlog.reset_defaults()


def test_people_read_in_the_log_what_events_say(capfd: pytest.CaptureFixture[str]) -> None:
    log.configure(LogLevel.INFO, LogFormat.TEXT)
    say = structlog.get_logger().info
    say("pod created", by=BY, grants={"0": {"class": "offline", "cores": 30, "memory": None}})
    say("policy set", by=BY, old={"policy": "a"}, new={"policy": "b"})
    say("device files of pods are isolated", by="BPF LSM")
    said = capfd.readouterr().err

    for words in ("qgpuctl[7]", "'pGPU 0: class offline, quota 30 %'", "'policy a -> b'", "BPF LSM"):
        assert words in said
    assert "{" not in said


def test_programs_read_in_the_log_what_was_recorded(capfd: pytest.CaptureFixture[str]) -> None:
    log.configure(LogLevel.INFO, LogFormat.JSON)
    structlog.get_logger().info("pod created", by=BY)

    assert '"pid": 7' in capfd.readouterr().err

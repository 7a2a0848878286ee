"""Skips tests that need what this machine lacks, with a line that names it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

# A machine that is busy with other things is no defect. On CI machines Hypothesis would draw the same examples each
# time, and forget what failed.
settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=False,
    database=DirectoryBasedExampleDatabase(Path(__file__).resolve().parent.parent / ".hypothesis" / "examples"),
)
settings.load_profile("patient")

# a shell makes background jobs ignore Ctrl-C, and every program that a test starts would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)

#: The files that take longest. They begin first, so that the run does not end by waiting for one of them (make test
#: gives each file to a process).
FIRST = (
    *("runtime/test_starts.py", "k8s/test_restarts.py", "hostile/test_escape.py", "groups/test_groups.py"),
    *("groups/test_keeper.py", "web/test_layout.py", "cli/test_bad_input.py", "test_docs_run.py"),
    *("sched/test_feedback.py", "k8s/test_claim_groups.py", "guardian/failover/test_death.py"),
    *("guardian/proxy/test_profiling.py", "hostile/test_moments.py", "daemon/test_metrics_endpoint.py"),
    *("daemon/test_claim_lifetimes.py", "doctor/test_self_test_kills.py", "sched/test_loop.py", "trace/test_trace.py"),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what can't run here, order the rest; tests that boot a kernel or fetch Slurm run only when asked for."""
    at = {Path(__file__).parent / name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: at.get(item.path, len(FIRST)))
    lacks = {"root": os.geteuid() != 0, "gpu": os.geteuid() != 0 or not Path("/proc/driver/nvidia/version").exists()}
    lacks |= {name: name not in config.option.markexpr for name in ("vm", "node", "slurm")}
    reasons = {
        "root": "needs root",
        "gpu": "needs root and an NVIDIA GPU",
        "vm": "boots a kernel: ask with -m vm",
        "node": "runs a containerd of Debian's: ask with -m node",
        "slurm": "fetches and runs Slurm: ask with -m slurm, as root",
    }
    for item in items:
        for marker, reason in reasons.items():
            if lacks[marker] and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The ends of a pipe: for reading, and for writing."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture(autouse=True)
def loops_end_with_their_test() -> Iterator[None]:
    """Fail a test that does not end a GPU's loop, which would slow every later test of the process."""
    before = set(threading.enumerate())
    yield
    left = [each.name for each in threading.enumerate() if each not in before and each.name.startswith("pgpu")]
    assert not left

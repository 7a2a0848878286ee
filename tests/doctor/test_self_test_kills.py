"""A self-test changes no setting and leaves no pod, whatever ends it."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from qgpu.ipc.control_socket import Client
from tests.cli import programs
from tests.cli.programs import TIMEOUT_S
from tests.doctor.self_test_kills import SIGNALS, kill_one, settings, tenant


@pytest.mark.parametrize("number", SIGNALS)
def test_a_killed_self_test_leaves_nothing_and_changes_nothing(tmp_path: Path, number: signal.Signals) -> None:
    state, dice = tmp_path / "state", random.Random(number)
    with programs.daemon(tmp_path / "run", "--sim-gpus", "2", "--state-dir", str(state)) as running:
        assert running.ctl("gpu", "policy", "set", "1", "best-effort").returncode == 0
        busy = running.start(*tenant(running, 0))
        while not running.json("pod", "list")["pods"]:
            pass
        try:
            assert [found for gpu in (0, 1) for found in kill_one(running, state, number, dice, gpu)] == []
        finally:
            busy.terminate()
            busy.communicate(timeout=TIMEOUT_S)


def test_beside_a_tenant_the_policy_in_force_is_judged(tmp_path: Path) -> None:
    with programs.daemon(tmp_path / "run") as running:
        assert running.ctl("gpu", "policy", "set", "0", "fixed-share").returncode == 0
        before = settings(running.runtime_dir)
        busy = running.start(*tenant(running, 0))
        try:
            while not running.json("pod", "list")["pods"]:
                pass
            test = running.start("doctor", "--self-test", "-o", "json")
            with Client(running.runtime_dir) as client:
                while test.poll() is None:
                    assert client.call("gpu.list")["gpus"][0]["temporary_policy"] is None
                    assert settings(running.runtime_dir) == before
                    time.sleep(0.01)
            said, announced = test.communicate(timeout=TIMEOUT_S)
        finally:
            busy.terminate()
            busy.communicate(timeout=TIMEOUT_S)

    assert "its policy stays fixed-share; meanwhile less idle time is lent to tenant" in announced
    assert '"gate"' in said
    assert '"burst share"' not in said

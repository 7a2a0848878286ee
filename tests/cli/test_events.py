"""Who changed what: printed at once, recorded, kept over restarts, and nothing changed that could not be recorded."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from qgpu.errors import ExitCode
from qgpu.ipc.control_socket import Client
from tests.cli import programs
from tests.cli.programs import Daemon


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def running(tmp_path: Path, state: Path) -> Iterator[Daemon]:
    with programs.daemon(tmp_path / "run", "--state-dir", str(state)) as daemon:
        yield daemon


def test_a_change_is_recorded_and_the_record_survives_a_restart(tmp_path: Path, state: Path) -> None:
    for policy in ("fixed-share", "best-effort"):
        with programs.daemon(tmp_path / "run", "--state-dir", str(state)) as daemon:
            assert daemon.ctl("gpu", "policy", "set", "0", policy).returncode == ExitCode.OK
            events = daemon.json("events")["events"]
            table = daemon.ctl("events").stdout

    assert [(event["what"], event["gpu"]) for event in events] == [("policy set", 0)] * 2
    assert [(event["old"]["policy"], event["new"]["policy"]) for event in events] == [
        ("burst-share", "fixed-share"),
        ("fixed-share", "best-effort"),
    ]
    assert all(event["by"]["uid"] == os.getuid() and event["by"]["pid"] > 0 for event in events)
    assert all(event["by"]["program"].startswith("python") and event["at"].endswith("Z") for event in events)
    assert "policy fixed-share -> best-effort" in table


def test_pods_are_recorded_from_start_to_end(running: Daemon) -> None:
    running.ctl("run", "--name", "brief", "--cores", "30", "--", "true")
    events = running.json("events")["events"]

    assert [(event["what"], event["name"]) for event in events] == [("pod created", "brief"), ("pod removed", "brief")]
    assert events[0]["grants"]["0"]["cores"] == 30
    assert "pGPU 0: class offline, quota 30 %" in running.ctl("events").stdout


def test_a_program_that_does_not_exist_makes_no_pod(running: Daemon) -> None:
    running.ctl("run", "--", "no-such-program")

    assert running.json("events")["events"] == []


def test_switching_the_module_is_recorded(running: Daemon) -> None:
    with Client(running.runtime_dir) as client:
        client.call("module.switched", on=False)

    assert [event["what"] for event in running.json("events")["events"]] == ["module switched off"]


def test_a_refused_change_is_not_recorded(running: Daemon) -> None:
    running.ctl("gpu", "policy", "set", "0", "--period", "1ms")

    assert running.json("events")["events"] == []


def test_a_set_that_changes_nothing_is_no_event(running: Daemon) -> None:
    pod = running.start("run", "--name", "one", "--cores", "30", "--", "sleep", "60")
    while not running.json("pod", "list")["pods"]:
        pass
    same = [
        running.ctl("gpu", "policy", "set", "0", "burst-share").stdout,
        running.ctl("pod", "set", "one", "--cores", "30").stdout,
    ]
    pod.terminate()
    pod.communicate(timeout=programs.TIMEOUT_S)

    assert [line.partition(";")[0] for line in same] == ["pGPU 0: no change", "pod one: no change"]
    assert running.json("events", "--settings")["events"] == []


@pytest.mark.parametrize("full", ["events.jsonl", "state.json"])
def test_a_change_that_cannot_be_kept_is_not_made(running: Daemon, state: Path, full: str) -> None:
    (state / full).symlink_to("/dev/full")
    result = running.ctl("gpu", "policy", "set", "0", "fixed-share")

    assert result.returncode == ExitCode.FAILED
    assert "No space left on device; nothing was changed" in result.stderr
    assert running.json("gpu", "show", "0")["gpu"]["policy"] == "burst-share"
    (state / full).unlink()
    assert running.ctl("gpu", "policy", "set", "0", "fixed-share").returncode == ExitCode.OK
    assert json.loads((state / "state.json").read_text())["gpus"]


def test_pods_start_although_nothing_can_be_recorded(running: Daemon, state: Path) -> None:
    (state / "events-of-pods.jsonl").symlink_to("/dev/full")

    assert running.ctl("run", "--", "true").returncode == ExitCode.OK


def test_show_tells_all_about_a_pod_and_a_gpu(running: Daemon) -> None:
    pod = running.start("run", "--name", "one", "--cores", "30", "--memory", "2GiB", "--", "sleep", "60")
    while not any(each["created_at"] for each in running.json("pod", "list")["pods"]):
        pass
    shown = running.ctl("pod", "show", "one").stdout
    gpu = running.ctl("gpu", "show", "0").stdout
    status = [line.split() for line in running.ctl("status").stdout.splitlines()]
    answer = running.json("pod", "show", "one")["pod"]
    pod.terminate()
    pod.communicate(timeout=programs.TIMEOUT_S)

    for fact in ("quota", "share, last seconds", "below its quota", "gate closed", "switched in", "debt", "refused"):
        assert fact in shown
    facts = {name: value for line in shown.splitlines() for name, _, value in [line.strip().partition("  ")]}
    assert {"expected p99", "in host memory"} <= facts.keys()
    made, *_ = running.json("events")["events"]
    assert (answer["created_at"], answer["created_by"]) == (made["at"], made["by"])
    assert answer["state_since_s"] == datetime.fromisoformat(made["at"]).timestamp()
    assert facts["in that state since"].strip() == made["at"]
    assert facts["started"].strip().startswith(f"{made['at']}, by ")
    assert f"[{made['by']['pid']}]" in facts["started"]
    for fact in ("utilization", "engine active", "limits granted", "2 GiB", "quotas granted", "30 %", "one"):
        assert fact in gpu
    (header,) = (line for line in status if line[:1] == ["GPU"])
    assert {"ENGINE", "ACTIVE", "UTILIZATION", "HELD"} <= set(header)
    (use,) = (line for line in status if line[:2] == ["POD", "GPU"])
    assert {"QUOTA", "SHARE", "GATED", "GATE", "SWITCH", "LIMIT", "HELD"} <= set(use)
    assert ["one", "0", "30", "%"] in [line[:4] for line in status]
    assert answer["grants"][0]["memory_bytes"] == 2 << 30
    assert answer["usage"][0]["memory_bytes"] == 0


def test_show_tells_the_expected_p99_of_an_online_pod(tmp_path: Path) -> None:
    online = ("--class", "online", "--", *programs.LOAD, "--kernel", "1ms", "--period", "10ms")
    with (
        programs.daemon(tmp_path / "run") as daemon,
        programs.pods(daemon, {"chat": online, "train": ("--", *programs.LOAD)}),
    ):
        # known at one moment it may be unknown at the next
        while not re.search(r"^ +expected p99 +\+ [0-9.]+ (ms|µs)$", daemon.ctl("pod", "show", "chat").stdout, re.M):
            pass


def test_show_tells_since_when_and_where_a_pod_is_suspended(tmp_path: Path) -> None:
    load = (*programs.LOAD, "--memory", "64MiB")
    with programs.daemon(tmp_path / "run") as daemon, programs.pods(daemon, {"one": ("--", *load)}):
        assert daemon.ctl("pod", "suspend", "one").returncode == 0
        shown = daemon.ctl("pod", "show", "one").stdout
        answer = daemon.json("pod", "show", "one")["pod"]
        daemon.ctl("pod", "resume", "one")

    assert re.search(r"^state +suspended$", shown, re.M)
    assert re.search(r"^in host memory +64 MiB$", shown, re.M)
    assert answer["state_since_s"] > datetime.fromisoformat(answer["created_at"]).timestamp()


def test_a_move_is_shown_with_pod_source_and_target(tmp_path: Path) -> None:
    with (
        programs.daemon(tmp_path / "run", "--sim-gpus", "2") as daemon,
        programs.pods(daemon, {"one": ("--", *programs.LOAD)}),
    ):
        moved = daemon.ctl("pod", "move", "one", "--gpu", "1")
        rows = [line.split()[2:] for line in daemon.ctl("events").stdout.splitlines()]

    assert moved.returncode == ExitCode.OK, moved.stderr
    assert [" ".join(row[-9:]) for row in rows if "move" in row] == ["pod told to move one pGPU 0 -> 1"]


def test_two_daemons_do_not_share_a_state_directory(tmp_path: Path, running: Daemon, state: Path) -> None:
    second = programs.qgpud("--plane", "sim", "--runtime-dir", str(tmp_path / "other"), "--state-dir", str(state))

    assert second.returncode == ExitCode.ALREADY_RUNNING
    assert second.stderr == f"qgpud: {state}: another qgpud keeps its settings there; choose another --state-dir\n"
    assert running.ctl("status").returncode == ExitCode.OK

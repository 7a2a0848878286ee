"""Every number that a program prints as JSON says what it counts or measures: nobody has to guess bytes or per cent."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qgpu.cli.main import command as qgpuctl
from qgpu.cli.output import with_units
from qgpu.ipc.control_socket import Client
from tests.cli.programs import TIMEOUT_S, Daemon, daemon
from tests.cli.test_help import leaves

_UNITS = ("_ns", "_us", "_ms", "_s", "_bytes", "_percent", "_ratio")
#: Numbers without a unit: how many there are of something, and which one it is.
_COUNTS = {
    *("abi", "clients", "dropped", "dry", "gaps", "iterations", "kernels", "lost", "objects", "pods", "refused_calls"),
    *("batch", "count", "refused_memory", "runs", "stalled_cards", "streams", "switches", "traces", "tsgs"),
}
#: ``windows`` of a load are pairs: when each began, in seconds, and its kernels.
_NAMES = {"gpu", "index", "login_uid", "members", "minor", "number", "pid", "pids", "uid", "windows"}
_SCENARIO = """
duration = "2s"
pods.train = { cores = 60, workload = { batch = 0 } }
pods.chat = { class = "online", workload = { kernel_us = 100, period_us = 10000 } }
"""
#: What to ask each command for; empty where it cannot answer here.
_ASKED = {
    "doctor": ("doctor",),
    "events": ("events",),
    "gpu list": ("gpu", "list"),
    "gpu show": ("gpu", "show", "0"),
    "grant list": ("grant", "list"),
    "group list": ("group", "list"),
    "group show": ("group", "show", "llm"),
    "module show": (),  # needs the kernel module
    "pod list": ("pod", "list"),
    "pod show": ("pod", "show", "chat"),
    "simulate": ("simulate", "{folder}/scenario.toml"),
    "status": ("status",),
    "top": ("top", "-1", "--every", "0.3"),
    "trace": ("trace", "--seconds", "0.5", "--out", "{folder}/trace"),
}


def unnamed(value: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield where a number, or a table or list of numbers, has no unit in its name or in one around it."""
    if isinstance(value, dict):
        for key, each in value.items():
            if not any(key + unit in value for unit in _UNITS):
                yield from unnamed(each, (*path, key))
    elif isinstance(value, list):
        for each in value:
            yield from unnamed(each, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        measured = any(key.endswith(_UNITS) for key in path[-2:]) or path[-1] == "seconds"
        if not measured and path[-1] not in _COUNTS | _NAMES and path[-2:-1] != ("policies",):
            yield ".".join(path)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon of everything there is to print: pods of both classes, a group, changed settings and grants."""
    folder = tmp_path_factory.mktemp("json")
    (folder / "scenario.toml").write_text(_SCENARIO)
    with (
        daemon(folder / "run", "--sim-gpus", "2", "--state-dir", str(folder / "state")) as running,
        Client(running.runtime_dir) as client,
    ):
        online = {"class": "online", "latency_target_ns": 2_000_000, "memory": 1 << 30}
        work = {"kernel_us": 100.0, "period_us": 10_000.0}
        for name, grant, load in (("chat", online, work), ("train", {"cores": 60}, {"batch": 0})):
            client.call("pod.create", name=name, grants={"0": grant})
            client.call("sim.start", pod=name, gpu=0, workload=load)
        for words in (
            ("gpu", "policy", "set", "0", "--offline-floor", "10%", "--period", "50ms"),
            ("pod", "set", "train", "--cores", "50", "--memory", "16GiB"),
            ("group", "create", "llm", "--gpu", "1", "--cores", "60", "--memory", "40GiB"),
            ("group", "set", "llm", "--sm", "50", "--member-memory", "1GiB"),
        ):
            done = running.ctl(*words)
            assert done.returncode == 0, done.stderr
        yield running
        running.ctl("group", "remove", "llm", "--force")


def test_every_command_that_prints_json_is_walked() -> None:
    printing = {path for path, each in leaves(qgpuctl) if any(param.name == "output" for param in each.params)}

    assert printing == _ASKED.keys()


@pytest.mark.parametrize("command", [name for name, words in _ASKED.items() if words])
def test_numbers_in_json_have_units_in_their_names(busy: Daemon, command: str) -> None:
    words = [word.format(folder=busy.runtime_dir.parent) for word in _ASKED[command]]
    answer = busy.json(*words)

    assert len(answer) > 1, "nothing but the schema"
    assert list(unnamed(answer)) == []


def test_numbers_of_the_load_have_units_in_their_names(busy: Daemon) -> None:
    load = (sys.executable, "-m", "qgpu.load.main", "--duration", "0.3s", "--json", "-")
    pod = busy.start("run", "--gpu", "1", "--", *load)
    said, _ = pod.communicate(timeout=TIMEOUT_S)

    assert list(unnamed(json.loads(said))) == []


def test_numbers_of_the_module_have_units_in_their_names() -> None:
    state = {"enforcing": "yes", "abi": 1, "stalled_cards": [0], "pods": 1, "clients": 1, "objects": 1}

    assert list(unnamed(state)) == []


def test_a_quantity_without_a_unit_is_noticed() -> None:
    wrong = {"pods": [{"memory": 3, "share": 0.5, "cores_percent": 5}], "depth": {"0": 7}}

    assert list(unnamed(wrong)) == ["pods.memory", "pods.share", "depth.0"]
    assert list(unnamed(with_units(wrong))) == ["depth.0"]


def test_files_of_others_are_printed_as_they_are(busy: Daemon, tmp_path: Path) -> None:
    base = {"defaultAction": "SCMP_ACT_ALLOW", "memory": 1, "syscalls": []}
    (tmp_path / "base.json").write_text(json.dumps(base))
    said = json.loads(busy.ctl("cdi", "profile", "--base", str(tmp_path / "base.json")).stdout)

    assert said["memory"] == 1
    assert "memory_bytes" not in said

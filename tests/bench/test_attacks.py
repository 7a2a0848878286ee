"""The attackers of bench/attacks build from the ABI that qgpu declares, and what profilers' calls came to is judged."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from attacks import build, judge, world
from attacks.cases import CASES
from attacks.judge import against_the_grant
from attacks.world import Attacker

SOURCES = Path(build.__file__).parent
PROFILE = [case for case in CASES if case.family == "profile"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_every_attacker_builds_without_warnings(tmp_path, capfd):
    build.build(tmp_path)

    built = {each.name for each in tmp_path.iterdir()}
    assert {each.stem for each in SOURCES.glob("*.c")} <= built
    assert {case.program for case in CASES} - built <= {"raw-musl"}
    assert capfd.readouterr().err == ""


def test_every_mode_of_the_profilers_attackers_has_a_case():
    for program in ("profile", "monitors"):
        source = (SOURCES / f"{program}.c").read_text()
        table = source[source.index("static const struct mode modes[]") :]
        modes = {line.split('"')[1] for line in table.splitlines() if line.startswith('\t{ "')}
        assert modes == {case.mode for case in PROFILE if case.program == program}


def test_no_two_cases_of_a_family_share_a_name():
    counted = Counter((case.family, case.path, plane) for case in CASES for plane in case.planes)

    assert max(counted.values()) == 1


@pytest.mark.parametrize(
    ("said", "may_profile", "wrong"),
    [
        ("granted 6, reached 0, refused 9 (last 0x33)", True, ""),
        ("granted 0, reached 0, refused 9 (last 0x33)", False, ""),
        ("granted 0, reached 0, refused 9 (last 0x33)", True, "not judged, refused all of it"),
        ("granted 1, reached 0, refused 9 (last 0x33)", False, "granted without the grant"),
        ("granted 6, reached 1, refused 9 (last 0x33)", True, "reached what no pod may reach"),
        ("granted 0, reached 1, refused 9 (last 0x33)", False, "reached what no pod may reach"),
        ("flooding; client 0xc1d00012", True, "not judged"),
    ],
)
def test_profilers_calls_are_judged_by_the_pods_grant(said, may_profile, wrong):
    assert against_the_grant(said, may_profile=may_profile) == wrong


@pytest.mark.parametrize(
    ("attacker", "how", "options"),
    [
        (Attacker.POD, "pod", ["--cores", "40"]),
        (Attacker.PROFILER, "pod", ["--cores", "40", "--allow-profiling"]),
        (Attacker.MEMBER, "member", ["--cores", "40"]),
    ],
)
def test_an_attacker_starts_as_what_the_run_says(monkeypatch, tmp_path, attacker, how, options):
    started = []
    monkeypatch.setattr(world, "start_pod", lambda _bench, _name, grant, *_: started.append(("pod", grant)))
    monkeypatch.setattr(world, "_start_member", lambda _bench, _name, grant, *_: started.append(("member", grant)))
    world.start_attacker(SimpleNamespace(bench=None, attacker=attacker), "a", ["--cores", "40"], ["true"], tmp_path)

    assert started == [(how, options)]


class Place:
    """A world whose attacker reports what it is told, beside a neighbour that loses no step."""

    plane, quota, arguments = "seccomp", 1 << 30, {}

    def __init__(self, folder: Path, attacker: Attacker, said: str) -> None:
        self.attacker, self.said, self.asked = attacker, said, []
        self.bench = SimpleNamespace(
            directory=folder, timeout_factor=0, ask=lambda op, **more: self.asked.append((op, more))
        )

    def card_used(self) -> int:
        return 0

    def neighbour_lives(self) -> bool:
        return True

    def report(self, *_: object) -> SimpleNamespace:
        (self.bench.directory / "report").write_text(self.said)
        return SimpleNamespace(poll=lambda: None)


def come_to(monkeypatch, tmp_path, said, path):
    """Judge one case in a pod that may profile."""
    place = Place(tmp_path, Attacker.PROFILER, said)
    watch = SimpleNamespace(
        between=lambda *_: [None] * 9,
        rate=lambda *_: 1000.0,
        most_used=lambda *_: 0,
        longest_pause_s=lambda *_: 0.0,
    )
    monkeypatch.setattr(judge, "start_attacker", place.report)
    monkeypatch.setattr(judge, "end_attacker", lambda *_: None)
    monkeypatch.setattr(judge.time, "sleep", lambda _: None)
    case = next(case for case in PROFILE if path in case.path)
    return judge.judge(place, watch, case, 1000.0, 0.5), place.asked


def test_a_call_that_reached_a_neighbour_fails_its_row(monkeypatch, tmp_path):
    row, _ = come_to(monkeypatch, tmp_path, "granted 6, reached 1, refused 9", "debuggers")

    assert not row.passed
    assert (row.neighbour_steps_lost, row.bytes_over_quota) == (0, 0)
    assert row.said.startswith("reached what no pod may reach")


def test_what_reached_nobody_passes(monkeypatch, tmp_path):
    row, _ = come_to(monkeypatch, tmp_path, "granted 6, reached 0, refused 9", "debuggers")

    assert row.passed


def test_the_neighbour_is_online_only_for_its_case(monkeypatch, tmp_path):
    said = "granted 6, reached 0, refused 9"
    classes = [
        [more["class"] for op, more in come_to(monkeypatch, tmp_path, said, path)[1] if op == "pod.set"]
        for path in ("online", "debuggers")
    ]

    assert classes == [["online", "offline"], []]

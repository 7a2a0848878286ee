"""Runs of one and the same sources add up in the results of the VM lanes; those of others do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

VM = Path(__file__).resolve().parents[1] / "vm"
sys.path.insert(0, str(VM))

import added  # noqa: E402  (tests/vm is a folder of scripts)
import lane  # noqa: E402
import mutants  # noqa: E402
import sources  # noqa: E402
from mutations import MUTATIONS  # noqa: E402


def test_counts_add_up_and_the_worst_time_counts() -> None:
    first = {"fault_runs": 300, "open_after_answer_s": 0.4, "fault_kinds": 17, "tests_failed": 0}
    second = {"fault_runs": 50, "open_after_answer_s": 0.2, "fault_kinds": 9, "tests_failed": 1}

    assert added.figures(first, second) == {
        "fault_runs": 350,
        "open_after_answer_s": 0.4,
        "fault_kinds": 17,
        "tests_failed": 1,
    }


def test_a_ratio_is_not_added_up() -> None:
    with pytest.raises(ValueError, match=r"ratio: 1\.5 is no count"):
        added.figures({}, {"ratio": 1.5})


def test_a_run_of_the_same_sources_adds_to_its_row(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    lane.add(path, "faults", {"sources": "same"}, {"fault_runs": 300}, seeds=6)
    lane.add(path, "faults", {"sources": "same"}, {"fault_runs": 100}, seeds=2)
    row = json.loads(path.read_text())["faults"]

    assert (row["figures"], row["next_seed"]) == ({"fault_runs": 400, "boots": 2}, 9)


def test_a_run_of_other_sources_begins_its_row_again(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    lane.add(path, "faults", {"sources": "before"}, {"fault_runs": 300}, seeds=6)
    lane.add(path, "faults", {"sources": "after"}, {"fault_runs": 100}, seeds=2)
    row = json.loads(path.read_text())["faults"]

    assert (row["figures"], row["next_seed"]) == ({"fault_runs": 100, "boots": 1}, 3)


@pytest.mark.parametrize("option", ["--add", "--row"])
def test_a_command_is_told_without_where_figures_go(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    given = ["/x/lane.py", "--faults", "50", "--results", "f.json", option, "6.1 faults", "-m", "vm and quiet", "a.py"]
    monkeypatch.setattr(sys, "argv", given)

    assert lane.command() == "tests/vm/lane.py --faults 50 -m 'vm and quiet' a.py"


@pytest.mark.parametrize("name", ["gate.c", "uapi/qgpu.h"])
def test_sources_differ_if_a_byte_of_them_does(tmp_path: Path, name: str) -> None:
    (tmp_path / "uapi").mkdir()
    for each in ("gate.c", "uapi/qgpu.h", "gate.o"):
        (tmp_path / each).write_text("1")
    before = sources.digest(tmp_path)
    (tmp_path / "gate.o").write_text("2")
    assert sources.digest(tmp_path) == before
    (tmp_path / name).write_text("2")

    assert sources.digest(tmp_path) != before


def test_outcomes_of_other_sources_do_not_count() -> None:
    first, second = MUTATIONS[:2]
    before, after = mutants.mark(first, "before"), mutants.mark(second, "after")
    row = mutants.row({before: mutants.KILLED, after: mutants.SURVIVED}, [first, second], "after")

    assert row["outcomes"] == {after: mutants.SURVIVED}
    assert row["survived"] == [f"{second.file}: {second.breaks}"]
    assert (row["figures"]["mutants_run"], row["figures"]["mutants_survived"]) == (1, 1)


@pytest.mark.parametrize(("without", "counts"), [(mutants.SURVIVED, True), (mutants.KILLED, False), (None, False)])
def test_killed_counts_if_the_test_passes_without_it(without: str | None, counts: bool) -> None:
    killed, plain = MUTATIONS[0], mutants.control(MUTATIONS[0])
    todo = {mutants.mark(each, "same"): each for each in (plain, killed)}
    found = {mutants.mark(killed, "same"): mutants.KILLED}
    found |= {mutants.mark(plain, "same"): without} if without else {}

    assert mutants.sure(found, todo, "same") == ({mutants.mark(killed, "same"): mutants.KILLED} if counts else {})

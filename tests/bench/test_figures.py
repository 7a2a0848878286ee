from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from figures import NOTHING, Figure, RunInfo, at_least, at_most, between, median, merge, read, write
from plots import Plot, svg
from report import main, page, results_in
from script import EVERY

ABOUT = RunInfo("python bench/x.py", "580.1", "2026-01-01", "card", "sim", 3.0)
PLOTS = [
    Plot("a line", "size", "ratio", {"us": [(16, 2.0, 1.9, 2.1), (32, 2.0, 2.0, 2.0)]}, (1.96, 2.04), log_x=True),
    Plot("bars & more", "", "µs", {"us": [("one", 1.0)], "them": [("one", 2.0)]}, (1.5,)),
]


def _results(tmp_path, *sections):
    for section in sections:
        figures = [median(f"{section}_ratio", [1.0, 2.0, 3.0], *at_most(2, " x"), note="how & why")]
        write(tmp_path, f"sim-bench-{section}", ABOUT, figures, {}, PLOTS)


def test_a_figure_is_the_median_with_its_spread_and_verdict(tmp_path):
    _results(tmp_path, "a")
    found = json.loads((tmp_path / "sim-bench-a.json").read_text())

    assert found["figures"] == {"a_ratio": 2.0}
    assert found["details"]["a_ratio"] == {
        "value": 2.0,
        "limit": "≤ 2 x",
        "ok": True,
        "spread": [1.0, 3.0],
        "repeats": [1.0, 2.0, 3.0],
        "how": "how & why",
    }
    assert found["command"] == "python bench/x.py"


@pytest.mark.parametrize(
    ("asked", "value", "holds"),
    [
        (at_most(2), 2.0, True),
        (at_most(2), 2.01, False),
        (at_least(2), 1.99, False),
        (between(1, 2), 2.01, False),
        (between(1, 2), 1.0, True),
        (NOTHING, 7.0, None),
    ],
)
def test_what_is_asked_decides_what_holds(asked, value, holds):
    assert median("x", [value], *asked).passed is holds


def test_what_is_no_number_is_null(tmp_path):
    write(tmp_path, "r", ABOUT, [median("x", [math.nan]), Figure("y", [1.0, math.inf])], {})

    assert json.loads((tmp_path / "r.json").read_text())["figures"] == {"x": None, "y": [1.0, None]}


def test_what_is_written_can_be_read_back(tmp_path):
    figures = [
        median("x", [1.0, 2.0], *at_least(1), note="n"),
        Figure("y", [1, 2]),
        Figure("z", True, (), "true", True),
    ]
    write(tmp_path, "r", ABOUT, figures, {"s": "broke"})

    assert read(tmp_path / "r.json") == (ABOUT, figures_as_read(figures), {"s": "broke"})


def figures_as_read(figures):
    return [Figure(f.name, f.value, tuple(f.repeats), f.required, f.passed, f.note) for f in figures]


def test_sections_are_put_together_whichever_there_are(tmp_path):
    _results(tmp_path, "c", "a")
    merge(tmp_path, "sim-bench", ["a", "b", "c"])
    found = json.loads((tmp_path / "sim-bench.json").read_text())

    assert list(found["figures"]) == ["a_ratio", "c_ratio"]
    assert found["took_s"] == 6.0
    assert "a_ratio" in (tmp_path / "sim-bench.md").read_text()


def test_page_shows_each_figure_once_and_loads_nothing_external(tmp_path):
    _results(tmp_path, "a", "b")
    merge(tmp_path, "sim-bench", ["a", "b"])
    (tmp_path / "other.json").write_text("[1]")
    found = page(results_in(tmp_path))

    assert found.count("<svg") == 2
    assert found.count("<code>a_ratio</code>") == 1
    assert "how &amp; why" in found
    assert "src=" not in found
    assert 'href="http' not in found


def test_a_section_measured_later_replaces_its_own_figures_only(tmp_path, monkeypatch):
    _results(tmp_path, "colocation", "harvest")
    merge(tmp_path, "sim-bench", EVERY)
    later = replace(ABOUT, date="2026-01-02", command="python bench/y.py")
    write(tmp_path, "sim-bench-harvest", later, [median("harvest_ratio", [5.0])], {})
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path)])
    main()
    found = json.loads((tmp_path / "sim-bench.json").read_text())

    assert found["figures"] == {"colocation_ratio": 2.0, "harvest_ratio": 5.0}
    assert found["date"] == "2026-01-01 to 2026-01-02"
    assert found["command"] == "python bench/x.py; python bench/y.py"


def test_a_folder_without_results_is_said_to_be_one(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path)])

    with pytest.raises(SystemExit, match="no results in here"):
        main()


def test_the_same_figures_make_the_same_picture():
    assert svg(PLOTS) == svg(PLOTS)


def test_figures_from_different_runs_say_so(tmp_path):
    _results(tmp_path, "a")
    later = replace(ABOUT, date="2026-01-02", command="python bench/y.py", sources="abc")
    write(tmp_path, "sim-bench-b", later, [median("b_ratio", [5.0])], {})
    merge(tmp_path, "sim-bench", ["a", "b"])
    found = json.loads((tmp_path / "sim-bench.json").read_text())
    text = (tmp_path / "sim-bench.md").read_text()

    assert {name: told["section"] for name, told in found["details"].items()} == {"a_ratio": "a", "b_ratio": "b"}
    assert {name: (run["date"], run["sources"]) for name, run in found["runs"].items()} == {
        "a": ("2026-01-01", ""),
        "b": ("2026-01-02", "abc"),
    }
    assert found["sources"] == "not noted, abc"
    assert text.index("## a") < text.index("2026-01-01") < text.index("## b") < text.index("bench/y.py")

"""Measured figures in the documents come from files in docs/results (bench/document_figures.py)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import documents

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import document_figures as figures  # noqa: E402  (bench is a folder of scripts)
import report  # noqa: E402

PAGES = [ROOT / "CHANGELOG.md", *documents.files(ROOT)]
_UNIT = "µs|us|ms|s|seconds?|minutes?|hours?|%|per cent|points?|pp|x|times|cores?|[KMG]i?B|bytes"
_NUMBER = re.compile(rf"(?<![\w.])\d[\d,]*(?:\.\d+)*(?:\s?(?:{_UNIT})(?!\w))?")
_CONSTANTS = re.compile(r"<!-- constants: (.*?) -->", re.DOTALL)
_CODE = re.compile(r"^```.*?^```|^    .*?$|`[^`]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL | re.MULTILINE)


def loose_figures(page: str) -> list[str]:
    """Return the numbers of a page that look measured, come from no file and are not declared constant."""
    named = {each.strip() for listed in _CONSTANTS.findall(page) for each in " ".join(listed.split()).split(";")}
    prose = _CODE.sub(" ", figures.templates(page))
    found = [each for each in _NUMBER.findall(" ".join(prose.split())) if re.search(rf"\.\d|(?:{_UNIT})$", each)]
    return [each for each in found if each not in named]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_generated_figures_are_those_of_their_files(page: Path) -> None:
    text = page.read_text()

    assert figures.render(text) == text, "run: python bench/document_figures.py"
    assert text.count("begin generated") == text.count("end generated") == text.count(figures.BEGIN)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_figure_without_a_file_is_a_declared_constant(page: Path) -> None:
    assert loose_figures(page.read_text()) == [], "see bench/document_figures.py; or name it in <!-- constants: ... -->"


@pytest.mark.parametrize("text", ["a gap of 7 ms", "12.5 of it", "it lost 3 %", "0.4 points", "5 x"])
def test_a_measured_number_in_prose_is_found(text: str) -> None:
    assert loose_figures(text) != []
    assert loose_figures(f"`{text}`") == []


def test_a_figure_of_no_file_is_refused() -> None:
    page = figures.BEGIN + "{host > no_such_figure}\n-->\n1\n" + figures.END

    with pytest.raises(figures.FigureError, match="no_such_figure"):
        figures.render(page)


def test_a_missed_requirement_is_shown_as_missed(tmp_path: Path) -> None:
    detail = '{"value": 0.5, "limit": "≥ 1", "ok": false, "how": "so"}'
    (tmp_path / "some.json").write_text(f'{{"figures": {{"a": 0.5}}, "details": {{"a": {detail}}}}}')
    page = figures.BEGIN + "got {some > a : .1f}\n{missed}\n-->\n" + figures.END
    rendered = figures.render(page, tmp_path)

    assert "got 0.5 (**missed**, asked: ≥ 1)\n" in rendered
    assert "| `some` | `a` | ≥ 1 | 0.5 | so |\n" in rendered


def _figure(tmp_path: Path, value: float, limit: str, style: str) -> str:
    detail = f'{{"value": {value}, "limit": "{limit}", "ok": false, "how": "so"}}'
    (tmp_path / "some.json").write_text(f'{{"figures": {{"a": {value}}}, "details": {{"a": {detail}}}}}')
    return figures.render(f"{figures.BEGIN}{{some > a : {style}}}\n-->\n1\n{figures.END}", tmp_path)


def test_what_was_asked_has_the_units_of_the_figure(tmp_path: Path) -> None:
    assert "\n11 % (**missed**, asked: ≤ 3 %)\n" in _figure(tmp_path, 0.111, "≤ 0.03", ".0%")


def test_a_missed_figure_that_seems_met_is_refused(tmp_path: Path) -> None:
    with pytest.raises(figures.FigureError, match="more digits"):
        _figure(tmp_path, 0.9985, "≥ 1", ".2f")


@pytest.mark.parametrize(
    ("value", "style", "shown"),
    [(0, "no", "no"), (2, "no", "2"), (0, "none", "none"), (1.0, "all", "all"), (0.98, "all", "98 % of the")],
)
def test_none_and_all_are_words(tmp_path: Path, value: float, style: str, shown: str) -> None:
    (tmp_path / "some.json").write_text(f'{{"figures": {{"a": {value}}}, "details": {{}}}}')
    page = f"{figures.BEGIN}{{some > a : {style}}}\n-->\n1\n{figures.END}"

    assert f"\n{shown}\n" in figures.render(page, tmp_path)


def test_every_picture_and_table_of_results_is_shown() -> None:
    listed = subprocess.run(["git", "ls-files", "docs/results"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git here")
    kept = [Path(line).name for line in listed.stdout.splitlines() if (ROOT / line).exists()]
    texts = [*PAGES, *(ROOT / "docs/decisions").glob("*.md"), *(ROOT / "docs/results").glob("*.md")]
    shown = {
        link.rpartition("/")[2] for text in texts for link in re.findall(r"\(([^()#]+)#?[^()]*\)", text.read_text())
    }

    assert [name for name in kept if not name.endswith((".json", ".gitignore")) and name not in shown] == []


@pytest.mark.parametrize("stem", ["h100-groups", "h100-real", "h200-groups", "h200-memory", "h200-real"])
def test_merged_results_are_those_of_their_sections(tmp_path: Path, stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (ROOT / "docs/results").glob(f"{stem}-*.json"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path)])
    report.main()

    for suffix in ("json", "md"):
        assert (tmp_path / f"{stem}.{suffix}").read_text() == (ROOT / f"docs/results/{stem}.{suffix}").read_text()


def test_the_readme_is_at_most_800_words() -> None:
    rendered = re.sub(r"<!--.*?-->|\]\([^)]*\)|^```.*$", " ", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.M)
    words = [word for word in rendered.replace("|", " ").split() if re.search(r"\w", word)]

    assert len(words) <= 800


def test_the_unreleased_changes_fit_on_a_screen() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 40

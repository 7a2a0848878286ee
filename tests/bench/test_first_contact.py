"""The defects of the operator trial: each topic names tests that there are, and lanes that there are."""

from __future__ import annotations

import re
from pathlib import Path

import first_contact
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_each_topic_of_the_operator_trial_has_tests() -> None:
    assert [name.partition(" ")[0] for name in first_contact.DEFECTS] == [f"D{number}" for number in range(1, 12)]
    assert all(first_contact.DEFECTS.values())


@pytest.mark.parametrize("test", [test for tests in first_contact.DEFECTS.values() for test in tests])
def test_a_test_that_a_topic_names_is_there(test: str) -> None:
    path, _, function = test.partition("::")

    assert (ROOT / path).exists()
    assert not function or f"def {function}(" in (ROOT / path).read_text()


@pytest.mark.parametrize(
    ("topic", "lane"), [(topic, lane) for topic, lanes in first_contact.LANES.items() for lane in lanes]
)
def test_a_lane_that_a_topic_names_is_there(topic: str, lane: str) -> None:
    program, what = lane.split()

    assert topic in {name.partition(" ")[0] for name in first_contact.DEFECTS}
    if program == "make":
        assert re.search(rf"^{what}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        assert (ROOT / what).is_file()

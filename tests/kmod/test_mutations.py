"""The list of mutations of the module's sources applies to them (tests/vm/mutants.py runs tests against each)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

VM = Path(__file__).resolve().parents[1] / "vm"
sys.path.insert(0, str(VM))

from mutations import KMOD, MUTATIONS, Mutation  # noqa: E402  (tests/vm is a folder of scripts)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: f"{each.file}: {each.breaks}")
def test_a_mutation_changes_one_place_and_names_a_test(mutation: Mutation) -> None:
    assert mutation.applied() != (KMOD / mutation.file).read_text()
    text = (VM / "guest" / mutation.test).read_text()
    names = [name for name in mutation.only.split(" or ") if name]
    assert all(name in text for name in names)


def test_there_are_enough_and_none_is_there_twice() -> None:
    assert len(MUTATIONS) >= 40
    assert len({(each.file, each.new, each.old) for each in MUTATIONS}) == len(MUTATIONS)

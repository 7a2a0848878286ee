"""The distributions lane pastes everything that README and docs/install.md tell a reader to type."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/vm/host"))

import pasting_guest

from tests import documents

ROOT = Path(__file__).parents[2]


def test_every_block_of_an_installation_is_pasted_or_says_why() -> None:
    wanted = {
        each.place
        for each in documents.blocks(ROOT)
        if each.document in (pasting_guest.README, pasting_guest.INSTALL) and not each.language
    }
    pasted = [pasting_guest.block(ROOT, *each[:2]).place for each in pasting_guest.PASTED]
    left_out = [pasting_guest.block(ROOT, *each).place for each in pasting_guest.LEFT_OUT]

    assert sorted(pasted + left_out) == sorted(wanted)

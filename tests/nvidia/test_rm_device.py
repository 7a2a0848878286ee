"""The cards as our own client opens them: one that cannot be opened changes no other's number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qgpu.errors import RmError
from qgpu.nvidia import abi, mig, rm_device
from qgpu.nvidia.rm_client import CardInfo

CARDS = [CardInfo(f"00000000:0{number}:00.0", 0x100 * number, number) for number in (1, 2, 3)]


class Client:
    """A client of RM with three cards, of which some cannot be opened."""

    handle = 1

    def __init__(self, broken: set[int]) -> None:
        self.broken = broken

    def cards(self) -> list[CardInfo]:
        return CARDS

    def open_card(self, minor: int, gpu_id: int) -> None:
        if minor in self.broken:
            raise RmError("ATTACH_IDS", 0x56)

    def control(self, target: int, command: int, params: object) -> None:
        return None

    def alloc(self, parent: int, class_: int, params: object) -> int:
        return 2


@pytest.mark.parametrize("broken", [set(), {1}, {2}, {1, 3}])
def test_a_card_left_out_leaves_the_others_their_numbers(broken: set[int]) -> None:
    found = rm_device.open_devices(Client(broken))

    assert [(card.index, card.pci) for card in found] == [
        (index, card.pci) for index, card in enumerate(CARDS) if card.minor not in broken
    ]


@pytest.mark.parametrize(("there", "indexes"), [("1/0 2/0", [201, 202]), ("1/0 1/1 2/0", [202]), ("1/0 1/1", [])])
def test_divided_card_is_listed_by_its_instances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, indexes: list[int]
) -> None:
    monkeypatch.setattr(mig, "CAPABILITIES", tmp_path)
    for gpu, compute in (each.split("/") for each in there.split()):
        place = tmp_path / "gpu2" / "mig" / f"gi{gpu}" / f"ci{compute}"
        place.mkdir(parents=True)
        (place / "access").touch()
    found = rm_device.open_devices(Client(set()))

    assert [card.index for card in found] == [0, *indexes, 2]
    assert [card.pci for card in found] == [CARDS[number].pci for number in (0, *(1 for _ in indexes), 2)]
    assert len({card.instance for card in found[1:-1]} | {found[0].instance}) == len(indexes) + 1


def test_copy_engines_on_the_compute_runlist_are_named() -> None:
    """COPY0 and COPY1 are, as on an H200; RM has no more than five copy engines there."""

    class Answering(Client):
        def control(self, target: int, command: int, params: Any) -> None:
            if command == abi.NV2080_CE_GET_CAPS_V2:
                if params.ceEngineType > 0x0D:
                    raise RmError("CE_GET_CAPS_V2", 0x56)
                params.capsTbl[0] = 0x0C | (params.ceEngineType < 0x0B)

    assert rm_device.open_devices(Answering({1, 3}))[0].grces() == {0x09, 0x0A, 0x40, 0x41}

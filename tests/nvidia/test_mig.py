"""Instances by the driver's capability files, laid out as in /proc, and their numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from qgpu.model.plane_api import MigInstance
from qgpu.nvidia import mig

#: nv-caps.c: nv_cap_procfs_show.
ACCESS = "DeviceFileMinor: {}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The card with minor 3, in MIG mode, with GPU instances 2 and 11."""
    for gpu_instance, minor in ((11, 102), (2, 21)):
        place = tmp_path / "gpu3" / "mig" / f"gi{gpu_instance}"
        (place / "ci0").mkdir(parents=True)
        (place / "access").write_text(ACCESS.format(minor))
        (place / "ci0" / "access").write_text(ACCESS.format(minor + 1))
    devices = tmp_path / "devices"
    devices.write_text("Character devices:\n195 nvidia\n237 nvidia-caps\n238 nvidia-caps-imex-channels\n")
    monkeypatch.setattr(mig, "CAPABILITIES", tmp_path)
    monkeypatch.setattr(mig, "DEVICES", devices)
    return tmp_path


def test_instances_of_a_card_are_listed_by_its_minor() -> None:
    assert mig.on_card(0, 3) == [MigInstance(0, 2, 0), MigInstance(0, 11, 0)]
    assert mig.on_card(1, 0) == []


def test_an_instance_has_two_capability_files() -> None:
    assert mig.capabilities(3, MigInstance(0, 2, 0)) == (21, 22)
    assert mig.major() == 237


@pytest.mark.parametrize(
    ("minor", "instance"), [(3, MigInstance(0, 2, 1)), (3, MigInstance(0, 4)), (0, MigInstance(0, 2))]
)
def test_an_instance_that_is_gone_has_no_files(minor: int, instance: MigInstance) -> None:
    assert mig.capabilities(minor, instance) is None


def test_places_tell_instances_of_a_card_apart() -> None:
    places = [mig.place_of(5, MigInstance(9, gpu, compute)) for gpu in (0, 14) for compute in (0, 7)]

    assert len({5, *places}) == 5
    assert {mig.card_of(place) for place in (5, *places)} == {5}
    assert [mig.numbers_at(place) for place in (5, *places)] == [None, (0, 0), (0, 7), (14, 0), (14, 7)]


def test_an_instance_has_no_cards_number_and_keeps_its_own() -> None:
    numbers = [MigInstance(card, gpu).index for card in range(64) for gpu in range(15)]

    assert len(set(numbers)) == len(numbers)
    assert min(numbers) > 64


def test_guardians_are_told_whose_instances_are_shared(tmp_path: Path) -> None:
    assert mig.shared(tmp_path) == frozenset()
    mig.keep_shared(tmp_path, [0, 3])
    assert mig.shared(tmp_path) == {0, 3}

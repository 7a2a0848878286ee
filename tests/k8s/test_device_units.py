"""Units of cards: names, sets, and the choice among them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.errors import InvalidValueError, RefusedError
from qgpu.k8s import device_units
from tests.k8s.world import card

NUMBERS = st.frozensets(st.integers(0, 5000), min_size=1)


@given(NUMBERS)
def test_numbers_are_read_back_from_a_name(numbers: frozenset[int]) -> None:
    name = f"cores-{device_units.ranges(numbers)}"

    assert device_units.named_units(name) == numbers


@given(NUMBERS, NUMBERS)
def test_different_units_have_different_uids(one: frozenset[int], other: frozenset[int]) -> None:
    uids = {device_units.claim_uid("qgpu.io/cores", card(0), numbers) for numbers in (one, other)}

    assert len(uids) == len({one, other})
    assert all(device_units.is_device_plugins(uid) and len(uid) <= 63 for uid in uids)


def test_units_of_two_cards_are_refused() -> None:
    with pytest.raises(RefusedError, match="units of 2 cards"):
        device_units.read_units([device_units.unit_name(card(number), 0) for number in (0, 1)])


@pytest.mark.parametrize("name", ["", "GPU-1", "GPU-1::x", "::"])
def test_strange_unit_is_refused(name: str) -> None:
    with pytest.raises(InvalidValueError, match="no such unit"):
        device_units.read_units([name])


def test_name_of_a_unit_fits_the_kubelets_limit() -> None:
    assert len(device_units.unit_name(card(63), 99_999)) <= 63


@given(st.data())
def test_choice_keeps_to_one_card_if_one_has_room(data: st.DataObject) -> None:
    free = {number: data.draw(st.frozensets(st.integers(0, 30)), label=f"card {number}") for number in (0, 1)}
    size = data.draw(st.integers(1, 20), label="size")
    available = [device_units.unit_name(card(number), unit) for number, there in free.items() for unit in there]
    must = data.draw(st.lists(st.sampled_from(available), unique=True, max_size=size) if available else st.just([]))
    cards = {name.partition("::")[0] for name in must}
    chosen = device_units.preferred(available, must, size)

    assert set(must) <= set(chosen) <= set(available)
    assert len(chosen) == len(set(chosen)) == min(size, len(available))
    if any(len(there) >= size and cards <= {card(number)} for number, there in free.items()):
        assert len({name.partition("::")[0] for name in chosen}) == 1


def test_choice_takes_the_fullest_card_that_suffices() -> None:
    available = [device_units.unit_name(card(0), unit) for unit in range(10)]
    available += [device_units.unit_name(card(1), unit) for unit in range(6)]

    assert device_units.read_units(device_units.preferred(available, [], 5))[0] == card(1)
    assert device_units.read_units(device_units.preferred(available, [], 5, card(0)))[0] == card(0)
    assert device_units.read_units(device_units.preferred(available, [], 7))[0] == card(0)


def test_too_scattered_units_are_refused() -> None:
    with pytest.raises(RefusedError, match="scattered"):
        device_units.grant_name("share", range(0, 2000, 2))

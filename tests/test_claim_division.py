"""What a claim holds is divided among its containers, and never given twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.claim_division import DeviceUser, added_up, connected, divided, spare
from qgpu.errors import RefusedError
from qgpu.model import NS_PER_MS, Grant, PodClass

GIB = 1 << 30
ONLINE = PodClass.ONLINE


def user(name, *devices, held=0, leaving=False):
    return DeviceUser(name, devices, held, leaving=leaving)


def test_who_is_alone_gets_everything():
    grant = Grant(ONLINE, 40, 10 * GIB, 2 * NS_PER_MS)

    assert divided({"d": grant}, [user("a", "d")]) == {"a": grant}


def test_two_containers_get_half_each():
    found = divided({"d": Grant(cores=41, memory=10 * GIB)}, [user("a", "d"), user("b", "d")])

    assert found == {"a": Grant(cores=21, memory=5 * GIB), "b": Grant(cores=20, memory=5 * GIB)}


@pytest.mark.parametrize(("held", "left"), [(0, 5), (5, 5), (8, 2)])
def test_who_has_more_than_its_part_keeps_it(held, left):
    found = divided({"d": Grant(memory=10 * GIB)}, [user("a", "d", held=held * GIB), user("b", "d")])

    assert found["b"].memory == left * GIB
    assert found["a"].memory == (10 - left) * GIB


def test_nothing_is_left_beside_who_has_everything():
    found = divided({"d": Grant(memory=10 * GIB)}, [user("a", "d", held=10 * GIB), user("b", "d")])

    assert (found["a"].memory, found["b"].memory) == (10 * GIB, 1)


def test_a_last_run_keeps_what_it_has_and_no_more():
    users = [user("old", "d", held=2 * GIB, leaving=True), user("new", "d")]
    found = divided({"d": Grant(cores=40, memory=10 * GIB)}, users)

    assert found == {"old": Grant(cores=1, memory=2 * GIB), "new": Grant(cores=39, memory=8 * GIB)}


def test_devices_of_one_card_add_up():
    devices = {"d": Grant(cores=10, memory=2 * GIB), "e": Grant(cores=30, memory=3 * GIB), "f": Grant(cores=5)}

    assert divided(devices, [user("a", "d", "e")]) == {"a": Grant(cores=40, memory=5 * GIB)}
    assert divided(devices, [user("a", "d", "f")]) == {"a": Grant(cores=15)}


def test_a_shared_device_is_divided_and_another_is_not():
    devices = {"d": Grant(cores=10, memory=2 * GIB), "e": Grant(cores=30, memory=4 * GIB)}
    found = divided(devices, [user("a", "d", "e"), user("b", "e")])

    assert found == {"a": Grant(cores=25, memory=4 * GIB), "b": Grant(cores=15, memory=2 * GIB)}


def test_a_quota_too_small_to_divide_is_refused():
    with pytest.raises(RefusedError, match="its quota of 1 % cannot be divided among 2 containers"):
        divided({"d": Grant(cores=1)}, [user("a", "d"), user("b", "d")])


def test_two_classes_on_one_card_are_refused():
    with pytest.raises(RefusedError, match="of different classes"):
        added_up([Grant(ONLINE), Grant()])


def test_the_strictest_latency_target_holds():
    targets = [Grant(ONLINE, latency_target_ns=ms * NS_PER_MS) for ms in (4, 2)]

    assert added_up(targets).latency_target_ns == 2 * NS_PER_MS
    assert added_up([*targets, Grant(ONLINE)]).latency_target_ns is None


@st.composite
def cards(draw):
    """Draw the devices of a card and containers that use some of them, with what they have."""
    names = draw(st.lists(st.sampled_from("defg"), min_size=1, unique=True))
    size = st.none() | st.integers(1, 64) | st.integers(1, 64).map(lambda n: n * GIB)
    devices = {name: Grant(cores=draw(st.none() | st.integers(5, 25)), memory=draw(size)) for name in names}
    number = draw(st.integers(1, 5))
    used = st.lists(st.sampled_from(names), min_size=1, unique=True)
    users = [user(f"u{n}", *draw(used), leaving=n < number - 1 and draw(st.booleans())) for n in range(number)]
    together = connected(users)
    had: dict[str, int] = {}
    for group in together:  # no more than there is: what each has, it once was given
        left = spare(group, devices, {})
        for each in group:
            had[each.name] = draw(st.integers(0, left))
            left -= had[each.name]
    return devices, [DeviceUser(u.name, u.devices, had[u.name], leaving=u.leaving) for u in users]


@given(cards())
def test_containers_never_get_more_than_their_devices_hold(case):
    devices, users = case
    found = divided(devices, users)

    for group in connected(users):
        used = {name for each in group for name in each.devices}
        assert sum(found[each.name].cores or 0 for each in group) <= sum(devices[name].cores or 0 for name in used)
        limits = [found[each.name].memory for each in group]
        if None not in limits:
            # a limit is a byte at least, which no allocation fits in
            assert sum(limits) <= sum(devices[name].memory for name in used) + len(group)


@given(cards())
def test_nobody_has_a_limit_below_what_it_has(case):
    devices, users = case
    found = divided(devices, users)

    for each in users:
        limit = found[each.name].memory
        assert limit is None or limit >= each.held
        assert (limit is None) == any(devices[name].memory is None for name in each.devices)


@given(cards())
def test_nothing_is_left_over_while_somebody_could_use_it(case):
    devices, users = case
    users = [DeviceUser(each.name, each.devices, each.held) for each in users]
    found = divided(devices, users)

    for group in connected(users):
        limits = {each.name: found[each.name].memory for each in group}
        if None not in limits.values() and any(limits[each.name] > max(1, each.held) for each in group):
            used = {name for each in group for name in each.devices}
            assert sum(limits.values()) > sum(devices[name].memory for name in used) - len(group)

"""The handles of TSGs: which count as one TSG, and which of them stands for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qgpu.guardian.accounting.tsg_handles import TsgHandles


def test_a_further_handle_is_no_tsg_of_its_own():
    handles = TsgHandles()
    handles.add((1, 1))
    handles.add((2, 1), (1, 1))
    handles.add((3, 1), (2, 1))

    assert handles.firsts() == [(1, 1)]
    assert list(handles.all_of((1, 1))) == [(1, 1), (2, 1), (3, 1)]


def test_the_oldest_handle_left_stands_for_the_tsg():
    handles = TsgHandles()
    for handle in (1, 2, 3):
        handles.add((handle, 1), (1, 1))
    handles.drop((1, 1))

    assert handles.firsts() == [(2, 1)]
    assert list(handles.all_of((2, 1))) == [(2, 1), (3, 1)]


def test_handle_of_an_unknown_tsg_is_a_tsg_of_its_own():
    handles = TsgHandles()
    handles.add((1, 1), (9, 9))

    assert handles.firsts() == [(1, 1)]


@given(st.lists(st.tuples(st.sampled_from(["new", "share", "drop", "separate"]), st.integers(0, 7), st.integers(0, 7))))
def test_each_handle_belongs_to_exactly_one_tsg(steps):
    handles, known = TsgHandles(), set()
    for what, at, other in steps:
        key, source = (at, 0), (other, 0)
        if what == "drop" or key in known:
            handles.drop(key)
            known.discard(key)
        elif what != "separate":
            handles.add(key, source if what == "share" else None)
            known.add(key)
        if what == "separate" and source in known:
            handles.separate(source)
            assert source in handles.firsts()
        assert sorted(each for first in handles.firsts() for each in handles.all_of(first)) == sorted(known)

"""The handles of TSGs: which count as one TSG, and which of them stands for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.accounting.object_tree import ObjectTree
from qgpu.guardian.accounting.rm_object import Key, RmObject, object_fact
from qgpu.nvidia import abi

CLIENTS = (1, 2, 3)


def table_with(*shared: tuple[Key, Key | None]) -> ObjectTable:
    """Make a table with TSGs, each of itself or of another one, and a channel below each."""
    table = ObjectTable()
    table.note({"fact": "process", "pid": 5, "pod": "web"})
    for client in CLIENTS:
        table.note({"fact": "client", "client": client, "pid": 5, "fd": 3})
        make(table, RmObject(client, 20, client, abi.NV01_DEVICE_0))
    for (client, handle), same_as in shared:
        make(table, RmObject(client, handle, 20, abi.KEPLER_CHANNEL_GROUP_A, 1, same_as=same_as))
        make(table, RmObject(client, handle + 100, handle, 0xC86F))
    return table


def make(table: ObjectTable, rm: RmObject) -> None:
    table.note(object_fact(rm))
    table.note({"fact": "confirm", "client": rm.client, "handle": rm.handle})


def channels(table: ObjectTable) -> dict[Key, list[Key]]:
    """Return the channels of each TSG."""
    return {tsg.key: [channel.key for channel in table.channels(tsg)] for tsg in table.compute_tsgs(0)}


def test_a_further_handle_is_no_tsg_of_its_own():
    table = table_with(((1, 30), None), ((2, 30), (1, 30)), ((3, 30), (2, 30)))

    assert channels(table) == {(1, 30): [(1, 130), (2, 130), (3, 130)]}


def test_the_oldest_handle_left_stands_for_the_tsg():
    table = table_with(((1, 30), None), ((2, 30), (1, 30)), ((3, 30), (1, 30)))
    table.note({"fact": "gone", "client": 1, "handle": 30})

    assert channels(table) == {(2, 30): [(2, 130), (3, 130)]}


def test_handle_of_an_unknown_tsg_is_a_tsg_of_its_own():
    assert channels(table_with(((1, 30), (9, 9)))) == {(1, 30): [(1, 130)]}


@given(st.lists(st.tuples(st.sampled_from(["new", "share", "drop", "separate"]), st.integers(0, 7), st.integers(0, 7))))
def test_each_handle_belongs_to_exactly_one_tsg(steps):
    tree, known = ObjectTree(), set()
    for what, at, other in steps:
        key, source = (at, 0), (other, 0)
        if what == "drop" or key in known:
            tree._leave_tsg(key)
            known.discard(key)
        elif what != "separate":
            tree._join_tsg(key, source if what == "share" else None)
            known.add(key)
        if what == "separate" and source in known:
            tree._leave_tsg(source)
            tree._join_tsg(source)
            assert tree._tsgs[source] == [source]
        firsts = [alike for key, alike in tree._tsgs.items() if key == alike[0]]
        assert sorted(each for alike in firsts for each in alike) == sorted(known)

"""What of a changed structure is written back into a pod's memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer


@given(before=st.binary(min_size=1, max_size=100), data=st.data())
def test_changes_written_back_make_memory_what_rm_left(before, data):
    after = data.draw(st.binary(min_size=len(before), max_size=len(before)))
    answer: list[tuple[int, bytes]] = []
    block = IoctlBuffer(answer, 0x1000, before)
    block.data[:] = after

    block.store_changes()

    there = bytearray(before)
    for address, written in answer:
        there[address - 0x1000 : address - 0x1000 + len(written)] = written
    assert bytes(there) == after
    assert all(written != before[address - 0x1000 :][: len(written)] for address, written in answer)


@given(before=st.binary(min_size=1, max_size=1024), data=st.data())
def test_words_that_rm_left_alone_are_not_written_back(before, data):
    changed = data.draw(st.sets(st.integers(0, len(before) - 1), max_size=12))
    answer: list[tuple[int, bytes]] = []
    block = IoctlBuffer(answer, 0, before)
    for at in changed:
        block.data[at] ^= 1

    block.store_changes()

    words = {8 * (at // 8) for at in changed}
    assert {at for address, written in answer for at in range(address, address + len(written), 8)} == words
    assert all(written == block.data[address : address + len(written)] for address, written in answer)

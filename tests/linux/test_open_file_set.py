"""Files that were seen, remembered by epoll and kept open by nobody."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.linux.open_file_set import FileSets

_PIDS = st.integers(1, (1 << 22) - 1)


def test_a_file_is_known_by_every_descriptor_it_has(pipe):
    seen = FileSets().roots
    new = seen.add(pipe[0])
    copy = os.dup(pipe[0])

    assert (new, seen.add(copy), seen.has(copy), seen.has(pipe[1])) == (True, False, True, False)
    os.close(copy)


def test_asking_is_not_telling_and_what_is_forgotten_is_new(pipe):
    seen = FileSets().roots
    asked = seen.has(pipe[0]), seen.has(pipe[0])
    seen.add(pipe[0])
    seen.discard(pipe[0])
    seen.discard(pipe[0])

    assert (*asked, seen.add(pipe[0])) == (False, False, True)


def test_a_file_is_not_kept_open(pipe):
    seen = FileSets().roots
    reading, writing = os.pipe()
    seen.add(reading)
    os.close(reading)

    with pytest.raises(BrokenPipeError):
        os.write(writing, b"x")
    os.close(writing)


def test_what_cannot_be_polled_is_an_error():
    fd = os.open("/dev/null", os.O_RDONLY)

    with pytest.raises(PermissionError):
        FileSets().roots.add(fd)
    os.close(fd)


@given(maker=_PIDS, other=_PIDS)
def test_a_file_knows_who_made_its_client_and_nobody_else(maker, other):
    makers, (reading, writing) = FileSets().makers, os.pipe()
    assert makers.claim(reading, maker, 0)
    copy = os.dup(reading)

    assert makers.is_by(copy, maker)
    assert makers.claim(copy, other, 0) == makers.is_by(copy, other) == (other == maker)
    assert not makers.is_by(writing, maker)
    makers.forget(copy)
    assert not makers.is_by(reading, maker)
    assert makers.claim(reading, other, 0)
    for fd in (reading, writing, copy):
        os.close(fd)


def test_claimed_files_are_counted_by_their_marks_while_open():
    makers, fds = FileSets().makers, [os.open("/dev/random", os.O_RDONLY) for _ in range(3)]
    for fd, mark in zip(fds, (1, 1, 1 << 63), strict=True):
        makers.claim(fd, 5, mark)
    makers.claim(fds[0], 5, 1)
    before = makers.count(), makers.count(1), makers.count(1 << 63)
    os.close(fds[0])
    makers.recount()
    makers.rule_out(fds[1], 1)

    assert (before, makers.count(), makers.count(1)) == ((3, 2, 1), 3, 2)  # as noted once more
    makers.recount()
    assert (makers.count(), makers.count(1), makers.count(1 << 63)) == (2, 1, 1)
    for fd in fds[1:]:
        os.close(fd)


def test_of_two_claims_at_once_one_holds():
    makers = FileSets().makers
    for number in range(0, 400, 4):
        reading, writing = os.pipe()
        together = threading.Barrier(2)

        def claim(pid, file=reading, together=together):
            together.wait()
            makers.claim(file, pid, 0)

        threads = [threading.Thread(target=claim, args=(pid,)) for pid in (number + 1, number + 2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert [makers.is_by(reading, number + 1), makers.is_by(reading, number + 2)].count(True) == 1
        os.close(reading)
        os.close(writing)

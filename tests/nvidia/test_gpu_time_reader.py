"""A card's time as both planes on real hardware measure it: switches in, uses by TSG out."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from qgpu.daemon.kmod_plane import CtxswSource
from qgpu.errors import BackendGoneError, RmError
from qgpu.model import NS_PER_MS, NS_PER_S
from qgpu.nvidia.ctxsw_log import END, START, ContextSwitch
from qgpu.nvidia.gpu_time_reader import GpuTimeReader
from qgpu.planes.kmod.backend import TsgRef

MS = NS_PER_MS
#: The card's clock is an hour ahead of the host's.
AHEAD_NS = 3600 * NS_PER_S


class Log:
    """Records as a card would write them, by the clock of a card that is asked as often."""

    dropped = 0

    def __init__(self):
        self.now_ns = 0
        self.switches = []
        self.broken = False
        self.device = SimpleNamespace(pci="0000:01:00.0", time_ns=lambda: self.now_ns)

    def turn(self, context, pid, ms):
        """``pid`` runs for so long."""
        self.switches.append(ContextSwitch(self.now_ns, START, context, pid))
        self.now_ns += ms * MS
        self.switches.append(ContextSwitch(self.now_ns, END, context, pid))

    def read(self):
        if self.broken:
            raise RmError("flush", 0x62)
        taken, self.switches = self.switches, []
        return taken


@pytest.fixture
def log():
    return Log()


def ref(ident, pid):
    return TsgRef(ident, 0xC0 + pid, 0x30 + ident, (pid,))


def used(reading):
    return {ident: (sample.run_ns // MS, sample.starts) for ident, sample in reading.tsgs.items()}


def test_source_reports_each_process_since_last_reading(log):
    source = CtxswSource(GpuTimeReader(log.device, log))
    both = [ref(1, 7), ref(2, 8)]
    log.turn(100, 7, 3)
    log.turn(101, 8, 5)
    first = used(source.read(both))
    log.turn(100, 7, 2)

    assert first == {1: (3, 1), 2: (5, 1)}
    assert used(source.read(both)) == {1: (2, 1), 2: (0, 0)}


def test_all_contexts_of_a_process_count_for_its_first_tsg(log):
    source = CtxswSource(GpuTimeReader(log.device, log))
    log.turn(100, 7, 3)
    log.turn(102, 7, 4)

    assert used(source.read([ref(1, 7), ref(2, 7)])) == {1: (7, 2)}


def test_time_of_every_process_with_a_handle_counts_for_the_tsg(log):
    source = CtxswSource(GpuTimeReader(log.device, log))
    group = TsgRef(1, 0xC7, 0x31, (7, 8))
    log.turn(100, 7, 3)
    log.turn(101, 8, 4)
    log.turn(102, 9, 5)

    assert used(source.read([group, ref(2, 9)])) == {1: (7, 2), 2: (5, 1)}


def test_a_new_tsg_is_not_given_what_its_process_did_before(log):
    source = CtxswSource(GpuTimeReader(log.device, log))
    log.turn(100, 7, 900)
    source.read([ref(1, 7)])
    log.turn(102, 7, 1)

    assert used(source.read([ref(2, 7)])) == {2: (1, 1)}


def test_whoever_ends_is_forgotten(log):
    watch = GpuTimeReader(log.device, log)
    source = CtxswSource(watch)
    for pid in range(100):
        log.turn(pid, pid, 1)
    source.read([])
    source.read([])

    assert (watch.counter.totals, watch.counter.handovers) == ({}, {})


def longest(reading):
    return {ident: sample.longest_ns // MS for ident, sample in reading.tsgs.items()}


def test_the_longest_turn_since_the_last_reading_is_told(log):
    source = CtxswSource(GpuTimeReader(log.device, log))
    both = [ref(1, 7), ref(2, 8)]
    for ms in (3, 9, 2):
        log.turn(100, 7, ms)
        log.turn(101, 8, 1)

    assert longest(source.read(both)) == {1: 9, 2: 1}
    log.turn(100, 7, 4)
    assert longest(source.read(both)) == {1: 4, 2: 0}


def test_a_turn_across_readings_is_told_in_full_once_it_ends(log):
    source = CtxswSource(GpuTimeReader(log.device, log))
    log.switches.append(ContextSwitch(log.now_ns, START, 100, 7))
    log.now_ns += 5 * MS
    assert longest(source.read([ref(1, 7)])) == {1: 0}

    log.now_ns += 6 * MS
    log.switches.append(ContextSwitch(log.now_ns, END, 100, 7))
    assert longest(source.read([ref(1, 7)])) == {1: 11}


def test_a_turn_whose_end_was_not_noted_ends_as_the_next_begins(log):
    source = CtxswSource(GpuTimeReader(log.device, log))
    log.switches.append(ContextSwitch(log.now_ns, START, 100, 7))
    log.now_ns += 5 * MS
    log.turn(101, 8, 2)

    assert longest(source.read([ref(1, 7), ref(2, 8)])) == {1: 5, 2: 2}


def test_straight_switches_are_told_by_tsg(log):
    source = CtxswSource(GpuTimeReader(log.device, log))
    for _ in range(3):
        log.turn(100, 7, 2)
        log.turn(101, 8, 1)

    assert source.read([ref(1, 7), ref(2, 8)]).handovers == {(1, 2): 3, (2, 1): 2}


def test_runs_use_host_clock_whatever_the_cards_clock(log):
    log.now_ns = time.monotonic_ns() + AHEAD_NS
    source = CtxswSource(GpuTimeReader(log.device, log))
    source.detailed = True
    source.read([ref(1, 7)])
    log.turn(100, 7, 3)
    runs = source.read([ref(1, 7)]).tsgs[1].runs

    assert [end_ns - start_ns for start_ns, end_ns in runs] == [3 * MS]
    assert abs(runs[0][1] - time.monotonic_ns()) < NS_PER_S * 60


def test_a_card_that_fails_is_said_to(log):
    source = CtxswSource(GpuTimeReader(log.device, log))
    log.broken = True

    with pytest.raises(BackendGoneError, match="0000:01"):
        source.read([ref(1, 7)])

"""RM's own mappings for the card, which pods without a memory limit may have: RM undoes all that it frees at once."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import nv
import pytest
import qg
from programs import MIB, program

SPACE, CONTEXT_DMA, SYSTEM = 0x50A0, 0x02, 0x3E
OF_CLIENT, OF_POD = 1 << 14, 1 << 15
PAGE, NOT_FOUND = 0x1000, 0x57
pytestmark = pytest.mark.skipif(
    Path("/proc/lockdep_stats").exists(), reason="too many calls for a kernel that watches every lock"
)


def begin(state):
    """A program with memory, and an address space to map it into."""
    state["p"] = p = nv.Program()
    state["memory"], state["space"] = p.memory(MIB), p.alloc(p.device, SPACE, struct.pack("8xI116x", 0x80400))


@pytest.fixture
def process(pod):
    made = pod("free").process()
    made.run(begin)
    return made


def map_at(state, first, count, pages=1, every=None, space="space", memory="memory"):
    """Map memory at so many places, one after another; how many RM mapped, and its first other status."""
    p, call = state["p"], bytearray(64)
    struct.pack_into("4IQQ", call, 0, p.client, p.device, state[space], state[memory], 0, pages * PAGE)
    for n in range(count):
        struct.pack_into("QI", call, 48, (first + n * (pages if every is None else every)) * PAGE, 0)
        p.send(p.ctl, 0x57, call)
        (status,) = struct.unpack_from("I", call, 56)
        if status:
            return n, status
    return count, 0


def unmap_at(state, first, pages=0, space="space"):
    """Unmap what begins at a place, or lies in so many pages; RM's status."""
    p = state["p"]
    call = bytearray(struct.pack("6IQQII", p.client, p.device, state[space], 0, 0, 0, first * PAGE, pages * PAGE, 0, 0))
    p.send(p.ctl, 0x58, call)
    return struct.unpack_from("I", call, 40)[0]


def room(state):
    """How many more mappings the client may have, which it has then."""
    return map_at(state, 1 << 24, OF_CLIENT + 1)[0]


def free_memory(state):
    state["p"].free(state["memory"])
    state["memory"] = state["p"].memory(MIB)


def test_a_client_has_so_many_mappings_for_the_card_at_most(process, qgpu):
    assert process.run(map_at, 0, OF_CLIENT + 1) == (OF_CLIENT, nv.NO_RESOURCES)
    assert [pod.refused_objects for pod in qgpu.pods()] == [1]
    assert process.run(unmap_at, 7) == 0
    assert process.run(map_at, 1 << 24, 2) == (1, nv.NO_RESOURCES)
    process.run(free_memory)  # RM undoes them, and no call says so
    assert process.run(map_at, 0, 10) == (10, 0)


def unmap_often(state, seconds):
    """Have RM look for a mapping that is not there; how often it did."""
    until, times = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        unmap_at(state, 1 << 24)
        times += 1
    return times


def test_looking_through_many_mappings_costs_the_pod_time(process, linger):
    """RM holds the card's lock meanwhile. A call of 20 ms: three of them in a second, with what they cost."""
    assert process.run(map_at, 0, 1024) == (1024, 0)
    linger(20000)
    assert process.run(unmap_often, 1) > 8
    linger(0)
    assert process.run(map_at, 1024, 1) == (1, 0)
    linger(20000)

    assert process.run(unmap_often, 1) <= 4


def test_a_pod_has_so_many_mappings_for_the_card_at_most(pod):
    free_pod = pod("free")
    first, second, third = (free_pod.process() for _ in range(3))
    for each in (first, second, third):
        each.run(begin)
    assert [each.run(map_at, 0, OF_CLIENT) for each in (first, second)] == [(OF_CLIENT, 0)] * 2

    assert third.run(map_at, 0, 1) == (0, nv.NO_RESOURCES)
    first.run(free_memory)
    assert third.run(map_at, 0, 1) == (1, 0)
    second.stop()
    qg.until(lambda: free_pod.info().nr_clients == 2)
    assert third.run(room) == OF_CLIENT - 1


def test_a_mapping_that_rm_splits_counts_twice(process):
    """Since branch 550 RM undoes what lies in a range."""
    assert process.run(map_at, 0, 1, 100) == (1, 0)
    assert [process.run(unmap_at, first, 2) for first in (10, 20, 30)] == [0] * 3
    assert [process.run(unmap_at, first, 4) for first in (19, 29)] == [0] * 2  # of no mapping's middle
    assert process.run(room) == OF_CLIENT - 4

    assert process.run(unmap_at, 50, 1) == nv.NO_RESOURCES
    assert process.run(unmap_at, 33, 67) == 0
    assert process.run(unmap_at, 5, 1) == 0
    assert process.run(unmap_at, 3, 1) == nv.NO_RESOURCES
    assert process.run(unmap_at, 0, 100) == 0
    assert process.run(map_at, 0, 5) == (4, nv.NO_RESOURCES)


def test_what_lies_in_a_range_no_longer_counts(process):
    process.run(map_at, 0, 100)
    assert process.run(unmap_at, 50, 30) == 0
    assert process.run(unmap_at, 0) == 0

    assert process.run(room) == OF_CLIENT - 69


def test_mappings_in_the_place_of_others_count_once(process):
    """RM had undone the others with their memory; they must not hide that RM splits what lies there now."""
    process.run(map_at, 0, 100)
    process.run(free_memory)
    process.run(map_at, 10, 1, 80)
    assert [process.run(unmap_at, first, 1) for first in range(20, 80, 10)] == [0] * 6

    assert process.run(room) == OF_CLIENT - 7


def test_mappings_of_a_context_dma_may_lie_over_each_other(process):
    """RM keeps each of them."""

    def context_dma(state):
        state["dma"] = state["p"].alloc(state["p"].device, CONTEXT_DMA)

    process.run(context_dma)
    assert process.run(map_at, 0, 50, 4, 1, "dma") == (50, 0)
    assert process.run(map_at, 0, 50, 4, 0, "dma") == (50, 0)

    assert process.run(room) == OF_CLIENT - 100


def test_unmapping_while_calls_are_not_sealed_frees_no_room(process):
    """Another thread could have RM split a mapping instead."""
    process.run(map_at, 0, 10)
    with qg.switched_off(qg.KPROBES):
        assert [process.run(unmap_at, 0, 1) for _ in range(5)] == [0] * 5
    qg.until(lambda: process.run(map_at, 100, 1) == (1, 0))

    assert process.run(room) == OF_CLIENT - 16


def test_a_mapping_for_the_card_that_rm_refuses_does_not_count(process):
    def lose_memory(state):
        """RM frees it with its device, and no call says so."""
        p = state["p"]
        device = p.alloc(p.client, nv.DEVICE, bytes(56))
        p.alloc(device, nv.SUBDEVICE, bytes(4))
        state["memory"] = p.alloc(device, SYSTEM)
        p.free(device)

    process.run(lose_memory)
    assert process.run(lambda state: [map_at(state, 0, 1) for _ in range(10)]) == [(0, NOT_FOUND)] * 10
    process.run(lambda state: state.update(memory=state["p"].memory(MIB)))
    assert process.run(room) == OF_CLIENT


def test_mappings_go_with_their_client(pod):
    """A client's end with a count left would be seen by the module's WARN_ON in client_free()."""
    free_pod = pod("free")
    process = free_pod.process()
    process.run(program)
    process.run(begin)
    process.run(map_at, 0, 1000)
    process.stop()

    qg.until(lambda: free_pod.info().nr_clients == 0)

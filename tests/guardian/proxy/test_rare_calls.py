"""Calls for which RM looks through many objects under its lock: a pod makes them rarely."""

from __future__ import annotations

import errno
import struct
from types import SimpleNamespace

import pytest

from qgpu.guardian.proxy import rare_calls
from qgpu.guardian.rules import escapes
from qgpu.nvidia import abi, uvm
from tests.guardian.asked import alloc, free, uvm_mapping, uvm_range
from tests.guardian.fake_rm import PAGE
from tests.guardian.pod import allocate

SLOW_NS = 20_000_000
#: What is left of a wait after one call of SLOW_NS.
REST_NS = 20 * SLOW_NS - 20_000_000
PAGE_OF_FIGURES, MEMORY = 30, 40
UNMAP, UPDATE = abi.NV_ESC_RM_UNMAP_MEMORY, abi.NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO
_SLOW = (abi.NV_ESC_RM_ALLOC, abi.NV_ESC_RM_FREE, abi.NV_ESC_RM_UNMAP_MEMORY_DMA, UNMAP, UPDATE)


@pytest.fixture
def clock(on_card, monkeypatch):
    """A clock that nothing moves but waits and RM; ``rests`` has the waits in ns."""
    clock = SimpleNamespace(now_ns=10**9, rests=[], took_ns=SLOW_NS, works=True)

    def sleep(seconds):
        clock.rests.append(round(seconds * 1e9))
        clock.now_ns += clock.rests[-1]

    fake = SimpleNamespace(
        sleep=sleep, monotonic_ns=lambda: clock.now_ns, thread_time_ns=lambda: clock.now_ns if clock.works else 0
    )
    monkeypatch.setattr(rare_calls, "time", fake)
    perform, figure = on_card.rm.perform, on_card.rm.private_bytes

    def look():
        clock.now_ns += clock.took_ns

    def slow(fd, request, argument):
        if request & 0xFF in _SLOW:
            look()
        return perform(fd, request, argument)

    on_card.shared.perform = slow
    on_card.dispatcher = on_card.dispatcher_of(on_card.shared, on_card.number)
    on_card.rm.private_bytes = lambda instance, pid: look() or figure(instance, pid)
    return clock


def waited(clock, act):
    """Return for how long a call waits, in ns."""
    clock.rests.clear()
    act()
    return sum(clock.rests)


def page(pod, mask=1 << 1):
    asked = alloc(PAGE_OF_FIGURES, 3, abi.RM_USER_SHARED_DATA)
    pod.call(abi.NV_ESC_RM_ALLOC, asked, struct.pack("<Q", mask))


def free_page(pod):
    pod.call(abi.NV_ESC_RM_FREE, free(PAGE_OF_FIGURES))


@pytest.mark.parametrize("mask", [1 << 1, 1 << 63, 0])
def test_handles_of_the_shared_page_with_a_mask_are_rare(on_card, clock, mask):
    """Each counts twice: RM looks once more as its process ends."""
    page(on_card, mask)
    again = waited(clock, lambda: on_card.dispatcher._ctx.rare.wait())

    assert again == (REST_NS + 21 * SLOW_NS if mask else 0)


def test_frees_of_the_shared_page_are_rare(on_card, clock):
    page(on_card, 0)

    assert waited(clock, lambda: free_page(on_card)) == 0
    assert waited(clock, lambda: page(on_card, 0)) == REST_NS
    on_card.call(abi.NV_ESC_RM_FREE, free(3))
    assert waited(clock, lambda: on_card.call(abi.NV_ESC_RM_ALLOC, alloc(5, 2, 0x2080), bytes(4))) == 0


def freed(pod):
    assert allocate(pod, MEMORY, PAGE) == abi.NV_OK
    pod.call(abi.NV_ESC_RM_FREE, free(MEMORY))


def unmapped(pod):
    allocate(pod, MEMORY, PAGE)
    pod.uvm(uvm.MAP_EXTERNAL_ALLOCATION, uvm_mapping(1 << 40, PAGE, MEMORY))
    pod.rm.mapped = {(7, MEMORY)}
    pod.call(abi.NV_ESC_RM_FREE, free(MEMORY))
    pod.rm.unmaps = True
    pod.uvm(uvm.UNMAP_EXTERNAL, uvm_range(1 << 40, PAGE))


@pytest.mark.parametrize(
    ("took_ns", "works", "rests"), [(999_999, True, False), (SLOW_NS, True, True), (SLOW_NS, False, False)]
)
@pytest.mark.parametrize("act", [freed, unmapped])
def test_slow_questions_about_freed_memory_are_rare(on_card, clock, act, took_ns, works, rests):
    """RM answers about a usual process sooner, and a neighbour may have RM's lock: then nobody waits."""
    clock.took_ns, clock.works = took_ns, works
    first, second = (waited(clock, lambda: act(on_card)) for _ in range(2))

    assert (first, second > 0) == (0, rests)


def look_for_mapping(pod, number, client=7):
    """Have RM look for a mapping for the CPU; return the errno. The kernel performs that for client 7."""
    size = next(size for each, size in escapes.WATCHED if each == number)
    return pod.call(number, struct.pack("<III", client, 3, 30) + bytes(size - 12))[1]


@pytest.mark.parametrize("number", [UNMAP, UPDATE])
@pytest.mark.parametrize(("limited", "mappings"), [(True, 1 << 12), (True, (1 << 12) - 1), (False, 1 << 16)])
def test_looks_of_the_kernels_for_mappings_are_rare(on_card, clock, number, limited, mappings):
    """The guardian cannot time them. It counts ended mappings too, so without a limit it lets them pass at once."""
    if not limited:
        on_card.limits.clear()
    on_card.shared.note({"fact": "cpu_mappings", "pid": on_card.process.pid, "count": mappings})
    for _ in range(20):
        first = waited(clock, lambda: look_for_mapping(on_card, number))

    assert (first > 0) is (limited and mappings == 1 << 12)


@pytest.mark.parametrize("number", [UNMAP, UPDATE])
def test_slow_looks_of_the_guardians_for_mappings_are_rare(on_card, clock, number):
    client = struct.unpack_from("<I", on_card.call(abi.NV_ESC_RM_ALLOC, alloc(0, 0, 0, client=0))[2], 8)[0]
    rests = [waited(clock, lambda: look_for_mapping(on_card, number, client)) for _ in range(2)]

    assert rests == [0, REST_NS]


def test_slow_looks_for_mappings_of_the_card_are_rare(on_card, clock):
    call = struct.pack("<IIIIQQQQ", 7, 2, 9, 0, 0, 1 << 20, 0, 0)
    rests = [waited(clock, lambda: on_card.call(abi.NV_ESC_RM_UNMAP_MEMORY_DMA, call)) for _ in range(2)]

    assert rests == [0, REST_NS]


def test_no_look_is_for_another_pods_mapping(on_card):
    """RM goes by the number of the process that made it, and looks at no file."""
    on_card.shared.note({"fact": "pod", "name": "neighbour", "grants": {}})
    with on_card.shared.lock:
        on_card.shared.table.clients[7].pod = "neighbour"

    assert look_for_mapping(on_card, UPDATE) == errno.EPERM
    assert look_for_mapping(on_card, UNMAP) != errno.EPERM
    what = "NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO on another pod's client"
    assert on_card.shared.refusals.counts["web", what] == 1

"""Memory that the card or its firmware writes for channels: RM frees it, and keeps the channels."""

from __future__ import annotations

import os
import struct

import nv
import pytest
import qg
from faults import cleared, fault, inject
from programs import MIB, free, status_of

SYSTEM, OWN_PAGES, CONTEXT_DMA, SHARED_DATA, VIRTUAL, SURFACE = 0x3E, 0x71, 0x02, 0xDE, 0x50A0, 0xDA
SPARE = 0x5E000000


def named(state, how, cls, below=None):
    """A TSG with a kernel in each of two channels, of which one names memory; the memory."""
    p = state["p"]
    device = getattr(p, below or "device")
    memory = p.alloc(device, cls, struct.pack("64xQ56x", MIB))
    tsg = p.alloc(p.device, nv.TSG, struct.pack("I8xI4x", memory if how == "TSG" else 0, 1))
    names = {} if how == "TSG" else {how: memory}
    state["channels"] = [p.channel(tsg, **names), p.channel(tsg)]
    for channel in state["channels"]:
        p.submit(channel, 1000)
    return memory


@pytest.mark.parametrize("gate", ["open", "closed"])
@pytest.mark.parametrize("cls", [nv.MEM, SYSTEM], ids=["video", "system"])
@pytest.mark.parametrize(("how", "left"), [("userd", 1), ("error", 1), ("ecc", 1), ("TSG", 0)])
def test_channels_go_before_memory_that_the_card_writes(web, qgpu, how, left, cls, gate):
    (process,) = web.processes
    memory = process.run(named, how, cls)
    before = qg.sim()
    if gate == "closed":
        qgpu.plan((web.id, 5000, []))

    assert process.run(free, memory) == 0
    assert web.usage().nr_channels == left
    after = qg.sim()
    assert (after["strays"], after["waits"]) == (before["strays"], before["waits"])
    assert [tsg["off"] for tsg in qg.sim_tsgs()] == ([int(gate == "closed")] if left else [])


def second_device(state):
    p = state["p"]
    p.second = p.alloc(p.client, nv.DEVICE, bytes(56))
    p.below_second = p.alloc(p.second, nv.SUBDEVICE, bytes(4))


@pytest.mark.parametrize("cls", [nv.MEM, SYSTEM], ids=["video", "system"])
@pytest.mark.parametrize(("below", "freed"), [("second", "second"), ("below_second", "below_second")])
def test_channels_go_before_a_device_with_their_memory(web, cls, below, freed):
    (process,) = web.processes
    process.run(second_device)
    process.run(named, "error", cls, below)
    before = qg.sim()["strays"]

    assert process.run(lambda state, freed: state["p"].free(getattr(state["p"], freed)), freed) == 0
    assert (web.usage().nr_channels, qg.sim()["strays"]) == (1, before)


def test_channels_stay_when_other_memory_is_freed(web):
    def memories(state):
        p = state["p"]
        return [p.memory(MIB), p.alloc(p.device, SYSTEM), p.old_memory(OWN_PAGES)]

    (process,) = web.processes
    process.run(named, "userd", nv.MEM)
    for memory in process.run(memories):
        assert process.run(free, memory) == 0

    assert web.usage().nr_channels == 2


@pytest.mark.parametrize("how", ["client", "device", "exit"])
def test_what_goes_with_its_channels_leaves_none_behind(web, how):
    (process,) = web.processes
    process.run(named, "userd", nv.MEM)
    before = qg.sim()["strays"]
    if how == "exit":
        process.stop()
    else:
        process.run(lambda state, how: state["p"].free(getattr(state["p"], how)), how)

    assert qg.until(lambda: web.usage().nr_channels == 0)
    assert qg.sim()["strays"] == before


@pytest.mark.parametrize("how", ["userd", "error", "ecc", "TSG"])
@pytest.mark.parametrize("cls", [CONTEXT_DMA, SHARED_DATA, VIRTUAL, OWN_PAGES, None])
def test_a_channel_names_only_memory_that_stays(web, cls, how):
    """RM would free what a context DMA or a virtual address leads to, and the card would write it.

    The process itself may only read its own pages.
    """

    def ask(state, cls, how):
        p = state["p"]
        if cls == OWN_PAGES:
            handle = p.old_memory(cls)
        else:
            handle = SPARE if cls is None else p.alloc(p.subdevice, cls, struct.pack("8xI116x", 0x400))
        if how == "TSG":
            return status_of(state, "alloc", p.device, nv.TSG, struct.pack("4xI4xI4x", handle, 1))
        at = {"error": 0, "userd": 32, "ecc": 140}[how]
        params = bytearray(368)
        struct.pack_into("I", params, at, handle)
        return status_of(state, "alloc", p.tsg(), nv.CHANNEL, bytes(params))

    assert web.processes[0].run(ask, cls, how) == nv.BAD_HANDLE
    assert web.usage().nr_channels == 0


@pytest.mark.parametrize("place", [0, 1], ids=["semaphores", "greatest values"])
@pytest.mark.parametrize(
    ("cls", "status"),
    [(SYSTEM, 0), *((cls, nv.BAD_HANDLE) for cls in (CONTEXT_DMA, SHARED_DATA, VIRTUAL, OWN_PAGES, None))],
)
def test_a_semaphore_surface_is_of_plain_memory(web, cls, status, place):
    """RM writes into each semaphore as it makes the surface: also into pages that the process may only read."""

    def ask(state, cls, place):
        p = state["p"]
        named = [p.alloc(p.device, SYSTEM)] * 2
        if cls == OWN_PAGES:
            named[place] = p.old_memory(cls)
        else:
            named[place] = SPARE if cls is None else p.alloc(p.subdevice, cls, struct.pack("8xI116x", 0x400))
        return status_of(state, "alloc", p.device, SURFACE, struct.pack("II16x", *named))

    assert web.processes[0].run(ask, cls, place) == status


@pytest.mark.parametrize(
    ("offset", "status"),
    [(0, 0), (8192 - 512, 0), (8192 - 511, nv.BAD_ARGUMENT), (1 << 37, nv.BAD_ARGUMENT), (-512, nv.BAD_ARGUMENT)],
)
@pytest.mark.parametrize("cls", [nv.MEM, SYSTEM], ids=["video", "system"])
def test_userd_lies_within_its_memory(web, cls, offset, status):
    """RM compares its place with no size: the card would write another pod's memory."""

    def ask(state, cls, offset):
        p = state["p"]
        memory = p.memory(0x10000) if cls == nv.MEM else p.alloc(p.device, SYSTEM)
        offset += (0x10000 - 8192) if cls == nv.MEM and offset > 0 else 0
        params = struct.pack("32xI28xQ296x", memory, offset % (1 << 64))
        return status_of(state, "alloc", p.tsg(), nv.CHANNEL, params)

    assert web.processes[0].run(ask, cls, offset) == status
    assert web.usage().nr_channels == int(not status)


@pytest.mark.parametrize("cls", [nv.MEM, SYSTEM], ids=["video", "system"])
def test_userd_in_memory_of_unknown_size_is_refused(web, cls):
    def make(state, cls):
        p = state["p"]
        state["memory"], state["tsg"] = p.memory(MIB) if cls == nv.MEM else p.alloc(p.device, SYSTEM), p.tsg()

    def ask(state):
        return status_of(state, "channel", state["tsg"], state["memory"])

    (process,) = web.processes
    process.run(make, cls)
    inject([fault("size", 0x57)])
    try:
        assert process.run(ask) == nv.BAD_ARGUMENT
    finally:
        cleared()
    assert process.run(ask) == 0


def with_second_card(state):
    """Also a device of another card, with memory there; the memory."""
    p = state["p"]
    state["other"] = os.open(nv.GPU.format(1), os.O_RDWR)
    p.second = p.alloc(p.client, nv.DEVICE, struct.pack("I52x", 1))
    p.alloc(p.second, nv.SUBDEVICE, bytes(4))
    return p.alloc(p.second, nv.MEM, struct.pack("64xQ56x", MIB))


def named_below(state, device, how, memory):
    """Name memory that the card writes for a channel or TSG below a device; what RM says."""
    p = state["p"]
    if how == "TSG":
        return status_of(state, "alloc", getattr(p, device), nv.TSG, struct.pack("I8xI4x", memory, 1))
    tsg = p.alloc(getattr(p, device), nv.TSG, struct.pack("12xI4x", 1))
    return status_of(state, "channel", tsg, **{how: memory})


def without_second_card(state):
    state["p"].free(state["p"].second)
    os.close(state["other"])


@pytest.mark.parametrize("how", ["userd", "error", "ecc", "TSG"])
@pytest.mark.parametrize("named", ["itself", "duplicate", "import"])
def test_memory_of_another_card_is_not_written(web, parameter, named, how):
    """RM would take its address on that card for one on the channel's, whatever device its handle is below."""

    def again(state, memory, named):
        p = state["p"]  # both go below the first card's device
        return p.dup(p.client, memory) if named == "duplicate" else p.import_(p.export(memory))

    parameter("gpus", 2)
    (process,) = web.processes
    memory = process.run(with_second_card)
    handle = memory if named == "itself" else process.run(again, memory, named)

    assert process.run(named_below, "device", how, handle) == nv.BAD_ARGUMENT
    assert web.usage().nr_channels == 0
    assert process.run(named_below, "second", how, memory) == 0
    process.run(without_second_card)


@pytest.mark.parametrize("how", ["userd", "error", "ecc", "TSG"])
@pytest.mark.parametrize("cls", [nv.MEM, SYSTEM], ids=["video", "system"])
def test_a_duplicate_of_the_channels_card_is_written(web, cls, how):
    def twice(state, cls):
        p = state["p"]
        return p.dup(p.client, p.dup(p.client, p.memory(MIB) if cls == nv.MEM else p.alloc(p.device, SYSTEM)))

    (process,) = web.processes

    assert process.run(named_below, "device", how, process.run(twice, cls)) == 0


def of_second_card(state, named):
    """Host memory made for the second card; its further handles go below the first card's device."""
    p = state["p"]
    memory = p.alloc(p.second, SYSTEM)
    if named == "duplicate":
        return p.dup(p.client, p.dup(p.client, memory))
    return memory if named == "itself" else p.import_(p.export(memory))


@pytest.mark.parametrize("how", ["userd", "error", "ecc", "TSG"])
@pytest.mark.parametrize(
    ("named", "there"), [("itself", 0), ("duplicate", 0), ("import", nv.BAD_ARGUMENT)], ids=["itself", "dup", "import"]
)
def test_host_memory_is_written_on_the_card_it_was_made_for(web, parameter, named, there, how):
    """It has the address that the IOMMU gave it for that card. Of an import nobody knows which one it is."""
    parameter("gpus", 2)
    (process,) = web.processes
    process.run(with_second_card)
    memory = process.run(of_second_card, named)

    assert process.run(named_below, "device", how, memory) == nv.BAD_ARGUMENT
    assert web.usage().nr_channels == 0
    assert process.run(named_below, "second", how, memory) == there
    process.run(without_second_card)


@pytest.mark.parametrize("call", ["short", "old", "heap"])
def test_host_memory_by_each_call_is_written(web, call):
    def make(state, call):
        p = state["p"]
        if call == "heap":
            return struct.unpack_from("I", p.heap(2, w56=1 << 25, u88=4096), 44)[0]
        return p.alloc(p.subdevice, SYSTEM) if call == "short" else p.old_memory(SYSTEM)

    (process,) = web.processes

    assert process.run(named_below, "device", "error", process.run(make, call)) == 0


def test_semaphores_lie_in_host_memory_of_any_card(web, parameter):
    """RM itself writes these."""

    def ask(state, memory):
        return status_of(state, "alloc", state["p"].device, SURFACE, struct.pack("II16x", memory, memory))

    parameter("gpus", 2)
    (process,) = web.processes
    process.run(with_second_card)

    assert process.run(ask, process.run(of_second_card, "itself")) == 0
    process.run(without_second_card)


def test_imported_memory_is_not_written(web):
    """RM does not say on which card it lies."""

    def come_back(state):
        p = state["p"]
        return p.import_(p.export(p.memory(MIB)))

    def alone(state, memory):
        """In a channel below a device whose card is not known either."""
        p = state["p"]
        device = p.alloc(p.client, nv.DEVICE, bytes(56))
        return status_of(state, "channel", device, memory)

    (process,) = web.processes
    memory = process.run(come_back)

    assert process.run(named_below, "device", "userd", memory) == nv.BAD_ARGUMENT
    assert process.run(alone, memory) == nv.BAD_ARGUMENT

"""Mappings of memory, for the CPU and for the card: RM takes the memory's address for one on the card of the device."""

from __future__ import annotations

import os
import struct

import nv
import pytest
from programs import MIB, program

SYSTEM, SPACE, FABRIC, MULTICAST = 0x3E, 0x50A0, 0xF8, 0xFD
MAP, MAP_FOR_THE_CARD = 0x4E, 0x57
#: Of RM's mapping for the card: the memory is a peer's, or another card's of the same device.
FROM_PEER, FROM_LINKED = 2 << 20, 1 << 20
#: Space that takes page tables later.
LAZY_SPACE = struct.pack("8xI116x", 0x80400)
NOBODYS = 0x5E000000


def with_two_cards(state):
    """A program with a device, a subdevice and an address space of each card."""
    p = state["p"]
    state["other"] = os.open(nv.GPU.format(1), os.O_RDWR)
    p.second = p.alloc(p.client, nv.DEVICE, struct.pack("I52x", 1))
    p.below_second = p.alloc(p.second, nv.SUBDEVICE, bytes(4))
    p.unlearned = p.alloc(p.client, nv.DEVICE, struct.pack("I52x", 1))
    for name in ("device", "second"):
        state[name, "space"] = p.alloc(getattr(p, name), SPACE, LAZY_SPACE)


def without_second_card(state):
    state["p"].free(state["p"].unlearned)
    state["p"].free(state["p"].second)
    os.close(state["other"])


@pytest.fixture
def pair(pod, parameter):
    """A pod without a limit, whose program has two cards."""
    parameter("gpus", 2)
    made = pod("free")
    process = made.process()
    process.run(program)
    process.run(with_two_cards)
    yield made
    process.run(without_second_card)


def memory_of(state, device, cls, named="itself"):
    """Memory of a device's card, or made for it; its further handles go below the first card's device."""
    p = state["p"]
    below = getattr(p, device)
    if cls == nv.MEM:
        memory = p.alloc(below, nv.MEM, struct.pack("64xQ56x", MIB))
    elif cls == FABRIC:
        memory = p.alloc(below, FABRIC, struct.pack("40xI20x", p.alloc(below, nv.MEM, struct.pack("64xQ56x", MIB))))
    else:
        memory = p.alloc(below, cls)
    if named == "duplicate":
        return p.dup(p.client, memory)
    return memory if named == "itself" else p.import_(p.export(memory))


def map_by_rm(state, device, memory):
    """Map memory for the CPU by a device; what RM says."""
    p = state["p"]
    data = bytearray(struct.pack("4I3Q2IiI", p.client, getattr(p, device), memory, 0, 0, 4096, 0, 0, 0, -1, 0))
    nv.call(p.ctl, MAP, data)
    return struct.unpack_from("I", data, 40)[0]


def map_for_the_card(state, device, space, memory, flags=0):
    """Map memory into the address space of a card by a device; what RM says."""
    p = state["p"]
    into = state.get((space, "space"), NOBODYS)
    data = bytearray(struct.pack("4IQQI28x", p.client, getattr(p, device), into, memory, 0, 4096, flags))
    p.send(p.ctl, MAP_FOR_THE_CARD, data)
    return struct.unpack_from("I", data, 56)[0]


@pytest.mark.parametrize("named", ["itself", "duplicate"])
def test_memory_is_mapped_for_the_cpu_by_its_own_card(pair, named):
    (process,) = pair.processes
    memory = process.run(memory_of, "second", nv.MEM, named)
    before = pair.info().refused_allocs

    answers = [process.run(map_by_rm, name, memory) for name in ("device", "subdevice", "unlearned")]
    assert answers == [nv.BAD_ARGUMENT] * 3
    assert pair.info().refused_allocs == before + 3
    assert [process.run(map_by_rm, name, memory) for name in ("second", "below_second")] == [0, 0]


def test_imported_video_memory_is_not_mapped_for_the_cpu(pair):
    """Its card is unknown."""
    (process,) = pair.processes
    memory = process.run(memory_of, "second", nv.MEM, "import")

    assert [process.run(map_by_rm, name, memory) for name in ("device", "second")] == [nv.BAD_ARGUMENT] * 2


@pytest.mark.parametrize("named", ["itself", "duplicate", "import"])
def test_host_memory_is_mapped_for_the_cpu_by_any_card(pair, named):
    """RM maps its pages."""
    (process,) = pair.processes
    memory = process.run(memory_of, "second", SYSTEM, named)

    assert [process.run(map_by_rm, name, memory) for name in ("device", "second")] == [0, 0]


def test_host_memory_without_a_device_is_mapped_for_the_cpu(web):
    def whole(state):
        p = state["p"]
        return map_by_rm(state, "client", p.alloc(p.client, SYSTEM))

    assert web.processes[0].run(whole) == 0


@pytest.mark.parametrize("named", ["itself", "duplicate"])
def test_memory_is_mapped_for_its_own_card(pair, named):
    (process,) = pair.processes
    memory = process.run(memory_of, "second", nv.MEM, named)
    before = pair.info().refused_allocs

    assert process.run(map_for_the_card, "device", "device", memory) == nv.BAD_ARGUMENT
    assert process.run(map_for_the_card, "second", "second", memory, FROM_LINKED) == 0
    assert process.run(map_for_the_card, "second", "second", memory) == 0
    assert pair.info().refused_allocs == before + 1


@pytest.mark.parametrize("named", ["itself", "duplicate", "import"])
def test_host_memory_is_mapped_for_any_card(pair, named):
    """RM takes the address that the mapping's card has for it."""
    (process,) = pair.processes
    memory = process.run(memory_of, "second", SYSTEM, named)

    assert [process.run(map_for_the_card, name, name, memory) for name in ("device", "second")] == [0, 0]


def imported_below(state, name, memory):
    p = state["p"]
    p.last += 1
    p.control(p.client, 0x3D06, struct.pack("iIIII", p.export(memory), 1, p.device, getattr(p, name), p.last))
    return p.last


@pytest.mark.parametrize("below", ["device", "unlearned"])
def test_an_import_of_unknown_card_is_not_mapped_for_the_card(pair, below):
    """Whether the card is known that its handle lies below, or not."""
    (process,) = pair.processes
    memory = process.run(imported_below, below, process.run(memory_of, "second", nv.MEM))

    for flags in (0, FROM_PEER):
        answers = [process.run(map_for_the_card, name, name, memory, flags) for name in ("device", "second")]
        assert answers == [nv.BAD_ARGUMENT] * 2


@pytest.mark.parametrize(("by", "space"), [("device", "second"), ("second", "device"), ("device", "nobody")])
def test_an_address_space_takes_mappings_of_its_own_card(pair, by, space):
    (process,) = pair.processes
    memory = process.run(memory_of, by, nv.MEM)

    assert process.run(map_for_the_card, by, space, memory) == nv.BAD_ARGUMENT
    assert process.run(map_for_the_card, by, by, memory) == 0


def test_nothing_is_mapped_by_a_device_of_unknown_card(pair):
    (process,) = pair.processes

    def unknown(state):
        """Neither the device's card is known nor that of what is below it."""
        p = state["p"]
        state["unlearned", "space"] = p.alloc(p.unlearned, SPACE, LAZY_SPACE)
        made = [p.alloc(p.unlearned, cls) for cls in (SYSTEM, MULTICAST)]  # of any card
        return [map_for_the_card(state, "unlearned", "unlearned", each) for each in made]

    assert process.run(unknown) == [nv.BAD_ARGUMENT] * 2


def test_a_peers_memory_is_mapped_by_a_handle_below_the_peer(pair):
    """RM takes it for that of the card that its handle lies below."""
    (process,) = pair.processes
    memory, again = (process.run(memory_of, "second", nv.MEM, named) for named in ("itself", "duplicate"))

    assert process.run(map_for_the_card, "device", "device", memory, FROM_PEER) == 0
    assert process.run(map_for_the_card, "device", "device", again, FROM_PEER) == nv.BAD_ARGUMENT
    assert process.run(map_for_the_card, "device", "device", memory, FROM_LINKED) == nv.BAD_ARGUMENT


@pytest.mark.parametrize("cls", [FABRIC, MULTICAST])
def test_an_object_of_the_fabric_is_mapped_for_any_card(pair, cls):
    (process,) = pair.processes
    made = process.run(memory_of, "second", cls)

    assert [process.run(map_for_the_card, name, name, made) for name in ("device", "second")] == [0, 0]

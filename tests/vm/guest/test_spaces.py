"""Address spaces of the card: what uses one lies on its card. RM takes one of any card."""

from __future__ import annotations

import os
import struct

import nv
import pytest
from programs import status_of

SHARE, VIRTUAL, VIRTUAL_MEMORY = 0x9067, 0x50A0, 0x70
LAZY, IS_VIRTUAL = 1 << 10, 1 << 19
SPARE, DYNAMIC = 0x5E000000, 0xFFFFFFFF


def with_two_cards(state):
    """A device of each card, and an address space below each device, by name."""
    p = state["p"]
    state["other"] = os.open(nv.GPU.format(1), os.O_RDWR)
    p.second = p.alloc(p.client, nv.DEVICE, struct.pack("I52x", 1))
    p.alloc(p.second, nv.SUBDEVICE, bytes(4))
    state["spaces"] = {name: p.alloc(getattr(p, name), nv.VASPACE) for name in ("device", "second")}


def use(state, what, space):
    """Make something below the first card's device that uses an address space; what RM says."""
    p = state["p"]
    match what:
        case "TSG":
            return status_of(state, "alloc", p.device, nv.TSG, struct.pack("8xII4x", space, 1))
        case "channel":
            return status_of(state, "alloc", p.device, nv.CHANNEL, struct.pack("28xI336x", space))
        case "context share":
            return status_of(state, "alloc", p.tsg(), SHARE, struct.pack("I8x", space))
        case "virtual memory":
            return status_of(state, "alloc", p.device, VIRTUAL, struct.pack("8xI96xI16x", LAZY, space))
        case "mapped memory":
            return status_of(state, "alloc", p.device, VIRTUAL_MEMORY, struct.pack("16xI4x", space))
        case _:
            return struct.unpack_from("I", p.heap(2, w12=space, w52=LAZY | IS_VIRTUAL, u88=4096), 20)[0]


def use_that_of(state, what, name):
    return use(state, what, state["spaces"][name])


USERS = ["TSG", "channel", "context share", "virtual memory", "mapped memory", "heap"]


@pytest.mark.parametrize("what", USERS)
def test_an_address_space_is_used_on_its_own_card(web, parameter, what):
    parameter("gpus", 2)
    (process,) = web.processes
    process.run(with_two_cards)
    before = web.info().refused_allocs

    assert process.run(use_that_of, what, "second") == nv.BAD_ARGUMENT
    assert web.info().refused_allocs == before + 1
    assert process.run(use_that_of, what, "device") == 0
    process.run(lambda state: (state["p"].free(state["p"].second), os.close(state["other"])))


@pytest.mark.parametrize("what", USERS)
def test_an_address_space_that_nobody_made_is_not_used(web, what):
    assert web.processes[0].run(use, what, SPARE) == nv.BAD_ARGUMENT


def test_memory_to_map_may_name_no_address_space(web):
    """RM knows this name for none."""
    assert web.processes[0].run(use, "mapped memory", DYNAMIC) == 0
    assert web.processes[0].run(use, "TSG", 0) == 0


@pytest.mark.parametrize(("flags", "status"), [(1 << 9, nv.BAD_ARGUMENT), (1 << 8, 0)], ids=["fabric", "other"])
def test_an_address_space_of_the_fabric_is_not_made(web, flags, status):
    """RM never frees one, or frees the card's own with it."""

    def make(state, flags):
        return status_of(state, "alloc", state["p"].device, nv.VASPACE, struct.pack("II40x", 0, flags))

    assert web.processes[0].run(make, flags) == status

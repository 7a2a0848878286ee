"""Copies of CUDA programs are copies to the module: the recorded card has their engines apart from compute."""

from __future__ import annotations

import json
import lzma
import struct
from pathlib import Path

import pytest

from qgpu.nvidia import abi
from tests.traces import TRACES

CE_GET_ALL_CAPS = 0x20802A0A
#: Bytes of an engine's capabilities; the first bit of the first: it is on the compute engine's runlist.
CAPS, GRCE = 2, 0x01


def _recorded(trace: Path) -> tuple[set[int], bytes]:
    """Return the copy engines that a program has TSGs for, and the card's answer about copy engines."""
    engines, answer = set(), b""
    with lzma.open(trace, "rt") as lines:
        for call in map(json.loads, lines):
            if call["op"] != "ioctl" or call["dev"] == "/dev/nvidia-uvm" or "pin" not in call:
                continue
            number, before = call["req"] & 0xFF, bytes.fromhex(call["in"])
            (what,) = struct.unpack_from("I", before, 8 if number == abi.NV_ESC_RM_CONTROL else 12)
            if number == abi.NV_ESC_RM_CONTROL and what == CE_GET_ALL_CAPS:
                answer = bytes.fromhex(call["pout"])
            elif number == abi.NV_ESC_RM_ALLOC and what == abi.KEPLER_CHANNEL_GROUP_A:
                engines |= {*struct.unpack_from("I", bytes.fromhex(call["pin"]), 12)} & abi.COPY_ENGINES
    return engines, answer


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.name)
def test_copy_engines_of_recorded_programs_are_apart(trace: Path) -> None:
    engines, answer = _recorded(trace)
    if not engines:
        pytest.skip("it copies nothing")
    shared = {engine for engine in range(0x09, 0x0E) if answer[(engine - 0x09) * CAPS] & GRCE}

    assert engines == {0x0B, 0x0C, 0x0D}
    assert shared == {0x09, 0x0A}

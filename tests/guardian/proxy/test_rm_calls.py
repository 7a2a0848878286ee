"""Decoding of recorded and of made-up calls."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu.guardian.proxy import rm_calls
from qgpu.nvidia import abi
from tests.traces import ARGUMENT, TRACES, decode, rows


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.name.split(".")[-3].rpartition("-")[2])
def test_every_recorded_object_call_is_understood(trace):
    for row in rows(trace):
        if row.number in (abi.NV_ESC_RM_ALLOC, abi.NV_ESC_RM_CONTROL, abi.NV_ESC_RM_FREE):
            assert decode(row.request, ARGUMENT, row.reader()) is not None, row.seq


def detail(row, call) -> int:
    return rm_calls.detail(call.rm_class, row.params)


def test_cuda_program_makes_one_compute_tsg_with_eight_channels():
    trace = next(path for path in TRACES if "min" in path.name)
    asked = [(row, decode(row.request, ARGUMENT, row.reader())) for row in rows(trace)]
    allocs = [(row, call) for row, call in asked if isinstance(call, rm_calls.Alloc)]
    tsgs = [(row, call) for row, call in allocs if call.rm_class == abi.KEPLER_CHANNEL_GROUP_A]
    compute = [call for row, call in tsgs if detail(row, call) in abi.GR_ENGINES]

    assert len(compute) == 1
    assert sum(a.parent == compute[0].handle and a.rm_class in abi.GPFIFO_CLASSES for _, a in allocs) == 8


def test_a_cuda_program_makes_copy_tsgs_of_copy_engines_alone():
    trace = next(path for path in TRACES if "min" in path.name)
    asked = [(row, decode(row.request, ARGUMENT, row.reader())) for row in rows(trace)]
    tsgs = [
        detail(row, call)
        for row, call in asked
        if isinstance(call, rm_calls.Alloc) and call.rm_class == abi.KEPLER_CHANNEL_GROUP_A
    ]

    assert [engine for engine in tsgs if engine in abi.COPY_ENGINES] == [11, 12, 13]
    assert len(tsgs) == 4


def test_memory_is_charged_by_the_size_in_its_parameters():
    trace = next(path for path in TRACES if "min" in path.name)
    asked = [(row, decode(row.request, ARGUMENT, row.reader())) for row in rows(trace)]
    sizes = [detail(row, call) for row, call in asked if isinstance(call, rm_calls.Alloc) and call.rm_class == 0x40]

    assert sizes
    assert all(size > 0 for size in sizes)


def test_a_wrapped_call_is_judged_by_what_it_wraps():
    inner = struct.pack("<IIIIQII", 1, 2, abi.NVA06C_SET_TIMESLICE, 0, 0x5000, 8, 0)
    outer = struct.pack("<IIQ", abi.NV_ESC_RM_CONTROL, len(inner), 0x3000)
    memory = {0x2000: outer, 0x3000: inner}
    request = abi.request(abi.NV_ESC_IOCTL_XFER_CMD, len(outer))

    call = decode(request, 0x2000, lambda address, size: memory[address][:size])

    assert isinstance(call, rm_calls.Control)
    assert call.command == abi.NVA06C_SET_TIMESLICE
    assert call.status_at == 28
    assert rm_calls.unwrap(request, 0x2000, lambda address, size: memory[address][:size]).address == 0x3000


@pytest.mark.parametrize("type_byte", [0, ord("F"), 0xFF])
@pytest.mark.parametrize("direction", range(4))
def test_type_and_direction_bits_hide_nothing(type_byte, direction):
    data = struct.pack("<IIIIQII", 1, 2, 3, 0, 0, 0, 0)
    request = direction << 30 | len(data) << 16 | type_byte << 8 | abi.NV_ESC_RM_CONTROL

    assert isinstance(decode(request, 0x2000, lambda _, size: data[:size]), rm_calls.Control)


@given(
    request=st.integers(0, 2**32 - 1),
    argument=st.integers(0, 2**64 - 1),
    memory=st.binary(max_size=256) | st.none(),
)
def test_no_bytes_make_the_decoder_fail(request, argument, memory):
    def read(_: int, size: int) -> bytes | None:
        return None if memory is None or len(memory) < size else memory[:size]

    decode(request, argument, read)

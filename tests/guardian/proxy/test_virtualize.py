"""What a pod is shown in the place of RM's answer."""

from __future__ import annotations

import ctypes
import struct

import pytest

from qgpu.guardian.proxy import virtualize
from qgpu.nvidia import abi
from tests.guardian.asked import alloc, control, status

NONE = 0xFFFFFFFF
_LIST = struct.Struct("<32I")


def gpus(*found):
    return _LIST.pack(*found, *[NONE] * (32 - len(found)))


def test_cards_of_others_are_in_no_list_and_the_own_move_up():
    params = bytearray(gpus(0x600, 0x700, 0x800) + gpus(0x900))
    virtualize.show_gpus(params, {0x700, 0x900})

    assert params == gpus(0x700) + gpus(0x900)


def test_a_list_that_is_too_short_is_left_alone():
    params = bytearray(b"RM's")
    virtualize.show_gpus(params, {1})

    assert params == b"RM's"


@pytest.mark.parametrize("command", [abi.NV0000_GPU_GET_PROBED_IDS, abi.NV0000_GPU_GET_ATTACHED_IDS])
def test_a_pod_sees_the_card_that_it_was_granted_and_no_other(pod, command):
    def answer(params):
        params[:128] = gpus(0x700, 0x600)

    pod.rm.answers[command] = answer
    call = control(command, target=7, size=128)
    _, _, argument, params = pod.call_for_params(abi.NV_ESC_RM_CONTROL, call, bytes(128))

    assert (status(argument), params) == (abi.NV_OK, gpus(0x600))


def test_flags_of_cards_stay_with_their_cards():
    params = bytearray(gpus(0x600, 0x700) + gpus() + _LIST.pack(1, 2, *[0] * 30))
    virtualize.show_gpus(params, {0x700})

    assert params == gpus(0x700) + gpus() + _LIST.pack(2, *[0] * 31)


def engine(size, share, pid):
    return struct.pack("<IIII100s4xQ", share, 1, pid, 7, b"vm", 0xFFFF888000000000)[:size]


@pytest.mark.parametrize(
    ("size", "engines"), [(116, 4), (116, 6), (128, 6)], ids=["before 550", "before 570", "since 570"]
)
def test_samples_show_a_pods_own_processes_and_no_pointers(size, engines):
    sample = struct.pack("<Q", 5) + b"".join(engine(size, 10 * i, 100 + i) for i in range(engines))
    params = bytearray(bytes(16) + 72 * sample)
    virtualize.show_samples(params, {102}, lambda pid: pid - 100)

    for at in range(16, len(params), len(sample)):
        entries = [params[at + 8 + size * i :][:size] for i in range(engines)]
        shown = [struct.unpack_from("<IIII100s", each) for each in entries]
        assert [(each[0], each[2]) for each in shown] == [
            (20, 2) if i == 2 else (0, 0xFFFFFFFF) for i in range(engines)
        ]
        assert {each[3:] for each in shown} == {(0xFFFFFFFF, bytes(100))}
        assert not any(any(each[116:]) for each in entries)


def test_samples_of_another_size_show_nobody():
    params = bytearray(b"\1" * 200)
    virtualize.show_samples(params, {102}, lambda pid: pid)

    assert params == b"\1" * 16 + bytes(184)


def test_a_pod_asks_rm_to_show_no_processes_to_all(on_card, monkeypatch):
    masks = []
    on_card.rm.answers[abi.NV00DE_REQUEST_DATA_POLL] = lambda params: masks.append(bytes(params))
    made, make = [], on_card.rm._alloc

    def alloc_in_rm(data):
        made.append(ctypes.string_at(struct.unpack_from("<Q", data, 16)[0], 8))
        return make(data)

    monkeypatch.setattr(on_card.rm, "_alloc", alloc_in_rm)
    everything = struct.pack("<Q", 0x3FF)
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(10, 3, abi.RM_USER_SHARED_DATA), everything)
    on_card.call(abi.NV_ESC_RM_CONTROL, control(abi.NV00DE_REQUEST_DATA_POLL, target=10), everything)

    assert (made, masks) == ([struct.pack("<Q", 0x37F)],) * 2

"""What a pod is shown in the place of RM's answer."""

from __future__ import annotations

import struct

import pytest

from qgpu.guardian.proxy import virtualize
from qgpu.nvidia import abi
from tests.guardian.asked import control, status

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


def test_samples_show_a_pods_own_processes_and_no_pointers():
    def engine(share, pid):
        return struct.pack("<IIII100s4xQ", share, 1, pid, 7, b"vm", 0xFFFF888000000000)

    params = bytearray(16) + struct.pack("<Q", 5) + b"".join(engine(10 * i, 100 + i) for i in range(6)) + bytes(776)
    virtualize.show_samples(params, {102}, lambda pid: pid - 100)

    shown = [struct.unpack_from("<IIII100s4xQ", params, 24 + 128 * i) for i in range(6)]
    assert [(each[0], each[2]) for each in shown] == [(0, 0xFFFFFFFF)] * 2 + [(20, 2)] + [(0, 0xFFFFFFFF)] * 3
    assert {each[3:] for each in shown} == {(0xFFFFFFFF, bytes(100), 0)}

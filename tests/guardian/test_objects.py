"""What a pod makes of RM is in the register, and what would be out of every gate's reach is not made."""

from __future__ import annotations

import errno
import struct

import pytest

from qgpu.guardian import supervisor
from qgpu.rm import abi
from tests.guardian.asked import (
    DEVICE_PARAMS,
    TSG,
    TSG_PARAMS,
    alloc,
    alloc_status,
    device,
    dup,
    dup_status,
    free,
    subdevice,
)
from tests.guardian.fake_rm import PAGE
from tests.guardian.pod import allocate, make_device


@pytest.mark.parametrize("form", ["long", "short"])
def test_what_rm_makes_is_in_the_register_and_what_it_frees_is_not(on_card, form):
    asked = alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A)
    on_card.call(abi.NV_ESC_RM_ALLOC, asked if form == "long" else asked[:24] + bytes(8), TSG_PARAMS)
    made = [tsg.key for tsg in on_card.supervisor.register.compute_tsgs(0)]
    on_card.call(abi.NV_ESC_RM_FREE, free(TSG))

    assert made == [(7, TSG)]
    assert on_card.supervisor.register.compute_tsgs(0) == []


def test_a_card_without_a_grant_gives_no_device(pod):
    answer = pod.call(abi.NV_ESC_RM_ALLOC, device(), struct.pack("<I", 1) + bytes(52))

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_ERR_INSUFFICIENT_PERMISSIONS)
    assert pod.rm.seen == []


def test_the_first_device_of_a_file_is_made_by_the_kernel_and_its_card_is_asked_of_rm(pod):
    make_device(pod)
    pod.rm.instances[7, 2] = 1  # it was made on another card than was checked
    answer = pod.call(abi.NV_ESC_RM_ALLOC, subdevice(), bytes(4))

    assert alloc_status(answer[2]) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS
    assert (7, 2) not in pod.rm.objects
    assert pod.supervisor.refusals["web", "card without a grant"] == 1


def test_below_a_device_whose_card_is_not_known_there_is_no_memory(pod):
    make_device(pod)

    assert allocate(pod, 10, PAGE) == abi.NV_ERR_INVALID_STATE


def test_a_device_that_was_not_made_may_have_been_made_under_another_name(pod):
    make_device(pod)
    pod.rm.objects[7, 66] = pod.rm.objects.pop((7, 2))
    second = pod.call(abi.NV_ESC_RM_ALLOC, device(4), DEVICE_PARAMS)
    root = pod.call(abi.NV_ESC_RM_ALLOC, alloc(0, 0, abi.NV01_ROOT, client=0))

    assert alloc_status(second[2]) == abi.NV_OK  # carried out for the pod
    assert alloc_status(root[2]) == abi.NV_ERR_INVALID_STATE


def test_a_channel_outside_a_tsg_is_refused_for_no_gate_would_hold_it(on_card):
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(9, 2, 0xC86F), bytes(368))

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_ERR_INVALID_ARGUMENT)


def test_a_class_that_nobody_knows_is_refused(on_card):
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(9, 2, 0x0071), bytes(64))

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_ERR_INVALID_CLASS)


def test_what_carries_a_gate_has_one_name(on_card):
    on_card.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    answer = on_card.call(abi.NV_ESC_RM_DUP_OBJECT, dup(20, TSG))

    assert dup_status(answer[2]) == abi.NV_ERR_NOT_SUPPORTED


def test_an_object_whose_handle_rm_would_choose_is_refused(on_card):
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(0, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_ERR_INVALID_ARGUMENT)


def test_a_client_that_rm_does_not_know_on_this_file_is_nobodys(pod):
    pod.call(abi.NV_ESC_RM_ALLOC, device(client=8), DEVICE_PARAMS)

    assert pod.supervisor.register.clients == {}


def test_a_root_client_is_made_by_the_kernel_for_the_pod_itself(pod):
    before = alloc(0, 0, abi.NV01_ROOT, client=0)
    result, error, after = pod.call(abi.NV_ESC_RM_ALLOC, before)

    assert (result, error, after) == (-1, errno.ENOTTY, before)  # /dev/null's answer
    assert pod.rm.seen == []


def test_a_root_client_beside_a_device_is_refused_for_something_else_could_be_made_in_its_stead(on_card):
    answer = on_card.call(abi.NV_ESC_RM_ALLOC, alloc(0, 0, abi.NV01_ROOT, client=0))

    assert (answer[0], alloc_status(answer[2])) == (0, abi.NV_ERR_INVALID_STATE)


def test_children_of_a_pod_are_in_the_pod(pod):
    pod.tell("fork")
    child = pod.child.said()
    make_device(pod)

    assert pod.supervisor.register.processes == {child: "web"}


def test_a_pod_has_so_many_objects_and_the_next_is_refused(on_card, monkeypatch):
    monkeypatch.setattr(supervisor, "_MOST_OBJECTS", 5)
    statuses = [allocate(on_card, handle, PAGE) for handle in range(10, 15)]

    assert statuses == [abi.NV_OK] * 3 + [abi.NV_ERR_INSUFFICIENT_RESOURCES] * 2
    on_card.call(abi.NV_ESC_RM_FREE, free(10))
    assert allocate(on_card, 16, PAGE) == abi.NV_OK

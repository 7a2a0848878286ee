"""A pod on a MIG instance: its card's device is its instance, and it subscribes to no other."""

from __future__ import annotations

import errno
import struct

import pytest

from qgpu.model.plane_api import MigInstance
from qgpu.nvidia import abi, mig, uvm
from tests.guardian.asked import TSG, TSG_PARAMS, alloc, alloc_status, control, status
from tests.guardian.fake_rm import PAGE
from tests.guardian.pod import LIMIT, MINOR, allocate, make_device, make_subdevice

#: RM's device instance is 0; the instances are compute instance 0 of GPU instances 1 and 2, and one more in the first.
OWN, OTHER, BESIDE = (mig.place_of(0, MigInstance(0, *each)) for each in ((1, 0), (2, 0), (1, 1)))
SUBDEVICE, OF_GPU, OF_COMPUTE = 3, 30, 31
CARD, INSTANCE = bytes(16), b"\x01" * 16


@pytest.fixture
def on_instance(pod):
    """A pod with a device and a subdevice on a card of which it has one instance."""
    pod.minors, pod.limits = {OWN: MINOR}, {OWN: LIMIT}
    pod.shared.uuids = {CARD: 0, INSTANCE: OWN, b"\x02" * 16: OTHER}
    make_device(pod)
    make_subdevice(pod)
    return pod


def subscribe(pod, numbers, fd=0):
    """Subscribe to a GPU instance, and if that works, to a compute instance in it; return both statuses."""
    said = []
    for handle, parent, rm_class, number in zip(
        (OF_GPU, OF_COMPUTE),
        (SUBDEVICE, OF_GPU),
        (abi.AMPERE_SMC_PARTITION_REF, abi.AMPERE_SMC_EXEC_PARTITION_REF),
        numbers,
        strict=True,
    ):
        params = struct.pack("<QII", fd, number, 0)
        said.append(alloc_status(pod.call(abi.NV_ESC_RM_ALLOC, alloc(handle, parent, rm_class), params)[2]))
        if said[-1] != abi.NV_OK:
            break
    return said


def test_pod_subscribes_to_its_own_instance(on_instance):
    assert subscribe(on_instance, (1, 0)) == [abi.NV_OK, abi.NV_OK]
    assert on_instance.rm.objects[7, OF_COMPUTE] == (abi.AMPERE_SMC_EXEC_PARTITION_REF, OF_GPU)


@pytest.mark.parametrize("number", [0, 2, abi.NVC637_DEVICE_PROFILING_SWIZZID])
def test_other_gpu_instance_is_refused_before_rm_is_asked(on_instance, number):
    assert subscribe(on_instance, (number, 0)) == [abi.NV_ERR_INSUFFICIENT_PERMISSIONS]
    assert (7, OF_GPU) not in on_instance.rm.objects
    assert on_instance.shared.refusals.counts["web", "MIG instance without a grant"] == 1


def test_other_compute_instance_of_same_gpu_instance_is_refused(on_instance):
    assert subscribe(on_instance, (1, 1)) == [abi.NV_OK, abi.NV_ERR_INSUFFICIENT_PERMISSIONS]


def test_subscription_below_an_unknown_device_is_refused(pod):
    pod.minors, pod.limits = {OWN: MINOR}, {OWN: LIMIT}

    assert subscribe(pod, (1, 0)) == [abi.NV_ERR_INSUFFICIENT_PERMISSIONS]


@pytest.mark.parametrize("command", [abi.NVC637_GET_UUID, 0xC6380101, 0xC6370103, 0xC6370104])
def test_pod_asks_its_subscriptions_who_they_are(on_instance, command):
    subscribe(on_instance, (1, 0))
    _, _, argument = on_instance.call(abi.NV_ESC_RM_CONTROL, control(command, OF_COMPUTE, 64), bytes(64))

    assert status(argument) == abi.NV_OK


@pytest.mark.parametrize("command", [0xC6370101, 0xC6370102, 0xC6370105])
def test_pod_makes_and_removes_no_instances(on_instance, command):
    subscribe(on_instance, (1, 0))
    _, _, argument = on_instance.call(abi.NV_ESC_RM_CONTROL, control(command, OF_GPU, 64), bytes(64))

    assert status(argument) == abi.NV_ERR_NOT_SUPPORTED


def test_pod_on_whole_card_has_no_use_for_instances(on_card):
    _, _, argument = on_card.call(abi.NV_ESC_RM_CONTROL, control(abi.NVC637_GET_UUID, OF_GPU, 64), bytes(64))

    assert status(argument) == abi.NV_ERR_NOT_SUPPORTED


def test_whole_cards_subscriptions_are_left_to_rm(on_card):
    assert subscribe(on_card, (1, 0))[0] == abi.NV_OK


def test_memory_and_tsgs_count_to_the_instance(on_instance):
    subscribe(on_instance, (1, 0))
    assert allocate(on_instance, 10, PAGE) == abi.NV_OK
    on_instance.call(abi.NV_ESC_RM_ALLOC, alloc(TSG, 2, abi.KEPLER_CHANNEL_GROUP_A), TSG_PARAMS)
    table = on_instance.shared.table

    assert on_instance.shared.quota.used("web", OWN) >= PAGE
    assert [on_instance.shared.quota.used("web", place) for place in (0, OTHER, BESIDE)] == [0, 0, 0]
    assert [[rm.handle for rm in table.compute_tsgs(place)] for place in (OWN, 0, OTHER)] == [[TSG], [], []]
    assert allocate(on_instance, 11, LIMIT) == abi.NV_ERR_NO_MEMORY


def test_card_without_a_grant_on_an_instance_is_refused(pod):
    pod.minors, pod.limits = {mig.place_of(1, MigInstance(1, 1)): MINOR}, {}

    answer = pod.call(abi.NV_ESC_RM_ALLOC, alloc(2, 7, abi.NV01_DEVICE_0), bytes(56))[2]
    assert alloc_status(answer) == abi.NV_ERR_INSUFFICIENT_PERMISSIONS


@pytest.mark.parametrize("limited", [True, False])
def test_instance_is_registered_with_uvm_by_the_pod_itself(on_instance, limited):
    """UVM takes a subscription from the process that made the client alone."""
    on_instance.limits = {OWN: LIMIT} if limited else {}
    on_instance.rm.seen.clear()
    result, error, _ = on_instance.uvm(uvm.REGISTER_GPU, CARD + bytes(24))

    assert (result, error) == (-1, errno.EINVAL)  # /dev/random has no such call
    assert uvm.REGISTER_GPU not in [request for request, _ in on_instance.rm.seen]
    held = on_instance.shared.uvm_files.take(on_instance.process.pid)
    assert [each.cards for each in held] == ([set(on_instance.shared.uuids)] if limited else [])
    on_instance.shared.uvm_files.release(held)


def test_card_of_no_own_instance_is_not_registered_with_uvm(on_instance):
    on_instance.shared.uuids = {CARD: 1, INSTANCE: OWN}
    result, _, argument = on_instance.uvm(uvm.REGISTER_GPU, CARD + bytes(24))

    assert (result, argument[36:40]) == (0, struct.pack("<I", abi.NV_ERR_INSUFFICIENT_PERMISSIONS))

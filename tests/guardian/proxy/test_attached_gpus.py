"""Cards attached to a control file: the pod's own, however long the list."""

from __future__ import annotations

import errno
import struct

import pytest

from qgpu.nvidia import abi

OWN, OTHERS = 0x600, 0x601
ATTACH = abi.NV_ESC_ATTACH_GPUS_TO_FD


@pytest.mark.parametrize("words", [1, 32, 1000])
def test_pod_attaches_its_own_card(pod, words):
    assert pod.call(ATTACH, struct.pack("<I", OWN) + bytes(4 * words - 4))[0] == 0
    assert [number for number, _ in pod.rm.seen] == [ATTACH]


@pytest.mark.parametrize("ids", [[OTHERS], [OWN, OTHERS], [0] * 31 + [1]])
def test_no_card_without_a_grant_is_attached(pod, ids):
    """Its start and stop would hold up every call of RM's."""
    assert pod.call(ATTACH, struct.pack(f"<{len(ids)}I", *ids))[:2] == (-1, errno.EPERM)
    assert pod.rm.seen == []
    assert pod.shared.refusals.counts["web", "card without a grant"] == 1


def test_another_drivers_call_of_that_number_goes_on(pod, monkeypatch):
    """RM has the number at any size, so the filter stops other drivers' calls too, such as TUNSETSNDBUF."""
    went_on = []
    go_on = pod.dispatcher._passthrough.continue_on
    monkeypatch.setattr(pod.dispatcher._passthrough, "continue_on", lambda call: went_on.append(call) or go_on(call))
    pod.shared.major = None
    answer = pod.call(ATTACH, bytes(4))

    assert len(went_on) == 1
    assert answer[:2] == (-1, errno.EINVAL)  # as /dev/random answers
    assert pod.rm.seen == []


def test_part_of_an_id_is_none(pod):
    assert pod.call(ATTACH, bytes(6))[:2] == (-1, errno.EINVAL)

"""A pod's call on a file that is not the driver's: the pod alone decides how long such a file takes to look at."""

from __future__ import annotations

import errno

import pytest

from qgpu.linux import fd_budget, pod_fd_closer
from qgpu.nvidia import abi
from tests import fuse


@pytest.mark.parametrize("number", [abi.NV_ESC_RM_CONTROL, abi.NV_ESC_ATTACH_GPUS_TO_FD], ids=["as RM's", "another's"])
@pytest.mark.parametrize("silent", [fuse.GETATTR, fuse.FLUSH], ids=["attributes", "close"])
def test_file_whose_server_does_not_answer_delays_no_call(pod, silent, number, tmp_path):
    with fuse.served(tmp_path, silent) as served:
        pod.tell(f"open {served.file}")
        pod.child.said()
        answer = pod.call(number, bytes(32), fd=300)

        assert served.lives()
        assert answer[:2] == (-1, errno.ENOTTY)


def test_few_files_of_a_pod_wait_to_be_closed(pod, tmp_path, monkeypatch):
    monkeypatch.setattr(pod_fd_closer, "MOST_WAITING", 2)
    monkeypatch.setattr(fd_budget, "_PATIENCE_S", 0.05)
    with fuse.served(tmp_path, fuse.FLUSH) as served:
        pod.tell(f"open {served.file}")
        pod.child.said()
        errors = [pod.call(abi.NV_ESC_RM_CONTROL, bytes(32), fd=300)[1] for _ in range(3)]

        assert served.lives()
        assert errors == [errno.ENOTTY, errno.ENOTTY, errno.EMFILE]

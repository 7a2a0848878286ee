"""Who may talk to the daemon at all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from qgpu import cgroup
from qgpu.daemon.peers import refuse_pods
from qgpu.errors import PermissionDeniedError
from qgpu.sched.backend import PodInfo


def test_a_process_of_a_pod_is_not_heard(monkeypatch):
    monkeypatch.setattr(cgroup, "of", lambda pid: {7: "/qgpu/web/inner", 8: "/qgpu/web2"}[pid])

    with pytest.raises(PermissionDeniedError, match="it is in pod web"):
        refuse_pods(7, [PodInfo("web", cgroup="/qgpu/web")])
    refuse_pods(8, [PodInfo("web", cgroup="/qgpu/web")])


def test_the_kernels_word_is_taken_on_where_a_process_is():
    own = cgroup.of(os.getpid())

    with pytest.raises(PermissionDeniedError):
        refuse_pods(os.getpid(), [PodInfo("own", cgroup=own)])
    refuse_pods(os.getpid(), [PodInfo("other", cgroup="/qgpu/no-such-pod")])


def test_a_process_that_has_ended_is_not_heard_where_there_are_pods():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    with pytest.raises(PermissionDeniedError, match="ended"):
        refuse_pods(ended.pid, [PodInfo("web", cgroup="/qgpu/web")])
    refuse_pods(ended.pid, [PodInfo("simulated")])

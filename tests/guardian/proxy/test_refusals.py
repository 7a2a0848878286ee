"""What keeps the plane from enforcing limits at all is said before any pod is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from qgpu.errors import NotSupportedError
from qgpu.model import Grant, PodClass
from qgpu.model.plane_api import PodInfo
from qgpu.planes.seccomp import preflight


@pytest.mark.parametrize("scope", ["0", "1", "2"])
def test_a_kernel_that_lets_root_reach_into_processes_will_do(tmp_path: Path, scope: str):
    (tmp_path / "scope").write_text(scope + "\n")

    preflight.check_kernel(tmp_path / "scope")
    preflight.check_kernel(tmp_path / "none")


def test_a_kernel_that_lets_nobody_is_named(tmp_path: Path):
    (tmp_path / "scope").write_text("3\n")

    with pytest.raises(NotSupportedError, match="is 3: no process may access another"):
        preflight.check_kernel(tmp_path / "scope")


def test_a_pod_over_its_lowered_limit_is_told_so():
    from qgpu.daemon.over_limit import over_limits

    grant = Grant(PodClass.OFFLINE, None, 1 << 30)
    (line,) = over_limits(PodInfo("web", {0: grant}, memory={0: 3 << 29}))

    assert line.startswith("holds 1.5 GiB on pGPU 0, 512 MiB over its limit")
    assert over_limits(PodInfo("web", {0: grant}, memory={0: 1 << 30})) == []

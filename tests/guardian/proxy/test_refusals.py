"""What keeps the plane from enforcing limits at all is said before any pod is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from qgpu.errors import NotSupportedError
from qgpu.model import Grant, PodClass
from qgpu.model.plane_api import PodInfo
from qgpu.nvidia import nvml
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


class _Nvml:
    """NVML with one card in MIG mode."""

    NVMLError = RuntimeError
    NVML_DEVICE_MIG_ENABLE = 1
    closed = False

    def nvmlInit(self):  # noqa: N802
        return None

    def nvmlShutdown(self):  # noqa: N802
        self.closed = True

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 3

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetMigMode(self, handle):  # noqa: N802
        if handle == 0:
            raise self.NVMLError("not supported")
        return (handle - 1, 0)


def test_a_card_in_mig_mode_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch):
    fake = _Nvml()
    monkeypatch.setattr(nvml, "pynvml", fake)

    with pytest.raises(NotSupportedError, match=r"GPU 2: MIG mode is on.*nvidia-smi -i 2 -mig 0"):
        nvml.check_cards()
    assert fake.closed


def test_a_pod_over_its_lowered_limit_is_told_so():
    from qgpu.daemon.over_limit import over_limits

    grant = Grant(PodClass.OFFLINE, None, 1 << 30)
    (line,) = over_limits(PodInfo("web", {0: grant}, memory={0: 3 << 29}))

    assert line.startswith("holds 1.5 GiB on pGPU 0, 512 MiB over its limit")
    assert over_limits(PodInfo("web", {0: grant}, memory={0: 1 << 30})) == []

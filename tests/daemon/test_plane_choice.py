"""Which plane is taken, what is not simulated instead, and where a host's daemon keeps what was set."""

from __future__ import annotations

from pathlib import Path

import pytest

from qgpu import paths
from qgpu.daemon import plane_choice
from qgpu.errors import PermissionDeniedError
from qgpu.model.plane_names import Plane
from qgpu.runtime import launch


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host without driver and module; they are files to be made."""
    monkeypatch.setattr(plane_choice, "DEVICE", tmp_path / "qgpu")
    monkeypatch.setattr(plane_choice, "DRIVER", tmp_path / "driver")
    return tmp_path


def test_gpus_are_simulated_only_where_there_is_no_driver(host: Path) -> None:
    assert plane_choice.choose(Plane.AUTO).plane is Plane.SIM
    (host / "driver").touch()
    assert plane_choice.choose(Plane.SIM).plane is Plane.SIM


@pytest.mark.parametrize(("user", "plane"), [(0, Plane.SECCOMP), (1000, None)])
def test_where_there_are_gpus_they_are_shared_or_nothing_is(
    host: Path, monkeypatch: pytest.MonkeyPatch, user: int, plane: Plane | None
) -> None:
    (host / "driver").touch()
    monkeypatch.setattr(plane_choice.os, "geteuid", lambda: user)
    if plane is None:
        with pytest.raises(PermissionDeniedError, match="only root can share its GPUs"):
            plane_choice.choose(Plane.AUTO)
    else:
        assert plane_choice.choose(Plane.AUTO).plane is plane


def test_a_simulated_pod_sees_no_real_gpu(tmp_path: Path) -> None:
    assert launch.environment("sim", "web", ["GPU-1"], tmp_path)["CUDA_VISIBLE_DEVICES"] == ""
    assert launch.environment("kmod", "web", ["GPU-1"], tmp_path)["CUDA_VISIBLE_DEVICES"] == "GPU-1"


@pytest.mark.parametrize(
    ("user", "runtime_dir", "kept"),
    [(0, "/run/qgpu", "/var/lib/qgpu"), (0, "/tmp/mine", None), (1000, "/run/qgpu", None)],
)
def test_hosts_daemon_has_default_state_directory(
    monkeypatch: pytest.MonkeyPatch, user: int, runtime_dir: str, kept: str | None
) -> None:
    monkeypatch.setattr(paths.os, "geteuid", lambda: user)

    assert paths.default_state_dir(Path(runtime_dir)) == (Path(kept) if kept else None)

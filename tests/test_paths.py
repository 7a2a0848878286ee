"""Which runtime directory is the default."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qgpu import paths


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of an ordinary user, on a host whose service has its socket at the place of ``service``."""
    monkeypatch.delenv("QGPU_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(paths, "SERVICE", tmp_path / "service")
    (tmp_path / "service").mkdir()
    (tmp_path / "service/qgpud.sock").touch()
    return tmp_path / "qgpu"


def test_a_user_without_a_daemon_reaches_the_service(own: Path) -> None:
    assert paths.client_runtime_dir() == own.parent / "service"
    assert paths.default_runtime_dir() == own


def test_a_user_with_a_daemon_reaches_it(own: Path) -> None:
    own.mkdir()
    (own / "qgpud.sock").touch()

    assert paths.client_runtime_dir() == own


def test_without_any_daemon_a_user_has_a_directory(own: Path) -> None:
    (own.parent / "service/qgpud.sock").unlink()

    assert paths.client_runtime_dir() == own


def test_a_chosen_directory_holds_for_clients_too(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QGPU_RUNTIME_DIR", "/chosen")

    assert paths.client_runtime_dir() == Path("/chosen")


def test_a_directory_that_another_user_made_is_not_ours(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user may make directories in /tmp."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(paths, "shared_runtime_dir", lambda: own)
    own.mkdir()
    (own / "qgpud.sock").touch()
    assert paths.client_runtime_dir() == own
    monkeypatch.setattr(os, "getuid", lambda: own.stat().st_uid + 1)

    assert paths.client_runtime_dir() == own.parent / "service"

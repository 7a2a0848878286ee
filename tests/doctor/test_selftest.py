"""What the self-test starts, and what it says before."""

from __future__ import annotations

import subprocess

import pytest

from qgpu.doctor import selftest
from qgpu.errors import PermissionDeniedError
from tests.cli import programs


def test_self_test_runs_nothing_from_the_folder_that_root_is_in(tmp_path, monkeypatch):
    (tmp_path / "qgpu").mkdir()
    (tmp_path / "qgpu/__init__.py").write_text(f"open({str(tmp_path / 'taken')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    started = selftest._start("qgpu.load.main", "--help", stdout=subprocess.DEVNULL)

    assert started.wait() == 0
    assert not (tmp_path / "taken").exists()


def test_a_self_test_without_permission_announces_nothing(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionDeniedError("permission denied; use sudo")

    said = []
    monkeypatch.setattr(selftest, "_try", refuse)
    with programs.daemon(tmp_path) as daemon, pytest.raises(PermissionDeniedError):
        selftest.self_test(daemon.runtime_dir, 0, programs.TIMEOUT_S, said.append)

    assert said == []


@pytest.mark.parametrize("tenants", [["train"], ["train", "chat"]])
def test_the_announcement_names_whoever_gets_less(tenants):
    said = selftest._announcement(0, "burst-share", (40, 20), tenants)

    assert said.endswith(f"; its policy stays burst-share; meanwhile less idle time is lent to {', '.join(tenants)}")

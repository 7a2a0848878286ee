"""Programs that the self-test starts."""

from __future__ import annotations

import subprocess

from qgpu.doctor import selftest


def test_self_test_runs_nothing_from_the_folder_that_root_is_in(tmp_path, monkeypatch):
    (tmp_path / "qgpu").mkdir()
    (tmp_path / "qgpu/__init__.py").write_text(f"open({str(tmp_path / 'taken')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    started = selftest._start("qgpu.load.main", "--help", stdout=subprocess.DEVNULL)

    assert started.wait() == 0
    assert not (tmp_path / "taken").exists()

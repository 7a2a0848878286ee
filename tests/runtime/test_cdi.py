"""The CDI file says what a runtime needs, stays current, and is never half there."""

from __future__ import annotations

import errno
import json
import os
import platform
from pathlib import Path

import pytest

from qgpu.doctor.containers import check_containers
from qgpu.doctor.report import Verdict
from qgpu.errors import ExitCode, InvalidValueError, NotSupportedError, QgpuError
from qgpu.linux import atomic_file
from qgpu.model.plane_api import Pgpu
from qgpu.runtime import cdi, driver_files
from tests.cli import programs

CARDS = [Pgpu(0, "GPU-aa", "a card", 1 << 30, 3), Pgpu(1, "GPU-bb", "a card", 1 << 30, 0)]
SOCKET = Path("/run/qgpu/qgpud.sock")
#: What version 0.5.0 of the format knows; runtimes refuse files with anything else.
EDITS = {"env", "deviceNodes", "hooks", "mounts"}

CACHE = """\
7 libs found in cache `/etc/ld.so.cache'
\tlibnvidia-ptxjitcompiler.so.1 (libc6,KIND) => /usr/lib/nv/libnvidia-ptxjitcompiler.so.1
\tlibnvidia-gpucomp.so.580.1 (libc6,KIND) => /usr/lib/nv/libnvidia-gpucomp.so.580.1
\tlibcudart.so.12 (libc6,KIND) => /usr/local/cuda/libcudart.so.12
\tlibcuda.so.1 (libc6,KIND) => /usr/lib/nv/libcuda.so.1
\tlibcuda.so.1 (libc6,KIND) => /usr/lib/older/libcuda.so.1
\tlibcuda.so.1 (libc6) => /usr/lib32/libcuda.so.1
\tlibc.so.6 (libc6,KIND, OS ABI: Linux 3.2.0) => /lib/libc.so.6
"""


@pytest.fixture
def keeper(tmp_path):
    made = cdi.CdiFileWriter(CARDS, SOCKET, tmp_path / "cdi")
    made.refresh()
    return made


def content(keeper):
    return json.loads((keeper.directory / "qgpu.json").read_text())


def test_cdi_names_each_card_by_number_and_uuid_and_all_at_once():
    devices = {each["name"]: each["containerEdits"] for each in cdi.specification(CARDS, SOCKET)["devices"]}

    assert set(devices) == {"0", "1", "GPU-aa", "GPU-bb", "all"}
    assert devices["0"] == {"env": ["QGPU_GPU_0=GPU-aa"], "deviceNodes": [{"path": "/dev/nvidia3"}]}
    assert devices["GPU-aa"] == devices["0"]
    assert [node["path"] for node in devices["all"]["deviceNodes"]] == ["/dev/nvidia3", "/dev/nvidia0"]


def test_the_file_is_of_the_version_it_says():
    made = cdi.specification(CARDS, SOCKET)

    assert (made["cdiVersion"], made["kind"]) == ("0.5.0", "qgpu.io/gpu")
    assert set(made) == {"cdiVersion", "kind", "devices", "containerEdits"}
    for edits in (made["containerEdits"], *(each["containerEdits"] for each in made["devices"])):
        assert set(edits) <= EDITS


def test_hook_runs_before_containers_process_and_exists():
    (entry,) = cdi.specification(CARDS, SOCKET)["containerEdits"]["hooks"]

    assert entry["hookName"] == "createRuntime"
    assert entry["args"][0] == entry["path"]
    assert Path(entry["path"]).is_absolute()
    assert Path(entry["args"][-2]).is_file()


def test_a_simulated_pgpu_brings_no_driver():
    made = cdi.specification([Pgpu(0, "GPU-aa", "simulated", 1 << 30)], SOCKET)["containerEdits"]

    assert (made["deviceNodes"], made["mounts"]) == ([], [])


def test_libraries_appear_under_the_names_programs_ask_for():
    kind = {"x86_64": "x86-64", "aarch64": "AArch64"}[platform.machine()]
    found = driver_files.libraries(CACHE.replace("KIND", kind))

    assert found == {
        "libcuda.so": "/usr/lib/nv/libcuda.so.1",
        "libcuda.so.1": "/usr/lib/nv/libcuda.so.1",
        "libnvidia-gpucomp.so.580.1": "/usr/lib/nv/libnvidia-gpucomp.so.580.1",
        "libnvidia-ptxjitcompiler.so.1": "/usr/lib/nv/libnvidia-ptxjitcompiler.so.1",
    }
    assert driver_files.Mount("/usr/lib/nv/libcuda.so.1", "/usr/lib64/libcuda.so") in driver_files.library_mounts(found)


def test_a_file_that_was_removed_or_changed_is_written_again(keeper):
    path = keeper.directory / "qgpu.json"
    for harm in (path.unlink, lambda: path.write_text("{")):
        harm()
        assert keeper.refresh()
        assert content(keeper)["kind"] == "qgpu.io/gpu"


def test_a_file_that_is_current_is_left_alone(keeper):
    before = (keeper.directory / "qgpu.json").stat()

    assert not keeper.refresh()
    cdi.write(content(keeper), keeper.directory)
    after = (keeper.directory / "qgpu.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_the_file_is_replaced_at_once_and_nothing_else_is_left(keeper):
    path = keeper.directory / "qgpu.json"
    with path.open() as reader:
        cdi.write({"kind": "another"}, keeper.directory)

        assert json.load(reader)["kind"] == "qgpu.io/gpu"
    assert [each.name for each in keeper.directory.iterdir()] == ["qgpu.json"]


def test_where_it_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(InvalidValueError, match=r"qgpu\.json: Not a directory; choose another"):
        cdi.write({}, tmp_path / "file")


def test_full_disk_has_its_own_exit_code(tmp_path, monkeypatch):
    def no_room(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_file, "replace", no_room)
    with pytest.raises(QgpuError, match="free some space there") as refused:
        cdi.write({}, tmp_path)

    assert refused.value.code == ExitCode.FAILED


@pytest.mark.parametrize("loader", ["exit 1", "kill -9 $$"])
def test_a_loader_whose_cache_cannot_be_read_is_said(monkeypatch, tmp_path, loader):
    tool = tmp_path / "ldconfig"
    tool.write_text(f"#!/bin/sh\n{loader}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(driver_files.shutil, "which", lambda *_, **__: str(tool))

    with pytest.raises(NotSupportedError, match="ldconfig"):
        driver_files.mounts()


def test_a_file_that_is_not_text_is_replaced(keeper):
    (keeper.directory / "qgpu.json").write_bytes(b"\xff\xfe")
    keeper.refresh()

    assert content(keeper)["kind"] == "qgpu.io/gpu"


def test_the_daemon_keeps_the_file_where_it_is_told(tmp_path):
    (tmp_path / "qgpu.toml").write_text(f'[containers]\ncdi = "{tmp_path}/cdi"\n')
    with programs.daemon(tmp_path / "run", "--config", str(tmp_path / "qgpu.toml")) as daemon:
        shown = json.loads(daemon.ctl("cdi", "show").stdout)
        generated = daemon.ctl("cdi", "generate", "--dir", str(tmp_path / "other"))

        assert json.loads((tmp_path / "cdi" / "qgpu.json").read_text()) == shown
        assert generated.stdout.strip() == str(tmp_path / "other" / "qgpu.json")
        assert json.loads((tmp_path / "other" / "qgpu.json").read_text()) == shown
        assert shown["containerEdits"]["hooks"][0]["args"][-1] == str(tmp_path / "run" / "root.sock")


def test_the_doctor_finds_a_file_that_is_missing_broken_or_stale(tmp_path):
    def verdict():
        return check_containers(tmp_path).verdict

    assert verdict() is Verdict.WARN
    (tmp_path / cdi.FILE).write_text('{"kind": "other"}')
    assert verdict() is Verdict.FAIL
    made = cdi.specification([Pgpu(0, "GPU-aa", "simulated", 1 << 30)], SOCKET)
    cdi.write(made, tmp_path)
    assert verdict() is Verdict.OK
    made["containerEdits"]["mounts"] = [{"hostPath": str(tmp_path / "libcuda.so.1"), "containerPath": "/x"}]
    cdi.write(made, tmp_path)
    assert verdict() is Verdict.FAIL

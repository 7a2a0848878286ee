"""What is read of processes that choose their names."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from qgpu.linux import proc
from tests.headless import headless

NAMING = "import ctypes, sys; ctypes.CDLL(None).prctl(15, bytes.fromhex(sys.argv[1]), 0, 0, 0); print(); input()"


@pytest.fixture(
    params=[b"plain", b"\x0cPPid:\t1", b"\xe2\x80\xa8PPid:\t1", b"\nPPid:\t1", b"a) Z 1 1", b"\xff\x0c\x1d"]
)
def named(request):
    """A process that has given itself a name."""
    process = subprocess.Popen(
        [sys.executable, "-uc", NAMING, request.param.hex()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.read(1) == b"\n"
    yield process
    process.communicate(b"\n")


def test_names_change_nothing_of_what_else_is_told(named):
    assert proc.status(named.pid, "PPid") == [str(os.getpid())]
    assert proc.status(named.pid, "Tgid") == [str(named.pid)]
    assert proc.stat(named.pid)[1] == str(os.getpid())
    assert proc.stat(named.pid, named.pid)[1] == str(os.getpid())


def test_what_is_gone_tells_nothing():
    process = subprocess.Popen(["true"])
    process.wait()

    assert (proc.status(process.pid, "Tgid"), proc.stat(process.pid), list(proc.maps(process.pid))) == ([], [], [])


def test_a_process_maps_what_it_runs():
    assert any(line.endswith(os.path.realpath(sys.executable).encode()) for line in proc.maps(os.getpid()))


def test_what_a_process_without_its_first_thread_maps_is_seen():
    with headless() as pid:
        assert any(line.endswith(os.path.realpath(sys.executable).encode()) for line in proc.maps(pid))


def test_a_process_has_not_ended_with_its_first_thread():
    with headless() as pid:
        assert (proc.start_time(pid), proc.is_headless(pid)) == (proc.stat(pid)[19], True)
    assert (proc.start_time(pid), proc.is_headless(pid)) == ("", False)


def test_what_no_thread_of_a_process_shows_is_unknown(monkeypatch):
    """Its threads end as they are looked at, and make others."""
    parts = proc._parts
    monkeypatch.setattr(proc, "_parts", lambda pid, name: iter(()) if name.endswith("maps") else parts(pid, name))

    with headless() as pid:
        assert proc.maps(pid) is None


def test_descriptors_that_are_devices_are_told_from_others(tmp_path):
    null = os.open("/dev/null", os.O_RDONLY)
    plain = os.open(tmp_path, os.O_RDONLY)
    here, number = os.getpid(), os.makedev(1, 3)

    assert (proc.device(here, null), proc.device_of(null)) == (number, number)
    assert (proc.device(here, plain), proc.device_of(plain), proc.device(here, 1 << 20)) == (None, None, None)
    assert (null, number) in proc.devices(here)
    assert list(proc.devices(here, 0)) == []
    os.close(null)
    os.close(plain)


def test_a_process_that_is_gone_has_no_devices():
    process = subprocess.Popen(["true"])
    process.wait()

    assert (proc.device(process.pid, 0), list(proc.devices(process.pid))) == (None, [])

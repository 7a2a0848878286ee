"""The attackers with what profilers may call (bench/attacks), behind a real filter: what they say, and what RM saw.

RM is a table that grants everything, so what is refused here the guardian refused.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qgpu.guardian.proxy.passthrough import Passthrough
from qgpu.nvidia import abi
from tests.guardian.fake_rm import FakeRm
from tests.guardian.pod import MAJOR, PATIENCE_S, Pod

ROOT = Path(__file__).parents[3]
#: /dev/random and /dev/urandom, in the places of a control file and a card.
CONTROL, CARD = 8, 9
NEIGHBOURS = range(2, 6)
LISTED = 0x13CC14
#: Where ways into a neighbour are tried; elsewhere calls are made without end, which takes a card to judge.
MODES = {
    "profile": ("debug", "suspend", "others", "flush", "unread", "ties", "maps"),
    "monitors": ("reserve", "outlive", "registers"),
}
_PROFILER, _DEBUGGER = 0xB2CC, 0x83DE
#: Mounts the two device files, puts the filter on, hands its listener over, and becomes the attacker.
_ENTER = """
import os, socket, sys
from qgpu.guardian.proxy.seccomp_filter import install
sock = socket.socket(fileno=int(sys.argv[1]))
socket.send_fds(sock, [b"listener"], [install(profiling=sys.argv[2] == "True")])
os.execv(sys.argv[3], sys.argv[3:])
"""
_DEVICES = """
mount -t tmpfs none /dev && mknod /dev/nvidiactl c 1 8 && mknod /dev/nvidia0 c 1 9 && mknod /dev/null c 1 3 &&
mknod /dev/urandom c 1 9 && exec "$@"
"""


class EagerRm(FakeRm):
    """Grants what it is asked, as a driver that checks little; keeps what reached a neighbour's client."""

    def __init__(self, objects):
        super().__init__(objects)
        self.reached = []

    def perform(self, fd, request, argument):
        data, number = abi.ffi.buffer(argument), request & 0xFF
        named = [struct.unpack_from("<I", data)[0]]
        if number == abi.NV_ESC_RM_ALLOC:
            rm_class, params = struct.unpack_from("<IQ", data, 12)
            if params and rm_class in (_PROFILER, _DEBUGGER):
                named += struct.unpack("<II", bytes(abi.ffi.buffer(abi.ffi.cast("char *", params), 8)))
        if number != abi.NV_ESC_REGISTER_FD and {*named} & {*NEIGHBOURS}:
            self.reached.append((number, named))
        error = super().perform(fd, request, argument)
        if number == abi.NV_ESC_RM_MAP_MEMORY and not error:
            offset, length = struct.unpack_from("<QQ", data, 16)
            struct.pack_into("<I", data, 40, abi.NV_OK if offset + length <= 1 << 16 else abi.NV_ERR_INVALID_ARGUMENT)
        return error


def _check_registers(params):
    """Answer as RM's list of registers does: only a counter's may be read or written."""
    count = struct.unpack_from("<I", params)[0]
    for i in range(min(count, 124)):
        at = 12 + 32 * i
        (offset,) = struct.unpack_from("<I", params, at + 12)
        params[at + 2] = 0 if offset == LISTED else 4


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if shutil.which("cc") is None or os.geteuid():
        pytest.skip("needs a C compiler and root")
    sys.path.insert(0, str(ROOT / "bench"))
    from attacks import build

    folder = tmp_path_factory.mktemp("attacks")
    build.build(folder)
    return folder


@pytest.fixture
def pod(monkeypatch):
    monkeypatch.setattr("tests.guardian.pod.FakeRm", EagerRm)
    made = Pod({(client, client): (abi.NV01_ROOT_CLIENT, 0) for client in NEIGHBOURS})
    yield made
    made.end()


def attack(built, pod, monkeypatch, program, mode):
    """Let an attacker do its worst once; return what it says."""
    for guardian_makes in ("makes_root_clients", "makes_devices"):  # the kernel cannot: there is no driver
        monkeypatch.setattr(Passthrough, guardian_makes, lambda *_: False)
    monkeypatch.setattr(abi, "NV_CONTROL_MINOR", CONTROL)
    pod.minors = {0: CARD}
    pod.rm.answers[0xB0CC010A] = _check_registers
    report = built / f"{program}-{mode}"
    report.unlink(missing_ok=True)
    ours, theirs = socket.socketpair()
    enter = [sys.executable, "-c", _ENTER, str(theirs.fileno()), str(pod.profiling), str(built / program)]
    process = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", _DEVICES, "sh", *enter, mode, str(report), str(1 << 30), "sim"],
        pass_fds=[theirs.fileno()],
        cwd=ROOT,
        start_new_session=True,
    )
    theirs.close()
    try:
        _, (listener,), _, _ = socket.recv_fds(ours, 16, 1)
        number = pod.shared.listeners.add("web", listener)
        _serve(pod, listener, number, lambda: report.exists() or process.poll() is not None)
    finally:
        ours.close()
        os.killpg(process.pid, 9)
        process.wait()
    os.close(listener)
    return report.read_text()


def _serve(pod, fd, number, ended):
    dispatcher, listener = pod.dispatcher_of(pod.shared, number), pod.shared.listeners[number][1]
    deadline = time.monotonic() + PATIENCE_S
    while not ended():
        assert time.monotonic() < deadline, "the attacker is stuck"
        if select.select([fd], [], [], 0.1)[0] and (call := listener.receive()) is not None:
            dispatcher.serve(listener, call)


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize(("program", "mode"), [(program, mode) for program, each in MODES.items() for mode in each])
def test_what_profilers_may_call_reaches_no_neighbour(built, pod, monkeypatch, program, mode, granted):
    pod.profiling = granted
    said = attack(built, pod, monkeypatch, program, mode)

    print(said)
    counted = re.match(r"granted (\d+), reached (\d+), refused (\d+)", said)
    assert counted is not None, said
    assert (int(counted[1]) > 0, int(counted[2])) == (granted, 0)
    assert int(counted[3]) > 0 or mode == "reserve"
    assert pod.rm.reached == []

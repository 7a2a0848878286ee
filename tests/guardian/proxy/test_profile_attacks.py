"""The attackers with what profilers may call (bench/attacks) behind a real filter: what they say, and what RM is asked.

RM is a table that checks whose file a call's own client is on, handles and sizes, and grants everything else.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from qgpu.guardian.proxy.passthrough import Passthrough
from qgpu.nvidia import abi
from tests.guardian.fake_rm import FakeRm
from tests.guardian.pod import PATIENCE_S, Pod

ROOT = Path(__file__).parents[3]
#: /dev/random and /dev/urandom, in the places of a control file and a card.
CONTROL, CARD = 8, 9
#: Among them the one that the table has from the start.
NEIGHBOURS = range(2, 8)
#: Where ways into a neighbour are tried.
WAYS = [
    *(("profile", mode) for mode in ("debug", "suspend", "others", "flush", "unread", "ties", "maps")),
    *(("monitors", mode) for mode in ("reserve", "outlive", "registers")),
]
#: What the card decides, or the judge by time and memory.
FLOODS = [("profile", "many-flushes"), ("monitors", "many-registers"), ("monitors", "streams"), ("monitors", "objects")]
#: Profiler and debugger.
_NAMES_CLIENTS = (0xB2CC, 0x83DE)
_MOST_REGISTERS, _LISTED = 124, 0x13CC14
_STATUS_AT = {abi.NV_ESC_RM_ALLOC: 40, abi.NV_ESC_RM_CONTROL: 28, abi.NV_ESC_RM_MAP_MEMORY: 40}
#: Puts the filter on, hands its listener over, and becomes the attacker.
_ENTER = """
import os, socket, sys
from qgpu.guardian.proxy.seccomp_filter import install
sock = socket.socket(fileno=int(sys.argv[1]))
socket.send_fds(sock, [b"listener"], [install()])
os.execv(sys.argv[3], sys.argv[3:])
"""
#: Finds the two device files where the driver's would be.
_DEVICES = """
mount -t tmpfs none /dev && mknod /dev/nvidiactl c 1 8 && mknod /dev/nvidia0 c 1 9 && mknod /dev/null c 1 3 &&
mknod /dev/urandom c 1 9 && exec "$@"
"""


class EagerRm(FakeRm):
    """Grants what it is asked, but for what RM itself checks; keeps what named a neighbour's client in parameters."""

    def __init__(self, objects):
        super().__init__(objects)
        self.reached = []
        self.too_many = False
        self.answers[abi.NVB0CC_EXEC_REG_OPS] = self._check_registers

    def _check_registers(self, params):
        """Answer as a card's firmware does: a counter's register is let through, and number 0; so many at once."""
        count = struct.unpack_from("<I", params)[0]
        self.too_many = count > _MOST_REGISTERS
        for at in range(12, 12 + 32 * min(count, _MOST_REGISTERS), 32):
            params[at + 2] = 0 if struct.unpack_from("<I", params, at + 12)[0] in (0, _LISTED) else 4

    def perform(self, fd, request, argument):
        data, number = abi.ffi.buffer(argument), request & 0xFF
        if number not in _STATUS_AT:
            return super().perform(fd, request, argument)
        client = struct.unpack_from("<I", data)[0]
        if client in NEIGHBOURS or (client and (client, client) not in self.objects):  # none of this file
            struct.pack_into("<I", data, _STATUS_AT[number], abi.NV_ERR_INVALID_CLIENT)
            return 0
        self._note(number, data)
        error = super().perform(fd, request, argument)
        if number == abi.NV_ESC_RM_MAP_MEMORY:
            _, memory, _, offset, length = struct.unpack_from("<IIIQQ", data, 4)
            fits = (client, memory) in self.objects and offset + length <= self.sizes[client, memory]
            struct.pack_into("<I", data, 40, abi.NV_OK if fits else abi.NV_ERR_INVALID_ARGUMENT)
        if number == abi.NV_ESC_RM_CONTROL and self.too_many:
            struct.pack_into("<I", data, 28, abi.NV_ERR_INVALID_ARGUMENT)
        self.too_many = False
        return error

    def _note(self, number, data):
        if number == abi.NV_ESC_RM_ALLOC:
            rm_class, params = struct.unpack_from("<IQ", data, 12)
            if params and rm_class in _NAMES_CLIENTS:
                named = struct.unpack("<II", bytes(abi.ffi.buffer(abi.ffi.cast("char *", params), 8)))
                self.reached += [(rm_class, client) for client in named if client in NEIGHBOURS]


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
    made.rm.elsewhere.update(NEIGHBOURS)
    yield made
    made.end()


def attack(built, pod, monkeypatch, program, mode):
    """Let an attacker do its worst once; return what it says."""
    for guardian_makes in ("makes_root_clients", "makes_devices"):  # the kernel cannot: there is no driver
        monkeypatch.setattr(Passthrough, guardian_makes, lambda *_: False)
    monkeypatch.setattr(abi, "NV_CONTROL_MINOR", CONTROL)
    pod.minors = {0: CARD}
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
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
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


def figures(said):
    """Return how many calls were granted and how many reached what they may not."""
    counted = re.match(r"granted (\d+), reached (\d+), refused \d+", said)
    assert counted is not None, said
    return int(counted[1]), int(counted[2])


@pytest.mark.parametrize("may_profile", [False, True])
@pytest.mark.parametrize(("program", "mode"), WAYS)
def test_profilers_calls_reach_no_neighbour(built, pod, monkeypatch, program, mode, may_profile):
    pod.profiling = may_profile
    granted, reached = figures(attack(built, pod, monkeypatch, program, mode))

    assert (granted > 0, reached) == (may_profile, 0)
    assert pod.rm.reached == []


@pytest.mark.parametrize("may_profile", [False, True])
@pytest.mark.parametrize(("program", "mode"), FLOODS)
def test_floods_of_profilers_calls_need_the_grant(built, pod, monkeypatch, program, mode, may_profile):
    pod.profiling = may_profile

    assert (figures(attack(built, pod, monkeypatch, program, mode))[0] > 0) == may_profile

"""A pod over a real seccomp filter: a real process, stopped by the kernel, its calls carried out for it.

There is no NVIDIA driver here: the pod's descriptor is /dev/random, whose major the dispatcher is told to watch, and
RM is a table (``fake_rm.py``) that reads and writes what the guardian hands it.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

from qgpu.guardian.accounting.memory_quota import Allowance
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.proxy.dispatcher import Dispatcher
from qgpu.guardian.proxy.shared_state import SharedState
from qgpu.linux import proc
from qgpu.linux.open_file_set import FileMakers, FileSets
from qgpu.nvidia import abi, uvm
from tests.guardian.asked import DEVICE_PARAMS, alloc, alloc_status, device, memory_params, subdevice
from tests.guardian.fake_rm import FakeRm

MAJOR, MINOR = 1, 8
#: Stands for the control file where one that is not the card's is needed.
CONTROL, CONTROL_MINOR = "/dev/kmsg", 11
LIMIT = 1 << 40
#: Three quarters of the limit: one fits, two do not.
MOST = 3 << 38
PATIENCE_S = 60


def until(condition):
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class _Makers(FileMakers):
    """Takes whoever asks for the maker of a client that RM's table has from the start."""

    def __init__(self, files):
        super().__init__(files.fd)
        self._roots = files.roots

    def is_by(self, file, pid):
        try:
            return not self._roots.has(file) or super().is_by(file, pid)
        except PermissionError:  # a file that cannot be polled stands for RM's
            return True


class Files(FileSets):
    """Sets of files of which some have root clients that no call made."""

    def __init__(self):
        super().__init__()
        self.makers = _Makers(self)


class Child:
    """A process behind the filter, which makes the calls it is told; ``listener`` is the filter's."""

    def __init__(self):
        self.sock, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.guardian.child", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=Path(__file__).parents[2],
        )
        theirs.close()
        _, (self.listener,), _, _ = socket.recv_fds(self.sock, 16, 1)
        self.lines = self.sock.makefile("rw")

    def tell(self, line):
        self.lines.write(line + "\n")
        self.lines.flush()

    def ask(self, request, argument, params=b"", **more):
        """Have it make an ioctl, and do not wait for the answer."""
        self.tell(json.dumps({"request": request, "argument": argument.hex(), "params": params.hex()} | more))

    def begin(self, number, argument, params=b"", **more):
        """As ask, for a call of RM's by its number."""
        self.ask(abi.request(number, len(argument)), argument, params, **more)

    def said(self):
        """Read what it answers to the last call."""
        return json.loads(self.lines.readline())

    def end(self):
        self.process.kill()
        self.process.wait()
        self.lines.close()
        self.sock.close()


class Pod:
    """A child in a pod, and the dispatcher that serves it."""

    def __init__(self, objects):
        self.child = Child()
        self.process, self.listener = self.child.process, self.child.listener
        self.tell, self.begin = self.child.tell, self.child.begin
        self.left, self.cancel_free = [], []
        self.rm = FakeRm(objects)
        self.minors, self.limits, self.profiling, self.graphics = {0: MINOR}, {0: LIMIT}, False, False
        self.files = Files()
        self.shared = self.fresh(Journal())
        self.shared.note({"fact": "pod", "name": "web", "grants": {}})
        self.number = self.shared.listeners.add("web", self.listener)
        self.dispatcher = self.dispatcher_of(self.shared, self.number)

    def fresh(self, journal):
        return SharedState(
            ObjectTable(),
            journal,
            self.rm,
            self.left.extend,
            self.cancel_free.extend,
            lambda pid, pidfd: None,
            time.monotonic_ns,
            lambda pod: Allowance(self.minors, self.limits, profiling=self.profiling, graphics=self.graphics),
            major=MAJOR,
            uvm_layouts=uvm.layouts("580.1"),
            perform=self.rm.perform,
            uuids={bytes(16): 0},
            files=self.files,
        )

    def dispatcher_of(self, shared, number):
        return Dispatcher(shared, shared.listeners[number][0])

    def settle(self):
        """Let everything come due."""
        for second in range(20):
            self.shared.reconciler.run_due(time.monotonic_ns() + second * 10**9)

    def uvm(self, request, argument):
        """Make a call of UVM's on a file that is taken for UVM's meanwhile."""
        self.shared.major, self.shared.uvm_major = None, MAJOR
        self.child.ask(request, argument)
        try:
            return self.answer()
        finally:
            self.shared.major, self.shared.uvm_major = MAJOR, None

    def call(self, number, argument, params=b"", **more):
        """Make one call in the pod, serving whatever the filter stops, and return its answer."""
        self.begin(number, argument, params, **more)
        return self.answer()

    def call_for_params(self, number, argument, params, **more):
        """As call, with the parameters as they are after it."""
        return (*self.call(number, argument, params, **more), self.params)

    def call_nested(self, number, argument, params, pointer_at, nested):
        """As call, where the parameters point to more; return that as it is after."""
        self.call(number, argument, params, nested=nested.hex(), nested_at=pointer_at)
        return self.nested

    def answer(self):
        while True:
            ready, _, _ = select.select([self.child.sock, self.listener], [], [], PATIENCE_S)
            assert ready, "the pod is stuck"
            if self.child.sock in ready:
                answer = self.child.said()
                self.params, self.nested = (bytes.fromhex(answer.get(part, "")) for part in ("params", "nested"))
                return answer["result"], answer["errno"], bytes.fromhex(answer["argument"])
            call = self.shared.listeners[self.number][1].receive()
            if call is not None:
                self.dispatcher.serve(self.shared.listeners[self.number][1], call)

    def open(self, path):
        """Have it open a file under number 300; return that."""
        self.tell(f"open {path}")
        self.child.said()
        return 300

    def end(self):
        self.child.end()
        for fd in (self.files.fd, self.listener, self.shared.journal.fd, *self.rm.pidfds.values()):
            os.close(fd)


def make_device(pod, handle=2):
    """Let the kernel carry a device's allocation out, which goes to /dev/random; RM has it then."""
    assert pod.call(abi.NV_ESC_RM_ALLOC, device(handle), DEVICE_PARAMS)[:2] == (-1, errno.EINVAL)
    pod.rm.objects[7, handle] = (abi.NV01_DEVICE_0, 7)


def make_subdevice(pod):
    assert alloc_status(pod.call(abi.NV_ESC_RM_ALLOC, subdevice(), bytes(4))[2]) == abi.NV_OK


def make_device_on_another_card(pod, handle, subdevice_handle):
    """Give a pod a grant on a second card, and a device there with a subdevice."""
    pod.minors[1] = MINOR  # the file that the child has open
    pod.rm.instances[7, handle] = 1
    card = struct.pack("<I52x", 1)
    for asked, params in ((device(handle), card), (subdevice(subdevice_handle, parent=handle), bytes(4))):
        assert alloc_status(pod.call(abi.NV_ESC_RM_ALLOC, asked, params)[2]) == abi.NV_OK


def allocate(pod, handle, size, parent=2):
    return alloc_status(pod.call(abi.NV_ESC_RM_ALLOC, alloc(handle, parent, 0x40), memory_params(size))[2])


def device_of(pod):
    """Return the descriptor under which a pod's process has its device."""
    return next(fd for fd in range(3, 64) if proc.device(pod.process.pid, fd) == os.makedev(MAJOR, MINOR))


def held(pod):
    """Return what a pod is charged, page tables included."""
    return pod.shared.quota.used("web", 0)

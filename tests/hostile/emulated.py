"""A driver in a file, for real daemons, guardians and pods: what RM has outlives whoever asks it.

The pods' device is /dev/random, whose ioctl answers EINVAL to whatever the kernel carries out for them. Nothing runs on
the card, so gates and timeslices are taken and do nothing.
"""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

from qgpu.daemon import plane_choice
from qgpu.guardian import server
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover import emergency_open
from qgpu.guardian.gpu import gpu_ops
from qgpu.guardian.gpu.gpu_ops import Moved
from qgpu.linux import fd_budget
from qgpu.model.plane_api import MigInstance, Pgpu
from qgpu.nvidia import abi, mig, nvml
from qgpu.planes.seccomp import host
from tests.guardian.fake_device import FakeDevice
from tests.guardian.lasting import LastingRm

#: Names the file.
VARIABLE = "EMULATED_RM"
#: Names a file with the ids of the GPU instances that NVML finds on a card in MIG mode; the guardian finds these.
DIVIDED = "EMULATED_MIG"
INSTANCES = (MigInstance(0, 1), MigInstance(0, 2))
#: A client's device is made by the kernel, that is by nobody: it is there from the first.
CLIENTS = range(7, 15)
#: One for each attack: processes of the one before may still use theirs.
ATTACKERS = range(15, 31)
#: From here on a client is there while a file of its number is among the ``files_of`` the driver.
FIRST_NUMBERED = 1 << 10
MEMORY = 1 << 34
_MAJOR, _MINOR = 1, 8


class Rm(LastingRm):
    """RM in a file, which is replaced whole with every call: a caller may be killed in any."""

    def __init__(self, path: Path, table: ObjectTable) -> None:
        self._table = table
        self._path: Path | None = None
        super().__init__()
        os.close(self.fd)
        self._path = path
        gpu_ops._CONTROL_DEVICE = os.makedev(_MAJOR, _MINOR)
        # The main loop asks, and may not wait for a descriptor to look into the file again: a driver needs none.
        known = SimpleNamespace(knows=lambda client, handle: (client, handle) in self.objects)
        self._reach = gpu_ops.GpuOps(table, SimpleNamespace(), known, [])
        self._reach._pidfds, self._reach.on_unreachable = self.pidfds, lambda client: self.on_unreachable(client)
        self._reach.object_info = self.object_info
        if not path.exists():
            self.objects = {(client, client): (abi.NV01_ROOT_CLIENT, 0) for client in (*CLIENTS, *ATTACKERS)}
            self.objects |= {(client, 2): (abi.NV01_DEVICE_0, client) for client in (*CLIENTS, *ATTACKERS)}
            self.keep()

    def load(self) -> None:
        self.__dict__.update(pickle.loads(fd_budget.retry_on_emfile(self._path.read_bytes)))
        self._follow_files()

    def _follow_files(self) -> None:
        """Have those of the numbered clients whose file is open, and nothing of the others."""
        files = fd_budget.retry_on_emfile(lambda: _names(files_of(self._path)))
        numbered = {client for client, _ in self.objects if client >= FIRST_NUMBERED}
        for client in numbered - files:
            for kept in (self.objects, self.sizes, self.aliases, self.memory):
                for key in [key for key in kept if key[0] == client]:
                    del kept[key]
        for client in files - numbered:
            self.objects |= {(client, client): (abi.NV01_ROOT_CLIENT, 0), (client, 2): (abi.NV01_DEVICE_0, client)}

    def keep(self) -> None:
        if self._path is None:
            super().keep()
            return
        new = self._path.with_suffix(f".{os.getpid()}.new")
        fd_budget.retry_on_emfile(
            lambda: new.write_bytes(self.said())
        )  # a driver's files are not its callers' descriptors
        new.rename(self._path)

    def private_bytes(self, instance, pid):
        with self.lock:
            self.load()
            owners = list(self.memory.values())
            makers = {handle: client.maker for handle, client in self._table.clients.items()}
            alone = [block for key, block in self.memory.items() if owners.count(block) == 1 and makers[key[0]] == pid]
            return sum(self.blocks[block] for block in alone)

    def gate(self, device, channels, closed, preempt=True):
        return Moved()

    def open_gates(self, device):
        return None

    def timeslice(self, tsg, timeslice_us):
        """Reach for the client's file as on a card; that done, nothing runs here whose slice could be set."""
        return self._reach._via_client_file(tsg.client, lambda file: True) is not None

    def clients_behind_fd(self, pid, fd, clients):
        return self._reach.clients_behind_fd(pid, fd, clients)

    def pod_has_file(self, client, pod, file):
        return self._reach.pod_has_file(client, pod, file)


def files_of(path: Path) -> Path:
    """Return where tests say which files of pods are open, by the numbers of their clients, for a driver in a file."""
    return path.with_suffix(".files")


def _names(directory: Path) -> set[int]:
    return {int(each.name) for each in directory.iterdir()} if directory.is_dir() else set()


class _Guardian(server.Guardian):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.shared.major = _MAJOR
        self.shared.perform = self.shared.uvm_files.perform = self.gpu_ops.perform
        self.shared.files.makers.is_by = lambda file, pid: True  # clients are there from the first


def install() -> None:
    """Let this process find the emulated driver instead of one."""
    path = Path(os.environ[VARIABLE])
    server.installed = emergency_open.installed = lambda: "580.1"
    server.RmClient = emergency_open.RmClient = lambda: SimpleNamespace(close=lambda: None)
    devices = [FakeDevice(_MINOR)]
    if DIVIDED in os.environ:
        devices = [FakeDevice(_MINOR, each.index, mig.place_of(0, each), each) for each in INSTANCES]
        server.gpu_instance_uuid = lambda device: bytes([device.index]) * 16
    server.open_devices = emergency_open.open_devices = lambda client: devices
    server.CtxswLog = lambda device: SimpleNamespace(dropped=0, read=list)
    server.GpuOps = emergency_open.GpuOps = lambda table, branch, client, devices: Rm(path, table)
    server.Guardian = _Guardian
    plane_choice.DRIVER = Path("/")
    plane_choice.driver_version = lambda plane: "580.1"
    host.mig_cards = _mig_cards
    host.describe = lambda cards: [Pgpu(index, _uuid(index), "emulated", MEMORY, _MINOR) for index, _ in cards]
    host.lock_host = lambda: _lock(path)


def _mig_cards(shared: Collection[int | str]) -> nvml.MigCards:
    if DIVIDED not in os.environ:
        return nvml.MigCards([], [], {})
    assert 0 in shared
    there = [MigInstance(0, int(number)) for number in Path(os.environ[DIVIDED]).read_text().split()]
    found = [Pgpu(each.index, f"MIG-{each.index}", "emulated MIG", MEMORY // 2, _MINOR, each) for each in there]
    return nvml.MigCards([], found, {0: FakeDevice.pci})


def _uuid(index: int) -> str:
    return f"GPU-51300000-0000-0000-0000-{index:012d}"  # Kubernetes allocates no card without a UUID


def _lock(path: Path) -> int:
    fd = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd

"""The BPF program that keeps NVIDIA device files within the pods that opened them (``bpf/device_files.bpf.c``).

This file loads it, tells it which cgroups are pods, and reads which processes it refused. It works without this
process.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qgpu.errors import NotSupportedError
from qgpu.linux import cgroup, proc
from qgpu.lsm import libbpf, pins

#: Names of the refused calls, by counter (enum counter).
CALLS = ("open", "receive", "ioctl", "mmap")

_SEEN, _FIRST_CALL = 0, 1
_POD, _GUARDIAN = 1, 2
_U32, _INT, _U64 = struct.Struct("=I"), struct.Struct("=i"), struct.Struct("=Q")
_PLACE, _REFUSAL, _REFUSED = struct.Struct("=Ii"), struct.Struct("=QII"), struct.Struct("=Q16s")
_OBJECT = "device_files.bpf.o"
_DEVICES = Path("/proc/devices")
_LSMS = Path("/sys/kernel/security/lsm")
_TYPES = Path("/sys/kernel/btf/vmlinux")
_NODE = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A process that was refused a pod's file: by which call, and how often. It chose its name itself."""

    pid: int
    name: str
    call: str
    cgroup: int
    times: int


def compiled() -> Path:
    """Find the compiled program: beside the package, or in a source tree. Raises NotSupportedError."""
    here = Path(__file__).resolve().parent.parent
    for path in (here / "data" / _OBJECT, here.parent / "bpf" / _OBJECT):
        if path.exists():
            return path
    raise NotSupportedError(f"{_OBJECT} was not built; that needs clang and libbpf-dev")


def check_kernel(lsms: Path = _LSMS, types: Path = _TYPES, mounts: Path = Path("/proc/self/mountinfo")) -> None:
    """Check the kernel's support, as far as it reports it. Raises NotSupportedError."""
    with suppress(OSError):
        if "bpf" not in (found := lsms.read_text().strip()).split(","):
            raise NotSupportedError(f"this kernel runs no BPF LSM; boot with lsm={found},bpf")
    if not types.exists():
        raise NotSupportedError("this kernel does not describe itself to BPF programs; it needs CONFIG_DEBUG_INFO_BTF")
    if not any(" - bpf " in line for line in os.fsdecode(mounts.read_bytes()).split("\n")):
        raise NotSupportedError(f"no bpf file system is mounted; mount -t bpf bpf {pins.DIRECTORY.parent}")


def majors(devices: Path = _DEVICES) -> set[int]:
    """Return the major numbers of NVIDIA's character devices."""
    found = set()
    for line in devices.read_text().partition("Block devices:")[0].splitlines():
        number, _, name = line.strip().partition(" ")
        if name.startswith("nvidia"):
            found.add(int(number))
    return found


class DeviceFiles:
    """The program in the kernel, through its pinned maps."""

    def __init__(self, directory: Path = pins.DIRECTORY) -> None:
        """Open the pinned maps. Raises OSError, NotSupportedError."""
        home = pins.maps(directory)
        self._majors = libbpf.Map(home / "majors", _U32.size, _U32.size)
        self._cgroups = libbpf.Map(home / "cgroups", _U64.size, _PLACE.size)
        self._trusted = libbpf.Map(home / "trusted", _INT.size, _U32.size)
        self._counters = libbpf.Map(home / "counters", _U32.size, _U64.size)
        self._refusals = libbpf.Map(home / "refusals", _REFUSAL.size, _REFUSED.size)

    def set_pods(self, pods: Iterable[str]) -> None:
        """Set the cgroups that are pods, and the program's other inputs. Raises OSError."""
        self._set_majors(majors())
        wanted = {ident: _POD for path in pods if (ident := cgroup.id_of(path))}
        if ident := cgroup.id_of(cgroup.GUARDIANS):
            wanted[ident] = _GUARDIAN
        there = {_U64.unpack(key)[0] for key in self._cgroups.listed()}
        for ident in there - wanted.keys():
            self._cgroups.drop(_U64.pack(ident))
        for ident in wanted.keys() - there:
            self._cgroups.put(_U64.pack(ident), _PLACE.pack(wanted[ident], 0))

    def _set_majors(self, wanted: set[int]) -> None:
        there = {_U32.unpack(key)[0] for key in self._majors.listed()}
        for major in there - wanted:
            self._majors.drop(_U32.pack(major))
        for major in wanted - there:
            self._majors.put(_U32.pack(major), _U32.pack(1))

    def trust(self, pid: int) -> None:
        """Let a process use pods' files until it ends, from any cgroup. Raises OSError."""
        pidfd = os.pidfd_open(pid)
        try:
            self._trusted.put(_INT.pack(pidfd), _U32.pack(1))
        finally:
            os.close(pidfd)

    def prove(self, node: Path = _NODE) -> None:
        """Check that the program sees a device open: some kernels have the hooks but never call them.

        Raises NotSupportedError.
        """
        before = self._counter(_SEEN)
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
        if self._counter(_SEEN) == before:
            raise NotSupportedError("this kernel took the program and does not run it; is bpf in its lsm= list?")

    def refused(self) -> dict[str, int]:
        """Return the number of refusals by call since the program was loaded."""
        return {call: self._counter(_FIRST_CALL + i) for i, call in enumerate(CALLS)}

    def files(self) -> int:
        """Return the number of files that belong to pods."""
        return sum(_PLACE.unpack(value)[1] for key in self._cgroups.listed() if (value := self._cgroups.get(key)))

    def refusals(self) -> list[Refusal]:
        """List recent refusals."""
        found = []
        for key in self._refusals.listed():
            if (value := self._refusals.get(key)) is not None:
                (ident, pid, counter), (times, name) = _REFUSAL.unpack(key), _REFUSED.unpack(value)
                text = proc.printable(name.split(b"\0")[0])
                found.append(Refusal(pid, text, CALLS[counter - _FIRST_CALL], ident, times))
        return found

    def _counter(self, number: int) -> int:
        value = self._counters.get(_U32.pack(number))
        return int(_U64.unpack(value)[0]) if value else 0

    def close(self) -> None:
        """Close the maps; the program continues."""
        for each in (self._majors, self._cgroups, self._trusted, self._counters, self._refusals):
            each.close()


def load(
    pods: Iterable[str], program: Path | None = None, directory: Path = pins.DIRECTORY, node: Path = _NODE
) -> DeviceFiles:
    """Load the program, tell it the pods' cgroups, and check that it works. Raises OSError, NotSupportedError.

    After an error, a program that was not installed before is removed again.
    """
    check_kernel()
    fresh = pins.install(program or compiled(), directory)
    try:
        found = DeviceFiles(directory)
        found.set_pods(pods)
        found.trust(os.getpid())
        if fresh:
            found.prove(node)
    except (OSError, NotSupportedError):
        if fresh:
            pins.remove(directory)
        raise
    return found

"""The other side for tests: /dev/qgpu by hand, pods as cgroups with processes in them, modules in and out."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import marshal
import multiprocessing
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from qgpu.planes.kmod import uapi

CGROUPS = Path("/sys/fs/cgroup")

BUILD = Path(os.environ.get("QGPU_VM_BUILD", "/nonexistent"))
MS = 1_000_000
N = uapi.NUMBERS
GATED, COPIES = N["QGPU_POD_PLAN_GATED"], N["QGPU_POD_PLAN_COPIES"]
#: What is charged for the address space of a device, which RM makes when it is used.
SPACE = 64 << 10
FIGURES = Path("/run/share/figures.json")
_fork = multiprocessing.get_context("fork")


def note(name: str, value: float) -> None:
    """Note a figure for docs/results."""
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    FIGURES.write_text(json.dumps(figures | {name: value}))


_libc = ctypes.CDLL(None, use_errno=True)
_FINIT_MODULE, _DELETE_MODULE = 313, 176  # x86_64


def _call(number: int, *arguments: int | bytes) -> None:
    if _libc.syscall(number, *arguments):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(arguments))


def insmod(name: str, *options: str) -> None:
    """Load a module; without a process for it, which in an emulator takes longer than the loading."""
    with (BUILD / name).open("rb") as file:
        _call(_FINIT_MODULE, file.fileno(), " ".join(options).encode(), 0)


def rmmod(name: str) -> None:
    """Unload a module. Raises OSError (EWOULDBLOCK) while it is in use."""
    _call(_DELETE_MODULE, name.encode(), os.O_NONBLOCK)


def mount(kind: str, at: Path) -> None:
    """Mount a kernel's file system, where there is one of this kind."""
    _libc.mount(kind.encode(), str(at).encode(), kind.encode(), 0, None)


def loaded(name: str) -> bool:
    return Path("/sys/module", name).exists() and Path("/sys/module", name, "refcnt").exists()


def take_descriptor(pid: int, fd: int) -> int:
    """Get another process's open file, as by a socket."""
    pidfd = _libc.syscall(434, pid, 0)
    taken = int(_libc.syscall(438, pidfd, fd, 0))
    os.close(pidfd)
    assert taken >= 0, os.strerror(ctypes.get_errno())
    return taken


def nodes() -> None:
    """Make the driver's device nodes, as nvidia-modprobe does."""
    for name, minor in (("nvidiactl", 255), ("nvidia0", 0), ("nvidia1", 1)):
        with contextlib.suppress(FileExistsError):
            os.mknod(f"/dev/{name}", 0o020666, os.makedev(195, minor))


def sim() -> dict[str, int]:
    """The simulated driver's own totals."""
    words = Path("/proc/driver/nvidia/sim").read_text().splitlines()[0].split()
    return {words[i]: int(words[i + 1]) for i in range(0, len(words), 2)}


def used() -> int:
    """Bytes of the simulated card that are in use."""
    now = sim()
    return now["total"] - now["free"]


def sim_tsgs() -> list[dict[str, int]]:
    """The simulated card's runlist."""
    rows = []
    for line in Path("/proc/driver/nvidia/sim").read_text().splitlines()[1:]:
        words = line.split()
        row = {"gpu": int(words[1]), "client": int(words[2]), "handle": int(words[3])}
        row |= {words[i]: int(words[i + 1]) for i in range(4, len(words), 2)}
        rows.append(row)
    return rows


def until(condition: Callable[[], Any], seconds: float = 20) -> Any:
    """Wait for a condition that must come; fail if it doesn't."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)
    return value


class Qgpu:
    """An open /dev/qgpu."""

    def __init__(self) -> None:
        self.fd = os.open("/dev/qgpu", os.O_RDWR | os.O_NONBLOCK)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def ioctl(self, call: str, /, **fields: Any) -> Any:
        arg = uapi.ffi.new(uapi.STRUCTS[f"QGPU_IOC_{call}"] + " *", fields)
        fcntl.ioctl(self.fd, uapi.COMMANDS[f"QGPU_IOC_{call}"], uapi.ffi.buffer(arg), True)
        return arg

    def info(self) -> Any:
        return self.ioctl("INFO")

    def pods(self) -> list[Any]:
        found, last = [], 0
        with contextlib.suppress(FileNotFoundError):
            while True:
                found.append(self.ioctl("POD_NEXT", pod=last))
                last = found[-1].pod
        return found

    def tsgs(self, pod: int, gpu: int = 0) -> list[Any]:
        found, last = [], 0
        with contextlib.suppress(FileNotFoundError):
            while True:
                found.append(self.ioctl("TSG_NEXT", pod=pod, gpu=gpu, id=last))
                last = found[-1].id
        return found

    def events(self) -> list[Any]:
        size = uapi.ffi.sizeof("struct qgpu_event")
        try:
            data = os.read(self.fd, size * 512)
        except BlockingIOError:
            return []
        # copies: what a buffer's array is indexed to does not keep the buffer
        return [uapi.ffi.new("struct qgpu_event *", each) for each in uapi.ffi.from_buffer("struct qgpu_event[]", data)]

    def plan(
        self,
        *parts: tuple[Any, ...],
        period_ns: int = 100 * MS,
        lease_ns: int = 60_000 * MS,
        copies: Mapping[int, int] | None = None,
        gate: int = GATED | COPIES,
        online: Collection[int] = (),
        **more: int,
    ) -> None:
        """Install a plan; a part is (pod, timeslice_us) or (pod, timeslice_us, [(start_ns, end_ns, flags), ...]).

        ``copies`` has copy timeslices by pod, ``gate`` the flags of parts with windows, ``online`` the online pods.
        """
        windows: list[dict[str, int]] = []
        pods = []
        for pod, timeslice_us, *rest in parts:
            own = rest[0] if rest else []
            pods.append(
                {
                    "pod": pod,
                    "timeslice_us": timeslice_us,
                    "flags": gate if rest else 0,
                    "first_window": len(windows) if rest else 0,
                    "nr_windows": len(own),
                    "copy_timeslice_us": (copies or {}).get(pod, 0),
                    "pod_class": int(pod in online),
                }
            )
            windows += [{"start_ns": w[0], "end_ns": w[1], "flags": w[2]} for w in own]
        c_pods = uapi.ffi.new("struct qgpu_pod_plan[]", pods)
        c_windows = uapi.ffi.new("struct qgpu_window[]", windows)
        fields = {
            "period_ns": period_ns,
            "lease_ns": lease_ns,
            "nr_pods": len(pods),
            "nr_windows": len(windows),
            "pods": int(uapi.ffi.cast("uintptr_t", c_pods)),
            "windows": int(uapi.ffi.cast("uintptr_t", c_windows)),
            "pod_plan_size": uapi.ffi.sizeof("struct qgpu_pod_plan"),
        }
        self.ioctl("PLAN", **(fields | more))


class Process:
    """A process in a cgroup that does what it is told: ``run(f, *args)`` calls f(state, *args) over there."""

    def __init__(self, cgroup: Path | None) -> None:
        self.pipe, theirs = _fork.Pipe()
        self.process = _fork.Process(target=_serve, args=(cgroup, theirs), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        self.start(function, *args)
        return self.result()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        assert function.__closure__ is None, "the other process has no part in local variables"
        self.pipe.send((marshal.dumps(function.__code__), function.__module__, function.__defaults__, args))

    def result(self) -> Any:
        ok, value = self.pipe.recv()
        if not ok:
            raise value
        return value

    def kill(self, how: int = signal.SIGKILL) -> None:
        if self.process.is_alive():
            os.kill(self.pid, how)
        self.process.join()

    def stop(self) -> None:
        """Let it end by itself."""
        self.pipe.close()
        self.process.join()


def _serve(cgroup: Path | None, pipe: Any) -> None:
    os.closerange(3, pipe.fileno())  # neither the parent's /dev/qgpu nor its files of the driver
    os.closerange(pipe.fileno() + 1, 1024)
    if cgroup:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    state: dict[str, Any] = {}
    while True:
        try:
            code, module, defaults, args = pipe.recv()
        except EOFError:
            return
        try:
            function = types.FunctionType(marshal.loads(code), sys.modules[module].__dict__, None, defaults)
            pipe.send((True, function(state, *args)))
        except Exception as error:  # noqa: BLE001 - handed to the caller
            pipe.send((False, error))


class Pod:
    """A cgroup that is a pod."""

    def __init__(self, qgpu: Qgpu, name: str, memory: int | None = None, **grant: int) -> None:
        self.qgpu, self.name = qgpu, name
        self.cgroup = CGROUPS / name
        self.cgroup.mkdir()
        self.processes: list[Process] = []
        self.id = self.add()
        if memory is not None or grant:
            self.grant(memory=memory or 0, **grant)

    def add(self) -> int:
        """Make the cgroup a pod; its number."""
        fd = os.open(self.cgroup, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return int(self.qgpu.ioctl("POD_ADD", cgroup_fd=fd, name=self.name.encode()).pod)
        finally:
            os.close(fd)

    def grant(self, **fields: int) -> None:
        self.qgpu.ioctl("GRANT_SET", pod=self.id, **fields)

    def process(self) -> Process:
        self.processes.append(Process(self.cgroup))
        return self.processes[-1]

    def usage(self, gpu: int = 0) -> Any:
        return self.qgpu.ioctl("USAGE", pod=self.id, gpu=gpu)

    def held(self) -> int:
        """Bytes it is charged, but for those of devices: one in each client."""
        return int(self.usage().memory) - SPACE * int(self.info().nr_clients)

    def info(self) -> Any:
        return next(pod for pod in self.qgpu.pods() if pod.pod == self.id)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        with contextlib.suppress(OSError):
            self.qgpu.ioctl("POD_REMOVE", pod=self.id)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            try:
                for folder in (*(path for path in self.cgroup.rglob("*") if path.is_dir()), self.cgroup):
                    folder.rmdir()
                return
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                time.sleep(0.01)


def kernel_log() -> str:
    """What the kernel has said so far; the suite asks for nothing older."""
    text = ctypes.create_string_buffer(_libc.klogctl(10, None, 0))
    _libc.klogctl(3, text, len(text))
    return text.value.decode(errors="replace")


KPROBES = Path("/sys/kernel/debug/kprobes/enabled")
FTRACE = Path("/proc/sys/kernel/ftrace_enabled")


@contextlib.contextmanager
def switched_off(switch: Path) -> Iterator[None]:
    """One of the kernel's switches of probes at 0, for as long as this lasts."""
    switch.write_text("0")
    try:
        yield
    finally:
        switch.write_text("1")


@contextlib.contextmanager
def rival(*options: str) -> Iterator[None]:
    """Another module that changes the driver (simnv/rival.c), for as long as this lasts."""
    insmod("rival.ko", *options)
    try:
        yield
    finally:
        rmmod("rival")


@contextlib.contextmanager
def driver(*options: str) -> Iterator[None]:
    """The simulated driver, for as long as this lasts."""
    insmod("nvidia.ko", *options)
    nodes()
    try:
        yield
    finally:
        rmmod("nvidia")

"""What a call to RM costs a pod on the user-space plane, by part, and how many a starting CUDA program makes.

    python bench/call_cost.py                 # on a GPU, as root, without another daemon: qgpu-load starts in a pod
    python bench/call_cost.py --plane sim     # the recorded calls of a small CUDA program, with RM in a table

A guardian runs in this process, and the pod's calls pass through it as always. Half of the starts are timed as a whole,
half by part. Parts exclude each other; ``rm`` is RM's own time for the pod's calls, ``asked`` its time for the
guardian's own calls. Only the replayed program measures the time between a call and its receipt.
"""

from __future__ import annotations

import ctypes
import json
import lzma
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import Figure, median
from pods import LOAD, BenchError
from script import Script, run

from qgpu.guardian import server
from qgpu.guardian.accounting.object_table import ObjectTable
from qgpu.guardian.failover.journal import Journal
from qgpu.guardian.gpu.gpu_ops import GpuOps, Moved
from qgpu.guardian.proxy import alloc_checks, rm_calls
from qgpu.guardian.proxy.dispatcher import Dispatcher
from qgpu.guardian.proxy.handler_context import HandlerContext
from qgpu.guardian.proxy.passthrough import Passthrough
from qgpu.guardian.proxy.seccomp_filter import NUMBER_AND_SIZE, install
from qgpu.guardian.rules import escapes
from qgpu.ipc import wire
from qgpu.linux import cgroup
from qgpu.linux.open_file_set import FileSets
from qgpu.linux.seccomp_notify import Listener, ProcessMemory
from qgpu.nvidia import abi, uvm
from tests.guardian.fake_rm import FakeRm
from tests.traces import TRACES, allocated

_TRACE = next(trace for trace in TRACES if trace.name.endswith("-min.jsonl.xz"))
_ROUNDS = 10
#: Device files that replace RM's and UVM's for a replayed program: their ioctls refuse everything.
_RM, _UVM = "/dev/random", "/dev/ptmx"
#: The one that stands for RM's control file.
_CONTROL = "/dev/kmsg"
#: The assumed distance in bytes from a call's structure to its parameters, as on a library's stack.
_BEHIND = 160
#: The parts of a call: a class or object, the methods whose time counts as the part.
_PARTS = (
    ("receive", Listener, ("receive",)),
    ("process", Dispatcher, ("_process",)),
    ("descriptor", HandlerContext, ("take_fd",)),
    ("memory", ProcessMemory, ("read_some", "write")),
    ("journal", Journal, ("append", "answer")),
    ("frozen", Passthrough, ("continue_in_kernel",)),
    ("answer", Listener, ("_send",)),
    ("checks", Dispatcher, ("serve",)),
)
_ASKED = (
    "exists",
    "object_info",
    "find_object",
    "private_bytes",
    "make_preemptible",
    "size_by_file",
    "instance_of",
    "size",
)


class Parts:
    """How long each part took, in ns, without the parts inside it."""

    def __init__(self) -> None:
        self.ns: Counter[str] = Counter()
        self.calls = 0
        self._thread = threading.local()

    def timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method to time it. For answers only CPU time counts: an answer lets the pod run, often on our CPU."""
        clock = time.thread_time_ns if part == "answer" else time.perf_counter_ns

        def wrapped(*arguments: Any, **more: Any) -> Any:
            open_parts: list[int] = self._thread.__dict__.setdefault("open", [])
            open_parts.append(0)
            began, ours = time.perf_counter_ns(), clock()
            try:
                return method(*arguments, **more)
            finally:
                took, ours = time.perf_counter_ns() - began, clock() - ours
                self.ns[part] += ours - open_parts.pop()
                if open_parts:
                    open_parts[-1] += took
                self.calls += part == "checks"

        return wrapped


@contextmanager
def guardian(parts: Parts | None, rm: FakeRm | None) -> Iterator[tuple[Path, int]]:
    """Run a guardian in a thread; yield its socket and its main loop's CPU clock. ``rm`` stands for the driver."""
    folder = Path(tempfile.mkdtemp(prefix="qgpu-calls-"))
    with ExitStack() as changes:
        changes.callback(shutil.rmtree, folder)
        change = lambda *what: changes.enter_context(patch.object(*what))  # noqa: E731
        change(cgroup, "create", _always(None))
        change(cgroup, "ensure_in", _always(None))
        if rm is not None:
            _replace_driver(change, rm)
        if parts is not None:
            for part, where, methods in _PARTS:
                for method in methods:
                    change(where, method, parts.timed(part, getattr(where, method)))
            for method in _ASKED:
                where = GpuOps if rm is None else rm
                change(where, method, parts.timed("asked", getattr(where, method)))
        made = server.Guardian(folder, Journal(), FileSets(), ObjectTable(), {})
        if rm is not None:
            made.shared.major, made.shared.uvm_major = (os.major(os.stat(file).st_rdev) for file in (_RM, _UVM))
            made.shared.perform = made.shared.uvm_files.perform = _in_kernel(rm.perform)
        if parts is not None:
            made.shared.perform = parts.timed("rm", made.shared.perform)
        over = threading.Event()
        change(made, "_is_unused", over.is_set)
        loop = threading.Thread(target=made.run, daemon=True)
        loop.start()
        try:
            yield folder / "guardian.sock", time.pthread_getcpuclockid(loop.ident or 0)
        finally:
            over.set()
            made._wake()
            loop.join()


def _replace_driver(change: Callable[..., object], rm: FakeRm) -> None:
    card = SimpleNamespace(
        index=0, instance=0, mig=None, minor=0, pci="0000:01:00.0", uuid=lambda: bytes(16), grces=frozenset
    )
    card.time_ns, card.set_channels = time.monotonic_ns, _always(None)
    rm.__dict__.update(gate=_always(Moved()), open_gates=_always(None), timeslice=_always(True))
    change(server, "installed", lambda: "580.1")
    change(server, "RmClient", _always(None))
    change(server, "open_devices", _always([card]))
    change(server, "CtxswLog", _always(SimpleNamespace(dropped=0, read=list)))
    change(server, "GpuOps", _always(rm))
    change(abi, "NV_CONTROL_MINOR", os.minor(os.stat(_CONTROL).st_rdev))
    change(alloc_checks, "_has_open", _always(True))  # the replayed program opens a file that stands for the card's


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _in_kernel(perform: Callable[[int, int, Any], int]) -> Callable[[int, int, Any], int]:
    """Make a system call too, as a driver is behind one."""

    def both(fd: int, request: int, argument: Any) -> int:
        abi.perform(fd, request, argument)
        return perform(fd, request, argument)

    return both


def there(trace: Path) -> dict[Any, Any]:
    """Return the objects that RM has from the start: the recorded clients, and devices, which the kernel makes."""
    made = allocated(trace)
    return {key: made[key] for key in made if key[0] == key[1] or made[key][0] == abi.NV01_DEVICE_0}


def start(command: Sequence[str], parts: Parts | None, rm: FakeRm | None) -> tuple[bytes, float]:
    """Start a program in a pod; return what it printed, and the CPU time of the main loop meanwhile, in s."""
    with guardian(parts, rm) as (path, loop):
        ours, theirs = socket.socketpair()
        child = [sys.executable, __file__, "--pod", str(theirs.fileno()), *command]
        with subprocess.Popen(child, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE) as process:
            theirs.close()
            _, (listener,), _, _ = socket.recv_fds(ours, 16, 1)
            daemon = wire.connect(str(path), 5.0)
            for op, fds, more in (
                ("admit", [], {"cgroup": None, "grants": {"0": {"class": "offline", "cores": None, "memory": None}}}),
                ("attach", [listener], {"pid": process.pid}),
            ):
                daemon.send({"op": op, "name": "web", **more}, fds)
                answer, _ = daemon.receive()
                if not answer["ok"]:
                    raise BenchError(f"guardian: {op}: {answer}")
            os.close(listener)
            before_s = time.clock_gettime(loop)
            ours.sendall(b"go")
            said, _ = process.communicate(timeout=60)
            loop_s = time.clock_gettime(loop) - before_s
            if process.returncode:
                raise BenchError(f"pod: exit code {process.returncode}")
            daemon.close()
    return said, loop_s


def calls(script: Script) -> list[Figure]:
    """Start a program in a pod again and again, in turn as a whole and by part."""
    replayed = script.bench.simulated
    seen: list[list[int]] = []
    starts: list[float] = []
    loops: list[float] = []
    by_part: list[Parts] = []
    for round_ in range(2 * round(_ROUNDS * script.scale)):
        parts = Parts() if round_ % 2 else None
        rm = FakeRm(there(_TRACE)) if replayed else None
        command = (
            ["--replay", str(_TRACE)] if replayed else [*LOAD, *script.bench.load_options("1ms", "--duration", "50ms")]
        )
        said, loop_s = start(command, parts, rm)
        if parts is not None:
            by_part.append(parts)
        elif replayed:
            seen.append(json.loads(said)["took_ns"])
            loops.append(loop_s)
        else:
            starts.append(json.loads(said)["startup_s"])
            loops.append(loop_s)
    found = [median("calls", [parts.calls for parts in by_part], note="of one start that stop at the guardian")]
    for part in (*(name for name, _, _ in _PARTS), "rm", "asked"):
        us = [parts.ns[part] / parts.calls / 1e3 for parts in by_part]
        found.append(
            median(f"call_us_{part}", us, note="mean over a start's calls; lower quartile of starts", pick=_quartile)
        )
    ours = [sum(ns for part, ns in parts.ns.items() if part != "rm") / parts.calls / 1e3 for parts in by_part]
    found.append(median("call_us_guardian", ours, note="all parts but rm, with the clocks' own cost", pick=_quartile))
    us = [1e6 * loop_s / parts.calls for loop_s, parts in zip(loops, by_part, strict=True)]
    found.append(median("call_us_main_loop", us, note="CPU time of the main loop meanwhile", pick=_quartile))
    if starts:
        found.append(median("start_s", starts, note="exec to first kernel done, in the pod"))
    if seen:
        whole = [sum(each) / len(each) / 1e3 for each in seen]
        found.append(median("call_us_seen", whole, note="by the pod, with RM's part", pick=_quartile))
        least = sum(map(min, zip(*seen, strict=True))) / len(seen[0]) / 1e3
        found.append(Figure("call_us_seen_least", least, note="each call in the start in which it was quickest"))
    return found


def _quartile(values: Sequence[float]) -> float:
    """Return the lower quartile, because other programs on the machine only add time."""
    return statistics.quantiles(values, n=4)[0] if len(values) > 1 else values[0]


def pod(sock: socket.socket, command: Sequence[str]) -> None:
    """Be the pod: put the filter on this process, hand over its listener, and start the program."""
    replay = _prepared(Path(command[1])) if command[0] == "--replay" else None
    socket.send_fds(sock, [b"listener"], [install()])
    sock.recv(2)
    if replay is None:
        os.execvp(command[0], [*command, "--started-at", f"{time.time():.6f}"])  # noqa: S606
    json.dump(replay(), sys.stdout)


def _prepared(trace: Path) -> Callable[[], dict[str, list[Any]]]:
    """Prepare recorded calls; the function that is returned makes them, and returns what came of them.

    ``took_ns`` has the time in ns of each call that goes to the guardian. ``failed`` has, for each RM call with another
    answer than NV_OK, its number, its place in the record and its status.
    """
    files: dict[int, int] = {}
    made: list[tuple[int, Any, Any, bool, int | None]] = []
    with lzma.open(trace, "rt") as lines:
        rows = [row for row in map(json.loads, lines) if row["op"] == "ioctl"]
    for row in rows:
        to_uvm = row["dev"] == "/dev/nvidia-uvm"
        if row["fd"] not in files:
            stands_for = {"/dev/nvidia-uvm": _UVM, "/dev/nvidiactl": _CONTROL}.get(row["dev"], _RM)
            files[row["fd"]] = os.open(stands_for, os.O_RDWR)
        argument, params = bytes.fromhex(row["in"]), b"" if to_uvm else bytes.fromhex(row.get("pin", ""))
        size = -(-len(argument) // 8) * 8 + _BEHIND
        block = ctypes.create_string_buffer(argument.ljust(size, b"\0") + params, size + len(params) + 1024)
        if params:
            ctypes.c_uint64.from_buffer(block, 16).value = ctypes.addressof(block) + size
        if not to_uvm and row["req"] & 0xFF == abi.NV_ESC_REGISTER_FD:
            control = ctypes.c_int.from_buffer(block)
            control.value = files.setdefault(control.value, os.open(_CONTROL, os.O_RDWR))
        number_and_size = row["req"] & NUMBER_AND_SIZE
        stops = row["req"] in uvm.WATCHED or (number_and_size & 0xFF, number_and_size >> 16) in escapes.WATCHED
        call = None if to_uvm else rm_calls.parse(row["req"] & 0xFF, argument)
        status_at = None if call is None else call.status_at
        made.append((files[row["fd"]], ctypes.c_ulong(row["req"]), block, stops, status_at))
    ioctl = ctypes.CDLL(None).ioctl

    def replay() -> dict[str, list[Any]]:
        took, failed = [], []
        for place, (fd, request, argument, stops, status_at) in enumerate(made):
            began = time.perf_counter_ns()
            ioctl(fd, request, argument)
            if stops:
                took.append(time.perf_counter_ns() - began)
            if status_at is not None and (status := int.from_bytes(argument.raw[status_at : status_at + 4], "little")):
                failed.append([request.value & 0xFF, place, status])
        return {"took_ns": took, "failed": failed}

    return replay


if __name__ == "__main__":
    if sys.argv[1:2] == ["--pod"]:
        pod(socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
    else:
        sys.exit(run("calls", {"calls": calls}, __doc__ or ""))

"""The kinds of load: a flood, one persistent kernel, a closed loop of batches, or batches by the clock.

This module decides when kernels are launched and when the host waits for them. Each function runs until its record is
complete, and reports to it what finished when.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from typing import Any

from qgpu.load.kernel import Kernel
from qgpu.load.record import Record
from qgpu.load.workload import Workload
from qgpu.model import NS_PER_US

#: A flood keeps this much work queued, records an event this often, and checks this often what has finished. So the
#: card never waits for the host, counts are recent, and the host sleeps most of the time.
_QUEUE_US = 32_000
_MARK_US = 1_000
_POLL_S = 0.001
#: With more than about a thousand launches queued, the driver blocks in the launch, where signals are not handled.
_MOST_QUEUED = 512
_LEAST_MARKS = 2


def run(kernel: Kernel, record: Record) -> None:
    """Run ``record.work``, with kernels of the length that ``kernel`` is set to, until the record is complete."""
    work = record.work
    # A garbage collection takes longer than a short kernel and would show as latency.
    gc.collect()
    gc.freeze()
    gc.disable()
    if work.persistent:
        _persistent(kernel, record)
    elif work.batch == 0:
        _flood(kernel, record)
    elif work.period_us:
        _periodic(kernel, record)
    else:
        _closed(kernel, record)
    # MPS treats a client that ends with work queued as a failure of all clients.
    kernel.synchronize()


def _flood(kernel: Kernel, record: Record) -> None:
    """Keep the queue full, and count kernels by events behind every few of them."""
    device, cuda = kernel.device, kernel.device.cuda
    batch = min(max(1, round(_MARK_US / record.work.kernel_us)), _MOST_QUEUED // 4)
    graph = kernel.graph(batch) if record.work.graph else None
    most = _MOST_QUEUED // (1 if graph else batch)  # a graph is one launch
    depth = max(_LEAST_MARKS, min(round(_QUEUE_US / (batch * record.work.kernel_us)), most))
    spare = deque(device.event() for _ in range(depth))
    marks: deque[Any] = deque()
    turn = looked_ns = 0
    while record.going(now_ns := time.perf_counter_ns()):
        while marks and device.event_done(marks[0]):
            record.done(now_ns, batch)
            spare.append(marks.popleft())
        if turn and len(spare) == depth:
            record.ran_dry(time.perf_counter_ns() - looked_ns)
        looked_ns = now_ns
        while spare:
            stream = kernel.streams[turn % len(kernel.streams)]
            turn += 1
            _launch(kernel, stream, batch, graph)
            mark = spare.popleft()
            cuda.call("cuEventRecord", mark, stream)
            marks.append(mark)
        time.sleep(_POLL_S)


def _persistent(kernel: Kernel, record: Record) -> None:
    """Run one kernel all the time, and count its rounds."""
    running, counted = kernel.start_persistent(host_reads=record.work.host_reads), 0
    try:
        while record.going(now_ns := time.perf_counter_ns()):
            rounds = running.rounds
            record.done(now_ns, rounds - counted)
            counted = rounds
            time.sleep(_POLL_S)
    finally:
        running.stop()


def _closed(kernel: Kernel, record: Record) -> None:
    """Launch a batch, wait for it, pause, and repeat."""
    batch = _Batch(kernel, record.work)
    gap_ns = round(record.work.gap_us * NS_PER_US)
    while record.going(launched_ns := time.perf_counter_ns()):
        done_ns = batch.run()
        record.done(done_ns, record.work.batch, [(done_ns - launched_ns) / NS_PER_US])
        if gap_ns:
            record.stop.wait_until(done_ns + gap_ns)


def _periodic(kernel: Kernel, record: Record) -> None:
    """Launch a batch each period on an absolute schedule; skip periods that were missed completely."""
    batch = _Batch(kernel, record.work)
    period_ns = round(record.work.period_us * NS_PER_US)
    due_ns = time.perf_counter_ns() + period_ns
    while record.stop.wait_until(due_ns) and record.going(launched_ns := time.perf_counter_ns()):
        done_ns = batch.run()
        record.done(done_ns, record.work.batch, [(done_ns - launched_ns) / NS_PER_US])
        due_ns += period_ns * max(1, -(-(done_ns - due_ns) // period_ns))


class _Batch:
    """A batch of kernels over the streams, or as one graph on the first."""

    def __init__(self, kernel: Kernel, work: Workload) -> None:
        self._kernel = kernel
        self._graph = kernel.graph(work.batch) if work.graph else None
        self._launch_ns = round(work.launch_us * NS_PER_US)
        streams = kernel.streams
        self._parts = [
            (stream, work.batch // len(streams) + (index < work.batch % len(streams)))
            for index, stream in enumerate(streams)
        ]

    def run(self) -> int:
        """Launch the batch, wait until it has finished, and return the time of that in ns."""
        if self._graph is not None:
            _launch(self._kernel, self._kernel.streams[0], 0, self._graph)
        elif self._launch_ns:
            self._launch_one_by_one()
        else:
            for stream, count in self._parts:
                self._kernel.launch(stream, count)
        self._kernel.synchronize()
        return time.perf_counter_ns()

    def _launch_one_by_one(self) -> None:
        """Spend a framework's host time before each launch, while the card runs the kernels that are queued."""
        due_ns = time.perf_counter_ns()
        for stream, count in self._parts:
            for _ in range(count):
                self._kernel.launch(stream, 1)
                due_ns += self._launch_ns
                while time.perf_counter_ns() < due_ns:
                    pass


def _launch(kernel: Kernel, stream: Any, count: int, graph: Any) -> None:
    if graph is None:
        kernel.launch(stream, count)
    else:
        kernel.device.cuda.call("cuGraphLaunch", graph, stream)

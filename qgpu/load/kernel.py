"""The kernels that load a card, and their calibration to a given length.

A kernel is a loop of fused multiply-adds in as many threads as the card runs at once. So it fills the card, and its
length is proportional to its iterations. A persistent kernel repeats that loop in rounds until the host stops it. The
kernels are PTX, which the driver compiles for the card. run.py decides when they are launched.
"""

from __future__ import annotations

import statistics
from typing import Any

from qgpu.load.cuda import Device
from qgpu.load.ptx import MAILBOX_WORDS, PTX, ROUNDS, STOP

_BLOCK = 256
_MOST_ITERATIONS = 2**32 - 1
_PROBE_ITERATIONS = 1000
#: An idle card needs about this long under load to raise its clocks.
_RAMP_US = 60_000
_STRETCH_US = 8_000
_REPEATS = 5
_MOST_QUEUED = 200


class Persistent:
    """A running persistent kernel, and its mailbox in host memory."""

    def __init__(self, kernel: Kernel, mailbox: Any) -> None:
        self._kernel = kernel
        self._mailbox = mailbox

    @property
    def rounds(self) -> int:
        """How many rounds it has done."""
        return int(self._mailbox[ROUNDS])

    def stop(self) -> None:
        """Stop it after the current round, and wait for that."""
        self._mailbox[STOP] = 1
        self._kernel.synchronize()


class Kernel:
    """The kernel, loaded on a device, and the streams it is launched on."""

    def __init__(self, device: Device, streams: int) -> None:
        cuda = device.cuda
        image = cuda.ffi.new("char[]", PTX.encode())
        module = cuda.make("cuModuleLoadData", "CUmodule", image)
        self._function = cuda.make("cuModuleGetFunction", "CUfunction", module, b"qgpu_fma")
        self._persistent = cuda.make("cuModuleGetFunction", "CUfunction", module, b"qgpu_persistent")
        self._sink = cuda.ffi.new("CUdeviceptr *", cuda.make("cuMemAlloc_v2", "CUdeviceptr", 4))
        self._iterations = cuda.ffi.new("unsigned int *", 1)
        self._parameters = cuda.ffi.new("void *[]", [self._sink, self._iterations])
        self._blocks = max(1, device.threads // _BLOCK)
        self.device = device
        self.streams = [device.stream() for _ in range(streams)]
        self._events = (device.event(), device.event())

    @property
    def iterations(self) -> int:
        """How often each thread repeats the loop: the length of kernels launched from now on."""
        return int(self._iterations[0])

    @iterations.setter
    def iterations(self, value: int) -> None:
        self._iterations[0] = value

    def launch(self, stream: Any, count: int = 1) -> None:
        """Launch ``count`` kernels on ``stream``."""
        cuda = self.device.cuda
        launch, null = cuda.lib.cuLaunchKernel, cuda.ffi.NULL
        function, blocks, parameters = self._function, self._blocks, self._parameters
        for _ in range(count):
            result = launch(function, blocks, 1, 1, _BLOCK, 1, 1, 0, stream, parameters, null)
            if result:
                cuda.check("cuLaunchKernel", result)

    def start_persistent(self, *, host_reads: bool = False) -> Persistent:
        """Launch a kernel that runs until it is stopped. One round is as long as an ordinary kernel.

        With ``host_reads`` every block reads host memory after each round, not only the first block.
        """
        cuda = self.device.cuda
        memory, address = self.device.shared_memory(MAILBOX_WORDS * 4)
        mailbox = cuda.ffi.cast("volatile uint32_t *", memory)
        mailbox[STOP] = mailbox[ROUNDS] = 0
        there = cuda.ffi.new("CUdeviceptr *", address)
        every = cuda.ffi.new("unsigned int *", host_reads)
        parameters = cuda.ffi.new("void *[]", [self._sink, self._iterations, there, every])
        stream, null = self.streams[0], cuda.ffi.NULL
        cuda.call("cuLaunchKernel", self._persistent, self._blocks, 1, 1, _BLOCK, 1, 1, 0, stream, parameters, null)
        return Persistent(self, mailbox)

    def graph(self, count: int) -> Any:
        """Return an executable graph of ``count`` kernels, one after the other."""
        stream = self.streams[0]
        return self.device.graph(stream, lambda: self.launch(stream, count))

    def synchronize(self) -> None:
        """Wait until everything launched has finished."""
        for stream in self.streams:
            self.device.cuda.call("cuStreamSynchronize", stream)

    def calibrate(self, kernel_us: float) -> float:
        """Set the iterations for kernels of ``kernel_us``; return how long one of several in a row then takes, in µs.

        Takes about 0.2 s. Other work on the card falsifies it.
        """
        each_us = self._measure_us(_PROBE_ITERATIONS) / _PROBE_ITERATIONS
        for stretch_us in (_RAMP_US / 2, _RAMP_US / 2):
            ramp = _bounded(stretch_us / each_us)
            each_us = self._measure_us(ramp) / ramp
        stretch = _bounded(_STRETCH_US / each_us)
        each_us = statistics.median(self._measure_us(stretch) for _ in range(_REPEATS)) / stretch
        self.iterations = iterations = _bounded(kernel_us / each_us)
        count = min(max(1, int(_STRETCH_US / kernel_us)), _MOST_QUEUED)
        repeats = _REPEATS if kernel_us < _STRETCH_US else 1
        return statistics.median(self._measure_us(iterations, count) for _ in range(repeats)) / count

    def _measure_us(self, iterations: int, count: int = 1) -> float:
        """Return how long the GPU takes for ``count`` kernels in a row, in µs."""
        self.iterations = iterations
        stream = self.streams[0]
        start, end = self._events
        record = self.device.cuda.call
        record("cuEventRecord", start, stream)
        self.launch(stream, count)
        record("cuEventRecord", end, stream)
        self.synchronize()
        return max(self.device.elapsed_us(start, end), 1e-3)


def _bounded(iterations: float) -> int:
    return min(max(1, round(iterations)), _MOST_ITERATIONS)

"""The kernels that load a card, and how many iterations make one of a given length.

A kernel is a loop of fused multiply-adds in as many threads as the card holds at once, so that it fills
the card and its length is proportional to its iterations. A persistent one goes through that loop round after
round until the host says stop. They are PTX, which the driver compiles for the card at hand. When kernels are
launched is run.py's matter.
"""

from __future__ import annotations

import statistics
from typing import Any

from qgpu.load.cuda import Device

#: One round of work: ``%f1`` stays positive, which the compiler cannot know, so ``sink`` is never written.
_LOOP = (
    """
    ld.param.u32 %r1, [iterations];
LOOP:
"""
    + "    fma.rn.f32 %f1, %f1, %f2, %f3;\n" * 8
    + """
    sub.u32 %r1, %r1, 1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra LOOP;
"""
)
_BEGIN = """
{
    .reg .pred %p<5>;
    .reg .b32 %r<6>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<5>;

    ld.param.u64 %rd1, [sink];
    mov.u32 %r2, %tid.x;
    cvt.rn.f32.u32 %f1, %r2;
    mov.f32 %f2, 0f3F7FBE77;
    mov.f32 %f3, 0f3A83126F;
"""
_END = """
    setp.lt.f32 %p2, %f1, 0f00000000;
    @!%p2 bra END;
    cvta.to.global.u64 %rd2, %rd1;
    st.global.f32 [%rd2], %f1;
END:
    ret;
}
"""
#: After each round the first thread of every block looks for ``stop`` and tells its block; that of the first block
#: counts. Host memory is read once a block and round, so that looking costs nothing beside the round.
_AGAIN = """
    setp.ne.u32 %p3, %r2, 0;
    @%p3 bra TOLD;
    ld.volatile.global.u32 %r3, [%rd3];
    st.shared.u32 [told], %r3;
    mov.u32 %r5, %ctaid.x;
    setp.ne.u32 %p4, %r5, 0;
    @%p4 bra TOLD;
    add.u32 %r4, %r4, 1;
    st.volatile.global.u32 [%rd3+{rounds}], %r4;
TOLD:
    bar.sync 0;
    ld.shared.u32 %r3, [told];
    bar.sync 0;
    setp.eq.u32 %p3, %r3, 0;
    @%p3 bra ROUND;
"""
#: Where in the mailbox of a persistent kernel, in 32-bit words: ``stop`` for it to read, and the rounds it has done.
_STOP, _ROUNDS, _MAILBOX_WORDS = 0, 32, 64

PTX = (
    """
.version 7.0
.target sm_70
.address_size 64

.visible .entry qgpu_fma(.param .u64 sink, .param .u32 iterations)
"""
    + _BEGIN
    + _LOOP
    + _END
    + """
.visible .entry qgpu_persistent(.param .u64 sink, .param .u32 iterations, .param .u64 mailbox)
"""
    + _BEGIN
    + """
    .shared .b32 told;
    ld.param.u64 %rd4, [mailbox];
    cvta.to.global.u64 %rd3, %rd4;
    mov.u32 %r4, 0;
ROUND:
"""
    + _LOOP
    + _AGAIN.format(rounds=_ROUNDS * 4)
    + _END
)

_BLOCK = 256
_MOST_ITERATIONS = 2**32 - 1
_PROBE_ITERATIONS = 1000
#: A card that idled needs about this long at work before its clocks are up.
_RAMP_US = 60_000
_STRETCH_US = 8_000
_REPEATS = 5
_MOST_QUEUED = 200


class Persistent:
    """A persistent kernel that runs, and the mailbox in host memory between it and us."""

    def __init__(self, kernel: Kernel, mailbox: Any) -> None:
        self._kernel = kernel
        self._mailbox = mailbox

    @property
    def rounds(self) -> int:
        """How often it has gone through its loop."""
        return int(self._mailbox[_ROUNDS])

    def stop(self) -> None:
        """Tell it to stop after its round, and wait until it has."""
        self._mailbox[_STOP] = 1
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
        """How often each thread goes round the loop: the length of kernels launched from now on."""
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

    def start_persistent(self) -> Persistent:
        """Launch a kernel that runs until it is told to stop, a round of it as long as an ordinary kernel."""
        cuda = self.device.cuda
        memory, address = self.device.shared_memory(_MAILBOX_WORDS * 4)
        mailbox = cuda.ffi.cast("volatile uint32_t *", memory)
        mailbox[_STOP] = mailbox[_ROUNDS] = 0
        there = cuda.ffi.new("CUdeviceptr *", address)
        parameters = cuda.ffi.new("void *[]", [self._sink, self._iterations, there])
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
        """Set the iterations that make a kernel last ``kernel_us``; return how long each then takes in a row, in µs.

        Meant for a card that nobody else uses; takes about 0.2 s.
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
        """Return how long the GPU takes for ``count`` kernels in a row."""
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

"""The kernel that loads a card, and how many iterations make one of a given length.

The kernel is a loop of fused multiply-adds in as many threads as the card holds at once, so that it fills
the card and its length is proportional to its iterations. It is PTX, which the driver compiles for the card
at hand. When kernels are launched is run.py's matter.
"""

from __future__ import annotations

import statistics
from typing import Any

from qgpu.load.cuda import Device

#: ``sink`` is never written: the value stays positive, which the compiler cannot know.
PTX = """
.version 7.0
.target sm_70
.address_size 64

.visible .entry qgpu_fma(.param .u64 sink, .param .u32 iterations)
{
    .reg .pred %p<3>;
    .reg .b32 %r<3>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<3>;

    ld.param.u64 %rd1, [sink];
    ld.param.u32 %r1, [iterations];
    mov.u32 %r2, %tid.x;
    cvt.rn.f32.u32 %f1, %r2;
    mov.f32 %f2, 0f3F7FBE77;
    mov.f32 %f3, 0f3A83126F;
LOOP:
    fma.rn.f32 %f1, %f1, %f2, %f3;
    fma.rn.f32 %f1, %f1, %f2, %f3;
    fma.rn.f32 %f1, %f1, %f2, %f3;
    fma.rn.f32 %f1, %f1, %f2, %f3;
    fma.rn.f32 %f1, %f1, %f2, %f3;
    fma.rn.f32 %f1, %f1, %f2, %f3;
    fma.rn.f32 %f1, %f1, %f2, %f3;
    fma.rn.f32 %f1, %f1, %f2, %f3;
    sub.u32 %r1, %r1, 1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra LOOP;
    setp.lt.f32 %p2, %f1, 0f00000000;
    @!%p2 bra END;
    cvta.to.global.u64 %rd2, %rd1;
    st.global.f32 [%rd2], %f1;
END:
    ret;
}
"""

_BLOCK = 256
_MOST_ITERATIONS = 2**32 - 1
_PROBE_ITERATIONS = 1000
#: A card that idled needs about this long at work before its clocks are up.
_RAMP_US = 60_000
_STRETCH_US = 8_000
_REPEATS = 5
_MOST_QUEUED = 200


class Kernel:
    """The kernel, loaded on a device, and the streams it is launched on."""

    def __init__(self, device: Device, streams: int) -> None:
        cuda = device.cuda
        image = cuda.ffi.new("char[]", PTX.encode())
        module = cuda.make("cuModuleLoadData", "CUmodule", image)
        self._function = cuda.make("cuModuleGetFunction", "CUfunction", module, b"qgpu_fma")
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

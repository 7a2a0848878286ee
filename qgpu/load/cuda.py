"""The part of the CUDA driver API that the load generator needs, called through cffi without a compiler.

It finds the library and turns failures into errors; kernel.py launches the work. The declarations follow NVIDIA's
cuda.h; names with ``_v2`` are the symbols that the header maps the plain names to. The environment variable
``QGPU_LIBCUDA`` names a library to load instead of the driver's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import IntEnum
from functools import cached_property
from typing import Any

from cffi import FFI

from qgpu.errors import NoGpuError, QgpuError

_CDEF = """
typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;

CUresult cuGetErrorName(CUresult error, const char **name);
CUresult cuInit(unsigned int flags);
CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuDeviceGetName(char *name, int len, CUdevice device);
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device);
CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size);
CUresult cuMemHostAlloc(void **address, size_t size, unsigned int flags);
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device_address, void *address, unsigned int flags);
CUresult cuStreamCreate(CUstream *stream, unsigned int flags);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuEventCreate(CUevent *event, unsigned int flags);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventQuery(CUevent event);
CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end);
CUresult cuLaunchKernel(CUfunction function,
                        unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z,
                        unsigned int shared_bytes, CUstream stream, void **parameters, void **extra);
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *executable, CUgraph graph, unsigned long long flags);
CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream);
"""

#: Stub library, no device, no such device, library and driver differ (cuda.h, enum cudaError_enum).
_NO_GPU = (34, 100, 101, 803, 804)
_NOT_READY = 600
_MULTIPROCESSOR_COUNT = 16
_MAX_THREADS_PER_MULTIPROCESSOR = 39
_STREAM_NON_BLOCKING = 0x1
_CAPTURE_THREAD_LOCAL = 1
_HOST_ALLOC_DEVICE_MAP = 0x2


class CudaError(QgpuError):
    """A CUDA call failed. The message is the call and CUDA's name of the error."""


class Sync(IntEnum):
    """How a synchronising call waits (CUctx_flags)."""

    SPIN = 0x1
    YIELD = 0x2
    BLOCK = 0x4


class Cuda:
    """The loaded library. Methods raise CudaError, or NoGpuError if there is no usable GPU."""

    def __init__(self) -> None:
        self.ffi = FFI()
        self.ffi.cdef(_CDEF)
        name = os.environ.get("QGPU_LIBCUDA", "libcuda.so.1")
        try:
            self.lib: Any = self.ffi.dlopen(name)
        except OSError as error:
            raise NoGpuError(
                f"no CUDA driver: cannot load {name}; is the NVIDIA driver installed? On a simulated GPU "
                "start it with: qgpuctl run -- qgpu-load"
            ) from error
        self.call("cuInit", 0)

    def call(self, name: str, *args: Any) -> None:
        """Call ``name`` and raise if it does not return CUDA_SUCCESS."""
        self.check(name, getattr(self.lib, name)(*args))

    def check(self, name: str, result: int) -> None:
        """Raise unless ``result``, what ``name`` returned, is CUDA_SUCCESS."""
        if result == 0:
            return
        message = f"{name}: {self._error_name(result)}"
        if result in _NO_GPU:
            raise NoGpuError(f"{message}; is there a GPU, and is the driver loaded?")
        raise CudaError(message)

    def make(self, name: str, ctype: str, *args: Any) -> Any:
        """Call ``name`` with a pointer to a new ``ctype`` before ``args``, and return what it stored."""
        out = self.ffi.new(f"{ctype} *")
        self.call(name, out, *args)
        return out[0]

    def _error_name(self, result: int) -> str:
        out = self.ffi.new("const char **")
        if self.lib.cuGetErrorName(result, out) != 0 or out[0] == self.ffi.NULL:
            return f"CUDA error {result}"
        text = self.ffi.string(out[0])
        assert isinstance(text, bytes)
        return text.decode()


class Device:
    """One CUDA device with its primary context made current in this thread."""

    def __init__(self, cuda: Cuda, ordinal: int, sync: Sync) -> None:
        self.cuda = cuda
        self._device = cuda.make("cuDeviceGet", "CUdevice", ordinal)
        # Set the flags before the context exists: changing them later is not reliable.
        cuda.call("cuDevicePrimaryCtxSetFlags_v2", self._device, int(sync))
        context = cuda.make("cuDevicePrimaryCtxRetain", "CUcontext", self._device)
        cuda.call("cuCtxSetCurrent", context)

    @cached_property
    def name(self) -> str:
        """The device's name, such as NVIDIA H200."""
        buffer = self.cuda.ffi.new("char[]", 256)
        self.cuda.call("cuDeviceGetName", buffer, len(buffer), self._device)
        text = self.cuda.ffi.string(buffer)
        assert isinstance(text, bytes)
        return text.decode()

    @cached_property
    def threads(self) -> int:
        """How many threads it runs at once; a kernel with that many fills the card."""
        return self._attribute(_MULTIPROCESSOR_COUNT) * self._attribute(_MAX_THREADS_PER_MULTIPROCESSOR)

    def _attribute(self, attribute: int) -> int:
        return int(self.cuda.make("cuDeviceGetAttribute", "int", attribute, self._device))

    def stream(self) -> Any:
        """Create a stream that does not wait for the default stream."""
        return self.cuda.make("cuStreamCreate", "CUstream", _STREAM_NON_BLOCKING)

    def shared_memory(self, size: int) -> tuple[Any, int]:
        """Allocate host memory that running kernels can access; return our pointer to it and the device address."""
        memory = self.cuda.make("cuMemHostAlloc", "void *", size, _HOST_ALLOC_DEVICE_MAP)
        return memory, int(self.cuda.make("cuMemHostGetDevicePointer_v2", "CUdeviceptr", memory, 0))

    def hold(self, size: int) -> None:
        """Take this many bytes of the card for as long as the process lives."""
        self.cuda.make("cuMemAlloc_v2", "CUdeviceptr", size)

    def event(self) -> Any:
        """Create an event that takes the time."""
        return self.cuda.make("cuEventCreate", "CUevent", 0)

    def event_done(self, event: Any) -> bool:
        """Tell whether the work before ``event`` has finished."""
        result = self.cuda.lib.cuEventQuery(event)
        if result == _NOT_READY:
            return False
        self.cuda.check("cuEventQuery", result)
        return True

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Return the time on the GPU from one finished event to another, in µs."""
        return float(self.cuda.make("cuEventElapsedTime", "float", start, end)) * 1000

    def graph(self, stream: Any, record: Callable[[], None]) -> Any:
        """Return an executable graph of what ``record`` launches on ``stream``, without running it."""
        self.cuda.call("cuStreamBeginCapture_v2", stream, _CAPTURE_THREAD_LOCAL)
        record()
        graph = self.cuda.ffi.new("CUgraph *")
        self.cuda.call("cuStreamEndCapture", stream, graph)
        return self.cuda.make("cuGraphInstantiateWithFlags", "CUgraphExec", graph[0], 0)

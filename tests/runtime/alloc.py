"""Ask CUDA for card memory: ``python -m tests.runtime.alloc MIB`` prints what cuMemAlloc returns, 0 being fine."""

from __future__ import annotations

import ctypes
import sys


def main() -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    for status in (
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(device), 0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        cuda.cuCtxSetCurrent(context),
    ):
        assert status == 0, status
    print(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(int(sys.argv[1]) << 20)))


if __name__ == "__main__":
    main()

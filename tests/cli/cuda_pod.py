"""A pod's program on a real GPU: allocates, fills, frees, again and again, and writes down when: cuda_pod.py FILE.

Every step asks RM for memory, so a step is late when the pod's calls are not answered, or its gate is closed.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

_BYTES = 256 << 20


def main() -> None:
    """Step until killed."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()

    def call(name: str, *arguments: object) -> None:
        if status := getattr(cuda, name)(*arguments):
            raise SystemExit(f"{name}: {status}")

    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    with Path(sys.argv[1]).open("w", buffering=1) as file:
        while True:
            call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(_BYTES))
            call("cuMemsetD8_v2", address, 1, ctypes.c_size_t(_BYTES))
            call("cuCtxSynchronize")
            call("cuMemFree_v2", address)
            file.write(f"{time.monotonic()}\n")


if __name__ == "__main__":
    main()

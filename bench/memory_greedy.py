"""A program that takes all the card memory it gets, gives some back and takes it again, for ``memory_pods.py``.

    python bench/memory_greedy.py --json FILE

It ends by a signal. It writes nothing to FILE, but takes ``--json`` like all programs of the benches.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from qgpu.load.cuda import Cuda, CudaError, Device, Sync

_CDEF = """
CUresult cuMemFree_v2(CUdeviceptr pointer);
CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned int value, size_t count);
"""
_PIECE, _PAUSE_S = 64 << 20, 0.02


def main() -> None:
    """Take and give back until a signal comes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", required=True)
    parser.parse_args()
    cuda = Cuda()
    cuda.ffi.cdef(_CDEF)
    Device(cuda, 0, Sync.BLOCK)
    held: list[Any] = []
    dice = random.Random(1)  # noqa: S311
    while True:
        try:
            while True:
                held.append(cuda.make("cuMemAlloc_v2", "CUdeviceptr", _PIECE))
                cuda.call("cuMemsetD32_v2", held[-1], 1, _PIECE // 4)
        except CudaError:  # no more
            time.sleep(_PAUSE_S)
        for _ in range(dice.randint(1, max(1, len(held)))):
            if held:
                cuda.call("cuMemFree_v2", held.pop(dice.randrange(len(held))))


if __name__ == "__main__":
    main()

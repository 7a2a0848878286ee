"""How long other programs' calls to RM wait while RM frees memory that is mapped many times.

    python bench/rm_mappings.py        # on a GPU, as root, without qgpu

RM undoes all mappings of a memory object when it frees the object, and a pod may make any number of mappings. Here one
process maps memory of the host for the CPU, memory of the card for the CPU, and memory of the card for the card. Then
it frees the memory, or closes its client. Another process makes and frees an object of its own all the while, and notes
its longest call.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import Figure, at_most, median
from pods import BenchError
from script import Script, run

from qgpu.nvidia import abi
from qgpu.nvidia.abi import ffi
from qgpu.nvidia.rm_client import RmClient, free

_MAPPINGS = 10_000
_PAGE, _BYTES = 4096, 1 << 16
#: NVOS32_ATTR: contiguous memory of the card in pages that RM chooses, and memory of the host.
_ON_CARD, _ON_HOST = 0x18000000, 0x12000000
#: NVOS32_ALLOC_FLAGS as libcuda sets them.
_FLAGS = 0x1C001
_NV01_MEMORY_VIRTUAL = 0x70
_DOUBLE = struct.Struct("<d")
#: A call that waits is noted only once it is over, and RM may free a closed client later.
_AFTER_S = 1.0


class Neighbour:
    """A process that makes and frees an object over and over, and notes how long its longest call took, in s."""

    def __init__(self) -> None:
        self._longest = mmap.mmap(-1, _PAGE)
        self._pid = os.fork()
        if not self._pid:
            try:
                self._call()
            finally:
                os._exit(1)
        time.sleep(0.5)

    def longest_s(self) -> float:
        """Return its longest call since the last question."""
        (longest,) = _DOUBLE.unpack_from(self._longest)
        _DOUBLE.pack_into(self._longest, 0, 0.0)
        return float(longest)

    def end(self) -> None:
        """End the process."""
        os.kill(self._pid, signal.SIGKILL)
        if os.WIFEXITED(os.waitpid(self._pid, 0)[1]):
            raise BenchError("neighbour: its calls failed")

    def _call(self) -> None:
        client, device = _opened()
        while True:
            began = time.perf_counter()
            free(client.fd, client.handle, client.alloc(device, abi.NV20_SUBDEVICE_0, ffi.new("uint32_t *")))
            took = time.perf_counter() - began
            if took > _DOUBLE.unpack_from(self._longest)[0]:
                _DOUBLE.pack_into(self._longest, 0, took)


def _opened() -> tuple[RmClient, int]:
    client = RmClient()
    card = client.cards()[0]
    client.open_card(card.minor, card.gpu_id)
    return client, client.alloc(client.handle, abi.NV01_DEVICE_0, ffi.new("NV0080_ALLOC_PARAMETERS *"))


def _memory(client: RmClient, device: int, *, on_card: bool) -> int:
    params = ffi.new("NV_MEMORY_ALLOCATION_PARAMS *", {"owner": client.handle, "size": _BYTES})
    params.flags, params.attr = (_FLAGS, _ON_CARD) if on_card else (0, _ON_HOST)
    return client.alloc(device, abi.NV01_MEMORY_LOCAL_USER if on_card else abi.NV01_MEMORY_SYSTEM, params)


def _map_for_cpu(client: RmClient, device: int, memory: int, file: str) -> None:
    """Map a page. RM keeps the mapping after the file that it belongs to is closed, and each needs a file."""
    fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    call = ffi.new("NVOS33_PARAMETERS_WITH_FD *", {"hClient": client.handle, "hDevice": device, "hMemory": memory})
    call.length, call.fd = _PAGE, fd
    abi.ioctl(client.fd, abi.NV_ESC_RM_MAP_MEMORY, call)
    os.close(fd)
    abi.check(call.status, "mapping for the CPU")


def _map_for_card(client: RmClient, device: int, memory: int, space: int) -> None:
    where = {"hClient": client.handle, "hDevice": device, "hDma": space, "hMemory": memory, "length": _BYTES}
    call = ffi.new("NVOS46_PARAMETERS *", where)  # from branch 580 on
    abi.raw_ioctl(client.fd, abi.request(abi.NV_ESC_RM_MAP_MEMORY_DMA, abi.sizeof("NVOS46_PARAMETERS")), call)
    abi.check(call.status, "mapping for the card")


def _virtual(client: RmClient, device: int) -> int:
    return client.alloc(device, _NV01_MEMORY_VIRTUAL, ffi.new("uint64_t[3]"))


def mappings(script: Script) -> list[Figure]:
    """Map memory many times in three ways, free it, and time both for this process and for its neighbour."""
    script.need_card()
    number = round(_MAPPINGS * script.scale)
    found = []
    for name, on_card in (("host_for_cpu", False), ("card_for_cpu", True), ("card_for_card", True)):
        for how in ("free", "close"):
            client, device = _opened()
            memory = _memory(client, device, on_card=on_card)
            if name == "card_for_card":
                make = partial(_map_for_card, client, device, memory, _virtual(client, device))
            else:
                file = f"/dev/nvidia{client.cards()[0].minor}" if on_card else "/dev/nvidiactl"
                make = partial(_map_for_cpu, client, device, memory, file)
            end = partial(free, client.fd, client.handle, memory) if how == "free" else client.close
            found += _measure(f"{name}_{how}", number, make, end)
            if how == "free":
                client.close()
    return found


def _measure(name: str, number: int, make: Callable[[], object], end: Callable[[], object]) -> list[Figure]:
    neighbour = Neighbour()
    try:
        alone_s = neighbour.longest_s()
        began = time.perf_counter()
        for _ in range(number):
            make()
        made_s, beside_s = time.perf_counter() - began, neighbour.longest_s()
        began = time.perf_counter()
        end()
        ended_s = time.perf_counter() - began
        time.sleep(_AFTER_S)
        waited_s = neighbour.longest_s()
    finally:
        neighbour.end()
    of = f"{number} mappings"
    return [
        median(f"{name}_map_us", [1e6 * made_s / number], note=f"{of}: one"),
        median(f"{name}_us", [1e6 * ended_s / number], note=f"{of}: the end of one"),
        median(f"{name}_neighbour_alone_ms", [1e3 * alone_s], note="longest call of the neighbour before, 0.5 s"),
        median(f"{name}_neighbour_beside_ms", [1e3 * beside_s], note="longest call while mappings are made"),
        median(
            f"{name}_neighbour_ms",
            [1e3 * waited_s],
            *at_most(500, " ms"),
            note=f"longest call while they end, and {_AFTER_S:.0f} s after",
        ),
    ]


if __name__ == "__main__":
    sys.exit(run("mappings", {"mappings": mappings}, __doc__ or ""))

"""What a pod sees: its own cards and processes, its limit as a card's size, the rest of its limit as free memory.

Pure: it edits RM's answer, in our memory, into the pod's answer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection

from qgpu.nvidia import abi

_ENTRY = struct.Struct("<II")
_U32 = struct.Struct("<I")

#: Indices of FB_GET_INFO (ctrl2080fb.h) for the size of the card's memory and for its free memory, in KiB.
_SIZES = frozenset({0x07, 0x08, 0x09, 0x0A, 0x20, 0x33})
_FREE = frozenset({0x12, 0x16, 0x34})

_MOST_GPUS = 32  # NV0000_CTRL_GPU_MAX_PROBED_GPUS
_GPU_IDS = struct.Struct(f"<{_MOST_GPUS}I")
_GPU_FLAGS_AT = 2 * _GPU_IDS.size

_PIDS_COUNT_AT, _PIDS_AT = 8, 12
_PID_INFOS_AT, _PID_INFO_BYTES = 8, 72
_PID_INFO_ANSWER_AT, _PID_INFO_FIGURES = 8, slice(16, 64)

#: Samples of engine utilization (NV2080_CTRL_PERF_GPUMON_PERFMON_UTIL_SAMPLE): a time, then for each engine its share,
#: scale, process, process in a virtual machine with its name, and since 570 a kernel pointer.
_SAMPLES, _SAMPLES_AT, _ENGINES_AT = 72, 16, 8
_WITHOUT_POINTER, _ENGINE, _NO_PROCESS = struct.Struct("<IIII100s"), struct.Struct("<IIII100s4xQ"), 0xFFFFFFFF
#: The engines of a sample, by its bytes: four, since 550 six.
_ENGINES = {472: (4, _WITHOUT_POINTER), 704: (6, _WITHOUT_POINTER), 776: (6, _ENGINE)}


def show_memory(entries: bytearray, at: int, count: int, limit: int, left: int) -> None:
    """Bound the entries of an FB_GET_INFO list to a limit and the rest of it, both in bytes."""
    for place in range(at, min(at + count * _ENTRY.size, len(entries) - _ENTRY.size + 1), _ENTRY.size):
        index, kib = _ENTRY.unpack_from(entries, place)
        if index in _SIZES:
            kib = min(kib, limit >> 10)
        elif index in _FREE:
            kib = min(kib, left >> 10)
        _ENTRY.pack_into(entries, place, index, kib)


def show_pids(params: bytearray, own: Collection[int], inside: Callable[[int], int]) -> None:
    """Keep only a pod's own processes in an answer of GPU_GET_PIDS, by their pids in its namespace (``inside``)."""
    (count,) = _U32.unpack_from(params, _PIDS_COUNT_AT)
    room = (len(params) - _PIDS_AT) // _U32.size
    pids = struct.unpack_from(f"<{min(count, room)}I", params, _PIDS_AT)
    shown = [inside(pid) for pid in pids if pid in own]
    answer = struct.pack(f"<{1 + len(shown)}I", len(shown), *shown)
    params[_PIDS_COUNT_AT:] = answer.ljust(len(params) - _PIDS_COUNT_AT, b"\0")


def show_gpus(params: bytearray, own: Collection[int]) -> None:
    """Keep only a pod's own cards in each list of GPU_GET_PROBED_IDS or GPU_GET_ATTACHED_IDS.

    Since 580 the third list of the former has flags of the cards in the first.
    """
    gpus: tuple[int, ...] = ()
    for at in range(0, len(params) - _GPU_IDS.size + 1, _GPU_IDS.size):
        listed = _GPU_IDS.unpack_from(params, at)
        gpus = gpus or listed
        flags = at == _GPU_FLAGS_AT
        shown = [each for gpu, each in zip(gpus if flags else listed, listed, strict=True) if gpu in own]
        nothing = 0 if flags else abi.NV0000_GPU_INVALID_ID
        _GPU_IDS.pack_into(params, at, *shown, *[nothing] * (_MOST_GPUS - len(shown)))


def pid_infos(params: bytearray) -> list[int]:
    """List the offsets of the entries of a GPU_GET_PID_INFO."""
    (count,) = _U32.unpack_from(params, 0)
    room = (len(params) - _PID_INFOS_AT) // _PID_INFO_BYTES
    return [_PID_INFOS_AT + i * _PID_INFO_BYTES for i in range(min(count, room))]


def asks_for_memory(params: bytearray, at: int) -> bool:
    """Tell whether an entry of GPU_GET_PID_INFO asks for the only thing that RM tells of a process."""
    return bool(_U32.unpack_from(params, at + 4)[0] == 0)


def pid_info(params: bytearray, at: int) -> bytes:
    """Return what an entry of GPU_GET_PID_INFO tells of its process."""
    return bytes(params[at + _PID_INFO_ANSWER_AT : at + _PID_INFO_BYTES])


def show_pid_info(params: bytearray, at: int, answer: bytes | None) -> None:
    """Put an answer about a pod's own process into an entry; without one, clear its figures."""
    if answer is None:
        figures = slice(at + _PID_INFO_FIGURES.start, at + _PID_INFO_FIGURES.stop)
        params[figures] = bytes(figures.stop - figures.start)
    else:
        params[at + _PID_INFO_ANSWER_AT : at + _PID_INFO_BYTES] = answer


def show_samples(params: bytearray, own: Collection[int], inside: Callable[[int], int]) -> None:
    """Keep only a pod's own processes in utilization samples, by their pids in its namespace (``inside``)."""
    sample_bytes = (len(params) - _SAMPLES_AT) // _SAMPLES
    if sample_bytes not in _ENGINES:  # RM refuses such parameters
        params[_SAMPLES_AT:] = bytes(len(params[_SAMPLES_AT:]))
        return
    number, layout = _ENGINES[sample_bytes]
    for sample in range(_SAMPLES_AT, len(params) - sample_bytes + 1, sample_bytes):
        for engine in range(number):
            at = sample + _ENGINES_AT + engine * layout.size
            share, scale, pid, *_ = layout.unpack_from(params, at)
            shown = (share, scale, inside(pid)) if pid in own else (0, scale, _NO_PROCESS)
            params[at : at + layout.size] = _ENGINE.pack(*shown, _NO_PROCESS, b"", 0)[: layout.size]


def leave_out_processes(params: bytearray) -> None:
    """Clear the processes on the card in a mask of what RM is asked to show in its page of shared data."""
    params[:1] = bytes(byte & ~abi.NV00DE_RUSD_POLL_PROC_UTIL & 0xFF for byte in params[:1])

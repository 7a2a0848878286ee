"""Context switches of one card's compute engine, as the GPU's front end (FECS) records them.

An event buffer (class 90CD), bound with GR_FECS_BIND_EVTBUF_FOR_UID_V2, gets a record when a context starts or stops
running: process, context id, wall-clock ns (fecs_event_list.c). Records arrive every 30 ms, or at once after a flush.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import Protocol

from qgpu.model.plane_api import MigInstance
from qgpu.nvidia import abi
from qgpu.nvidia.abi import ffi
from qgpu.nvidia.rm_device import RmDevice

_HEADER_BYTES = 4096
#: Two records per switch: at 50 µs slices (6,000 switches a second at most) this holds over two seconds.
_RECORDS = 32768
_RECORD_BYTES = abi.sizeof("NV_EVENT_BUFFER_FECS_RECORD")

START, END = abi.NV_EVENT_BUFFER_FECS_SIMPLE_START, abi.NV_EVENT_BUFFER_FECS_SIMPLE_END

# tag, vmid, seqno, context_id, pid, 2 bytes and 2 MIG ids, timestamp: NV_EVENT_BUFFER_FECS_RECORD past its header.
_RECORD = struct.Struct("<8xBxHIIIQ")
_GET_PUT = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class ContextSwitch:
    """A context starts (``START``) or stops (``END``) running at ``at_ns`` on CLOCK_REALTIME."""

    at_ns: int
    tag: int
    context: int
    pid: int
    #: The record's last four bytes before the time, which end with the ids of the GPU instance and compute instance.
    mig: int = 0


class ContextSwitches(Protocol):
    """A log of context switches on one compute engine."""

    @property
    def dropped(self) -> int:
        """Return how many records were lost so far."""

    def read(self) -> list[ContextSwitch]:
        """Return all new ones, oldest first."""


class CtxswLog:
    """The event buffer of one card. Read it often: when it is full, new records are dropped."""

    def __init__(self, device: RmDevice) -> None:
        client = device.client
        self._client = client
        header = client.alloc(client.handle, abi.NV01_MEMORY_DEVICELESS, _readonly(client.handle, _HEADER_BYTES))
        size = _RECORDS * _RECORD_BYTES
        records = client.alloc(client.handle, abi.NV01_MEMORY_DEVICELESS, _readonly(client.handle, size))
        params = ffi.new("NV_EVENT_BUFFER_ALLOC_PARAMETERS *")
        params.recordSize, params.recordCount, params.hSubDevice = _RECORD_BYTES, _RECORDS, device.subdevice
        params.hBufferHeader, params.hRecordBuffer = header, records
        self._buffer = client.alloc(client.handle, abi.NV_EVENT_BUFFER, params)
        bind = ffi.new("NV2080_CTRL_GR_FECS_BIND_EVTBUF_FOR_UID_V2_PARAMS *")
        bind.hEventBuffer, bind.recordSize = self._buffer, _RECORD_BYTES
        bind.levelOfDetail, bind.bAllUsers = abi.NV2080_GR_FECS_LEVEL_OF_DETAIL_SIMPLE, 1
        client.control(device.subdevice, abi.NV2080_GR_FECS_BIND_EVTBUF_FOR_UID_V2, bind)
        enable = ffi.new("NV_EVENT_BUFFER_CTRL_CMD_ENABLE_EVENTS_PARAMS *")
        enable.enable, enable.flags = 1, abi.NV_EVENT_BUFFER_OVERFLOW_KEEP_OLDEST
        client.control(self._buffer, abi.NV_EVENT_BUFFER_ENABLE_EVENTS, enable)
        self._header: mmap.mmap = client.map_readonly(header, _HEADER_BYTES)
        self._records: mmap.mmap = client.map_readonly(records, size)

    @property
    def dropped(self) -> int:
        """Return how many records were lost so far because the buffer was full."""
        return int(ffi.cast("NV_EVENT_BUFFER_HEADER *", ffi.from_buffer(self._header)).recordDropcount)

    def read(self) -> list[ContextSwitch]:
        """Flush the records that the GPU still holds, and return all new ones, oldest first."""
        self._client.control(self._buffer, abi.NV_EVENT_BUFFER_FLUSH)
        get, put = _GET_PUT.unpack_from(self._header)
        found = []
        while get != put:
            tag, _, context, pid, mig, at_ns = _RECORD.unpack_from(self._records, get * _RECORD_BYTES)
            if tag in (START, END):
                found.append(ContextSwitch(at_ns, tag, context, pid, mig))
            get = (get + 1) % _RECORDS
        if found:
            update = ffi.new("NV_EVENT_BUFFER_CTRL_CMD_UPDATE_GET_PARAMS *", {"recordBufferGet": get})
            self._client.control(self._buffer, abi.NV_EVENT_BUFFER_UPDATE_GET, update)
        return found


class DividedLog:
    """The log of a card that MIG divides, whose instances each read what happened on their own engine.

    Its client must see all instances: ``RmDevice.see_all_instances``.
    """

    def __init__(self, log: ContextSwitches) -> None:
        self._log = log
        self._unread: dict[int, list[ContextSwitch]] = {}

    def of(self, instance: MigInstance) -> InstanceLog:
        """Return the part of one instance. All parts must be read about as often."""
        ids = instance.gpu_instance << 16 | instance.compute_instance << 24
        self._unread[ids] = []
        return InstanceLog(self, ids)

    @property
    def dropped(self) -> int:
        """Return how many records of the whole card were lost so far."""
        return self._log.dropped

    def read(self, ids: int) -> list[ContextSwitch]:
        """Return the new records of an instance."""
        for switch in self._log.read():
            if (unread := self._unread.get(switch.mig)) is not None:
                unread.append(switch)
        found, self._unread[ids] = self._unread[ids], []
        return found


@dataclass(frozen=True, slots=True)
class InstanceLog:
    """The part of a divided log that is one instance's."""

    _divided: DividedLog
    _ids: int

    @property
    def dropped(self) -> int:
        """Return how many records of the whole card were lost so far."""
        return self._divided.dropped

    def read(self) -> list[ContextSwitch]:
        """Return the instance's new records, oldest first."""
        return self._divided.read(self._ids)


def _readonly(owner: int, size: int) -> object:
    return ffi.new(
        "NV_MEMORY_ALLOCATION_PARAMS *",
        {
            "owner": owner,
            "attr": abi.NVOS32_ATTR_COHERENCY_CACHED,
            "attr2": abi.NVOS32_ATTR2_PROTECTION_USER_READ_ONLY,
            "size": size,
        },
    )

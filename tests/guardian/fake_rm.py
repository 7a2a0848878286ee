"""RM in a table: what objects there are, and what becomes of calls that are carried out for a pod.

Stands where the driver would, behind the guardian's own ioctl on the file it took from the pod (/dev/random). It
reads and writes the guardian's memory as RM does: parameters behind pointers.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from contextlib import contextmanager

from qgpu.guardian.rules import escapes
from qgpu.linux import proc
from qgpu.linux.pod_fd_closer import PodFdCloser
from qgpu.linux.pod_fd_taker import PodFdTaker
from qgpu.nvidia import abi, uvm

#: What RM rounds memory up to.
PAGE = 1 << 16
#: Without this flag the old heap chooses a handle itself (nvos.h).
HANDLE_PROVIDED = 0x4000


def _at(address: int, size: int) -> bytearray:
    return (ctypes.c_char * size).from_address(address)


class FakeRm:
    """Objects by (client, handle): (class, parent); memory's sizes; and the calls that arrived."""

    def __init__(self, objects: dict | None = None) -> None:
        self.objects = {(7, 7): (abi.NV01_ROOT_CLIENT, 0), **(objects or {})}
        self.sizes: dict = {}
        self.seen: list = []
        self.pidfds: dict = {}
        self.answers: dict = {}
        self.share_status = abi.NV_OK
        self.aliases: dict = {}
        self.mapped: set = set()
        #: Channels that were registered with UVM: it keeps their TSGs until it is told to end that.
        self.registered: set = set()
        #: What objects use: RM frees them with each of these.
        self.used: dict = {}
        #: Objects of the fabric, with the memory that each keeps.
        self.fabric: dict = {}
        #: What RM says of objects of the fabric if that is not the memory's size: (bytes, flags), or nothing.
        self.fabric_says: dict = {}
        self.unmaps = False
        #: UVM's version, and its ranges by base.
        self.uvm_version, self.ranges = "580.1", {}
        self.instances: dict = {}
        self.wakes = 0
        self.preemptible: list = []
        self.carried = None
        #: What one file carries, place by place, for an import of several objects; None: nothing.
        self.carriers: list = []
        #: Clients to which none of their pods' descriptors leads.
        self.stale: set = set()
        self.closer = PodFdCloser()
        self.taker = PodFdTaker(abi.pidfd_getfd)
        self.lost: set = set()
        #: Whether files at hand have none of the clients.
        self.bare = False
        self.knows_contexts = True
        #: Clients that they do not have in any case.
        self.elsewhere: set = set()
        #: The first is called while memory is freed, the second with the key of memory that was just made.
        self.meanwhile = lambda: None
        self.made = lambda key: None
        #: Objects that were shared for a duplicate, with the client that got it.
        self.shared: list = []
        #: What the old heap makes.
        self.heap_class = abi.NV01_MEMORY_LOCAL_USER
        #: How often devices were looked through for what no pod may have.
        self.looks = 0
        #: OS events that the guardian freed by itself, by client and number.
        self.freed_events: list = []
        #: What the descriptors of dma-bufs were, as the guardian had them.
        self.dma_bufs: list = []

    # -- what GpuOps does ------------------------------------------------------------------------------------------

    def watch(self, pid):
        self.pidfds[pid] = os.pidfd_open(pid)
        return self.pidfds[pid]

    def unwatch(self, pid):
        if (pidfd := self.pidfds.pop(pid, None)) is not None:
            os.close(pidfd)

    def pidfd(self, pid):
        if pid not in self.pidfds:
            raise ProcessLookupError(errno.ESRCH, "process is gone")
        return self.pidfds[pid]

    def exists(self, key):
        return tuple(key) in self.objects

    def has_client(self, client):
        return self.exists((client, client))

    def object_info(self, file, client, handle):
        return None if self.bare or client in self.elsewhere else self.objects.get((client, handle))

    def reaches(self, file, client):
        return self.object_info(file, client, client) is not None

    def find_object(self, rm):
        return self.objects.get(rm.key)

    def size(self, rm):
        return self.sizes.get(rm.key)

    def size_by_file(self, file, client, memory):
        return self.sizes.get((client, memory), 0)

    def fabric_info(self, file, client, handle):
        original = self.aliases.get((client, handle), (client, handle))
        return self.fabric_says.get(original, (self.sizes.get(self.fabric[original], 0), 0))

    def free(self, file, client, handle):
        self._free(client, handle)

    def free_anywhere(self, key):
        return self._free(*key)

    def duplicate(self, file, rm, handle):
        self.objects[rm.client, handle] = (rm.rm_class, rm.parent)
        self.sizes[rm.client, handle] = self.sizes[rm.key]
        self.aliases[rm.client, handle] = self.aliases.get(rm.key, rm.key)
        return True

    def free_children(self, client, parents, class_ids, file=None):
        self.looks += 1
        if client in (self.stale if file is None else self.elsewhere):
            return None
        wanted = {abi.NV01_DEVICE_0 if class_id == abi.CLASS_ID_DEVICE else 0xF3 for class_id in class_ids}
        below = {key: rm_class for key, (rm_class, parent) in self.objects.items() if parent in parents}
        found = [key for key, rm_class in below.items() if rm_class in wanted and key[0] == client]
        for key in found:
            self._free(*key)
        return len(found)

    def free_os_event(self, client, number):
        self.freed_events.append((client, number))

    @contextmanager
    def shared_with(self, source, client):
        self.shared.append((source, client))
        yield

    def is_same(self, file, key, parent, other):
        return self.aliases.get(key, key) == self.aliases.get(other, other)

    def private_bytes(self, instance, pid):
        """Memory with one handle and no mapping of UVM's (``mapped`` holds what the test says it has mapped)."""
        roots = [self.aliases.get(key, key) for key in self.sizes if key in self.objects]
        kept = {root for key, root in self.fabric.items() if key in self.objects} | self.mapped
        return sum(self.sizes[root] for root in set(roots) if roots.count(root) == 1 and root not in kept)

    def instance_of(self, file, client, subdevice):
        return self.instances.get((client, self.objects[client, subdevice][1]), 0)

    def gpu_ids(self, instances):
        return {0x600 + instance for instance in instances}

    def clients_behind_fd(self, pid, fd, clients):
        return clients - self.stale if proc.device(pid, fd) is not None else set()

    def pod_has_file(self, client, pod, file):
        return client not in self.stale

    def make_preemptible(self, file, client, subdevice, tsg):
        self.preemptible.append((client, subdevice, tsg))
        return True

    def register_p2p(self, file, client, handle):
        return None

    def context(self, channel):
        return channel.handle

    def context_by_file(self, file, channel):
        return channel.handle if self.knows_contexts else 0

    # -- what the driver does -------------------------------------------------------------------------------------

    def perform(self, fd, request, argument):
        number, data = request & 0xFF, abi.ffi.buffer(argument)
        if request in {*uvm.WATCHED, uvm.UNREGISTER_GPU, uvm.UNREGISTER_CHANNEL, uvm.VALIDATE_VA_RANGE}:
            return self._uvm(request, data)
        self.seen.append((number, bytes(data)))
        match number:
            case abi.NV_ESC_RM_ALLOC:
                return self._alloc(data)
            case abi.NV_ESC_RM_FREE:
                client, _, handle, _ = struct.unpack("<IIII", data)
                found = not self.bare and self._free(client, handle)
                self.meanwhile()
                self._status(data, 12, abi.NV_OK if found else abi.NV_ERR_OBJECT_NOT_FOUND)
            case abi.NV_ESC_RM_DUP_OBJECT:
                self._dup(data)
            case abi.NV_ESC_RM_CONTROL:
                return self._control(data)
            case abi.NV_ESC_RM_VID_HEAP_CONTROL:
                client, parent, function = struct.unpack_from("<III", data)
                (handle,) = struct.unpack_from("<I", data, 44)
                (size,) = struct.unpack_from("<Q", data, 88)
                if function == 2:
                    if not struct.unpack_from("<I", data, 52)[0] & HANDLE_PROVIDED:
                        handle = 1 + max(0xCAF00000, *(key[1] for key in self.objects))
                        struct.pack_into("<I", data, 44, handle)
                    self._make(client, handle, self.heap_class, parent, size)
                    struct.pack_into("<Q", data, 88, self.sizes.get((client, handle), size))
                struct.pack_into("<QQ", data, 24, 1 << 44, 1 << 43)
                self._status(data, 20, abi.NV_OK)
            case abi.NV_ESC_REGISTER_FD | abi.NV_ESC_RM_ALLOC_MEMORY:
                pass
            case abi.NV_ESC_RM_SHARE:
                self._status(data, abi.offsetof("NVOS57_PARAMETERS", "status"), self.share_status)
            case abi.NV_ESC_ALLOC_OS_EVENT | abi.NV_ESC_FREE_OS_EVENT | abi.NV_ESC_ATTACH_GPUS_TO_FD:
                pass
            case abi.NV_ESC_RM_MAP_MEMORY_DMA | abi.NV_ESC_RM_UNMAP_MEMORY_DMA | abi.NV_ESC_RM_ALLOC_CONTEXT_DMA2:
                pass
            case abi.NV_ESC_EXPORT_TO_DMABUF_FD:
                if (fd := struct.unpack_from("<i", data)[0]) < 0:
                    struct.pack_into("<i", data, 0, fd := os.memfd_create("dma-buf"))
                self.dma_bufs.append(os.readlink(f"/proc/self/fd/{fd}"))
            case _ if number in escapes.MAPPINGS:
                pass
            case _:
                return errno.ENOTTY
        return 0

    def _status(self, data, at, status):
        struct.pack_into("<I", data, at, status)

    def _make(self, client, handle, rm_class, parent, size=0):
        self.objects[client, handle] = (rm_class, parent)
        if rm_class == abi.NV01_MEMORY_LOCAL_USER:
            self.sizes[client, handle] = -(-size // PAGE) * PAGE
            self.made((client, handle))

    def _alloc(self, data):
        client, parent, handle, rm_class, params = struct.unpack_from("<IIIIQ", data)
        status_at = 40 if len(data) == 48 else 28
        if rm_class in abi.ROOT_CLASSES:
            handle = handle or 1 + max(key[0] for key in self.objects)
            self._make(handle, handle, rm_class, 0)
            struct.pack_into("<I", data, 8, handle)
            self._status(data, status_at, abi.NV_OK)
            return 0
        if (client, client) not in self.objects:
            self._status(data, status_at, abi.NV_ERR_INVALID_CLIENT)
            return 0
        size = 0
        if rm_class == abi.NV01_MEMORY_LOCAL_USER and params:
            block = _at(params, 128)
            (size,) = struct.unpack_from("<Q", block, 64)
        self._make(client, handle, rm_class, parent, size)
        self.used[client, handle] = set(self._used(client, rm_class, params) if params else ())
        if rm_class == abi.NV_MEMORY_FABRIC:
            key = client, struct.unpack_from("<I", _at(params, 64), 40)[0]
            self.fabric[client, handle] = self.aliases.get(key, key)
        if size:
            struct.pack_into("<Q", block, 64, self.sizes[client, handle])
        self._status(data, status_at, abi.NV_OK)
        return 0

    def _used(self, client, rm_class, params):
        """Yield what an object uses."""
        if rm_class == abi.KEPLER_CHANNEL_GROUP_A:
            yield client, struct.unpack_from("<I", _at(params, 16), 8)[0]
        if rm_class == abi.FERMI_CONTEXT_SHARE_A:
            yield client, struct.unpack_from("<I", _at(params, 12))[0]
        if rm_class in abi.GPFIFO_CLASSES:
            share, space = struct.unpack_from("<II", _at(params, 32), 24)
            yield from ((client, share), (client, space))

    def _free(self, client, handle):
        gone = {(client, handle)}
        while more := {key for key in self.objects if self._goes_with(key, gone)} - gone:
            gone |= more
        if client == handle:
            gone |= {key for key in self.objects if key[0] == client}
        found = (client, handle) in self.objects
        for key in gone:
            self.objects.pop(key, None)
        return found

    def _goes_with(self, key, gone):
        return (key[0], self.objects[key][1]) in gone or not gone.isdisjoint(self.used.get(key, ()))

    def _dup(self, data):
        client, parent, handle, source_client, source, _, _ = struct.unpack("<7I", data)
        found = self.objects.get((source_client, source))
        if found is None:
            self._status(data, 24, abi.NV_ERR_OBJECT_NOT_FOUND)
            return
        self.objects[client, handle] = (found[0], parent)
        if (source_client, source) in self.fabric:
            self._copy_on_fabric((source_client, source), (client, handle))
        if (source_client, source) in self.sizes:
            self.sizes[client, handle] = self.sizes[source_client, source]
            self.aliases[client, handle] = self.aliases.get((source_client, source), (source_client, source))
        self._status(data, 24, abi.NV_OK)

    def _copy_on_fabric(self, source, copy):
        self.fabric[copy] = self.fabric[source]
        self.aliases[copy] = self.aliases.get(source, source)

    def _control(self, data):
        client, _, command, _, params, size, _ = struct.unpack("<IIIIQII", data)
        if command in (abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD, abi.NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD) and params:
            self._hand_over(command, client, _at(params, size))
        if command == abi.NV0000_OS_UNIX_IMPORT_OBJECTS_FROM_FD and params:
            self._import_all(client, _at(params, size))
        answer = self.answers.get(command)
        if answer is not None and params:
            answer(_at(params, size))
        self._status(data, 28, abi.NV_OK)
        return 0

    def _hand_over(self, command, client, params):
        """There is one descriptor: it carries what was exported last."""
        if command == abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD:
            key = client, struct.unpack_from("<I", params, 12)[0]
            self.carried = self.aliases.get(key, key)
        elif self.carried is not None:
            _, _, _, parent, handle = struct.unpack("<iIIII", params)
            if self.carried in self.fabric:
                self.objects[client, handle] = (abi.NV_MEMORY_FABRIC, parent)
                self._copy_on_fabric(self.carried, (client, handle))
                return
            self.objects[client, handle] = (abi.NV01_MEMORY_LOCAL_USER, parent)
            self.sizes[client, handle] = self.sizes[self.carried]
            self.aliases[client, handle] = self.carried

    def _import_all(self, client, params):
        """Import what ``carriers`` exports, place by place; None is a place without an export."""
        (parent,) = struct.unpack_from("<I", params, 4)
        (count,) = struct.unpack_from("<H", params, 648)
        for n, source in zip(range(count), self.carriers, strict=False):
            params[520 + n : 521 + n] = bytes([source is not None])
            if source is not None:
                (handle,) = struct.unpack_from("<I", params, 8 + 4 * n)
                self.objects[client, handle] = (abi.NV01_MEMORY_LOCAL_USER, parent)
                self.sizes[client, handle] = self.sizes[source]
                self.aliases[client, handle] = self.aliases.get(source, source)

    def _uvm(self, request, data):
        self.seen.append((request, bytes(data)))
        if request == uvm.UNMAP_EXTERNAL and self.unmaps:
            self.mapped.clear()
        if request == uvm.UNREGISTER_GPU:
            self.mapped.clear()
            self.registered.clear()
        elif request == uvm.UNREGISTER_CHANNEL:
            key, layout = struct.unpack_from("<II", data, 16), uvm.layouts("580.1")[request]
            there = key in self.registered
            self.registered.discard(key)
            self._status(data, layout.status_at, abi.NV_OK if there else abi.NV_ERR_INVALID_CHANNEL)
        elif request == uvm.INITIALIZE:
            self._status(data, uvm.STATUS_AT_INITIALIZE, self.answers.get("initialised", abi.NV_OK))
        else:
            self._status(data, uvm.layouts(self.uvm_version)[request].status_at, self._uvm_status(request, data))
        return 0

    def _uvm_status(self, request, data):
        base, length = struct.unpack_from("<QQ", data)
        known = request != uvm.VALIDATE_VA_RANGE or self.ranges.get(base) == length
        return abi.NV_OK if known else abi.NV_ERR_INVALID_ADDRESS

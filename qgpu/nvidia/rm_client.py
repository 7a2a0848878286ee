"""An RM client: opens the control device, makes objects, issues controls, maps memory.

It can also act under another process's client. RM ties a client to the open file that it was made on, so any process
that holds that file (taken with pidfd_getfd) may name the client (rmclientValidate_IMPL).
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

from qgpu.errors import NoGpuError, PermissionDeniedError, RmError
from qgpu.nvidia import abi
from qgpu.nvidia.abi import ffi

_CONTROL_DEVICE = "/dev/nvidiactl"
#: Our objects' handles start here, far from those that libcuda chooses; each client has its own handles.
_FIRST_HANDLE = 0x71000000


def control(fd: int, client: int, target: int, command: int, params: Any = None) -> None:
    """Issue an RM control through ``fd`` on an object of ``client``. Raises RmError, OSError.

    ``params`` is a cffi pointer to the control's structure; RM writes its answer there.
    """
    call = ffi.new("NVOS54_PARAMETERS *")
    call.hClient, call.hObject, call.cmd = client, target, command
    if params is not None:
        call.params = int(ffi.cast("uintptr_t", params))
        call.paramsSize = ffi.sizeof(ffi.typeof(params).item)
    abi.ioctl(fd, abi.NV_ESC_RM_CONTROL, call)
    abi.check(call.status, f"RM control {command:#x} on {client:#x}/{target:#x}")


def handle_info(fd: int, client: int, handle: int) -> tuple[int, int] | None:
    """Ask RM for (class, parent) of an object; None if it does not exist (CLIENT_GET_HANDLE_INFO)."""
    found = []
    for index in (abi.NV0000_CLIENT_HANDLE_INFO_CLASS, abi.NV0000_CLIENT_HANDLE_INFO_PARENT):
        params = ffi.new("NV0000_CTRL_CLIENT_GET_HANDLE_INFO_PARAMS *", {"hObject": handle, "index": index})
        try:
            control(fd, client, client, abi.NV0000_CLIENT_GET_HANDLE_INFO, params)
        except RmError:
            return None
        found.append(int(params.data))
    return found[0], found[1]


def memory_bytes(fd: int, client: int, memory: int) -> int | None:
    """Ask RM for the true size of a memory object, in bytes; None if it does not exist (GET_SURFACE_INFO)."""
    entries = ffi.new("NV0041_CTRL_SURFACE_INFO[1]", [{"index": abi.NV0041_SURFACE_INFO_PHYS_SIZE}])
    params = ffi.new("NV0041_CTRL_GET_SURFACE_INFO_PARAMS *", {"surfaceInfoListSize": 1})
    params.surfaceInfoList = int(ffi.cast("uintptr_t", entries))
    try:
        control(fd, client, memory, abi.NV0041_GET_SURFACE_INFO, params)
    except RmError:
        return None
    return int(entries[0].data) * abi.NV0041_SURFACE_INFO_PHYS_SIZE_UNIT


def fabric_info(fd: int, client: int, handle: int) -> tuple[int, int] | None:
    """Ask RM for (bytes, flags) of an object of the NVLink fabric; None if RM does not say (GET_INFO)."""
    params = ffi.new("NV00F8_CTRL_GET_INFO_PARAMS *")
    try:
        control(fd, client, handle, abi.NV00F8_GET_INFO, params)
    except RmError:
        return None
    return int(params.size), int(params.allocFlags)


def free(fd: int, client: int, handle: int) -> bool:
    """Free an object through its client's file; False if RM refused."""
    call = ffi.new("NVOS00_PARAMETERS *", {"hRoot": client, "hObjectOld": handle})
    abi.ioctl(fd, abi.NV_ESC_RM_FREE, call)
    return bool(call.status == abi.NV_OK)


def duplicate(fd: int, client: int, parent: int, handle: int, source: int) -> bool:
    """Give an object a second handle in the same client; False if RM refused."""
    call = ffi.new("NVOS55_PARAMETERS *")
    call.hClient, call.hParent, call.hObject, call.hClientSrc, call.hObjectSrc = client, parent, handle, client, source
    abi.ioctl(fd, abi.NV_ESC_RM_DUP_OBJECT, call)
    return bool(call.status == abi.NV_OK)


def share(fd: int, client: int, handle: int, with_client: int, *, revoke: bool = False) -> bool:
    """Let another client duplicate an object, or no longer; False if RM refused.

    RM does not ask whose client and object these are (rs_server.c:_serverShareResourceAccessClient): the caller must.
    """
    call = ffi.new("NVOS57_PARAMETERS *", {"hClient": client, "hObject": handle})
    policy = call.sharePolicy
    policy.target, policy.accessMask, policy.type = with_client, abi.RS_ACCESS_DUP_OBJECT, abi.RS_SHARE_TYPE_CLIENT
    policy.action = abi.RS_SHARE_ACTION_FLAG_COMPOSE | (abi.RS_SHARE_ACTION_FLAG_REVOKE if revoke else 0)
    abi.ioctl(fd, abi.NV_ESC_RM_SHARE, call)
    return bool(call.status == abi.NV_OK)


def child(fd: int, client: int, parent: int, class_id: int) -> int | None:
    """Return the handle of an object below another one, by RM's own number of its class; None if there is none.

    Raises RmError if RM does not say.
    """
    params = ffi.new("NV0000_CTRL_CMD_CLIENT_GET_CHILD_HANDLE_PARAMS *", {"hParent": parent, "classId": class_id})
    try:
        control(fd, client, client, abi.NV0000_CLIENT_GET_CHILD_HANDLE, params)
    except RmError as error:
        if error.status not in abi.UNKNOWN_TO_RM:
            raise
        return None
    return int(params.hObject) or None


def export(fd: int, client: int, memory: int) -> int:
    """Export memory to a new descriptor, which keeps the memory until the caller closes it. Raises RmError, OSError."""
    carrier = os.open(_CONTROL_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        params = ffi.new("NV0000_CTRL_OS_UNIX_EXPORT_OBJECT_TO_FD_PARAMS *", {"fd": carrier, "hObject": memory})
        params.type = abi.NV0000_OS_UNIX_EXPORT_OBJECT_TYPE_RM
        control(fd, client, client, abi.NV0000_OS_UNIX_EXPORT_OBJECT_TO_FD, params)
    except BaseException:
        os.close(carrier)
        raise
    return carrier


def is_exported(fd: int, client: int, parent: int, memory: int, carrier: int) -> bool:
    """Ask RM whether a descriptor carries a client's memory. Raises RmError, OSError.

    RM compares two handles of one client, so the client gets another handle meanwhile.
    """
    params = ffi.new("NV0000_CTRL_OS_UNIX_IMPORT_OBJECT_FROM_FD_PARAMS *", {"fd": carrier, "hParent": parent})
    params.type = abi.NV0000_OS_UNIX_EXPORT_OBJECT_TYPE_RM
    control(fd, client, client, abi.NV0000_OS_UNIX_IMPORT_OBJECT_FROM_FD, params)
    try:
        pair = ffi.new("NV0000_CTRL_CLIENT_OBJECTS_ARE_DUPLICATES_PARAMS *", {"hObject1": memory})
        pair.hObject2 = params.hObject
        control(fd, client, client, abi.NV0000_CLIENT_OBJECTS_ARE_DUPLICATES, pair)
        return bool(pair.bDuplicates)
    finally:
        free(fd, client, params.hObject)


def take(pidfd: int, fd: int) -> int:
    """Duplicate another process's descriptor ``fd``; close it again soon. Raises OSError.

    A file held here keeps its RM clients alive after the process's end.
    """
    return abi.pidfd_getfd(pidfd, fd)


@dataclass(frozen=True, order=True, slots=True)
class CardInfo:
    """One card as the driver lists it."""

    pci: str
    gpu_id: int
    minor: int


class RmClient:
    """One root client of our own, with the objects below it; closing it frees them all."""

    def __init__(self) -> None:
        try:
            self.fd = os.open(_CONTROL_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        except PermissionError as error:
            raise PermissionDeniedError(f"{_CONTROL_DEVICE}: {error.strerror}; run as root") from error
        except OSError as error:
            raise NoGpuError(f"{_CONTROL_DEVICE}: {error.strerror}; is the NVIDIA driver loaded?") from error
        self._next = _FIRST_HANDLE
        self._device_fds: list[int] = []
        call = ffi.new("NVOS64_PARAMETERS *", {"hClass": abi.NV01_ROOT_CLIENT})
        abi.ioctl(self.fd, abi.NV_ESC_RM_ALLOC, call)
        abi.check(call.status, "RM root client")
        self.handle = int(call.hObjectNew)

    def close(self) -> None:
        """Free everything by closing the files."""
        for fd in (*self._device_fds, self.fd):
            os.close(fd)
        self._device_fds, self.fd = [], -1

    def cards(self) -> list[CardInfo]:
        """List the cards the driver has probed, in PCI order (nv_ioctl_card_info_t)."""
        cards = ffi.new("nv_ioctl_card_info_t[32]")
        abi.raw_ioctl(self.fd, abi.request(abi.NV_ESC_CARD_INFO, ffi.sizeof(cards)), cards)
        return sorted(
            CardInfo(f"{card.domain:08x}:{card.bus:02x}:{card.slot:02x}.0", card.gpu_id, card.minor_number)
            for card in cards
            if card.valid
        )

    def open_card(self, minor: int, gpu_id: int) -> None:
        """Open a card's device file for this client and attach it; a Device needs this first."""
        fd = os.open(f"/dev/nvidia{minor}", os.O_RDWR | os.O_CLOEXEC)
        self._device_fds.append(fd)
        abi.ioctl(fd, abi.NV_ESC_REGISTER_FD, ffi.new("int *", self.fd))
        ids = ffi.new("NV0000_CTRL_GPU_ATTACH_IDS_PARAMS *")
        ids.gpuIds[0], ids.gpuIds[1] = gpu_id, abi.NV0000_GPU_INVALID_ID
        self.control(self.handle, abi.NV0000_GPU_ATTACH_IDS, ids)

    def alloc(self, parent: int, class_: int, params: Any = None) -> int:
        """Make an object of ``class_`` under ``parent`` and return its handle. Raises RmError."""
        self._next += 1
        call = ffi.new("NVOS64_PARAMETERS *")
        call.hRoot, call.hObjectParent, call.hObjectNew, call.hClass = self.handle, parent, self._next, class_
        if params is not None:
            call.pAllocParms = int(ffi.cast("uintptr_t", params))
        abi.ioctl(self.fd, abi.NV_ESC_RM_ALLOC, call)
        abi.check(call.status, f"RM object of class {class_:#x}")
        return int(call.hObjectNew)

    def control(self, target: int, command: int, params: Any = None) -> None:
        """Issue a control on an object of this client. Raises RmError."""
        control(self.fd, self.handle, target, command, params)

    def knows(self, client: int, handle: int) -> bool:
        """Tell whether RM has an object of any client (CLIENT_GET_ACCESS_RIGHTS accepts all clients)."""
        params = ffi.new("NV0000_CTRL_CLIENT_GET_ACCESS_RIGHTS_PARAMS *", {"hObject": handle, "hClient": client})
        try:
            self.control(self.handle, abi.NV0000_CLIENT_GET_ACCESS_RIGHTS, params)
        except RmError as error:
            return error.status not in abi.UNKNOWN_TO_RM
        return True

    def map_readonly(self, memory: int, length: int) -> mmap.mmap:
        """Map a deviceless memory object for reading; the mapping needs a control descriptor of its own."""
        fd = os.open(_CONTROL_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        try:
            call = ffi.new("NVOS33_PARAMETERS_WITH_FD *")
            call.hClient, call.hDevice, call.hMemory = self.handle, self.handle, memory
            call.length, call.flags, call.fd = length, abi.NVOS33_FLAGS_ACCESS_READ_ONLY, fd
            abi.ioctl(self.fd, abi.NV_ESC_RM_MAP_MEMORY, call)
            abi.check(call.status, "RM memory mapping")
            return mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)

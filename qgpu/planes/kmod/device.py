"""An open /dev/qgpu: its calls, and its cards and grants in qgpu's terms.

kmod/uapi/qgpu.h documents the calls; the callers turn each errno into an error.
"""

from __future__ import annotations

import fcntl
import os
import select
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qgpu.errors import BackendGoneError, NoGpuError, NotSupportedError, PermissionDeniedError
from qgpu.model import NS_PER_MS, Grant, PodClass
from qgpu.planes.kmod import DEVICE
from qgpu.planes.kmod.uapi import COMMANDS, NUMBERS, STRUCTS, ffi

CLASSES = {PodClass.OFFLINE: NUMBERS["QGPU_CLASS_OFFLINE"], PodClass.ONLINE: NUMBERS["QGPU_CLASS_ONLINE"]}

_STATES = {
    NUMBERS["QGPU_STATE_NO_DRIVER"]: "no NVIDIA driver is loaded, or /dev/nvidiactl is missing",
    NUMBERS["QGPU_STATE_UNKNOWN_DRIVER"]: "driver {driver} is unknown to it; it enforces nothing",
    NUMBERS["QGPU_STATE_NO_RM_INTERFACE"]: "it cannot reach the driver; before 565, load qgpu_rm.ko too",
    NUMBERS["QGPU_STATE_OFF"]: "it is switched off; qgpuctl module on",
}
#: The reasons for which the module cannot enforce limits, each with its remedy. If several hold, the first causes the
#: others.
_MISSING = {
    NUMBERS["QGPU_MISSING_PROBES"]: (
        "the kernel's probes do not work; they need /sys/kernel/debug/kprobes/enabled and kernel.ftrace_enabled at 1, "
        "and a kernel with probes by ftrace (x86-64)"
    ),
    NUMBERS["QGPU_MISSING_SEAL"]: "calls are not sealed; dmesg names the driver's function that cannot be hooked",
    NUMBERS["QGPU_MISSING_HELD"]: (
        "memory that UVM holds is not counted; dmesg names the driver's function that cannot be hooked"
    ),
    NUMBERS["QGPU_MISSING_MANAGED"]: (
        "managed memory is not bounded; dmesg names UVM's function that cannot be hooked, as when a live patch or a "
        "BPF program holds it"
    ),
}


@dataclass(frozen=True, slots=True)
class Card:
    """A pGPU as the module identifies it: its number there, and its PCI address."""

    number: int
    pci: str
    memory: int


class Device:
    """An open /dev/qgpu."""

    def __init__(self) -> None:
        try:
            self.fd = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NoGpuError(f"{DEVICE}: not there; is qgpu.ko loaded?") from error
        except PermissionError as error:
            raise PermissionDeniedError(f"{DEVICE}: {error.strerror}; only root can share a GPU") from error
        except OSError as error:
            raise BackendGoneError(f"{DEVICE}: {error.strerror}; dmesg may say why") from error

    def call(self, name: str, /, **fields: Any) -> Any:
        """Issue one ioctl with a struct of these fields, and return the struct that comes back. Raises OSError."""
        if self.fd < 0:
            raise BackendGoneError(f"{DEVICE}: closed")
        arg = ffi.new(STRUCTS[f"QGPU_IOC_{name}"] + " *", fields)
        fcntl.ioctl(self.fd, COMMANDS[f"QGPU_IOC_{name}"], ffi.buffer(arg), True)
        return arg

    def info(self) -> Any:
        """Ask for the module's state. Raises NotSupportedError if the module lacks this call."""
        try:
            return self.call("INFO")
        except OSError as error:
            raise NotSupportedError(f"qgpu.ko: {error.strerror}; is it the same version as the daemon?") from error

    def each(self, name: str, key: str, /, **fields: Any) -> Iterator[Any]:
        """Yield the answers of a _NEXT call, from the first to the last."""
        last = 0
        while True:
            try:
                found = self.call(name, **{key: last}, **fields)
            except FileNotFoundError:
                return
            last = getattr(found, key)
            yield found

    def wait(self, timeout_ns: int) -> None:
        """Return when an event arrives or the time is up, and read the events."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        if poll.poll(timeout_ns / NS_PER_MS):
            os.read(self.fd, ffi.sizeof("struct qgpu_event") * 256)

    def close(self) -> None:
        """Close it: a plan that was installed through it ends."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def problem_of(info: Any) -> str:
    """Return why a module that answers ``info`` enforces nothing; empty if it enforces."""
    return _STATES.get(info.state, "").format(driver=text_of(info.driver))


def missing_for_limits(info: Any) -> str:
    """Return why a module that answers ``info`` refuses limits now; empty if it grants them."""
    return next((text for bit, text in _MISSING.items() if info.missing & bit), "")


def card_of(device: Device, number: int) -> Card:
    """Ask for a card. Raises OSError."""
    gpu = device.call("GPU", gpu=number)
    return Card(number, f"{gpu.domain:08x}:{gpu.bus:02x}:{gpu.slot:02x}.{gpu.function:x}", gpu.memory)


def stalled_of(device: Device, info: Any) -> list[str]:
    """Return the PCI addresses of the cards on which, as ``info`` says, the driver does not do what it is asked."""
    return [card_of(device, number).pci for number in range(info.nr_gpus) if info.stalled >> number & 1]


def grant_of(device: Device, pod: int, card: Card) -> Grant | None:
    """Ask for a pod's grant on a card; None if it has none, or is gone."""
    try:
        grant = device.call("GRANT_GET", pod=pod, gpu=card.number)
    except FileNotFoundError:
        return None
    pod_class = PodClass.ONLINE if grant.pod_class == CLASSES[PodClass.ONLINE] else PodClass.OFFLINE
    return Grant(pod_class, grant.cores or None, grant.memory or None, grant.latency_target_ns or None)


def text_of(value: Any) -> str:
    """Return a char array of a struct as a string."""
    text = ffi.string(value)
    assert isinstance(text, bytes)
    return text.decode()

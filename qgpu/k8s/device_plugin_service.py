"""What the kubelet asks of a device plugin, for one extended resource: its units, and what to give a container."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import structlog

from qgpu.errors import QgpuError, RefusedError
from qgpu.k8s.device_units import unit_name
from qgpu.k8s.grpc_server import Handler
from qgpu.k8s.kubelet_api import DEVICE_PLUGIN, Service
from qgpu.k8s.resources import Resource
from qgpu.k8s.unit_allocator import UnitAllocator
from qgpu.k8s.unit_watch import UnitWatch

_log = structlog.get_logger("k8s.device-plugin")
_MESSAGES = DEVICE_PLUGIN.messages

VERSION = "v1beta1"
_HEALTHY, _UNHEALTHY = "Healthy", "Unhealthy"
_REPEAT_S = 60.0


class DevicePlugin:
    """The service of one resource."""

    def __init__(self, resource: Resource, allocator: UnitAllocator, units: UnitWatch) -> None:
        self._resource = resource
        self._allocator = allocator
        self._units = units

    @property
    def endpoint(self) -> str:
        """The name of its socket."""
        return f"qgpu-{self._resource.name.replace('/', '-')}.sock"

    @property
    def registration(self) -> Any:
        """Return the message by which the plugin registers with the kubelet."""
        return _MESSAGES.RegisterRequest(
            version=VERSION, endpoint=self.endpoint, resource_name=self._resource.name, options=self._options()
        )

    def services(self) -> list[tuple[Service, dict[str, Handler]]]:
        """Return the service with what handles its calls."""
        handlers: dict[str, Handler] = {
            "GetDevicePluginOptions": lambda _request, _context: self._options(),
            "ListAndWatch": self._list,
            "GetPreferredAllocation": self._prefer,
            "Allocate": self._allocate,
            "PreStartContainer": self._settle,
        }
        return [(DEVICE_PLUGIN.services["DevicePlugin"], handlers)]

    def _options(self) -> Any:
        # An init container and its pod's other containers may have the same units; each gets its grant when it starts.
        return _MESSAGES.DevicePluginOptions(get_preferred_allocation_available=True, pre_start_required=True)

    def _list(self, _request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """Yield all units at every change."""
        context.add_callback(self._units.wake)
        seen, last = -1, None
        while context.is_active() and not self._units.closed:
            seen = self._units.wait(seen, _REPEAT_S)
            found = self._units.of(self._resource)
            if found is None or found == last:
                continue
            last = found
            response = _MESSAGES.ListAndWatchResponse()
            for card, count, held, more in found:
                for number in range(count):
                    health = _HEALTHY if number in held or more > 0 else _UNHEALTHY
                    more -= number not in held
                    response.devices.add(ID=unit_name(card, number), health=health)
            yield response

    def _prefer(self, request: Any, _context: grpc.ServicerContext) -> Any:
        response = _MESSAGES.PreferredAllocationResponse()
        for each in request.container_requests:
            chosen = self._allocator.prefer(
                self._resource, each.available_deviceIDs, each.must_include_deviceIDs, each.allocation_size
            )
            response.container_responses.add(deviceIDs=chosen)
        return response

    def _settle(self, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            self._allocator.settle(self._resource, request.devices_ids)
        except QgpuError as error:
            _log.warning("container not ready to start", resource=self._resource.name, error=str(error))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{self._resource.name}: {error}")
        self._units.poll()
        return _MESSAGES.PreStartContainerResponse()

    def _allocate(self, request: Any, context: grpc.ServicerContext) -> Any:
        response = _MESSAGES.AllocateResponse()
        for each in request.container_requests:
            try:
                # Units of a pod that has just ended still count as healthy, so the kubelet can give them to a new pod.
                if conflict := self._units.conflict:
                    raise RefusedError(conflict)
                name = self._allocator.allocate(self._resource, each.devices_ids)
            except QgpuError as error:
                _log.warning("units not allocated", resource=self._resource.name, error=str(error))
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{self._resource.name}: {error}")
            # Some runtimes read the field, some the annotation. A runtime that reads both adds the device once.
            response.container_responses.add(
                cdi_devices=[_MESSAGES.CDIDevice(name=name)],
                annotations={f"cdi.k8s.io/qgpu.io_{name.partition('=')[2]}"[:_ANNOTATION_MAX]: name},
            )
        self._units.poll()
        return response


#: The longest annotation name: "cdi.k8s.io/" and 63 characters.
_ANNOTATION_MAX = 11 + 63

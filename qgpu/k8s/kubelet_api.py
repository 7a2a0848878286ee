"""The kubelet's plugin interfaces as protobuf messages and gRPC services, built when this module is imported.

The tables below give the fields that qgpu uses with their numbers, as the interfaces define them. Messages built at
run time work with every protobuf that the extra ``k8s`` allows, while generated code works with two major versions
only.
``tests/k8s/protos`` states the same interfaces as .proto files; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto


@dataclass(frozen=True, slots=True)
class _Spec:
    """A field's number and type: a scalar type, or the name of a message or enumeration of the same file."""

    number: int
    kind: int | str = _Field.TYPE_STRING
    label: int = _Field.LABEL_OPTIONAL
    #: The type of a map's values; its keys are strings. None for a field that is not a map.
    values: int | str | None = None
    #: Whether an absent value differs from an empty one.
    presence: bool = False


def _many(number: int, kind: int | str = _Field.TYPE_STRING) -> _Spec:
    return _Spec(number, kind, _Field.LABEL_REPEATED)


def _map(number: int, values: int | str = _Field.TYPE_STRING) -> _Spec:
    return _Spec(number, "", _Field.LABEL_REPEATED, values)


_BOOL, _INT32, _INT64 = _Field.TYPE_BOOL, _Field.TYPE_INT32, _Field.TYPE_INT64
#: Fields of a message by name. A bare number is the number of a string field.
_Message = Mapping[str, "_Spec | int"]


@dataclass(frozen=True, slots=True)
class Method:
    """One call of a service: its classes of messages, and whether the answer is a stream."""

    path: str
    request: Any
    response: Any
    streams: bool


@dataclass(frozen=True, slots=True)
class Service:
    """A gRPC service by its full name, and its calls by name."""

    name: str
    methods: Mapping[str, Method]


@dataclass(frozen=True, slots=True)
class Interface:
    """One version of an interface: its classes of messages and its services, by name."""

    messages: SimpleNamespace
    services: Mapping[str, Service]


def _interface(
    package: str,
    messages: Mapping[str, _Message],
    services: Mapping[str, Mapping[str, tuple[str, str]]],
    enums: Mapping[str, tuple[str, ...]] | None = None,
) -> Interface:
    """Build an interface. A call is its request and its response, which starts with ``stream `` for a stream."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, values in (enums or {}).items():
        made = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            made.value.add(name=value, number=number)
    for name, fields in messages.items():
        _add_message(file, name, fields, frozenset(enums or ()))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages
    }

    def method(service: str, name: str, request: str, response: str) -> Method:
        streams = response.startswith("stream ")
        path = f"/{package}.{service}/{name}"
        return Method(path, classes[request], classes[response.removeprefix("stream ")], streams)

    return Interface(
        SimpleNamespace(**classes),
        {
            service: Service(
                f"{package}.{service}", {name: method(service, name, *types) for name, types in calls.items()}
            )
            for service, calls in services.items()
        },
    )


def _add_message(file: descriptor_pb2.FileDescriptorProto, name: str, fields: _Message, enums: frozenset[str]) -> None:
    message = file.message_type.add(name=name)
    for field, given in fields.items():
        spec = _Spec(given) if isinstance(given, int) else given
        made = message.field.add(name=field, number=spec.number, label=_Field.Label.ValueType(spec.label))
        if spec.values is not None:
            entry = message.nested_type.add(name="".join(word.capitalize() for word in field.split("_")) + "Entry")
            entry.options.map_entry = True
            _set_type(
                entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL), file, _Field.TYPE_STRING, enums
            )
            _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), file, spec.values, enums)
            made.type, made.type_name = _Field.TYPE_MESSAGE, f".{file.package}.{name}.{entry.name}"
        else:
            _set_type(made, file, spec.kind, enums)
        if spec.presence:
            made.proto3_optional = True
            made.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field}")


def _set_type(field: Any, file: descriptor_pb2.FileDescriptorProto, kind: int | str, enums: frozenset[str]) -> None:
    if isinstance(kind, str):
        field.type = _Field.TYPE_ENUM if kind in enums else _Field.TYPE_MESSAGE
        field.type_name = f".{file.package}.{kind}"
    else:
        field.type = kind


#: How a plugin makes itself known, on a socket of its own in the kubelet's folder ``plugins_registry``.
REGISTRATION = _interface(
    "pluginregistration",
    {
        "PluginInfo": {"type": 1, "name": 2, "endpoint": 3, "supported_versions": _many(4)},
        "RegistrationStatus": {"plugin_registered": _Spec(1, _BOOL), "error": 2},
        "RegistrationStatusResponse": {},
        "InfoRequest": {},
    },
    {
        "Registration": {
            "GetInfo": ("InfoRequest", "PluginInfo"),
            "NotifyRegistrationStatus": ("RegistrationStatus", "RegistrationStatusResponse"),
        }
    },
)


def _dra(version: str, device: _Message) -> Interface:
    """Build one version of the interface of DRA drivers; versions differ in the message for a device."""
    return _interface(
        f"k8s.io.kubelet.pkg.apis.dra.{version}",
        {
            "NodePrepareResourcesRequest": {"claims": _many(1, "Claim")},
            "NodePrepareResourcesResponse": {"claims": _map(1, "NodePrepareResourceResponse")},
            "NodePrepareResourceResponse": {"devices": _many(1, "Device"), "error": 2},
            "Device": device,
            "NodeUnprepareResourcesRequest": {"claims": _many(1, "Claim")},
            "NodeUnprepareResourcesResponse": {"claims": _map(1, "NodeUnprepareResourceResponse")},
            "NodeUnprepareResourceResponse": {"error": 1},
            "Claim": {"namespace": 1, "uid": 2, "name": 3},
        },
        {
            "DRAPlugin": {
                "NodePrepareResources": ("NodePrepareResourcesRequest", "NodePrepareResourcesResponse"),
                "NodeUnprepareResources": ("NodeUnprepareResourcesRequest", "NodeUnprepareResourcesResponse"),
            }
        },
    )


_DEVICE: _Message = {"request_names": _many(1), "pool_name": 2, "device_name": 3, "cdi_device_ids": _many(4)}
#: Kubernetes 1.34 and newer.
DRA_V1 = _dra("v1", {**_DEVICE, "share_id": _Spec(5, presence=True)})
#: Kubernetes 1.32 and 1.33.
DRA_V1BETA1 = _dra("v1beta1", _DEVICE)

#: The health of devices, as the kubelet shows it in a pod's status.
DRA_HEALTH = _interface(
    "v1alpha1",
    {
        "NodeWatchResourcesRequest": {},
        "DeviceIdentifier": {"pool_name": 1, "device_name": 2},
        "DeviceHealth": {
            "device": _Spec(1, "DeviceIdentifier"),
            "health": _Spec(2, "HealthStatus"),
            "last_updated_time": _Spec(3, _INT64),
        },
        "NodeWatchResourcesResponse": {"devices": _many(1, "DeviceHealth")},
    },
    {
        "DRAResourceHealth": {
            "NodeWatchResources": ("NodeWatchResourcesRequest", "stream NodeWatchResourcesResponse"),
        }
    },
    {"HealthStatus": ("UNKNOWN", "HEALTHY", "UNHEALTHY")},
)

#: Extended resources: the kubelet's own registration service, and what a device plugin serves.
DEVICE_PLUGIN = _interface(
    "v1beta1",
    {
        "DevicePluginOptions": {
            "pre_start_required": _Spec(1, _BOOL),
            "get_preferred_allocation_available": _Spec(2, _BOOL),
        },
        "RegisterRequest": {
            "version": 1,
            "endpoint": 2,
            "resource_name": 3,
            "options": _Spec(4, "DevicePluginOptions"),
        },
        "Empty": {},
        "ListAndWatchResponse": {"devices": _many(1, "Device")},
        "Device": {"ID": 1, "health": 2},
        "PreStartContainerRequest": {"devices_ids": _many(1)},
        "PreStartContainerResponse": {},
        "PreferredAllocationRequest": {"container_requests": _many(1, "ContainerPreferredAllocationRequest")},
        "ContainerPreferredAllocationRequest": {
            "available_deviceIDs": _many(1),
            "must_include_deviceIDs": _many(2),
            "allocation_size": _Spec(3, _INT32),
        },
        "PreferredAllocationResponse": {"container_responses": _many(1, "ContainerPreferredAllocationResponse")},
        "ContainerPreferredAllocationResponse": {"deviceIDs": _many(1)},
        "AllocateRequest": {"container_requests": _many(1, "ContainerAllocateRequest")},
        "ContainerAllocateRequest": {"devices_ids": _many(1)},
        "CDIDevice": {"name": 1},
        "AllocateResponse": {"container_responses": _many(1, "ContainerAllocateResponse")},
        "ContainerAllocateResponse": {"annotations": _map(4), "cdi_devices": _many(5, "CDIDevice")},
    },
    {
        "Registration": {"Register": ("RegisterRequest", "Empty")},
        "DevicePlugin": {
            "GetDevicePluginOptions": ("Empty", "DevicePluginOptions"),
            "ListAndWatch": ("Empty", "stream ListAndWatchResponse"),
            "GetPreferredAllocation": ("PreferredAllocationRequest", "PreferredAllocationResponse"),
            "Allocate": ("AllocateRequest", "AllocateResponse"),
            "PreStartContainer": ("PreStartContainerRequest", "PreStartContainerResponse"),
        },
    },
)

#: What the kubelet tells about the devices of running containers.
POD_RESOURCES = _interface(
    "v1",
    {
        "ListPodResourcesRequest": {},
        "ListPodResourcesResponse": {"pod_resources": _many(1, "PodResources")},
        "PodResources": {"name": 1, "namespace": 2, "containers": _many(3, "ContainerResources")},
        "ContainerResources": {
            "name": 1,
            "devices": _many(2, "ContainerDevices"),
            "dynamic_resources": _many(5, "DynamicResource"),
        },
        "ContainerDevices": {"resource_name": 1, "device_ids": _many(2)},
        "DynamicResource": {"claim_name": 2, "claim_namespace": 3},
    },
    {"PodResourcesLister": {"List": ("ListPodResourcesRequest", "ListPodResourcesResponse")}},
)

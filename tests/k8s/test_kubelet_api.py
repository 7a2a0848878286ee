"""The messages and services that ``qgpu.k8s`` builds are those of the .proto files, compiled by protoc."""

from __future__ import annotations

from typing import Any

import pytest

from qgpu.k8s import kubelet_api
from tests.k8s.wire import MESSAGES, NAMES

BUILT = {
    "registration": kubelet_api.REGISTRATION,
    "dra_v1": kubelet_api.DRA_V1,
    "dra_v1beta1": kubelet_api.DRA_V1BETA1,
    "dra_health": kubelet_api.DRA_HEALTH,
    "device_plugin": kubelet_api.DEVICE_PLUGIN,
    "pod_resources": kubelet_api.POD_RESOURCES,
}


def fields(message: Any) -> set[tuple[object, ...]]:
    """What a message looks like on the wire."""
    return {
        (
            field.name,
            field.number,
            field.type,
            field.is_repeated,
            field.has_presence,
            field.message_type.full_name if field.message_type is not None else None,
            field.enum_type.full_name if field.enum_type is not None else None,
        )
        for field in message.fields
    }


@pytest.mark.parametrize("name", NAMES)
def test_built_messages_have_the_fields_of_the_protos(name: str) -> None:
    compiled = MESSAGES[name].DESCRIPTOR.message_types_by_name

    assert set(compiled) == set(vars(BUILT[name].messages))
    for message, descriptor in compiled.items():
        built = getattr(BUILT[name].messages, message).DESCRIPTOR
        assert built.full_name == descriptor.full_name
        assert fields(built) == fields(descriptor)
        for nested, entry in descriptor.nested_types_by_name.items():
            assert fields(built.nested_types_by_name[nested]) == fields(entry)


@pytest.mark.parametrize("name", NAMES)
def test_built_services_have_the_calls_of_the_protos(name: str) -> None:
    def calls(service: Any) -> set[tuple[object, ...]]:
        return {
            (
                f"/{service.full_name}/{each.name}",
                each.input_type.full_name,
                each.output_type.full_name,
                each.server_streaming,
            )
            for each in service.methods
        }

    compiled = MESSAGES[name].DESCRIPTOR.services_by_name
    built = BUILT[name].services

    assert {f"{each.full_name}" for each in compiled.values()} == {each.name for each in built.values()}
    for service, descriptor in compiled.items():
        assert calls(descriptor) == {
            (each.path, each.request.DESCRIPTOR.full_name, each.response.DESCRIPTOR.full_name, each.streams)
            for each in built[service].methods.values()
        }


@pytest.mark.parametrize("name", NAMES)
def test_enumerations_have_the_values_of_the_protos(name: str) -> None:
    for enum, descriptor in MESSAGES[name].DESCRIPTOR.enum_types_by_name.items():
        (built,) = {
            field.enum_type
            for message in vars(BUILT[name].messages).values()
            for field in message.DESCRIPTOR.fields
            if field.enum_type is not None and field.enum_type.name == enum
        }
        assert built.values_by_name.keys() == descriptor.values_by_name.keys()
        assert {each: value.number for each, value in built.values_by_name.items()} == {
            each: value.number for each, value in descriptor.values_by_name.items()
        }

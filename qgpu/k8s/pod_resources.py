"""Reads from the kubelet what this node's containers hold: claims, and units of extended resources."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qgpu.k8s import grpc_server
from qgpu.k8s.kubelet_api import POD_RESOURCES

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Holding:
    """The units of an extended resource that a container holds."""

    namespace: str
    pod: str
    container: str
    resource: str
    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PodResources:
    """All that containers hold, at one moment."""

    #: Namespaces and names of claims.
    claims: frozenset[tuple[str, str]]
    units: tuple[Holding, ...]


def read(socket: Path) -> PodResources:
    """Ask the kubelet. Raises DaemonUnreachableError."""
    method = POD_RESOURCES.services["PodResourcesLister"].methods["List"]
    answer = grpc_server.call(socket, method, POD_RESOURCES.messages.ListPodResourcesRequest(), _TIMEOUT_S)
    claims: set[tuple[str, str]] = set()
    units: list[Holding] = []
    for pod in answer.pod_resources:
        for container in pod.containers:
            claims.update((each.claim_namespace, each.claim_name) for each in container.dynamic_resources)
            units.extend(
                Holding(pod.namespace, pod.name, container.name, each.resource_name, tuple(each.device_ids))
                for each in container.devices
            )
    return PodResources(frozenset(claims), tuple(units))

"""What a ResourceClaim asks of this node: its allocation becomes the content of a prepared grant.

Pure. Limits come from ``consumedCapacity``, never from the claim's request: the scheduler rounds requests up, and
subtracts the rounded amount from the card.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lightkube.models.resource_v1 import DeviceRequestAllocationResult
from lightkube.resources.resource_v1 import ResourceClaim

from qgpu.errors import InvalidValueError, RefusedError
from qgpu.k8s import parameters, quantities
from qgpu.k8s.names import DRIVER, card_uuid
from qgpu.k8s.qgpud import Card
from qgpu.model import Grant, PodClass
from qgpu.model.member_limits import MemberLimits
from qgpu.model.prepared_grant import PreparedDevice, PreparedGrant

#: The capacities of a device that a grant is made of.
MEMORY, CORES = "memory", "cores"


def read(claim: ResourceClaim, uid: str, node: str) -> PreparedGrant:
    """Return what a claim allocates on this node. Raises InvalidValueError or RefusedError.

    ``uid`` is the UID of the claim that the kubelet means. Another claim of the same name may have replaced it.
    """
    about = label(claim)
    if claim.metadata is None or claim.metadata.uid != uid:
        raise RefusedError(f"{about}: it has been replaced by another of that name; waiting for the pod to follow")
    results = results_here(claim, node)
    if not results:
        raise RefusedError(f"{about}: it has no device of {DRIVER} on node {node}")
    try:
        found = [_device(claim, result) for result in results]
    except InvalidValueError as error:
        raise InvalidValueError(f"{about}: {error}") from error
    devices = tuple(device for device, _ in found)
    part = next((part for _, part in found if part is not None), None)
    namespace, name = claim.metadata.namespace or "", claim.metadata.name or ""
    return PreparedGrant(uid, namespace, name, consumers(claim), devices, part)


@dataclass(frozen=True, slots=True)
class AskedPolicy:
    """A policy that one device of a claim asks for."""

    request: str
    gpu: str
    pod_class: PodClass
    policy: str


def policies(claim: ResourceClaim, node: str) -> list[AskedPolicy]:
    """Return the policies that a claim asks for on this node; call ``read`` first. Raises InvalidValueError."""
    found = []
    for result in results_here(claim, node):
        asked = parameters.merge(_configurations(claim, result.request))
        if asked.policy is not None:
            found.append(AskedPolicy(result.request, card_uuid(result.device) or "", asked.pod_class, asked.policy))
    return found


def check_policies(about: str, asked: Iterable[AskedPolicy], cards: Iterable[Card]) -> None:
    """Raise RefusedError if a card has another policy for pods of the class; its text begins with ``about``."""
    known = {card.uuid: card for card in cards}
    for each in asked:
        if (card := known.get(each.gpu)) is None:
            continue  # qgpud refuses a grant on a card that it does not have
        online = each.pod_class is PodClass.ONLINE
        has = card.online_policy if online else card.policy
        if has != each.policy:
            attribute, option = ("onlinePolicy", "--online-policy ") if online else ("policy", "")
            raise RefusedError(
                f"{about}: request {each.request}: pGPU {card.index} has {attribute} {has}, and the claim asks for "
                f"{each.policy}; select cards by attribute {attribute}, or change this one's: "
                f"qgpuctl gpu policy set {card.index} {option}{each.policy}"
            )


def label(claim: ResourceClaim) -> str:
    """Return how messages name a claim."""
    metadata = claim.metadata
    return f"claim {metadata.namespace}/{metadata.name}" if metadata is not None else "claim"


def results_here(claim: ResourceClaim, node: str) -> Sequence[DeviceRequestAllocationResult]:
    """Return the devices of this node that a claim allocates; none if it is not allocated."""
    return [each for each in _results(claim) if each.pool == node]


def pool_of(claim: ResourceClaim, cards: Collection[str]) -> str:
    """Return the pool from which a claim allocates one of these cards, by UUID; "" if it allocates none of them."""
    return next((each.pool for each in _results(claim) if card_uuid(each.device) in cards), "")


def consumers(claim: ResourceClaim) -> tuple[str, ...]:
    """Return the UIDs of the pods that may use a claim. Raises RefusedError if others than pods may."""
    reserved = (claim.status.reservedFor if claim.status is not None else None) or ()
    for each in reserved:
        if each.resource != "pods" or each.apiGroup:
            raise RefusedError(
                f"{label(claim)}: it is reserved for {each.resource} {each.name}; qgpu serves claims that are "
                "reserved for pods"
            )
    return tuple(each.uid for each in reserved)


def base_request(request: str) -> str:
    """Return a request's name without its alternative: ``gpu`` for ``gpu`` and for ``gpu/small``."""
    return request.partition("/")[0]


def may_be_shared(claim: ResourceClaim) -> bool:
    """Tell whether more pods may use a claim later. A claim that was made for one pod serves only that pod."""
    owners = (claim.metadata.ownerReferences if claim.metadata is not None else None) or ()
    return not any(owner.kind == "Pod" and owner.controller for owner in owners)


def _results(claim: ResourceClaim) -> Sequence[DeviceRequestAllocationResult]:
    """Return the devices of our driver that a claim allocates, on any node."""
    allocation = claim.status.allocation if claim.status is not None else None
    if allocation is None or allocation.devices is None:
        return ()
    return [each for each in allocation.devices.results or () if each.driver == DRIVER]


def _device(claim: ResourceClaim, result: DeviceRequestAllocationResult) -> tuple[PreparedDevice, MemberLimits | None]:
    """Return one allocated device, and with sharing MPS the limits of each member. Raises InvalidValueError."""
    about = f"request {result.request}"
    if result.adminAccess:
        raise InvalidValueError(f"{about}: qgpu gives no admin access; a monitor reads qgpud's metrics")
    uuid = card_uuid(result.device)
    if uuid is None:
        raise InvalidValueError(f"{about}: device {result.device} is none of qgpu's")
    consumed = result.consumedCapacity or {}
    if MEMORY not in consumed or CORES not in consumed:
        raise InvalidValueError(
            f"{about}: the allocation states no consumed capacity, so it may be granted twice; the cluster, and the "
            "scheduler that chose the card, need feature gate DRAConsumableCapacity, or qgpu's device plugin instead"
        )
    try:
        memory, cores = quantities.whole(consumed[MEMORY]), quantities.whole(consumed[CORES])
        found = parameters.merge(_configurations(claim, result.request))
        grant = Grant(found.pod_class, cores or None, memory, found.latency_target_ns)
    except InvalidValueError as error:
        raise InvalidValueError(f"{about}: {error}") from error
    return PreparedDevice(result.request, result.shareID or "", uuid, grant), found.part


def _configurations(claim: ResourceClaim, request: str) -> list[tuple[str, Any]]:
    """Return the parameters for our driver that apply to a request, by source.

    A request with alternatives is named ``request/alternative`` in results; configurations may name either.
    """
    assert claim.status is not None
    assert claim.status.allocation is not None
    assert claim.status.allocation.devices is not None
    named, devices = {request, base_request(request)}, claim.status.allocation.devices
    ours = [
        (each.source, each.opaque.parameters, {*(each.requests or ())})
        for each in devices.config or ()
        if each.opaque is not None and each.opaque.driver == DRIVER
    ]
    unnamed = any(source == "FromClass" and not requests for source, _, requests in ours)
    if unnamed and len(_device_classes(claim, devices.results or ())) > 1:
        raise InvalidValueError(
            "the scheduler does not say which request has which DeviceClass's parameters (1.34.0 and 1.34.1); "
            "make a claim for each DeviceClass, or update the scheduler"
        )
    return [(source, found) for source, found, requests in ours if not requests or named & requests]


def _device_classes(claim: ResourceClaim, results: Iterable[DeviceRequestAllocationResult]) -> set[str]:
    """Return the DeviceClasses of the requests for which devices of ours are allocated."""
    allocated = {result.request for result in results if result.driver == DRIVER}
    found = set()
    for request in (claim.spec.devices.requests or ()) if claim.spec and claim.spec.devices else ():
        if request.exactly is not None and request.name in allocated:
            found.add(request.exactly.deviceClassName)
        for alternative in request.firstAvailable or ():
            if f"{request.name}/{alternative.name}" in allocated:
                found.add(alternative.deviceClassName)
    return found

"""The ResourceSlice of a node: its cards as devices that many claims share.

Pure: what qgpud says about the cards, and the node's annotation about draining them, becomes the slice that the API
server should hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lightkube.models.meta_v1 import ObjectMeta, OwnerReference
from lightkube.models.resource_v1 import Device, DeviceTaint, ResourcePool, ResourceSliceSpec
from lightkube.resources.resource_v1 import ResourceSlice

from qgpu.errors import InvalidValueError
from qgpu.k8s import quantities
from qgpu.k8s.claims import CORES, MEMORY
from qgpu.k8s.names import DRAIN_ANNOTATION, DRIVER, device_name
from qgpu.k8s.qgpud import Card, Node
from qgpu.policies.registry import POLICIES

#: The capacity that bounds how many claims share a card.
SHARES = "shares"

_TEXT_MAX = 64  # the longest value of an attribute in resource.k8s.io/v1


class Effect(StrEnum):
    """What a taint does to pods without a toleration."""

    NO_SCHEDULE = "NoSchedule"
    NO_EXECUTE = "NoExecute"


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """How cards are divided. Sizes are bytes."""

    #: Bytes of each card that no claim gets.
    reserve: int
    #: The scheduler rounds memory requests up to a multiple of this.
    memory_step: int
    #: What a request without a memory size gets.
    memory_default: int
    #: The most claims on a card.
    shares: int


def drained(annotation: str) -> dict[str, Effect]:
    """Read the node's annotation ``qgpu.io/drain``. Raises InvalidValueError.

    It lists cards by UUID, or ``all``, separated by commas. A card gets no new pods; with ``:NoExecute`` behind it, the
    pods that it has are evicted too.
    """
    found: dict[str, Effect] = {}
    for word in annotation.replace(",", " ").split():
        card, _, effect = word.partition(":")
        try:
            found[card] = Effect(effect or Effect.NO_SCHEDULE)
        except ValueError:
            raise InvalidValueError(
                f"annotation {DRAIN_ANNOTATION}: {word!r}: write a card's UUID or all, and {' or '.join(Effect)} "
                "behind a colon"
            ) from None
    return found


@dataclass(frozen=True, slots=True)
class Condition:
    """Problems beyond the cards themselves; each text is "" if there is none."""

    #: Why qgpud's last answer is out of date.
    daemon: str = ""
    #: Another driver that advertises the same cards.
    conflict: str = ""
    drain: Mapping[str, Effect] | None = None


def spec(node: Node, name: str, sharing: SharingOptions, condition: Condition, generation: int) -> ResourceSliceSpec:
    """Return the content of the slice of a node of that name."""
    return ResourceSliceSpec(
        driver=DRIVER,
        nodeName=name,
        pool=ResourcePool(name=name, generation=generation, resourceSliceCount=1),
        devices=[
            _device(node, card, known, sharing, condition)
            for card in node.cards
            if (known := device_name(card.uuid)) is not None
        ],
    )


def slice_object(name: str, owner: OwnerReference, content: ResourceSliceSpec) -> ResourceSlice:
    """Return a slice that is deleted with its node."""
    return ResourceSlice(metadata=ObjectMeta(name=name, ownerReferences=[owner]), spec=content)


def same(one: ResourceSliceSpec, other: ResourceSliceSpec) -> bool:
    """Tell whether two slices say the same, apart from their generation and how the server writes values."""
    return bool(_plain(one) == _plain(other))


def shares_cards(kept: ResourceSliceSpec) -> bool:
    """Tell whether the API server kept the fields that let claims share devices; it needs the feature gate."""
    return all(
        device.allowMultipleAllocations
        and all("requestPolicy" in capacity for capacity in (device.capacity or {}).values())
        for device in kept.devices or ()
    )


def free_capacity(card: Card, sharing: SharingOptions) -> tuple[int, int]:
    """Return what claims may take of a card: bytes of memory, and per cent of its time."""
    memory = card.memory - sharing.reserve - card.held_memory
    return max(memory - memory % sharing.memory_step, 0), max(100 - card.held_cores, 0)


def _device(node: Node, card: Card, name: str, sharing: SharingOptions, condition: Condition) -> Device:
    memory, cores = free_capacity(card, sharing)
    # A claim consumes at least this much. So under fixed-share every pod has a quota.
    least_cores = 1 if POLICIES[card.policy].needs_quota or POLICIES[card.online_policy].needs_quota else 0
    full = memory < sharing.memory_step or cores < least_cores
    memory, cores = max(memory, sharing.memory_step), max(cores, least_cores)
    attributes = {
        "uuid": {"string": card.uuid},
        "productName": {"string": card.name[:_TEXT_MAX]},
        "policy": {"string": card.policy},
        "onlinePolicy": {"string": card.online_policy},
        "plane": {"string": node.plane},
    }
    if (version := _semantic(node.driver)) is not None:
        attributes["driverVersion"] = {"version": version}
    return Device(
        name=name,
        allowMultipleAllocations=True,
        attributes=attributes,
        capacity={
            MEMORY: _capacity(
                quantities.from_bytes(memory),
                quantities.from_bytes(min(sharing.memory_default, memory)),
                quantities.from_bytes(sharing.memory_step),
                quantities.from_bytes(sharing.memory_step),
            ),
            CORES: _capacity(str(cores), str(least_cores), str(least_cores), "1"),
            SHARES: _capacity(str(sharing.shares), "1", "1", "1", most="1"),
        },
        taints=_taints(card, full, condition) or None,
    )


def _capacity(value: str, default: str, least: str, step: str, most: str | None = None) -> dict[str, Any]:
    bounds = {"min": least, "step": step} | ({"max": most} if most is not None else {})
    return {"value": value, "requestPolicy": {"default": default, "validRange": bounds}}


def _taints(card: Card, full: bool, condition: Condition) -> list[DeviceTaint]:
    drain = condition.drain or {}
    effects = {
        "problem": Effect.NO_SCHEDULE if card.problem or condition.daemon else None,
        "conflict": Effect.NO_SCHEDULE if condition.conflict else None,
        "full": Effect.NO_SCHEDULE if full else None,
        "drain": drain.get(card.uuid, drain.get("all")),
    }
    return [
        DeviceTaint(key=f"{DRIVER}/{key}", effect=effect.value) for key, effect in effects.items() if effect is not None
    ]


def _semantic(version: str) -> str | None:
    """Return a driver's version as Semantic Versioning writes it: 580.105.8 for 580.105.08; None if invalid."""
    numbers = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return ".".join(str(int(number or 0)) for number in numbers.groups()) if numbers else None


def _plain(content: ResourceSliceSpec) -> Any:
    """Return a slice's content in a form that does not depend on how the server writes it."""
    return (
        content.driver,
        content.nodeName,
        content.pool.name,
        content.pool.resourceSliceCount,
        [_plain_device(device) for device in content.devices or ()],
    )


def _plain_device(device: Device) -> Any:
    return (
        device.name,
        bool(device.allowMultipleAllocations),
        dict(device.attributes or {}),
        {name: _plain_capacity(capacity) for name, capacity in (device.capacity or {}).items()},
        sorted((taint.key, taint.effect) for taint in device.taints or ()),
    )


def _plain_capacity(capacity: Mapping[str, Any]) -> Sequence[Any]:
    policy = capacity.get("requestPolicy") or {}
    bounds = policy.get("validRange") or {}
    texts = capacity["value"], policy.get("default"), *(bounds.get(key) for key in ("min", "max", "step"))
    return [None if text is None else quantities.parse(text) for text in texts]

"""An RM object as the guardian knows it, and the facts that record its life."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from qgpu.nvidia import abi

Fact = dict[str, Any]
#: Client and handle.
Key = tuple[int, int]
#: A device's instance while its card is unknown.
NO_INSTANCE = 0xFFFFFFFF


class Userd(NamedTuple):
    """A channel's USERD: the handle of its memory, the offset in it, and how many entries the channel's GPFIFO has."""

    memory: int
    offset: int
    ring_size: int


@dataclass(slots=True)
class RmObject:
    """One RM object. ``detail`` is the device instance, the engine type, or bytes, by class."""

    client: int
    handle: int
    parent: int
    rm_class: int
    detail: int = 0
    confirmed: bool = False
    #: Channels: the id that context-switch records carry, 0 while unknown.
    context: int = 0
    #: TSGs: the timeslice that their process requested, which applies when no plan sets another.
    requested_us: int = abi.RM_DEFAULT_TIMESLICE_US
    #: TSGs: another handle of the same TSG, from which this one was made.
    same_as: Key | None = None
    #: TSGs, context shares and channels: the handles of what they use, with each of which RM may free them.
    uses: tuple[int, ...] = ()
    #: TSGs and channels: the handles of memory that the card writes for them, and of what lies above it.
    written: tuple[int, ...] = ()
    #: Memory that another pod or program exported: the card that it counts to.
    card: int | None = None
    #: Channels: None while unknown, or where RM has the memory to itself.
    userd: Userd | None = None

    @property
    def key(self) -> Key:
        """The object's name on this machine: client handles are unique while they exist."""
        return self.client, self.handle


def gone_fact(key: Key) -> Fact:
    """Return the fact that an object, with all below it, is gone."""
    return {"fact": "gone", "client": key[0], "handle": key[1]}


def confirm_fact(key: Key, context: int = 0) -> Fact:
    """Return the fact that RM has made an object."""
    return {"fact": "confirm", "client": key[0], "handle": key[1], "context": context}


def object_fact(rm: RmObject) -> Fact:
    """Return the fact that describes an object."""
    fact: Fact = {"fact": "object", "client": rm.client, "handle": rm.handle, "parent": rm.parent}
    fact |= {"class": rm.rm_class, "detail": rm.detail}
    lists = {"same_as": rm.same_as, "uses": rm.uses, "written": rm.written, "userd": rm.userd}
    fact |= {name: list(handles) for name, handles in lists.items() if handles}
    return fact | ({"card": rm.card} if rm.card is not None else {})

"""RM objects by what is above them, and what follows from that: card, TSG, kind of channel."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from qgpu.guardian.accounting.rm_object import NO_INSTANCE, Key, RmObject
from qgpu.guardian.accounting.sets_by_key import HandlesByClient, SetsByKey
from qgpu.nvidia import abi

#: Levels of objects below an RM client: device, TSG or subdevice, channel, objects on the channel; and some to spare.
_DEEPEST = 8
#: Objects above a channel, and what it and they use: about a dozen; and some to spare.
_MOST_ABOVE = 64
#: Classes whose objects have a bound of their own, or are memory.
OWN_BOUNDS = abi.GPFIFO_CLASSES | {
    *(abi.NV01_DEVICE_0, abi.KEPLER_CHANNEL_GROUP_A, abi.NV01_MEMORY_LOCAL_USER, abi.NV_MEMORY_FABRIC),
}


@dataclass(slots=True)
class ObjectTree:
    """All clients' objects."""

    objects: dict[Key, RmObject] = field(default_factory=dict)
    #: Their handles by client, and by what they are below.
    handles: HandlesByClient = field(default_factory=HandlesByClient, compare=False)
    _children: SetsByKey[Key, int] = field(default_factory=SetsByKey)
    #: By object, the handles of the objects that use it.
    _users: SetsByKey[Key, int] = field(default_factory=SetsByKey, compare=False)
    #: By memory and what lies above it, the handles of the TSGs and channels for which the card writes it.
    _writers: SetsByKey[Key, int] = field(default_factory=SetsByKey, compare=False)
    #: By device instance, the types of the copy engines on the compute engine's runlist (GRCEs).
    grces: Mapping[int | None, Collection[int]] = field(default_factory=dict, compare=False)
    devices: HandlesByClient = field(default_factory=HandlesByClient, compare=False)
    #: Devices on a card that is unknown so far: any of their pod's cards may have their address space.
    unplaced_devices: HandlesByClient = field(default_factory=HandlesByClient, compare=False)
    #: Subdevices by device.
    subdevices: SetsByKey[Key, int] = field(default_factory=SetsByKey, compare=False)
    #: By handle of a TSG, all its handles in the order in which they were made; the first one stands for the TSG. A
    #: client of an MPS server duplicates the server's TSG, and makes its channels below the new handle.
    _tsgs: dict[Key, list[Key]] = field(default_factory=dict, compare=False)
    #: All handles of TSGs, with channels that stand alone, and those of channels.
    tsg_handles: HandlesByClient = field(default_factory=HandlesByClient, compare=False)
    channel_handles: HandlesByClient = field(default_factory=HandlesByClient, compare=False)
    #: Those of other objects, such as address spaces, which are bounded with those that no table keeps; and by class.
    other_handles: HandlesByClient = field(default_factory=HandlesByClient, compare=False)
    _others: dict[int, HandlesByClient] = field(default_factory=dict, compare=False)

    def _add(self, rm: RmObject, pod: str) -> None:
        """Add a pod's object, or put it in place of one that is forgotten."""
        self.objects[rm.key] = rm
        self.handles.add(pod, *rm.key)
        self._children.add((rm.client, rm.parent), rm.handle)
        for used in rm.uses:
            self._users.add((rm.client, used), rm.handle)
        for written in rm.written:
            self._writers.add((rm.client, written), rm.handle)
        if rm.rm_class == abi.NV01_DEVICE_0:
            self.devices.add(pod, *rm.key)
            if rm.detail == NO_INSTANCE:
                self.unplaced_devices.add(pod, *rm.key)
        if rm.rm_class == abi.NV20_SUBDEVICE_0:
            self.subdevices.add((rm.client, rm.parent), rm.handle)
        if self.is_scheduled(rm):
            self._join_tsg(rm.key, rm.same_as)
            self.tsg_handles.add(pod, *rm.key)
        if rm.rm_class in abi.GPFIFO_CLASSES:
            self.channel_handles.add(pod, *rm.key)
        if rm.rm_class not in OWN_BOUNDS:
            self.other_handles.add(pod, *rm.key)
            self._others.setdefault(rm.rm_class, HandlesByClient()).add(pod, *rm.key)

    def _unlink(self, rm: RmObject, pod: str) -> None:
        """Undo _add, except that the object and its handle stay."""
        self._children.discard((rm.client, rm.parent), rm.handle)
        for used in rm.uses:
            self._users.discard((rm.client, used), rm.handle)
        for written in rm.written:
            self._writers.discard((rm.client, written), rm.handle)
        self.subdevices.discard((rm.client, rm.parent), rm.handle)
        self._leave_tsg(rm.key)
        for kind in self._kinds_by_class(self.others(rm.rm_class)):
            kind.discard(pod, *rm.key)

    def _join_tsg(self, key: Key, same_as: Key | None = None) -> None:
        """Add a handle of the TSG that ``same_as`` names, or of a TSG of its own."""
        alike = self._tsgs.get(same_as, []) if same_as is not None else []
        alike.append(key)
        self._tsgs[key] = alike

    def _leave_tsg(self, key: Key) -> None:
        if (alike := self._tsgs.pop(key, None)) is not None:
            alike.remove(key)

    def _kinds_by_class(self, *others: HandlesByClient) -> tuple[HandlesByClient, ...]:
        """Return the kinds of handles that follow from objects' classes; of ``others``, all without one given."""
        kinds = self.devices, self.unplaced_devices, self.tsg_handles, self.channel_handles, self.other_handles
        return (*kinds, *(others or self._others.values()))

    def count_below(self, key: Key, most: int) -> int:
        """Return how many objects ``below`` yields, or a number above ``most`` if they are more."""
        return sum(1 for _ in islice(self.below(key), most + 1))

    def below(self, key: Key) -> Iterator[RmObject]:
        """Yield an object and everything below it, parents first; a client's handle stands for the client itself.

        It needs no lock: what comes or goes meanwhile may be listed or not.
        """
        whole_client = key[0] == key[1]
        if (rm := self.objects.get(key)) is not None and not whole_client:
            yield rm
        handles = self.handles.of(key[0]) if whole_client else self._children.of(key)
        for handle in list(handles):
            if not whole_client and (key[0], handle) in self._children:
                yield from self.below((key[0], handle))
            elif (rm := self.objects.get((key[0], handle))) is not None:
                yield rm

    def _goes_with(self, each: Key, key: Key) -> bool:
        """Tell whether RM frees an object with another, because it lies below it or uses it, or goes with what does."""
        reached, at = {each}, [each]
        while at:
            here = at.pop()
            if here == key:
                return True
            rm = self.objects.get(here)
            for handle in (rm.parent, *rm.uses) if rm is not None else ():
                above = here[0], handle
                if above not in reached and len(reached) < _MOST_ABOVE:
                    reached.add(above)
                    at.append(above)
        return False

    def writers_of(self, key: Key) -> list[Key]:
        """List the TSGs and channels for which the card writes memory that goes with an object, while they stay.

        It needs no lock.
        """
        client = key[0]
        if key not in self._writers and (client == key[1] or key not in self._children):
            return []
        handles = (*self.tsg_handles.of(client), *self.channel_handles.of(client))
        found = (self.objects.get((client, handle)) for handle in dict.fromkeys(handles))
        return [
            rm.key
            for rm in found
            if rm is not None
            and key not in self._upwards(rm.key)
            and any(key in self._upwards((client, handle)) for handle in rm.written)
        ]

    def _upwards(self, at: Key) -> Iterator[Key]:
        """Yield a key, and those above it up to the first of no object."""
        for _ in range(_DEEPEST):
            yield at
            if (rm := self.objects.get(at)) is None:
                return
            at = rm.client, rm.parent

    def others(self, rm_class: int) -> HandlesByClient:
        """Return the handles of the objects of a class, of those without a kind of their own; do not keep them."""
        return self._others.get(rm_class) or HandlesByClient()

    def _hangs_together(self, rm: RmObject) -> bool:
        """Tell whether an object is not its own ancestor: RM makes no such object, but a pod may ask for one."""
        above = [*self._upwards((rm.client, rm.parent))]
        return rm.handle != rm.client and rm.key not in above and above[-1] not in self.objects

    def instance_of(self, rm: RmObject) -> int | None:
        """Return the device instance that an object is on; None if no known device is above it."""
        at: RmObject | None = rm
        while at is not None:
            if at.rm_class == abi.NV01_DEVICE_0:
                return at.detail if at.detail != NO_INSTANCE else None
            at = self.objects.get((at.client, at.parent))
        return None

    def shared_as(self, rm: RmObject) -> str:
        """Return how a TSG's engine is shared: as "compute", also if it chose none, as "copies", or not at all."""
        if rm.detail == 0 or rm.detail in abi.GR_ENGINES or rm.detail in self.grces.get(self.instance_of(rm), ()):
            return "compute"
        return "copies" if rm.detail in abi.COPY_ENGINES else ""

    def is_compute(self, rm: RmObject) -> bool:
        """Tell whether an object is a TSG on the compute engine's runlist; one without a chosen engine counts, too."""
        return rm.rm_class == abi.KEPLER_CHANNEL_GROUP_A and self.shared_as(rm) == "compute"

    def is_copy(self, rm: RmObject) -> bool:
        """Tell whether an object is a TSG of a copy engine with a runlist of its own, or a lone channel there."""
        return self.is_scheduled(rm) and self.shared_as(rm) == "copies"

    def is_scheduled(self, rm: RmObject) -> bool:
        """Tell whether an object is a TSG, or a channel that stands alone: what gets turns on a runlist."""
        return rm.rm_class == abi.KEPLER_CHANNEL_GROUP_A or self.stands_alone(rm)

    def stands_alone(self, rm: RmObject) -> bool:
        """Tell whether an object is a channel below a device: RM puts it into a TSG that has no handle."""
        parent = self.objects.get((rm.client, rm.parent)) if rm.rm_class in abi.GPFIFO_CLASSES else None
        return parent is not None and parent.rm_class == abi.NV01_DEVICE_0

    def scheduled_with(self, channel: RmObject) -> RmObject | None:
        """Return the TSG of a channel, or a channel itself that stands alone."""
        return channel if self.stands_alone(channel) else self.objects.get((channel.client, channel.parent))

    def is_shared_alike(self, channel: RmObject, engine: int) -> bool:
        """Tell whether an engine has the gate and the timeslice of a channel's TSG.

        RM puts a TSG on the runlist of what its first channel is bound to, or has an object for
        (kfifoRunlistSetId_GM107). Before Blackwell, the TSG's own engine decides only if there is neither.
        """
        if (tsg := self.scheduled_with(channel)) is None:
            return False
        own, other = self.shared_as(tsg), self.shared_as(replace(tsg, detail=engine))
        unknown = not self.grces.get(self.instance_of(tsg))  # the card does not say where its copies run
        return own == other or (unknown and (own, other) == ("compute", "copies"))

    def tsg_above(self, rm: RmObject) -> RmObject | None:
        """Return the TSG of an object that lies below a channel; None if the channel has none."""
        channel = self.objects.get((rm.client, rm.parent))
        return self.objects.get((rm.client, channel.parent)) if channel is not None else None

    def is_on_fabric(self, key: Key) -> bool:
        """Tell whether a handle of memory is an object of the NVLink fabric, which keeps that memory."""
        rm = self.objects.get(key)
        return rm is not None and rm.rm_class == abi.NV_MEMORY_FABRIC

    def instances_of(self, client: int) -> set[int]:
        """Return the device instances of the cards on which a client has devices."""
        devices = [self.objects[client, handle] for handle in self.devices.of(client)]
        return {instance for rm in devices if (instance := self.instance_of(rm)) is not None}

    def tsgs_on(self, instance: int) -> list[RmObject]:
        """List the confirmed TSGs of one card, and the channels there that stand alone."""
        tsgs = [self.objects[key] for key, alike in self._tsgs.items() if key == alike[0]]
        return [rm for rm in tsgs if rm.confirmed and self.instance_of(rm) == instance]

    def compute_tsgs(self, instance: int) -> list[RmObject]:
        """List the confirmed TSGs of the compute engine of one card."""
        return [*filter(self.is_compute, self.tsgs_on(instance))]

    def copy_tsgs(self, instance: int) -> list[RmObject]:
        """List the confirmed TSGs of the copy engines of one card, and the channels there that stand alone."""
        return [*filter(self.is_copy, self.tsgs_on(instance))]

    def channels(self, tsg: RmObject) -> list[RmObject]:
        """List the confirmed channels of a TSG, under all its handles; a channel that stands alone is its own."""
        if tsg.rm_class in abi.GPFIFO_CLASSES:
            return [tsg] if tsg.confirmed else []
        below = (
            self.objects.get((key[0], handle))
            for key in self._tsgs.get(tsg.key, ())
            for handle in self._children.of(key)
        )
        return [rm for rm in below if rm is not None and rm.confirmed and rm.rm_class in abi.GPFIFO_CLASSES]

    def subdevice_of(self, device: Key) -> int | None:
        """Return the handle of a subdevice of a device; None without one."""
        return next(iter(self.subdevices.of(device)), None)

    def channels_freed_with(self, key: Key) -> list[Key]:
        """List the channels that RM frees with an object or a client. It needs no lock."""
        handles = list(self.channel_handles.of(key[0]))
        known = key in self._children or key in self._users or key[1] in handles
        if key[0] != key[1] and not known:
            return []
        channels = [(key[0], handle) for handle in handles]
        return [each for each in channels if key[0] == key[1] or self._goes_with(each, key)]

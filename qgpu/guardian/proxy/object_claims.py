"""Claims of RM objects: charged before RM is asked, then confirmed or removed; and what RM frees."""

from __future__ import annotations

from collections.abc import Collection

from qgpu.guardian.accounting.rm_object import Key, RmObject, confirm_fact, gone_fact, object_fact
from qgpu.guardian.gpu.reconciler import BATCH
from qgpu.guardian.proxy.client_registry import ClientRegistry
from qgpu.guardian.proxy.shared_table import SharedPart, SharedTable
from qgpu.guardian.rules.classes import CHARGED, DEBUGGER, GATED
from qgpu.nvidia import abi

#: How many objects a pod may have: freeing a client walks all of them.
_MOST_OBJECTS = 100_000
TOO_MANY = "too many objects of RM"
#: Classes of objects with which RM may free channels.
_WITH_CHANNELS = GATED | {abi.NV01_DEVICE_0, abi.NV20_SUBDEVICE_0, abi.FERMI_VASPACE_A}
#: This many devices of a pod are allowed even when their memory does not fit.
_FREE_DEVICES = 16


class ObjectClaims(SharedPart):
    """Records what pods' calls make and free."""

    def __init__(self, shared: SharedTable, clients: ClientRegistry) -> None:
        super().__init__(shared)
        self._clients = clients
        #: By pod, the claims that a dead guardian did not confirm.
        self._unsettled: dict[str, list[Key]] = self._kept_by_pod()

    def unconfirmed(self, rm: RmObject) -> None:
        """Record that a dead guardian did not confirm a claim."""
        self._unsettled.setdefault(self._table.pod_of(rm), []).append(rm.key)

    def settle(self, pod: str) -> None:
        """Ask RM about the claims of a pod that a dead guardian did not confirm, before the pod is served.

        A pod may hide the file through which RM tells of memory. Until that is found, it gets no more.
        """
        known = (self._table.objects.get(key) for key in self._unsettled.pop(pod, ()))
        left = [rm.key for rm in known if rm is not None and not rm.confirmed and not self._settle(rm)]
        if left:
            self._unsettled[pod] = left

    def _settle(self, rm: RmObject) -> bool:
        """Find out what became of a claim that a dead guardian left; False for memory of unknown size."""
        found = self._gpu_ops.find_object(rm)
        if (found is None and not self._gpu_ops.exists(rm.key)) or (found is not None and found[0] != rm.rm_class):
            self.cancel(rm.key)
            return True
        size = self._gpu_ops.size(rm) if rm.rm_class == abi.NV01_MEMORY_LOCAL_USER else None
        if size is None and rm.rm_class == abi.NV01_MEMORY_LOCAL_USER:
            return False
        self.confirm(rm.key, size)
        return True

    def claim(self, rm: RmObject, number: int | None = None) -> int:
        """Charge an object before RM makes it; return NV_OK, or the RM status of the refusal.

        ``number`` is the allocation that gets another handle. Call it without the lock.
        """
        entry = self._table.clients.get(rm.client)
        if entry is not None and entry.pod in self._unsettled and rm.rm_class in CHARGED:
            self.settle(entry.pod)
            if entry.pod in self._unsettled:
                return abi.NV_ERR_BUSY_RETRY
        status = self._claim(rm, number)
        if status == abi.NV_ERR_NO_MEMORY and entry is not None and self._clients.recheck(entry.pod):
            status = self._claim(rm, number)
        return status

    def _claim(self, rm: RmObject, number: int | None) -> int:
        with self._lock:
            if status := self.vacate(rm.key):
                return status
            entry = self._table.clients.get(rm.client)
            if entry is not None and (why := self._has_too_many(entry.pod, rm)):
                self._shared.refusals.count(entry.pod, why)
                return abi.NV_ERR_INSUFFICIENT_RESOURCES
            copied = rm.rm_class == abi.NV_MEMORY_FABRIC and rm.detail > 0
            charged = rm.rm_class in CHARGED or self._table.stands_alone(rm) or copied
            if charged and number is None:
                number = self._table.allocations.next_number()
            self._note(object_fact(rm) | ({"memory": number} if number is not None else {}))
            if rm.key not in self._table.objects:
                return abi.NV_ERR_INVALID_ARGUMENT
            memory = self._table.allocations.by_handle.get(rm.key)
            pod = self._table.pod_of(rm)
            more_devices = rm.rm_class == abi.NV01_DEVICE_0 and self._table.devices.counts[pod] > _FREE_DEVICES
            if more_devices and self._shared.quota.over_limit(pod, rm.detail):
                status = abi.NV_ERR_NO_MEMORY
            elif not charged:
                return abi.NV_OK
            elif memory is None:  # no known device above it, so no card to charge
                status = abi.NV_ERR_INVALID_STATE
            elif memory.instance not in self._shared.allowance(memory.pod).minors:
                status = abi.NV_ERR_INSUFFICIENT_PERMISSIONS
            elif self._shared.quota.over_limit(memory.pod, memory.instance):
                status = abi.NV_ERR_NO_MEMORY
            else:
                return abi.NV_OK
            self._note(gone_fact(rm.key))
            return status

    def _has_too_many(self, pod: str, rm: RmObject) -> str:
        """Return why a pod may have no other object of this kind, or nothing."""
        if self._table.handles.counts[pod] >= _MOST_OBJECTS or not self._shared.quota.may_record(pod):
            return TOO_MANY
        kinds = self._table.is_scheduled(rm), rm.rm_class in abi.GPFIFO_CLASSES, rm.rm_class == DEBUGGER
        return self._clients.has_too_many(pod, *map(int, kinds))

    def vacate(self, key: Key) -> int:
        """Forget what had a handle, if RM no longer has it, before RM gives it to another object.

        Return NV_OK, or the status with which the other object is refused. RM frees some objects with others that they
        do not lie below, such as channels with their address space.
        """
        with self._lock:
            if (there := self._table.objects.get(key)) is None:
                return abi.NV_OK
            if not there.confirmed or self._gpu_ops.exists(key):
                return abi.NV_ERR_INSERT_DUPLICATE_NAME
            return abi.NV_OK if self._clients.forget_vanished(key) else abi.NV_ERR_INSUFFICIENT_RESOURCES

    def replaced(self, rm: RmObject) -> None:
        """Forget an object whose handle names another one in RM by now."""
        with self._lock:
            if rm.confirmed and self._table.objects.get(rm.key) is rm:
                self._clients.forget_vanished(rm.key)

    def confirm(self, key: Key, size: int | None = None) -> bool:
        """Confirm an object that RM has made, memory at its true size; False if it does not fit and must be freed.

        It stays charged until then. One without its claim must be freed, too: its client has become another pod's
        meanwhile, or is gone.
        """
        with self._lock:
            rm = self._table.objects.get(key)
            if rm is None:
                return False
            if size is not None and size != rm.detail:  # enter it again
                memory = self._table.allocations.by_handle.get(key)
                self._note(gone_fact(key))
                fact = object_fact(RmObject(rm.client, rm.handle, rm.parent, rm.rm_class, size))
                self._note(fact | ({"memory": memory.number} if memory is not None else {}))
            self._note(confirm_fact(key))
            self._shared.reconciler.object_made(rm)
        grown, memory = size is not None and size > rm.detail, self._table.allocations.by_handle.get(key)
        return not grown or memory is None or self._shared.quota.fits(memory.pod, [memory.instance])

    def set_instance(self, device: RmObject, instance: int) -> bool:
        """Record which card a device is on; False if its address space does not fit on that card.

        The first few devices of a pod always fit, because a program needs one to ask about a full card.
        """
        with self._lock:
            found = RmObject(device.client, device.handle, device.parent, device.rm_class, instance)
            self._note(object_fact(found))
            self._note(confirm_fact(device.key))
            pod = self._table.pod_of(found)
        return self._table.devices.counts[pod] <= _FREE_DEVICES or self._shared.quota.fits(pod, [instance])

    def cancel(self, key: Key) -> None:
        """Take a claim back."""
        with self._lock:
            if (rm := self._table.objects.get(key)) is not None and not rm.confirmed:
                self._note(gone_fact(key))

    def begin_free(self, key: Key, file: int) -> list[Key]:
        """Open the gates over the channels to be freed, because a free may wait for queued work; return the channels.

        Gates open only if RM can free the object through this file, with channels. Otherwise a pod could use frees to
        open its gate.
        """
        channels = self._table.channels_freed_with(key)  # without the lock: a client can have thousands
        about = self._gpu_ops.object_info(file, *key) if channels else None
        if about is None or (about[0] not in _WITH_CHANNELS and key[0] != key[1]):
            return []
        self._shared.open_for_free(channels)
        return channels

    def end_free(self, key: Key, was: RmObject | None, channels: list[Key], *, gone: bool) -> None:
        """Forget what RM has freed, or gate the channels again if RM freed nothing.

        ``was`` is what the table had before: a client's own pod may have made another object by now, of the handle that
        another pod with the client's file has freed.
        """
        with self._lock:
            if not gone:
                self._shared.cancel_free(channels)
                self._shared.wake()
                return
            many = self._forget_freed(key, was, channels)
        if many:
            self._wait_until_forgotten(key)
        self._forget_users(channels)

    def _forget_freed(self, key: Key, was: RmObject | None, channels: list[Key]) -> bool:
        """Forget an object with all below it; True if that is so much that it goes step by step."""
        rm = self._table.objects.get(key)
        if rm is not was or (rm is None and key[0] != key[1]):
            return False
        many = self._table.count_below(key, BATCH) > BATCH
        if many:
            self._shared.reconciler.forget_in_steps(key, freed=True)
        else:
            self._note(gone_fact(key))
        if rm is not None and rm.rm_class in {abi.FERMI_VASPACE_A, abi.FERMI_CONTEXT_SHARE_A}:
            self._shared.reconciler.recheck_clients([key[0]])  # RM has freed other objects that used it, too
        if channels or rm is None or rm.rm_class in GATED:
            self._shared.reconciler.tsgs_changed()
        return many

    def _forget_users(self, channels: list[Key]) -> None:
        """Forget those of the channels that RM freed, and gate the others again. Call it without the lock."""
        with self._lock:
            users = {each: rm for each in channels if (rm := self._table.objects.get(each)) is not None}
        if not users:
            return
        freed = {each for each in users if not self._gpu_ops.exists(each)}
        with self._lock:
            for each in freed:
                if self._table.objects.get(each) is users[each]:
                    self._note(gone_fact(each))
            self._shared.cancel_free([each for each in users if each not in freed])
            self._shared.reconciler.tsgs_changed()
            self._shared.wake()

    def freed(self, key: Key) -> None:
        """Forget what the guardian has freed by itself."""
        self.end_free(key, self._table.objects.get(key), [], gone=True)

    def _wait_until_forgotten(self, key: Key) -> None:
        """Wait until the freed memory is no longer charged, so that the pod can allocate as much again."""
        known: Collection[object] = self._table.clients if key[0] == key[1] else self._table.objects
        self._shared.wait_until(lambda: (key[0] if key[0] == key[1] else key) not in known)

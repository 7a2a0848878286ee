"""Lets clients duplicate each other's objects: a pod's own objects only, with its own clients or with all.

RM would share anybody's object. It notes each sharing with a client in that client, also one that is repeated or taken
back, and goes through these notes under its lock when the client ends (rs_client.c, clientAddAccessBackRef). So no pod
shares with another pod's client, and a pod's notes have a bound.

What a pod shares with all, or with all of a kind, RM would let UVM map for any process, and nobody would be charged. So
RM does not hear of it: the guardian notes it, and shares the object with one client of the same pod while it duplicates
it for that client.

One page RM itself shares with all: of figures of the card. It keeps CPUs alone from writing there. So nobody may
duplicate an object of this page, not even UVM for its own process, which would map it for the card.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from qgpu.guardian.accounting.rm_object import Key, RmObject
from qgpu.guardian.proxy.client_registry import of_others
from qgpu.guardian.proxy.handler_context import Handler, PodCall
from qgpu.guardian.proxy.ioctl_proxy import IoctlBuffer
from qgpu.nvidia import abi
from qgpu.nvidia.abi import ffi

#: How many notes RM may keep in a pod's clients. CUDA makes none: for CUDA IPC it shares with all.
_MOST_NOTES = 1 << 17
#: Sharing and taking back: two notes.
_BOTH = 2
TOO_MANY = "too many shared objects"
#: The refusal of another handle of the page that RM shares with all, and that RM let UVM duplicate it all the same.
SHARED_PAGE, STILL_SHARED = "another handle of the driver's shared page", "the driver's shared page still open to UVM"


def beyond_process(share_type: int) -> bool:
    """Tell whether RM would share with processes that the call does not name: with all, or all of a kind."""
    return share_type not in (abi.RS_SHARE_TYPE_NONE, abi.RS_SHARE_TYPE_CLIENT, abi.RS_SHARE_TYPE_PID)


class RmShare(Handler):
    """Handles one pod's RM_SHARE, and shares among the clients of a process."""

    def share(self, pod_call: PodCall, block: IoctlBuffer) -> int:
        """Share an object of one of the pod's clients, as CUDA IPC does."""
        asked = block.view("NVOS57_PARAMETERS")
        client, handle, policy = asked.hClient, asked.hObject, asked.sharePolicy
        target, share_type, action = policy.target, policy.type, policy.action
        own = self._shared.clients.owns(self._pod, client) and client not in self._ctx.unseen
        own = own and (share_type != abi.RS_SHARE_TYPE_CLIENT or self._shared.clients.owns(self._pod, target))
        found = self._gpu_ops.find_object(RmObject(client, handle, client, 0)) if own else None
        if found is None or found[0] == abi.RM_USER_SHARED_DATA:
            return self._refuse(block, abi.NV_ERR_INSUFFICIENT_PERMISSIONS, of_others("NV_ESC_RM_SHARE"))
        if beyond_process(share_type):
            there = not action & abi.RS_SHARE_ACTION_FLAG_REVOKE
            if self._shared.clients.share_with_all(client, handle, there=there):
                return block.answer(abi.NV_OK)
        if beyond_process(share_type) or (share_type == abi.RS_SHARE_TYPE_CLIENT and not self._note(target)):
            return self._refuse(block, abi.NV_ERR_INSUFFICIENT_RESOURCES, TOO_MANY)
        return self._ctx.perform(pod_call, block, repeatable=True)

    def is_shared_page(self, key: Key, file: int | None = None) -> bool:
        """Tell whether an object is of the page that RM shares with all.

        RM is asked through a ``file`` that reaches the client. Without one, a pod may hide those that do.
        """
        ask = self._gpu_ops
        found = ask.find_object(RmObject(*key, key[0], 0)) if file is None else ask.object_info(file, *key)
        return found is not None and found[0] == abi.RM_USER_SHARED_DATA

    def keep_from_all(self, file: int, key: Key) -> None:
        """Have RM let nobody duplicate an object: it forgets with whom it would share it."""
        policy = 0, abi.RS_ACCESS_DUP_OBJECT, abi.RS_SHARE_TYPE_PID, abi.RS_SHARE_ACTION_FLAG_REVOKE
        block = self._proxy.block(bytes(ffi.buffer(ffi.new("NVOS57_PARAMETERS *", [*key, policy]))))
        shares = block.view("NVOS57_PARAMETERS")
        if self._proxy.escape(file, abi.NV_ESC_RM_SHARE, block) or shares.status != abi.NV_OK:
            self._count(STILL_SHARED)

    def meanwhile(self, source: Key, target: int) -> AbstractContextManager[None]:
        """Let a client duplicate an object meanwhile, if it is shared with all, or one process made both clients."""
        if not self._shared.table.is_shared(source) and not self._is_by_one_process(source[0], target):
            return nullcontext()
        if not self._note(target, _BOTH):
            self._count(TOO_MANY)
            return nullcontext()
        return self._gpu_ops.shared_with(source, target)

    def _is_by_one_process(self, source: int, target: int) -> bool:
        """Tell whether two clients are a process's of which the guardian made one: RM does not see that they are.

        RM lets clients share that one process made. Of a process's clients the kernel makes some, the guardian others.
        """
        entry, own = (self._shared.table.clients.get(client) for client in (source, target))
        if entry is None or own is None or entry is own or not (entry.made_here or own.made_here):
            return False
        return (entry.pod, entry.maker) == (own.pod, own.maker)

    def _note(self, client: int, more: int = 1) -> bool:
        """Record notes that RM will keep in a client; False if the pod has too many. They end with their client."""
        table = self._shared.table
        if table.notes_of(self._pod) + more > _MOST_NOTES:
            return False
        with self._shared.lock:
            if (entry := table.clients.get(client)) is None:
                return False
            self._shared.note({"fact": "notes", "client": client, "count": entry.notes + more})
        return True

"""The users who launched pods: who may bring a process into one, and how many a member of the socket's group may have.

Pods of containers and of Slurm's jobs were launched by nobody: only root brings processes into them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from qgpu.daemon import caller
from qgpu.errors import PermissionDeniedError, RefusedError
from qgpu.ipc.control_socket import Session
from qgpu.ipc.subordinate_uids import owner
from qgpu.linux import cgroup
from qgpu.model.plane_api import PodInfo

#: The key of a note at a pod's cgroup: its launcher's user. A daemon that starts finds it there.
_USER = "user"
#: How many pods one user may have who is neither root nor the daemon's own, and all of them together, because each
#: request looks at all pods. A user has fewer connections as a rule, each the launcher of one pod.
MOST_OF_USER, MOST_OF_MEMBERS = 256, 512
#: How many pods of such a user may have ended while something of theirs is left: each keeps a place in the module.
MOST_LEFT_OF_USER = 32


class PodUsers:
    """The users by pod. Callers hold the pods' lock."""

    def __init__(self, pods: Iterable[PodInfo]) -> None:
        notes = {pod.name: cgroup.get_xattr(pod.cgroup, _USER) for pod in pods if pod.cgroup}
        self._users = {name: int(note) for name, note in notes.items() if note}
        #: Those of pods that have ended; some of these are gone.
        self._ended: dict[str, int] = {}

    def note(self, name: str, at: str, uid: int) -> None:
        """Note who launched a pod, whose cgroup is ``at``; empty for none."""
        self._users[name] = uid
        with suppress(RefusedError):  # at worst only root may come into it under the next daemon
            if at:
                cgroup.set_xattr(at, _USER, str(uid))

    def forget(self, name: str) -> None:
        """Forget a pod; of a member's, something may be left."""
        uid = self._users.pop(name, None)
        if uid is not None and not caller.is_own_user(uid):
            self._ended[name] = uid

    def check_entrant(self, pod: PodInfo, session: Session) -> None:
        """Raise PermissionDeniedError if a client may not come into a pod."""
        if not caller.is_own(session) and self._users.get(pod.name) != session.peer.uid:
            raise PermissionDeniedError(f"pod {pod.name}: only root and the user who started it may run programs in it")

    def check_number(
        self, launcher: Session, pods: Iterable[PodInfo], names_in_use: Callable[[], Collection[str]]
    ) -> None:
        """Raise RefusedError if the launcher's user may have no more pods beside those that there are.

        ``names_in_use`` lists the pods that have ended and of which something is left.
        """
        if caller.is_own(launcher):
            return
        self._ended = {name: self._ended[name] for name in names_in_use() if name in self._ended}
        if [owner(uid) for uid in self._ended.values()].count(owner(launcher.peer.uid)) >= MOST_LEFT_OF_USER:
            raise RefusedError(
                f"too many pods: other processes have files or memory of {MOST_LEFT_OF_USER} of this user's ended "
                "pods; end those processes first"
            )
        users = [self._users[pod.name] for pod in pods if pod.name in self._users]
        members = [owner(uid) for uid in users if not caller.is_own_user(uid)]
        if members.count(owner(launcher.peer.uid)) >= MOST_OF_USER or len(members) >= MOST_OF_MEMBERS:
            raise RefusedError(
                f"too many pods: each user but root may have {MOST_OF_USER}, all {MOST_OF_MEMBERS}; end one first"
            )

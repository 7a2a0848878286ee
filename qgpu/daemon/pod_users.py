"""The users who launched pods: who may bring a process into one, and how many a member of the socket's group may have.

Pods of containers and of Slurm's jobs have no launcher: only root brings processes into them. Their owners, a
namespace of Kubernetes or a user of Slurm, start as many as they like, one after the other. So the limit counts pods
that have ended while something of theirs is left. A container without a claim leaves one at most: its name stays taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from qgpu.daemon import caller
from qgpu.errors import PermissionDeniedError, RefusedError
from qgpu.ipc.control_socket import Session, is_own_user
from qgpu.ipc.subordinate_uids import owner
from qgpu.linux import cgroup
from qgpu.model.plane_api import PodInfo

#: The key of a note at a pod's cgroup: its launcher's user. A daemon that starts finds it there.
_USER = "user"
#: How many pods one user may have who is neither root nor the daemon's own, and all of them together, because each
#: request looks at all pods. A user has fewer connections as a rule, each the launcher of one pod.
MOST_OF_USER, MOST_OF_MEMBERS = 256, 512
#: How many pods of one owner may have ended while something of theirs is left: each keeps a place in the module, which
#: has 256. It is at most half of what others leave of this many, so that all owners together never take all places; but
#: a few are everybody's.
MOST_LEFT_OF_OWNER, MOST_LEFT, LEAST_LEFT = 32, 128, 4
#: The key of the note at a pod's cgroup of its owner.
_OWNER = "owner"


class PodUsers:
    """The users by pod. Callers hold the pods' lock."""

    def __init__(self, pods: Collection[PodInfo]) -> None:
        notes = {pod.name: cgroup.get_xattr(pod.cgroup, _USER) for pod in pods if pod.cgroup}
        self._users = {name: int(note) for name, note in notes.items() if note}
        owners = {pod.name: cgroup.get_xattr(pod.cgroup, _OWNER) for pod in pods if pod.cgroup}
        #: Whose a pod is, in words; root's are nobody's.
        self._owners = {name: note for name, note in owners.items() if note}
        #: Those of pods that have ended; some of these are gone.
        self._ended: dict[str, str] = {}

    def note(self, name: str, at: str, uid: int) -> None:
        """Note who launched a pod, whose cgroup is ``at``; empty if it has none."""
        self._users[name] = uid
        with suppress(RefusedError):  # at worst only root may come into it under the next daemon
            if at:
                cgroup.set_xattr(at, _USER, str(uid))
        self.note_owner(name, at, user(uid))

    def note_owner(self, name: str, at: str, whose: str) -> None:
        """Note the owner of a pod, whose cgroup is ``at``; ``whose`` is empty for no owner, and for root."""
        if whose in ("", self._owners.get(name)):
            return
        self._owners[name] = whose
        with suppress(RefusedError):  # at worst it is nobody's under the next daemon
            if at:
                cgroup.set_xattr(at, _OWNER, whose)

    def owner_of(self, name: str) -> str:
        """Name the owner of a pod; empty if it has none."""
        return self._owners.get(name, "")

    def forget(self, name: str) -> None:
        """Forget a pod; something of it may be left."""
        self._users.pop(name, None)
        if (whose := self._owners.pop(name, "")) != "":
            self._ended[name] = whose

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
        self.check_left(user(launcher.peer.uid), names_in_use)
        users = [self._users[pod.name] for pod in pods if pod.name in self._users]
        members = [owner(uid) for uid in users if not is_own_user(uid)]
        if members.count(owner(launcher.peer.uid)) >= MOST_OF_USER or len(members) >= MOST_OF_MEMBERS:
            raise RefusedError(
                f"too many pods: each user but root may have {MOST_OF_USER}, all {MOST_OF_MEMBERS}; end one first"
            )

    def check_left(self, whose: str, names_in_use: Callable[[], Collection[str]]) -> None:
        """Raise RefusedError if too many pods of an owner have ended while something of theirs is left."""
        if not whose or not self._ended:
            return
        names = names_in_use()
        self._ended = {name: self._ended[name] for name in names if name in self._ended}
        mine = list(self._ended.values()).count(whose)
        others = len(names) - mine  # nobody knows whose those are that an earlier daemon had
        if mine >= max(LEAST_LEFT, min(MOST_LEFT_OF_OWNER, (MOST_LEFT - others) // 2)):
            raise RefusedError(
                f"too many pods: other processes have files or memory of {mine} ended pods of {whose}; end those "
                "processes first"
            )


def user(uid: int) -> str:
    """Name the user behind an id as the owner of pods; empty for root and the daemon's own user."""
    return "" if is_own_user(uid) else f"user {owner(uid)}"

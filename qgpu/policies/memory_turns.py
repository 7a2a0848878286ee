"""Memory turns: which offline pods yield a card's memory by suspension, and which come back, where it is overcommitted.

Limits count, not use, because a pod on the card may take all of its limit at any time. Offline pods that do not fit
together take turns. Each is charged, by quota, for its time on the card while another waits; the pod that was charged
least comes first.

Properties:
- Limits of pods on the card, or on the way, never exceed its memory, except while an online pod makes room for itself.
- Online pods never yield. As soon as online limits grow, so many offline pods yield that what is left fits: the
  coldest first, then those that were charged most.
- Unless an online pod needs the room, a pod that came stays for ``TURN_NS``, and for so long that moving takes at most
  ``MOVING_PART`` of its time. A pod that yielded stays off for ``HOLD_NS`` and the time of its move.
- Waiting pods get residence in the ratio of quotas: no two charges differ by more than two turns.
- Every pod whose limit fits beside the online pods comes in the end: a smaller pod overtakes it only if both fit.
- Pods that are held (suspended or moved by hand, refused by the driver, on several pGPUs) are left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from qgpu.model import NS_PER_MS, NS_PER_S, PodClass

GIB = 1 << 30
#: The shortest stay on the card, and off it for a pod that has memory to bring back.
TURN_NS, HOLD_NS = 120 * NS_PER_S, 15 * NS_PER_S
#: The most that moving a pod off and back may take of its time, where pods take turns.
MOVING_PART = 0.05
#: A pod that has not used the GPU for so long is cold.
COLD_NS = 10 * NS_PER_S
#: How far a pod's charge may exceed the lowest, in turns of its own: what it had while there was room costs no more.
_LEAD_TURNS = 2
#: Weights are per cent of the card times this factor, so that a token is a thousandth of a per cent.
_SCALE = 1000


class Place(StrEnum):
    """Where a pod's memory is."""

    ON = "on"
    OFF = "off"
    LEAVING = "leaving"
    COMING = "coming"


@dataclass(frozen=True, slots=True)
class Pace:
    """What it takes to move a GiB off a card and back, in ns; by default what an H200 takes (h200-memory.json)."""

    off_ns_per_gib: int = 610 * NS_PER_MS
    back_ns_per_gib: int = 260 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class PodMemory:
    """One pod and its memory on one card. A pod that has not begun is off, with nothing to bring back."""

    name: str
    pod_class: PodClass
    place: Place
    #: Its memory limit, in bytes; None without one.
    limit: int | None
    #: What it has on the card, and what it has in host memory, in bytes.
    used: int = 0
    away: int = 0
    cores: int | None = None
    #: How long it has been in its place, and since it last used the GPU, in ns.
    stay_ns: int = 0
    idle_ns: int = 0
    #: What its residence was charged so far, in ns over quota (``charge``).
    charged_ns: int = 0
    #: It must not be moved, or does not ask to come back.
    held: bool = False

    @property
    def size(self) -> int:
        """Return what is reserved for it on the card, in bytes."""
        return max(self.limit or 0, self.used, self.away)

    @property
    def present(self) -> int:
        """Return what counts as taken by it now."""
        return self.used if self.place is Place.OFF else self.size

    @property
    def takes_turns(self) -> bool:
        """Tell whether it may be moved to make room."""
        return self.pod_class is PodClass.OFFLINE and not self.held


@dataclass(frozen=True, slots=True)
class Moves:
    """What to begin now, and how many bytes are missing for the limits of those that stay."""

    leave: tuple[str, ...] = ()
    come: tuple[str, ...] = ()
    short: int = 0


def move_ns(pod: PodMemory, pace: Pace) -> int:
    """Return what it takes to move a pod's memory off and back."""
    return max(pod.used, pod.away) * (pace.off_ns_per_gib + pace.back_ns_per_gib) // GIB


def turn_ns(pod: PodMemory, pace: Pace) -> int:
    """Return how long a pod stays once it has come."""
    return max(TURN_NS, int(move_ns(pod, pace) * (1 / MOVING_PART - 1)))


def charge(charged_ns: Mapping[str, int], pods: Collection[PodMemory], elapsed_ns: int, pace: Pace) -> dict[str, int]:
    """Return the charges after ``elapsed_ns`` in these places; the lowest is 0, as is a newcomer's.

    Residence is charged only while some pod waits, divided by the pod's part of all quotas.
    """
    weights = _weights([pod for pod in pods if pod.takes_turns])
    known = [charged_ns[name] for name in weights if name in charged_ns]
    least_ns = min(known, default=0)
    waits = any(pod.takes_turns and pod.place is Place.OFF for pod in pods)
    found = {}
    for pod in pods:
        if (weight := weights.get(pod.name)) is None:
            continue
        now_ns = charged_ns.get(pod.name, least_ns) - least_ns
        if waits and pod.place is Place.ON:
            now_ns += elapsed_ns * 100 * _SCALE // weight
        found[pod.name] = min(now_ns, _LEAD_TURNS * turn_ns(pod, pace) * 100 * _SCALE // weight)
    return found


def decide(capacity: int, pods: Sequence[PodMemory], pace: Pace) -> Moves:
    """Decide for a card with ``capacity`` bytes for these pods."""
    room = capacity - sum(_kept(pod) for pod in pods)
    turns = [pod for pod in pods if pod.takes_turns]
    forced = _forced([pod for pod in turns if pod.place is Place.ON], _sizes(turns, Place.ON, Place.COMING) - room)
    chosen = _chosen(room, [pod for pod in turns if pod not in forced], pace)
    leave = [pod for pod in turns if pod.place is Place.ON and pod not in chosen]
    left = capacity - sum(pod.present for pod in pods)
    short = max(0, -left)
    come = []
    online_back = [pod for pod in pods if _asks_back(pod)]
    for pod in (*online_back, *(each for each in chosen if each.place is Place.OFF)):
        if pod.size - pod.present <= left:
            come.append(pod.name)
            left -= pod.size - pod.present
    return Moves(tuple(pod.name for pod in leave), tuple(come), short)


def _weights(pods: Collection[PodMemory]) -> dict[str, int]:
    """Return each pod's part of the card by quota, in 1/1000 %. Pods without one divide the rest; each gets a token."""
    left = 100 - sum(pod.cores or 0 for pod in pods)
    without = sum(pod.cores is None for pod in pods)
    without_quota = max(1, left * _SCALE // max(1, without))
    return {pod.name: without_quota if pod.cores is None else pod.cores * _SCALE for pod in pods}


def _kept(pod: PodMemory) -> int:
    """Return the bytes that are not for turns: an online or held pod's, and what an absent pod's processes took."""
    if pod.takes_turns:
        return pod.used if pod.place is Place.OFF else 0
    return pod.size if _asks_back(pod) else pod.present


def _asks_back(pod: PodMemory) -> bool:
    return pod.pod_class is PodClass.ONLINE and pod.place is Place.OFF and not pod.held


def _sizes(pods: Iterable[PodMemory], *places: Place) -> int:
    return sum(pod.size for pod in pods if pod.place in places)


def _bound(pod: PodMemory, pace: Pace) -> bool:
    """Tell whether a pod must stay in its place for now."""
    if pod.place is Place.ON:
        return pod.stay_ns < turn_ns(pod, pace)
    return pod.place is Place.OFF and bool(pod.away) and pod.stay_ns < HOLD_NS + move_ns(pod, pace)


def _forced(there: Iterable[PodMemory], missing: int) -> list[PodMemory]:
    """Return the pods that must leave for ``missing`` bytes: coldest first, then charged most; none beyond need."""
    victims: list[PodMemory] = []
    for pod in sorted(there, key=lambda pod: (-_cold_ns(pod), -pod.charged_ns, pod.name)):
        if missing <= 0:
            break
        victims.append(pod)
        missing -= pod.size
    for pod in reversed(victims[:]):
        if missing + pod.size <= 0:
            victims.remove(pod)
            missing += pod.size
    return victims


def _cold_ns(pod: PodMemory) -> int:
    return pod.idle_ns if pod.idle_ns >= COLD_NS else 0


def _chosen(room: int, pods: Sequence[PodMemory], pace: Pace) -> list[PodMemory]:
    """Choose the pods that are to be on the card: those bound to stay, then by charge, as they fit."""
    chosen = [pod for pod in pods if pod.place is Place.COMING or (pod.place is Place.ON and _bound(pod, pace))]
    left = room - sum(pod.size for pod in chosen)
    first: PodMemory | None = None  # the first that waits and does not fit
    for pod in sorted(pods, key=_order):
        if pod in chosen or pod.place is Place.LEAVING or (pod.place is Place.OFF and _bound(pod, pace)):
            continue
        beside = pod.place is Place.ON or first is None or _fits_beside(pod, first, pods, room)
        if pod.size <= left and beside:
            chosen.append(pod)
            left -= pod.size
        elif first is None and pod.place is Place.OFF and pod.size <= room:
            first = pod
    return chosen


def _order(pod: PodMemory) -> tuple[bool, int, bool, int, str]:
    """Sort pods: cold ones last, then by the least charge, those on the card first, and the longest waiting first."""
    there = pod.place is Place.ON
    return there and pod.idle_ns >= COLD_NS, pod.charged_ns, not there, -pod.stay_ns, pod.name


def _fits_beside(pod: PodMemory, first: PodMemory, pods: Iterable[PodMemory], room: int) -> bool:
    """Tell whether a pod that overtakes ``first`` leaves room for it, with all that came since it waits."""
    since = sum(
        each.size
        for each in pods
        if each.place is Place.COMING or (each.place is Place.ON and each.stay_ns <= first.stay_ns)
    )
    return since + pod.size + first.size <= room

"""Online over offline: online work first, on top of any two policies.

An online TSG gets a long timeslice and offline TSGs a short one, so the hardware itself switches to online
work soon after its arrival, with no software in between: the shortest slice that is sensible, or what the
tightest latency target of the online pods allows. A price follows: two busy offline pods would cut each other
at every slice and lose the card to switching, so they take turns by gate, each turn as long as the offline
policy's share. So would the processes of one offline pod: they take turns by gate while their pod has its own.

Properties:
- No gate of an online pod is closed on behalf of an offline one.
- With no online pod on the card the plan is the offline policy's own, unchanged.
- Among offline pods, shares stay those of the offline policy, over a period that may be longer than asked.
- Whatever is owed to others, an offline pod keeps half of the turn it has if nobody is owed anything.
- No offline slice is longer than the tightest latency target allows, but to pay an offline floor. A tighter target
  allows no longer slice. Below it slices also fit into turns by gate, which are longer below a target of 2 ms.
- With an offline floor, offline pods together get so much of the GPU however much online work there is.
"""

from __future__ import annotations

from dataclasses import replace

from qgpu.model import (
    MAX_PERIOD_NS,
    MAX_TIMESLICE_US,
    MIN_TIMESLICE_US,
    NS_PER_MS,
    NS_PER_US,
    OnIdle,
    Plan,
    Pod,
    PodPlan,
    Policy,
    Sharing,
    Snapshot,
)
from qgpu.model.hardware_traits import HardwareTraits, traits
from qgpu.policies import latency_targets, offline_floor
from qgpu.policies.mechanism import (
    corrected,
    for_lending,
    in_round,
    in_turns,
    period_of_turns,
    shortened,
    split,
)

#: Mean slice of several online pods among themselves without a target: they must not wait a second for each other.
ONLINE_ROUND_US = 4_000

#: Mean turn of busy offline pods beside online ones. Online work that arrives while a gate moves (0.6 ms a turn)
#: waits up to a millisecond; turns this long keep that below one request in a hundred. An odd number, so that
#: requests that come by a round period of their own do not meet every edge, or none, by chance of phase.
TURN_NS = 251 * NS_PER_MS

#: From this target on, a gate that moves (1.2 ms with preemption) is within it, so that turns need not be odd: their
#: period is one of which a second holds a whole number.
LOOSE_NS = 2 * NS_PER_MS
LOOSE_TURN_NS = 100 * NS_PER_MS


def online_first(offline: Policy, online: Policy) -> Policy:
    """Compose a policy that serves online pods by ``online`` and leaves the rest to ``offline``."""

    def plan(snapshot: Snapshot) -> Plan:
        if True not in [pod.online for pod in snapshot.pods]:
            return offline(snapshot)
        present = tuple(pod for pod in snapshot.pods if pod.online and pod.tsgs)
        others = tuple(pod for pod in snapshot.pods if not pod.online)
        absent = tuple(pod for pod in snapshot.pods if pod.online and not pod.tsgs)
        period_ns, hardware = snapshot.period_ns, traits(snapshot.card)
        if present:
            front, behind = (
                policy(replace(snapshot, pods=pods, offline=Sharing()))
                for policy, pods in ((online, present), (offline, others))
            )
            calm_ns = _last_end(online(replace(snapshot, pods=_debtless(present)))) if front.gated else 0
            front, behind = _fitting(_up_to(front, (calm_ns + front.period_ns) // 2), behind)
            target_ns = latency_targets.tightest_ns(present)
            waits = _waits(present, others)
            if not front.gated and not behind.gated:
                period_ns = _period_of_turns(period_ns, behind, others, target_ns)
            rest = replace(snapshot, pods=others, period_ns=period_ns)
            slice_us = latency_targets.allowed_us(present, waits, hardware)
            ahead = _prompt(front, present, waits, offline_floor.online_round_us(snapshot), hardware)
            ahead, among = _fitted(ahead, front, present, snapshot.online)
            owed_us = offline_floor.offline_round_us(snapshot, _round_us(ahead, present))
            short_us = max(slice_us, owed_us)
            back = _step_back(behind, rest, _last_end(front), short_us, calm_ns)
            parts = (*ahead, *_tsgs_in_turns(back, others, target_ns))
        else:
            behind = offline(replace(snapshot, pods=others))
            parts, period_ns, among = behind.pods, behind.period_ns, None
        waiting = tuple(PodPlan(pod.name, pod.grant.pod_class, MAX_TIMESLICE_US) for pod in absent)
        by_name = {part.pod: part for part in (*parts, *waiting)}
        ordered = tuple(by_name[pod.name] for pod in snapshot.pods)
        floor_here = snapshot.offline_floor if present else 0
        return Plan(snapshot.pgpu, period_ns, ordered, floor_here, None if present else behind.offline, among)

    return plan


def _fitted(
    ahead: tuple[PodPlan, ...], front: Plan, present: tuple[Pod, ...], sharing: Sharing
) -> tuple[tuple[PodPlan, ...], Sharing | None]:
    """Make the round of several busy online pods as short as the ledger found best; tell what it is.

    Turns by gate would cost latency, so there are none among online pods.
    """
    busy = [(part, pod) for part, pod in zip(ahead, present, strict=True) if pod.busy]
    if front.gated or len(busy) < 2:
        return ahead, None
    longest_ns = sum(part.timeslice_us * pod.busy_tsgs for part, pod in busy) * NS_PER_US
    if sharing.round_ns is None or sharing.by_gate or sharing.round_ns >= longest_ns:
        return ahead, Sharing(round_ns=longest_ns)
    return in_round(ahead, present, sharing.round_ns), sharing


def _debtless(pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
    """Ask for what would be given without debts: they move gates, never timeslices."""
    return tuple(replace(pod, debt_ns=0) for pod in pods)


def _waits(present: tuple[Pod, ...], others: tuple[Pod, ...]) -> int:
    """Count the TSGs that online work may have to wait for: of online pods beside it, and one of one offline pod."""
    online = sum(pod.busy_tsgs for pod in present if pod.busy) if len(present) > 1 else 0
    return online + (True in [pod.busy for pod in others])


def _tsgs_in_turns(parts: tuple[PodPlan, ...], pods: tuple[Pod, ...], target_ns: int | None) -> tuple[PodPlan, ...]:
    """Have the TSGs of each offline pod take turns by gate.

    Who waits for a turn runs nothing, so how many are busy can't be told here: the planes leave out who is idle.
    """
    turn_ns = LOOSE_TURN_NS if _is_loose(target_ns) else TURN_NS
    return tuple(
        replace(part, tsg_turn_ns=turn_ns) if len(pod.tsgs) > 1 else part for part, pod in zip(parts, pods, strict=True)
    )


def _is_loose(target_ns: int | None) -> bool:
    return target_ns is not None and target_ns >= LOOSE_NS


def _round_us(parts: tuple[PodPlan, ...], pods: tuple[Pod, ...]) -> int:
    """Return how long the busy TSGs of these pods run in a round."""
    return sum(part.timeslice_us * pod.busy_tsgs for part, pod in zip(parts, pods, strict=True) if pod.busy)


def _period_of_turns(period_ns: int, behind: Plan, others: tuple[Pod, ...], target_ns: int | None) -> int:
    """Make turns of busy offline pods long enough for what online work beside them puts up with."""
    turns = [turn for turn in _turn_weights(behind.pods, others) if turn]
    if len(turns) < 2:
        return period_ns
    if _is_loose(target_ns):
        return period_of_turns(period_ns, turns, LOOSE_TURN_NS)
    return max(period_ns, min(MAX_PERIOD_NS, len(turns) * TURN_NS))


def _turn_weights(parts: tuple[PodPlan, ...], pods: tuple[Pod, ...]) -> list[int]:
    """Return by what weight each pod takes turns; 0 for idle ones, and for those held to a quota that are let start."""
    return [part.weight if pod.busy else 0 for part, pod in zip(parts, pods, strict=True)]


def _prompt(
    front: Plan, present: tuple[Pod, ...], waits: int, round_us: int | None, hardware: HardwareTraits
) -> tuple[PodPlan, ...]:
    """Give several online pods short rounds in the ratio their policy chose; one at a time has the longest slice.

    With ``round_us`` all their busy TSGs together run no longer than this.
    """
    if len(front.pods) == 1 or front.gated:
        longest = [
            min(MAX_TIMESLICE_US, max(MIN_TIMESLICE_US, (round_us or MAX_TIMESLICE_US) // pod.busy_tsgs))
            for pod in present
        ]
        return tuple(replace(part, timeslice_us=us) for part, us in zip(front.pods, longest, strict=True))
    targets = [pod.grant.latency_target_ns for pod in present]
    means = [
        ONLINE_ROUND_US if target_ns is None else latency_targets.slice_us(target_ns, waits, hardware)
        for target_ns in targets
    ]
    if round_us is not None:
        means.append(round_us // max(1, sum(pod.busy_tsgs for pod in present if pod.busy)))
    return shortened(front.pods, min(means), hardware)


def _step_back(behind: Plan, snapshot: Snapshot, taken_ns: int, slice_us: int, calm_ns: int) -> tuple[PodPlan, ...]:
    """Give offline pods a slice as short as this, and turns by gate where more than one of them is busy.

    Online pods with windows have the period up to ``taken_ns``, or ``calm_ns`` if nobody owed anything; nobody's
    only turn may lie in there.
    """
    short = tuple(replace(part, timeslice_us=slice_us) for part in behind.pods)
    shares = _turn_weights(behind.pods, snapshot.pods)
    if behind.gated:
        shift = min(taken_ns, snapshot.period_ns - _last_end(behind))
        return tuple(_later(part, shift) for part in short)
    if sum(share > 0 for share in shares) < 2:
        return short
    short = for_lending(short, split(max(0, snapshot.period_ns - calm_ns), shares), traits(snapshot.card))
    meanwhile = in_turns(split(taken_ns, shares), OnIdle.YIELD)
    afterwards = in_turns(_turns(snapshot, taken_ns, calm_ns, shares), OnIdle.YIELD, taken_ns)
    return tuple(
        replace(part, windows=(*first, *second) if pod.busy else None)
        for part, pod, first, second in zip(short, snapshot.pods, meanwhile, afterwards, strict=True)
    )


def _turns(snapshot: Snapshot, taken_ns: int, calm_ns: int, shares: list[int]) -> list[int]:
    """Divide what online windows leave of the period, and make up for debt there.

    Whatever is owed to online pods and among offline ones, each keeps half of the turn it has if nobody owes anything.
    """
    left_ns = snapshot.period_ns - taken_ns
    turns = [
        corrected(turn, pod.debt_ns, snapshot.period_ns) if turn else 0
        for turn, pod in zip(split(left_ns, shares), snapshot.pods, strict=True)
    ]
    halves = split((snapshot.period_ns - calm_ns) // 2, shares)
    beyond = [max(0, turn - half) for turn, half in zip(split(left_ns, turns), halves, strict=True)]
    rest = split(left_ns - sum(halves), beyond)
    return [half + more for half, more in zip(halves, rest, strict=True)]


def _fitting(front: Plan, behind: Plan) -> tuple[Plan, Plan]:
    """Shorten the windows of both classes in proportion where they are more than a period, for what is owed to some."""
    whole_ns = _last_end(front) + _last_end(behind) if front.gated and behind.gated else 0
    if whole_ns <= front.period_ns:
        return front, behind
    return _scaled(front, front.period_ns, whole_ns), _scaled(behind, front.period_ns, whole_ns)


def _up_to(front: Plan, end_ns: int) -> Plan:
    """Shorten online windows in proportion where debts would have them take more than half of what they leave."""
    last_ns = _last_end(front)
    return _scaled(front, end_ns, last_ns) if last_ns > end_ns else front


def _scaled(plan: Plan, numerator: int, denominator: int) -> Plan:
    return replace(plan, pods=tuple(_shortened(part, numerator, denominator) for part in plan.pods))


def _shortened(part: PodPlan, numerator: int, denominator: int) -> PodPlan:
    if part.windows is None:
        return part
    edges = [(w, w.start_ns * numerator // denominator, w.end_ns * numerator // denominator) for w in part.windows]
    return replace(part, windows=tuple(replace(w, start_ns=a, end_ns=b) for w, a, b in edges if b > a))


def _last_end(plan: Plan) -> int:
    return max((window.end_ns for part in plan.pods for window in part.windows or ()), default=0)


def _later(part: PodPlan, shift_ns: int) -> PodPlan:
    if part.windows is None:
        return part
    return replace(
        part,
        windows=tuple(replace(w, start_ns=w.start_ns + shift_ns, end_ns=w.end_ns + shift_ns) for w in part.windows),
    )

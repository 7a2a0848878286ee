"""Online over offline: serve online work first, on top of any two policies.

An online TSG gets a long timeslice and offline TSGs a short one. So the hardware itself switches to online work soon
after it arrives, without software in between. The offline slice is the shortest sensible one, or the longest that the
tightest latency target of the online pods allows. This has a price: two busy offline pods would preempt each other at
every slice and lose the card to switching. So offline pods take turns by gate, each turn as long as the offline
policy's share. The processes of one offline pod would preempt each other too, so they take turns by gate during their
pod's turn.

Properties:
- No gate of an online pod is closed on behalf of an offline one.
- With no online pod on the card the plan is the offline policy's own, unchanged.
- Among offline pods, shares stay those of the offline policy, over a period that may be longer than configured.
- Whatever is owed to other pods, an offline pod keeps half of the turn that it has when no pod is owed anything.
- No offline slice is longer than the tightest latency target allows, except to pay an offline floor. A tighter target
  never allows a longer slice. In turns by gate, the shortest turn bounds all slices as well, so a larger quota for one
  offline pod may leave all of them less beside endless online work. Below a target of 2 ms turns are longer.
- With an offline floor, offline pods together get that part of the GPU however much online work there is.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    consecutive_windows,
    debt_corrected,
    in_round,
    period_of_turns,
    shortened,
    shortened_to,
    slices_within_windows,
    split,
    with_factors,
)

#: Mean slice among several online pods without a target, so that they do not wait a second for each other.
ONLINE_ROUND_US = 4_000

#: A lone online pod that never pauses runs no longer than this at a stretch. When RM frees an offline context it may
#: wait for that context's turn, and holds its lock meanwhile (docs/decisions/0058). With a latency target it runs as
#: long as a slice can be, because each cut adds an offline slice to a long request, and the target allows one.
LONE_ROUND_US = 100_000

#: Mean turn of busy offline pods beside online ones. Online work that arrives while a gate moves (0.6 ms a turn) waits
#: up to a millisecond. Turns this long keep that below one request in a hundred. The number is odd, so that periodic
#: requests do not meet every edge, or none, depending on their phase.
TURN_NS = 251 * NS_PER_MS

#: From this target on, the time to move a gate (1.2 ms with preemption) is within the target, so turns need not be odd:
#: their period is one that divides a second into whole periods.
LOOSE_TARGET_NS = 2 * NS_PER_MS
LOOSE_TARGET_TURN_NS = 100 * NS_PER_MS


def online_first(offline: Policy, online: Policy, *, guarantees: bool) -> Policy:
    """Compose a policy that serves online pods by ``online`` and leaves the rest to ``offline``.

    ``guarantees`` tells whether quotas are floors under ``online``.
    """

    def plan(snapshot: Snapshot) -> Plan:
        if True not in [pod.online for pod in snapshot.pods]:
            return offline(snapshot)
        present = tuple(pod for pod in snapshot.pods if pod.online and pod.tsgs)
        others = tuple(pod for pod in snapshot.pods if not pod.online)
        absent = tuple(pod for pod in snapshot.pods if pod.online and not pod.tsgs)
        period_ns, hardware = snapshot.period_ns, traits(snapshot.card)
        if present:
            online_plan, offline_plan = (
                policy(replace(snapshot, pods=pods, offline=Sharing()))
                for policy, pods in ((online, present), (offline, others))
            )
            debtless_end_ns = 0
            if online_plan.gated:
                debtless = tuple(
                    policy(replace(snapshot, pods=_debtless(pods), offline=Sharing()))
                    for policy, pods in ((online, present), (offline, others))
                )
                debtless_end_ns = _last_end(debtless[0])
                online_plan, offline_plan = _fit_into_period(online_plan, offline_plan, *debtless)
            target_ns = latency_targets.tightest_ns(present)
            waits = _waits(present, others)
            if not online_plan.gated and not offline_plan.gated:
                period_ns = _period_of_turns(period_ns, offline_plan, others, target_ns)
            rest = replace(snapshot, pods=others, period_ns=period_ns)
            slice_us = latency_targets.allowed_us(present, waits, hardware)
            online_parts = _online_slices(
                online_plan, present, waits, offline_floor.online_round_us(snapshot), hardware
            )
            sharing = snapshot.online if guarantees else replace(snapshot.online, slice_factors=())
            online_parts, among = _fit_online_round(online_parts, online_plan, present, sharing)
            owed_us = offline_floor.offline_round_us(snapshot, _round_us(online_parts, present))
            short_us = max(slice_us, owed_us)
            offline_parts = _offline_parts(offline_plan, rest, _last_end(online_plan), short_us, debtless_end_ns)
            parts = (*online_parts, *_tsgs_in_turns(offline_parts, others, target_ns))
        else:
            offline_plan = offline(replace(snapshot, pods=others))
            parts, period_ns, among = offline_plan.pods, offline_plan.period_ns, None
        waiting = tuple(PodPlan(pod.name, pod.grant.pod_class, _lone_us(pod)) for pod in absent)
        by_name = {part.pod: part for part in (*parts, *waiting)}
        ordered = tuple(by_name[pod.name] for pod in snapshot.pods)
        floor_here = snapshot.offline_floor if present else 0
        return Plan(snapshot.pgpu, period_ns, ordered, floor_here, None if present else offline_plan.offline, among)

    return plan


def _fit_online_round(
    online_parts: tuple[PodPlan, ...], online_plan: Plan, present: tuple[Pod, ...], sharing: Sharing
) -> tuple[tuple[PodPlan, ...], Sharing | None]:
    """Shorten the round of several busy online pods to the length the ledger settled on; return their sharing too.

    Online pods take no turns by gate among themselves, because that would cost latency.
    """
    busy = [(part, pod) for part, pod in zip(online_parts, present, strict=True) if pod.busy]
    if online_plan.gated or len(busy) < 2:
        return online_parts, None
    longest_ns = sum(part.timeslice_us * pod.busy_tsgs for part, pod in busy) * NS_PER_US
    if sharing.round_ns is None or sharing.by_gate or sharing.round_ns >= longest_ns:
        return online_parts, Sharing(round_ns=longest_ns)
    return with_factors(in_round(online_parts, present, sharing.round_ns), sharing), sharing


def _debtless(pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
    """Drop all debts, to plan what the pods get without them; debts move gates, never timeslices."""
    return tuple([pod._replace(debt_ns=0) for pod in pods])


def _waits(present: tuple[Pod, ...], others: tuple[Pod, ...]) -> int:
    """Count the TSGs that online work may wait for: those of other online pods, and one TSG of one offline pod."""
    online = sum(pod.busy_tsgs for pod in present if pod.busy) if len(present) > 1 else 0
    return online + (True in [pod.busy for pod in others])


def _tsgs_in_turns(parts: tuple[PodPlan, ...], pods: tuple[Pod, ...], target_ns: int | None) -> tuple[PodPlan, ...]:
    """Have the TSGs of each offline pod take turns by gate.

    A TSG that waits for its turn runs nothing, so the number of busy TSGs is unknown here. The planes skip idle TSGs.
    """
    turn_ns = LOOSE_TARGET_TURN_NS if _is_loose(target_ns) else TURN_NS
    return tuple(
        replace(part, tsg_turn_ns=turn_ns) if len(pod.tsgs) > 1 else part for part, pod in zip(parts, pods, strict=True)
    )


def _is_loose(target_ns: int | None) -> bool:
    return target_ns is not None and target_ns >= LOOSE_TARGET_NS


def _round_us(parts: tuple[PodPlan, ...], pods: tuple[Pod, ...]) -> int:
    """Return how long the busy TSGs of these pods together run in a round."""
    return sum(part.timeslice_us * pod.busy_tsgs for part, pod in zip(parts, pods, strict=True) if pod.busy)


def _period_of_turns(period_ns: int, offline_plan: Plan, others: tuple[Pod, ...], target_ns: int | None) -> int:
    """Choose a period whose offline turns are long enough for the online work beside them."""
    turns = [turn for turn in _turn_weights(offline_plan.pods, others) if turn]
    if len(turns) < 2:
        return period_ns
    if _is_loose(target_ns):
        return period_of_turns(period_ns, turns, LOOSE_TARGET_TURN_NS)
    return max(period_ns, min(MAX_PERIOD_NS, len(turns) * TURN_NS))


def _turn_weights(parts: tuple[PodPlan, ...], pods: tuple[Pod, ...]) -> list[int]:
    """Return the weight of each pod's turn; 0 for idle pods, and for capped pods whose gate is open to start."""
    return [part.weight if pod.busy else 0 for part, pod in zip(parts, pods, strict=True)]


def _online_slices(
    online_plan: Plan, present: tuple[Pod, ...], waits: int, round_us: int | None, hardware: HardwareTraits
) -> tuple[PodPlan, ...]:
    """Give several online pods short rounds in the ratio of their policy; a lone online pod has a long one.

    With ``round_us`` all their busy TSGs together run no longer than that.
    """
    if len(online_plan.pods) == 1 or online_plan.gated:
        longest = [max(MIN_TIMESLICE_US, (round_us or _lone_us(pod)) // pod.busy_tsgs) for pod in present]
        return tuple(replace(part, timeslice_us=us) for part, us in zip(online_plan.pods, longest, strict=True))
    targets = [pod.grant.latency_target_ns for pod in present]
    means = [
        ONLINE_ROUND_US if target_ns is None else latency_targets.slice_us(target_ns, waits, hardware)
        for target_ns in targets
    ]
    if round_us is not None:
        means.append(round_us // max(1, sum(pod.busy_tsgs for pod in present if pod.busy)))
    return shortened(online_plan.pods, min(means), hardware)


def _lone_us(pod: Pod) -> int:
    return LONE_ROUND_US if pod.grant.latency_target_ns is None else MAX_TIMESLICE_US


def _offline_parts(
    offline_plan: Plan, snapshot: Snapshot, online_end_ns: int, slice_us: int, debtless_end_ns: int
) -> tuple[PodPlan, ...]:
    """Give offline pods slices of this length, and turns by gate if more than one of them is busy.

    Online pods with windows occupy the period up to ``online_end_ns``, or ``debtless_end_ns`` if no pod is in debt. No
    offline pod may have its only turn in that part.
    """
    short = tuple(replace(part, timeslice_us=slice_us) for part in offline_plan.pods)
    shares = _turn_weights(offline_plan.pods, snapshot.pods)
    if offline_plan.gated:
        shift = min(online_end_ns, snapshot.period_ns - _last_end(offline_plan))
        return tuple(_shifted(part, shift) for part in short)
    if sum(share > 0 for share in shares) < 2:
        return short
    short = slices_within_windows(
        short, split(max(0, snapshot.period_ns - debtless_end_ns), shares), traits(snapshot.card)
    )
    meanwhile = consecutive_windows(split(online_end_ns, shares), OnIdle.YIELD)
    afterwards = consecutive_windows(
        _offline_turns(snapshot, online_end_ns, debtless_end_ns, shares), OnIdle.YIELD, online_end_ns
    )
    return tuple(
        replace(part, windows=(*first, *second) if pod.busy else None)
        for part, pod, first, second in zip(short, snapshot.pods, meanwhile, afterwards, strict=True)
    )


def _offline_turns(snapshot: Snapshot, online_end_ns: int, debtless_end_ns: int, shares: list[int]) -> list[int]:
    """Divide what online windows leave of the period, corrected for the debts of offline pods.

    Whatever is owed, each offline pod keeps half of the turn that it has when no pod is in debt.
    """
    left_ns = snapshot.period_ns - online_end_ns
    turns = [
        debt_corrected(turn, pod.debt_ns, snapshot.period_ns) if turn else 0
        for turn, pod in zip(split(left_ns, shares), snapshot.pods, strict=True)
    ]
    halves = split((snapshot.period_ns - debtless_end_ns) // 2, shares)
    beyond = [max(0, turn - half) for turn, half in zip(split(left_ns, turns), halves, strict=True)]
    rest = split(left_ns - sum(halves), beyond)
    return [half + more for half, more in zip(halves, rest, strict=True)]


def _fit_into_period(
    online_plan: Plan, offline_plan: Plan, debtless_online: Plan, debtless_offline: Plan
) -> tuple[Plan, Plan]:
    """Shorten windows where debts make those of both classes longer than a period together.

    First, debts may give online windows no more than half of the time that these leave free without any debt.
    """
    period_ns = online_plan.period_ns
    online_ns, nominal_ns = _lengths(online_plan), _lengths(debtless_online)
    online_ns = shortened_to((sum(nominal_ns) + period_ns) // 2, online_ns, nominal_ns)
    if not offline_plan.gated:
        return _with_lengths(online_plan, online_ns), offline_plan
    both_ns = shortened_to(period_ns, [*online_ns, *_lengths(offline_plan)], [*nominal_ns, *_lengths(debtless_offline)])
    online_ns, offline_ns = both_ns[: len(online_ns)], both_ns[len(online_ns) :]
    return _with_lengths(online_plan, online_ns), _with_lengths(offline_plan, offline_ns)


def _lengths(plan: Plan) -> list[int]:
    return [sum(window.end_ns - window.start_ns for window in part.windows or ()) for part in plan.pods]


def _with_lengths(plan: Plan, lengths_ns: Sequence[int]) -> Plan:
    """Give the pods that have a window one of this length each, one after the other."""
    windows = consecutive_windows(lengths_ns, OnIdle.KEEP)
    parts = zip(plan.pods, windows, strict=True)
    return replace(
        plan, pods=tuple(part if part.windows is None else replace(part, windows=own) for part, own in parts)
    )


def _last_end(plan: Plan) -> int:
    return max((window.end_ns for part in plan.pods for window in part.windows or ()), default=0)


def _shifted(part: PodPlan, shift_ns: int) -> PodPlan:
    if part.windows is None:
        return part
    return replace(
        part,
        windows=tuple(replace(w, start_ns=w.start_ns + shift_ns, end_ns=w.end_ns + shift_ns) for w in part.windows),
    )

"""Gangs: pods that are busy on several pGPUs get the same turn on all of them at once, on top of any policy.

A kernel that communicates with its peer on another card spins while the peer's gate is closed. So if a gang contends on
any of its pGPUs, all of them give it the same window of the same period. ``agree`` decides on those turns from what
every pGPU would give by itself; ``gangs_first`` lays them into the plan of one pGPU and fills the rest by that pGPU's
own policy. Both are pure; ``qgpu.daemon.gang_exchange`` carries bids between pGPUs.

Properties:
- A gang's window begins and ends at the same phase on each of its pGPUs where it contends.
- The window is as long as the least that any of these pGPUs would give the gang. So no other pod gets less than under
  the policy alone.
- Two gangs on one pGPU never have the same turn.
- Without such turns the plan is the policy's own, unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from qgpu.model import NS_PER_MS, NS_PER_US, GangTurn, OnIdle, Plan, PodPlan, Policy, Sharing, Snapshot, Window
from qgpu.model.hardware_traits import traits
from qgpu.policies.mechanism import MIN_TURN_NS, debt_corrected, lengths, period_of_turns, slices_within_windows, split

#: Mean turn on a pGPU with a gang. Gates of several cards move one after the other, so turns on two cards overlap less
#: the shorter they are.
TURN_NS = 100 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class Bid:
    """The part of the period that one pGPU's policy would give a busy pod, and the pod's debt there."""

    part: float
    debt_ns: int
    #: Whether another pod wants the pGPU at the same time.
    contended: bool


@dataclass(frozen=True, slots=True)
class Bids:
    """The bids of all busy offline pods of one pGPU, and the period that turns among them would take."""

    period_ns: int
    pods: Mapping[str, Bid] = field(default_factory=dict)


def bids(plan: Plan, snapshot: Snapshot) -> Bids:
    """Read each busy pod's bid from the policy's own plan for a pGPU."""
    busy = [(part, pod) for part, pod in zip(plan.pods, snapshot.pods, strict=True) if pod.busy]
    weights = [part.weight for part, _ in busy if part.weight]
    period_ns = period_of_turns(plan.period_ns, weights, TURN_NS) if len(weights) > 1 else plan.period_ns
    return Bids(
        period_ns,
        {
            pod.name: Bid(part.weight / sum(weights), pod.debt_ns, len(weights) > 1)
            if part.weight
            else Bid((pod.grant.cores or 0) / 100, pod.debt_ns, part.windows is not None)
            for part, pod in busy
        },
    )


def agree(every: Mapping[int, Bids], pgpu: int) -> tuple[int, tuple[GangTurn, ...]]:
    """Return the period and the turns of gangs on one pGPU, from the bids of all pGPUs; (0, ()) if there are none.

    The turns of a gang are the same whichever pGPU asks.
    """
    gangs = _gangs_near(every, pgpu)
    if not gangs:
        return 0, ()
    period_ns = max(
        every[card].period_ns for by_card in gangs.values() for card, bid in by_card.items() if bid.contended
    )
    turns: dict[str, GangTurn] = {}
    for name, by_card in sorted(gangs.items()):
        contended = [bid for bid in by_card.values() if bid.contended]
        due_ns = max(MIN_TURN_NS, int(min(bid.part for bid in contended) * period_ns))
        debt_ns = sum(bid.debt_ns for bid in contended) // len(contended)
        taken = [turn for other, turn in turns.items() if gangs[other].keys() & by_card.keys()]
        length_ns = debt_corrected(due_ns, debt_ns, period_ns)
        start_ns = _first_gap(taken, length_ns)
        turns[name] = GangTurn(name, start_ns, start_ns + length_ns, due_ns)
    end_ns = max(turn.end_ns for turn in turns.values())
    return period_ns, tuple(
        _scaled(turn, period_ns, end_ns) if end_ns > period_ns else turn
        for name, turn in turns.items()
        if pgpu in gangs[name] and gangs[name][pgpu].contended
    )


def _gangs_near(every: Mapping[int, Bids], pgpu: int) -> dict[str, Mapping[int, Bid]]:
    """Find the gangs that contend on this pGPU, or on a pGPU that such gangs connect to it."""
    by_pod: dict[str, dict[int, Bid]] = {}
    for card, bids_here in sorted(every.items()):
        for name, bid in bids_here.pods.items():
            by_pod.setdefault(name, {})[card] = bid
    gangs = {
        name: by_card
        for name, by_card in by_pod.items()
        if len(by_card) > 1 and any(bid.contended for bid in by_card.values())
    }
    near, before = {pgpu}, set[int]()
    while near != before:
        before = set(near)
        near |= {card for by_card in gangs.values() if by_card.keys() & near for card in by_card}
    return {name: by_card for name, by_card in gangs.items() if by_card.keys() & near}


def _first_gap(taken: Sequence[GangTurn], length_ns: int) -> int:
    at_ns = 0
    for turn in sorted(taken, key=lambda turn: turn.start_ns):
        if turn.start_ns >= at_ns + length_ns:
            break
        at_ns = max(at_ns, turn.end_ns)
    return at_ns


def _scaled(turn: GangTurn, period_ns: int, end_ns: int) -> GangTurn:
    """Scale a turn so that turns that end after the period fit into it."""
    start_ns, stop_ns, due_ns = (at * period_ns // end_ns for at in (turn.start_ns, turn.end_ns, turn.due_ns))
    return GangTurn(turn.pod, start_ns, stop_ns, due_ns)


def gangs_first(policy: Policy) -> Policy:
    """Compose a policy that gives gangs the agreed turns and divides the rest by ``policy``."""

    def plan(snapshot: Snapshot) -> Plan:
        if not snapshot.gang_turns:
            return policy(snapshot)
        own = policy(replace(snapshot, gang_turns=(), offline=Sharing()))
        turns = {turn.pod: turn for turn in snapshot.gang_turns}
        dues = split(snapshot.period_ns - sum(turn.due_ns for turn in turns.values()), _weights(own, snapshot, turns))
        whole = [turn.due_ns for turn in turns.values()]
        parts = own.pods if own.gated else slices_within_windows(own.pods, [*whole, *dues], traits(snapshot.card))
        windows = iter(
            _place_windows(_lengths(own, snapshot, turns), _gaps(snapshot), OnIdle.KEEP if own.gated else OnIdle.YIELD)
        )
        return Plan(
            snapshot.pgpu,
            snapshot.period_ns,
            tuple(
                _with_turn(part, turns.get(part.pod), due_ns, next(windows), pod.busy)
                for part, pod, due_ns in zip(parts, snapshot.pods, dues, strict=True)
            ),
        )

    return plan


def _weights(own: Plan, snapshot: Snapshot, turns: Mapping[str, GangTurn]) -> list[int]:
    """Return the weights of busy pods that are not gangs, and 0 for all others."""
    return [
        part.weight if pod.busy and part.pod not in turns else 0
        for part, pod in zip(own.pods, snapshot.pods, strict=True)
    ]


def _lengths(own: Plan, snapshot: Snapshot, turns: Mapping[str, GangTurn]) -> list[int]:
    """Return the window length of each pod that is not a gang, out of the time that gangs leave."""
    left_ns = max(0, snapshot.period_ns - sum(turn.end_ns - turn.start_ns for turn in turns.values()))
    if own.gated:
        planned = [0 if part.pod in turns else _planned_ns(part) for part in own.pods]
        return split(left_ns, planned) if sum(planned) > left_ns else planned
    return lengths(left_ns, _weights(own, snapshot, turns), snapshot.pods)


def _planned_ns(part: PodPlan) -> int:
    return sum(window.end_ns - window.start_ns for window in part.windows or ())


def _gaps(snapshot: Snapshot) -> list[tuple[int, int]]:
    """Return the gaps between the turns of gangs, as (start, end)."""
    gaps, at_ns = [], 0
    for turn in sorted(snapshot.gang_turns, key=lambda turn: turn.start_ns):
        gaps.append((at_ns, turn.start_ns))
        at_ns = turn.end_ns
    return [(start, end) for start, end in (*gaps, (at_ns, snapshot.period_ns)) if end > start]


def _place_windows(
    lengths: Sequence[int], gaps: Sequence[tuple[int, int]], on_idle: OnIdle
) -> list[tuple[Window, ...]]:
    """Lay windows of these lengths into the gaps, one after the other; a window is cut where a gap ends."""
    left = list(gaps)
    laid: list[tuple[Window, ...]] = []
    for length in lengths:
        own, length_ns = [], length
        while length_ns > 0 and left:
            start_ns, end_ns = left.pop(0)
            stop_ns = min(end_ns, start_ns + length_ns)
            own.append(Window(start_ns, stop_ns, on_idle))
            length_ns -= stop_ns - start_ns
            if stop_ns < end_ns:
                left.insert(0, (stop_ns, end_ns))
        laid.append(tuple(own))
    return laid


def _with_turn(part: PodPlan, turn: GangTurn | None, due_ns: int, own: tuple[Window, ...], busy: bool) -> PodPlan:
    """Give a gang its turn and a busy pod its windows; the ledger measures both against the planned time.

    No gate moves for an idle pod with a weight. A pod held to its quota keeps its windows even when idle.
    """
    if turn is not None:
        on_idle = OnIdle.YIELD if part.weight else OnIdle.KEEP
        aim = max(1, turn.due_ns // NS_PER_US) if part.weight else 0
        return replace(part, windows=(Window(turn.start_ns, turn.end_ns, on_idle),), weight=aim)
    if not part.weight:
        return part if part.windows is None else replace(part, windows=own)
    return replace(part, windows=own, weight=max(1, due_ns // NS_PER_US)) if busy else part

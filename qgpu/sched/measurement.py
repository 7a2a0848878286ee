"""Adds up what pods do while they take turns in one way, and tells when that is enough for a judgement.

``slice_tuner.py`` judges. ``trial.py`` says what the sum amounts to.
"""

from __future__ import annotations

from collections.abc import Mapping

from qgpu.model import NS_PER_MS, Sharing
from qgpu.model.hardware_traits import HardwareTraits
from qgpu.sched.gpu_usage import GpuUse, RoundEntry, known_sum
from qgpu.sched.trial import MIN_TURNS, dues, is_early
from qgpu.sched.tuning import Tuning

#: How long the tuner measures a way to take turns before it judges it: on trial, and after it settled on it.
TRIAL_NS = 90 * NS_PER_MS
WATCH_NS = 300 * NS_PER_MS

#: A trial lasts up to MAX_TRIAL_NS where pods have few turns. The first turns of a round of LONG_ROUND_NS or more still
#: belong to the previous way.
MAX_TRIAL_NS = 300 * NS_PER_MS
LONG_ROUND_NS = 30 * NS_PER_MS

#: Of a few turns in a long round, one that was cut off looks like an early end. A pod that left more than _LEFT of a
#: turn is measured longer.
_LEFT = 0.5

#: For STALE_NS after gates begin to move, NVML's utilization still covers the time before.
STALE_NS = 300 * NS_PER_MS
GATE_TRIAL_NS = 500 * NS_PER_MS

#: Pods contend for the card when together, switches included, they occupy it for at least this part of the time.
_CONTENDED = 0.85

#: Small corrections of slices can make up the rest for pods that have at least this part of their share.
_NEARLY_FAIR = 0.85

#: The largest work debt or credit of a pod under timeslices.
MAX_WORK_DEBT_NS = 24 * NS_PER_MS
#: The part of a work debt that remains after a round. A measured round ends at a random point of a turn, and the decay
#: keeps those errors from adding up.
_DEBT_DECAY = 0.9


def is_contended(
    now: Tuning, pods: Mapping[str, RoundEntry], elapsed_ns: int, foreign_ns: int, utilization: float | None
) -> bool:
    """Tell whether pods filled the card and none was starting: other rounds teach nothing."""
    if True in [entry.starting for entry in pods.values()]:
        return False
    uses, gap_ns = [entry.use for entry in pods.values()], now.hardware.gap_ns
    used_ns = sum([use.run_ns + use.starts * gap_ns for use in uses])
    if used_ns + foreign_ns < _CONTENDED * elapsed_ns:
        return False
    # A context that is alone on the card counts as running while it idles. Only NVML shows the difference.
    return now.sharing.by_gate or utilization is None or utilization >= _CONTENDED


def accumulate(
    now: Tuning, pods: Mapping[str, RoundEntry], elapsed_ns: int, foreign_ns: int, utilization: float | None
) -> Tuning:
    """Add what pods did, except in the first moments, which still belong to the previous way."""
    passed_ns = now.passed_ns + elapsed_ns
    stale_ns = STALE_NS if now.sharing.by_gate else TRIAL_NS if is_long(now.sharing) else 0
    if not now.settled and passed_ns - elapsed_ns < stale_ns:
        return now._replace(passed_ns=passed_ns)
    known = now.uses
    uses = {name: _sum(known[name], entry.use) if name in known else entry.use for name, entry in pods.items()}
    told_ns = elapsed_ns if utilization is not None else 0
    return now._replace(
        uses=uses,
        passed_ns=passed_ns,
        watched_ns=now.watched_ns + max(0, elapsed_ns - foreign_ns),
        utilization=now.utilization + (utilization or 0.0) * told_ns,
        utilization_ns=now.utilization_ns + told_ns,
    )


def is_conclusive(now: Tuning, pods: Mapping[str, RoundEntry], period_ns: int) -> bool:
    """Tell whether the measurement is long enough: in time, and in turns where pods have few."""
    if now.settled:
        return now.passed_ns >= max(WATCH_NS, 2 * period_ns)
    if now.sharing.by_gate:
        return now.passed_ns >= max(GATE_TRIAL_NS, 3 * period_ns)
    long = is_long(now.sharing)
    if now.passed_ns < (max(2 * TRIAL_NS, 2 * period_ns * 9 // 10) if long else TRIAL_NS):
        return False
    few = any(
        use.starts < MIN_TURNS * pods[name].busy_tsgs
        and (is_early(use, pods[name], now.hardware) or (long and _may_be_early(use, pods[name], now.hardware)))
        for name, use in now.uses.items()
    )
    return not (few and now.passed_ns < (4 * period_ns if long else MAX_TRIAL_NS))


def _may_be_early(use: GpuUse, entry: RoundEntry, hardware: HardwareTraits) -> bool:
    """Tell whether a pod may end turns early: of a few turns, one may have been cut off instead."""
    assert entry.part is not None
    full_ns = hardware.turn_ns(entry.part.timeslice_us)
    return use.starts * full_ns - use.run_ns > _LEFT * full_ns


def is_long(sharing: Sharing) -> bool:
    """Tell whether a round is so long that its first turns still belong to the previous way."""
    return not sharing.equal and (sharing.round_ns is None or sharing.round_ns >= LONG_ROUND_NS)


def work_debts(now: Tuning, pods: Mapping[str, RoundEntry], available_ns: int) -> dict[str, float]:
    """Return each unsatisfied pod's debt with its work beyond its due added; only credits where shares are far off.

    A slice that cuts a pod's steps gives it a half or a third of a step, never exactly its share. So the policy
    shortens the slices of debtors and lengthens those of creditors, and the share is right on average.
    """
    asking = {name: entry for name, entry in pods.items() if name not in now.satisfied}
    work = {
        name: max(0, entry.use.run_ns - entry.use.starts * now.hardware.switched_ns) for name, entry in asking.items()
    }
    available_ns -= sum(entry.use.run_ns for name, entry in pods.items() if name not in asking)
    most_ns = MAX_WORK_DEBT_NS if _is_nearly_fair(now, pods) else 0
    return {
        name: max(-MAX_WORK_DEBT_NS, min(most_ns, _DEBT_DECAY * now.debts_ns.get(name, 0.0) + work[name] - due_ns))
        for name, due_ns in dues(asking, sum(work.values()), available_ns).items()
    }


def _is_nearly_fair(now: Tuning, pods: Mapping[str, RoundEntry]) -> bool:
    """Tell whether all unsatisfied pods nearly have their share, so that small corrections can give them the rest."""
    trial = now.last_trial()
    if trial is None or not trial.rates.keys() <= pods.keys():
        return False
    asking = [name for name in trial.rates if name not in now.satisfied]
    done, whole = sum(trial.rates[name] for name in asking), sum(pods[name].weight for name in asking)
    return all(trial.rates[name] >= _NEARLY_FAIR * done * pods[name].weight / whole for name in asking)


def _sum(a: GpuUse, b: GpuUse) -> GpuUse:
    return GpuUse(
        a.run_ns + b.run_ns,
        a.starts + b.starts,
        a.open_ns + b.open_ns,
        a.passed_ns + b.passed_ns,
        max(a.longest_ns, b.longest_ns),
        entries=known_sum(a.entries, b.entries),
    )

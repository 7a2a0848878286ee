"""Computes each pod's debt after a round: measured GPU time against what the plan aimed at.

Pure arithmetic on one round. The ledger keeps the debts and policies act on them. ``qgpu.sched.slice_tuner`` chooses
how pods take turns. docs/feedback.md has the control law, its limits and why no pod can starve.
"""

from __future__ import annotations

from collections.abc import Mapping

from qgpu.model import NS_PER_MS, PodClass
from qgpu.sched.gpu_usage import RoundEntry, overruns

#: The largest debt against a quota: what the quota gives in this time. Anything beyond is forgiven. A starting pod may
#: run in the windows of others, so it owes up to what its quota gives in STARTING_HORIZON_NS.
DEBT_HORIZON_NS = 200 * NS_PER_MS
STARTING_HORIZON_NS = 3_000 * NS_PER_MS

#: The largest credit of a pod is the larger of these: in ns, and as a part of a period. It covers what gates cost, not
#: time that the pod left unused. Against a quota it also covers what a pod loses while another one's context ends: RM
#: moves no gate for 15 ms then.
CREDIT_NS = 6 * NS_PER_MS
CREDIT = 0.06
QUOTA_CREDIT_NS = 12 * NS_PER_MS
QUOTA_CREDIT = 0.12

#: A pod that ran for less than this part of its turns, less the cost of a gate, had nothing to run in the rest.
_FILLING = 0.85
_GATE_NS = 1 * NS_PER_MS


def settle(entries: Mapping[str, RoundEntry], round_ns: int, period_ns: int, *, ragged: bool = False) -> dict[str, int]:
    """Return each pod's debt in ns after a round of ``round_ns`` under a plan of ``period_ns``.

    A round is ragged if pods became busy or idle in it, or if a part of it is missing. A ragged round settles only
    quotas, because they are measured against the clock and not against other pods. Weights are settled among pods with
    windows. Timeslices leave no debts here.
    """
    debts = {}
    ungated_ns = sum([entry.use.ungated_ns for entry in entries.values()])
    by_class: dict[PodClass, dict[str, RoundEntry]] = {}
    for name, entry in entries.items():
        debts[name] = entry.debt_ns
        if not entry.weight:
            debts[name] = _against_quota(entry, period_ns, ungated_ns - entry.use.ungated_ns)
        elif not entry.busy_tsgs or entry.part is None or entry.part.turn_ns is None:
            debts[name] = 0
        else:
            by_class.setdefault(entry.grant.pod_class, {})[name] = entry
    if ragged or not round_ns:
        return debts
    for rivals in by_class.values():
        foreign_ns = sum([entry.use.run_ns for name, entry in entries.items() if name not in rivals])
        if len(rivals) > 1:
            debts |= _by_windows(rivals, round_ns, period_ns, foreign_ns)
    return debts


def _against_quota(entry: RoundEntry, period_ns: int, ungated_ns: int) -> int:
    """Charge what a pod had beyond its quota. It gets credit for missing time only if it filled its turns.

    Others that start may have taken ``ungated_ns`` of its turns from it.
    """
    cores = entry.grant.cores
    if cores is None:
        return 0
    before_ns = entry.debt_ns if entry.busy_tsgs else max(0, entry.debt_ns)
    after_ns = before_ns + entry.use.run_ns - entry.use.passed_ns * cores // 100
    if not entry.busy_tsgs or entry.starting or not _fills(entry, entry.use.passed_ns, period_ns, 0, ungated_ns):
        after_ns = max(after_ns, min(before_ns, 0))
    horizon_ns = STARTING_HORIZON_NS if entry.starting else DEBT_HORIZON_NS
    most_ns = max(horizon_ns * cores // 100, min(before_ns, STARTING_HORIZON_NS * cores // 100))
    return max(-max(QUOTA_CREDIT_NS, round(QUOTA_CREDIT * period_ns)), min(most_ns, after_ns))


def _by_windows(rivals: Mapping[str, RoundEntry], round_ns: int, period_ns: int, foreign_ns: int) -> dict[str, int]:
    """Settle the pods that filled their turns by weight, against the time they had together.

    A pod that left some of its turns unused has what it asks for: it gets no credit and no debt.
    """
    filling = {name: entry for name, entry in rivals.items() if _fills(entry, round_ns, period_ns, foreign_ns)}
    bound_ns = max(CREDIT_NS, round(CREDIT * period_ns))
    return {
        name: max(-bound_ns, min(bound_ns, filling[name].debt_ns + over_ns))
        for name, over_ns in overruns(filling).items()
    }


def _fills(entry: RoundEntry, round_ns: int, period_ns: int, foreign_ns: int, taken_ns: int = 0) -> bool:
    """Tell whether a pod had work in all of its own turns.

    Other classes took ``foreign_ns`` of the round, and others up to ``taken_ns`` of the pod's own turns.
    """
    if entry.part is None or (own_ns := entry.part.turn_ns) is None:
        return True
    turns_ns = (
        min(entry.use.open_ns, own_ns * round_ns // period_ns) * max(0, round_ns - foreign_ns) // max(1, round_ns)
    )
    return entry.use.run_ns + taken_ns >= _FILLING * turns_ns - _GATE_NS

"""What the pods of a pGPU owe each other after a round: measured GPU time against what the plan aimed at.

Pure arithmetic on one round; the ledger keeps what comes of it, policies act on it. How pods had best take their
turns is told in ``qgpu.sched.slice_tuner``. The control law, its limits and why nobody can starve are in
docs/feedback.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from qgpu.model import NS_PER_MS, PodClass
from qgpu.sched.gpu_usage import RoundEntry, overruns

#: Overruns of a quota are paid back up to what the quota gives in this time; older ones are forgiven.
DEBT_HORIZON_NS = 200 * NS_PER_MS

#: What a pod may be short of at most, in ns and as part of a period: what gates cost, not what it left unused.
CREDIT_NS = 6 * NS_PER_MS
CREDIT = 0.06

#: A pod that ran for less than this part of its turns (and the price of a gate) had nothing to run in the rest.
_FILLING = 0.85
_GATE_NS = 1 * NS_PER_MS


def settle(entries: Mapping[str, RoundEntry], round_ns: int, period_ns: int, *, ragged: bool = False) -> dict[str, int]:
    """Return everybody's debt in ns after a round of ``round_ns`` under a plan of ``period_ns``.

    Of a ragged round, in which pods came to life or went to rest or of which a part is missing, only quotas are
    settled: they are held to the clock, not to what others did. Weights are settled among pods with windows; timeslices
    leave no debts.
    """
    debts = {}
    by_class: dict[PodClass, dict[str, RoundEntry]] = {}
    for name, entry in entries.items():
        debts[name] = entry.debt_ns
        if not entry.weight:
            debts[name] = _against_quota(entry, period_ns)
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


def _against_quota(entry: RoundEntry, period_ns: int) -> int:
    """Charge what a pod had beyond its quota; what it did not use is owed to it only if it filled its turns."""
    cores = entry.grant.cores
    if cores is None:
        return 0
    before_ns = entry.debt_ns if entry.busy_tsgs else max(0, entry.debt_ns)
    after_ns = before_ns + entry.use.run_ns - entry.use.passed_ns * cores // 100
    if not entry.busy_tsgs or entry.starting or not _fills(entry, entry.use.passed_ns, period_ns, 0):
        after_ns = max(after_ns, min(before_ns, 0))
    return max(-_credit_ns(period_ns), min(DEBT_HORIZON_NS * cores // 100, after_ns))


def _by_windows(rivals: Mapping[str, RoundEntry], round_ns: int, period_ns: int, foreign_ns: int) -> dict[str, int]:
    """Hold those who filled their turns to their weights in what they got together.

    Who left some of its turns unused has what it wants; it neither saves that up nor owes for it.
    """
    filling = {name: entry for name, entry in rivals.items() if _fills(entry, round_ns, period_ns, foreign_ns)}
    bound_ns = _credit_ns(period_ns)
    return {
        name: max(-bound_ns, min(bound_ns, filling[name].debt_ns + over_ns))
        for name, over_ns in overruns(filling).items()
    }


def _fills(entry: RoundEntry, round_ns: int, period_ns: int, foreign_ns: int) -> bool:
    """Tell whether it had work in all of its own turns; ``foreign_ns`` of the round was never to be had."""
    if entry.part is None or (own_ns := entry.part.turn_ns) is None:
        return True
    turns_ns = (
        min(entry.use.open_ns, own_ns * round_ns // period_ns) * max(0, round_ns - foreign_ns) // max(1, round_ns)
    )
    return entry.use.run_ns >= _FILLING * turns_ns - _GATE_NS


def _credit_ns(period_ns: int) -> int:
    return max(CREDIT_NS, round(CREDIT * period_ns))

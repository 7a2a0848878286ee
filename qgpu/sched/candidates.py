"""Which way to take turns is worth a trial next, and which of those tried is the best.

``slice_tuner.py`` decides when to try.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from math import log2

from qgpu.model import NS_PER_MS, NS_PER_S, PodClass, Sharing
from qgpu.sched.gpu_usage import RoundEntry
from qgpu.sched.trial import Trial, dues, guaranteed, score, short_of_share
from qgpu.sched.tuning import Tuning, first_round

#: When a round shrinks to fit a pod that ends its turns early, the longest slice of the other pods stays at least this
#: long, because a switch there and back takes a third of a millisecond. Online pods pay more of that for latency.
SHORTEST_NS = {PodClass.OFFLINE: NS_PER_MS, PodClass.ONLINE: NS_PER_MS // 2}

#: Longer turns save no switch if some pod uses less than half of its turn.
_HALF = 0.5

#: A pod is short when a trial gave it less than this part of its share by weight.
_SHORT = 0.93

#: A way stays after a change of weights if the pods do at least this part of the work that they did before.
_AS_GOOD = 0.97

#: A longer round is worth a trial once switches take more than _SWITCHING_LOW of the time. Where all pods use their
#: slices up, gates are worth one once switches take more than _SWITCHING_HIGH.
_SWITCHING_LOW, _SWITCHING_HIGH = 0.02, 0.05

#: Two rounds are alike if one is less than a fifth longer than the other: the difference of their logarithms, base 2.
_ALIKE = 0.25

#: If a pod has less than this part of its quota, pods without one get shorter slices, down to _LEAST_SLICE_US.
_OWED, _LEAST_SLICE_US = 0.97, 250

#: A round must beat the score of the driver's own slices by _ROUND_WORTH, and shorter slices of pods without a quota
#: must beat every round by _SHORTER_WORTH. Gates must beat all of them by _GATES_WORTH, because a step then waits for
#: whole turns of others.
_ROUND_WORTH = 1.08
_SHORTER_WORTH = 1.02
_GATES_WORTH = 1.03

#: With gates, pods must use _USE_KEPT of what they used with slices; and _GATED_USE of the card, or _USE_MORE
#: times what they used with slices. With less, they have gaps in their turns and the card idles. Where one pod alone
#: has gaps, its work is certain, and what it gains may cost more: _USE_KEPT_FOR_ONE of what they used with slices is
#: enough.
_GATED_USE, _USE_KEPT, _USE_MORE, _USE_KEPT_FOR_ONE = 0.88, 0.97, 1.03, 0.7

#: Every way is tried again after RETRY_NS, unless slices hardly cost a switch. Gates that failed are tried again after
#: RETRY_NS, too; or after _GATES_BACKOFF_NS, if they had worked before or a pod's turns have become longer or shorter
#: by the factor _CHANGED_TURNS.
RETRY_NS = 120 * NS_PER_S
_GATES_BACKOFF_NS = 10 * NS_PER_S
_CHANGED_TURNS = 3.0


def next_round(
    now: Tuning, last: Trial, weights: Mapping[str, int], pods: Mapping[str, RoundEntry], period_ns: int
) -> tuple[Sharing, frozenset[str]] | None:
    """Return the next round worth a trial after ``last``, and the pods whose steps it fits; None for no more.

    The round is shorter if a pod is short: that pod's turn becomes as long as its step. It is longer if all pods use
    their slices and switching costs too much.
    """
    if last.sharing.slice_factors:
        return None
    whole = sum(weights.values())
    start_ns = first_round(pods).round_ns or 0
    round_ns = start_ns if last.sharing.equal else last.sharing.round_ns or period_ns
    short = short_of_share(last, weights, _SHORT) - now.satisfied
    if short:
        equal = Sharing(equal=True)
        if last.sharing.round_ns == start_ns and len(set(weights.values())) > 1 and not _tried(equal, now, period_ns):
            return equal, frozenset()
        others = max((weights[name] for name in weights if name not in short), default=max(weights.values()))
        fit_ns = min(
            max(1.0, last.turns_ns[name] - pods[name].busy_tsgs * now.hardware.switched_ns) * whole / weights[name]
            for name in short
        )
        pod_class = next(iter(pods.values())).grant.pod_class
        wanted_ns = max(fit_ns, SHORTEST_NS[pod_class] * whole / others)
        if round_ns > 2 * start_ns > 2 * wanted_ns:
            wanted_ns = float(start_ns)
        if wanted_ns >= 0.85 * round_ns:
            return None
    elif (
        last.sharing.round_ns
        and last.switching > _SWITCHING_LOW
        and last.min_slice_use > _HALF
        and last.fits_slice <= last.resting
    ):
        # Resting pods must not come more often than once in such a round.
        most_ns = min(
            (last.watched_ns / 2 / max(1, last.starts[name]) for name in last.resting), default=float(period_ns)
        )
        wanted_ns = float(period_ns) if last.slices_exhausted and period_ns <= most_ns else 2.0 * round_ns
        if wanted_ns > most_ns:
            return None
    else:
        return None
    wanted = Sharing(round_ns=None if wanted_ns >= period_ns else int(wanted_ns))
    return None if _tried(wanted, now, period_ns) else (wanted, short)


def resting_unasked(now: Tuning, last: Trial, weights: Mapping[str, int]) -> frozenset[str]:
    """Name the pods that rest because they want no more.

    A pod that starts its steps by a timer also rests if a step ends too late for the next one. So where weights differ,
    a pod that rests counts only after a trial of equal slices.
    """
    equal = Sharing(equal=True)
    if len(set(weights.values())) > 1 and equal not in [*(each.sharing for each in now.trials), *now.rejected]:
        return frozenset()
    return last.resting


def _tried(wanted: Sharing, now: Tuning, period_ns: int) -> bool:
    """Tell whether a similar way was on trial or rejected by the policy."""
    known = [*(trial.sharing for trial in now.trials), *now.rejected]
    if wanted.equal:
        return wanted in known
    rounds = [sharing.round_ns or period_ns for sharing in known if not sharing.equal and not sharing.by_gate]
    return any(abs(log2((wanted.round_ns or period_ns) / before)) < _ALIKE for before in rounds)


def shorter_slices(now: Tuning, best: Trial, pods: Mapping[str, RoundEntry]) -> Sharing | None:
    """Return ``best`` with slices half as long for pods without a quota, if a pod has less than its quota.

    None if no pod has less, no slice can be shorter, or this was on trial before; also if the slices of ``best`` are
    equal, because slices by weight serve quotas better.
    """
    has_quotas = any(entry.grant.cores is not None for entry in pods.values())
    if best.sharing.equal or not has_quotas or not owed(best, now.satisfied, pods):
        return None
    factors = dict(best.sharing.slice_factors)
    for name, entry in pods.items():
        if entry.grant.cores is None and entry.part is not None and entry.part.timeslice_us >= 2 * _LEAST_SLICE_US:
            factors[name] = factors.get(name, 1.0) / 2
    wanted = replace(best.sharing, slice_factors=tuple(sorted(factors.items())))
    return None if wanted in [*(trial.sharing for trial in now.trials), *now.rejected] else wanted


def owed(trial: Trial, satisfied: AbstractSet[str], pods: Mapping[str, RoundEntry]) -> bool:
    """Tell whether a pod had less than its quota, or less than its part by weight where no pod has a quota."""
    parts = dues(pods, sum(trial.rates.values()), 1.0)
    for name in (guaranteed(trial, pods) & pods.keys()) - satisfied:
        cores = pods[name].grant.cores
        if trial.rates[name] < _OWED * (parts[name] if cores is None else cores / 100):
            return True
    return False


def best_round(slices: Sequence[Trial], every: Sequence[Trial], pods: Mapping[str, RoundEntry]) -> Trial:
    """Return the best round: the first or the equal one, unless another is clearly better."""
    usual = (first_round(pods), Sharing(equal=True))
    scores = {id(trial): score(trial, every, pods) for trial in slices}

    def highest(trials: Sequence[Trial]) -> Trial:
        return max(trials, key=lambda trial: scores[id(trial)])

    by_weight = [trial for trial in slices if not trial.sharing.slice_factors] or slices
    best = highest(by_weight)
    plain = highest([trial for trial in by_weight if trial.sharing in usual] or [best])
    if scores[id(best)] < _ROUND_WORTH * scores[id(plain)] and not _is_longer(best, plain):
        best = plain
    found = highest(slices)
    return found if scores[id(found)] >= _SHORTER_WORTH * scores[id(best)] else best


def _is_longer(trial: Trial, than: Trial) -> bool:
    """Tell whether a round is longer than another, and so costs fewer switches."""
    if trial.sharing.equal or than.sharing.equal:
        return False
    return than.sharing.round_ns is not None and (
        trial.sharing.round_ns is None or trial.sharing.round_ns > than.sharing.round_ns
    )


def serves_as_before(expected: float, trial: Trial, weights: Mapping[str, int]) -> bool:
    """Tell whether a way serves pods under new weights: no pod is short, and they do the work ``expected`` of them."""
    return sum(trial.rates.values()) >= _AS_GOOD * expected and not short_of_share(trial, weights, _SHORT)


def gates_worth_a_trial(now: Tuning, best: Trial, pods: Mapping[str, RoundEntry]) -> Sharing | None:
    """Return turns by gate if they can gain something over slices: two pods or more take them, and one is owed work.

    None where all pods use their slices up and switches take little time. A pod that had uneven turns in any trial is
    launched kernel by kernel, and its turns by gate would be full of gaps. So it gets no gate; nor does a pod that
    rests, if two others are left.
    """
    asking = pods.keys() - now.satisfied
    uneven = best.uneven.union(*(trial.uneven for trial in now.trials))
    beside = uneven if len(asking - uneven - best.resting) < 2 else uneven | best.resting
    in_turn = asking - beside
    if len(in_turn) < 2 or (best.slices_exhausted and best.switching < _SWITCHING_HIGH):
        return None
    gates = Sharing(by_gate=True, ungated=frozenset(asking & beside))
    return gates if owed(best, pods.keys() - in_turn, pods) else None


def round_to_see_steps(now: Tuning, best: Trial, pods: Mapping[str, RoundEntry], period_ns: int) -> Sharing | None:
    """Return a round as long as the period, if slices have cut all steps of a pod that leaves turns early.

    Only a step that no slice cuts shows whether the pod has even turns. None if that is known or was on trial, and
    where no pod has a quota that such long turns could serve.
    """
    seen = frozenset[str]().union(*(trial.fits_slice | trial.uneven for trial in now.trials))
    longest, has_quotas = Sharing(), any(entry.grant.cores is not None for entry in pods.values())
    known = not has_quotas or best.early - now.satisfied <= seen
    return None if known or _tried(longest, now, period_ns) else longest


def gates_retry_due(now: Tuning, best: Trial, now_ns: int) -> bool:
    """Tell whether gates have not failed lately, or the pods' turns have changed since."""
    if now.gates_failed_ns is None or now_ns - now.gates_failed_ns >= RETRY_NS:
        return True
    if now_ns - now.gates_failed_ns < _GATES_BACKOFF_NS:
        return False
    return not now.gates_failed or any(
        not 1 / _CHANGED_TURNS <= turn / max(1.0, now.gates_failed.get(name, 1.0)) <= _CHANGED_TURNS
        for name, turn in best.turns_ns.items()
    )


def all_retry_due(now: Tuning, trial: Trial, now_ns: int) -> bool:
    """Tell whether what is known of other ways is old; ``trial`` is the newest of the way that was settled on.

    Small pods may do something else by now, and windows hide what pods do in them. A way that was kept for new weights
    is old after a delay, in which the operator sees the new weights in force.
    """
    if now.kept_until_ns:
        return now_ns >= now.kept_until_ns
    return (now.sharing.by_gate or trial.switching > _SWITCHING_LOW) and now_ns - now.tried_ns >= RETRY_NS


def gates_pay(gated: Trial, best: Trial, now: Tuning, pods: Mapping[str, RoundEntry]) -> bool:
    """Tell whether turns by gate are better than the best round, and leave the card busy enough."""
    if score(gated, now.trials, pods) < _GATES_WORTH * score(best, now.trials, pods):
        return False
    return sum(gated.rates.values()) >= least_gated_use(now, gated, best)


def least_gated_use(now: Tuning, gated: Trial, best: Trial) -> float:
    """Return the least use of the card, 0 to 1, with which ``gated`` stays; ``best`` is the best round.

    Idle time in turns by gate belongs to the pods that leave gaps with slices. The work of these pods is certain if it
    is one pod, or if the entries of all were counted. Otherwise it is an estimate: good where little idles, or where
    all of them together do more than with slices.
    """
    used, gappy = sum(best.rates.values()), best.gappy - now.satisfied - gated.sharing.ungated
    if len(gappy) == 1 or (gappy and gappy <= gated.counted & best.counted):
        return _USE_KEPT_FOR_ONE * used
    return max(min(_GATED_USE, _USE_MORE * used), _USE_KEPT * used)

"""Chooses how the busy pods of one class take turns: the control law. It judges by work done, not by residence.

Pods take turns by timeslices or by gates. With timeslices, the hardware switches to the next pod when a slice ends or a
pod has nothing to run. With gates, each pod has the card to itself for its part of a period, or pods that are owed work
have a part of it to themselves (``reservation.py``). For timeslices one number, the length of a round, sets every
slice: a pod's slice is its weight's part of the round, or all slices are equal. Only pods without a quota may get less,
where another pod has less than its quota.

A long round costs few context switches. But a pod that waits for its own work ends its turn early, and then waits for
the long turns of the others. So the tuner tries several rounds, tries gates where slices leave a pod below its quota,
and keeps the way with the best ``score``: how far the least satisfied pod is satisfied, squared, times the work of all
pods. A pod is satisfied when it has its due (``dues``), or as much as it had in any round tried. docs/feedback.md gives
the reasons and the limits.

Pure arithmetic: ``advance`` folds one measured round into a ``Tuning``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qgpu.model import NS_PER_S, Sharing
from qgpu.sched import reservation
from qgpu.sched.candidates import (
    all_retry_due,
    best_round,
    gates_pay,
    gates_retry_due,
    gates_worth_a_trial,
    least_gated_use,
    next_round,
    resting_unasked,
    round_to_see_steps,
    serves_as_before,
    shorter_slices,
)
from qgpu.sched.entry_cost import alike, by_entries
from qgpu.sched.gpu_usage import RoundEntry
from qgpu.sched.measurement import accumulate, is_conclusive, is_contended, is_long, work_debts
from qgpu.sched.trial import Trial, guaranteed, observe, satisfied_pods, short_of_share
from qgpu.sched.tuning import Tuning, begin, first_round

__all__ = ["Tuning", "advance", "begin", "interrupted"]

#: How many rejected ways and how many trials a ``Tuning`` remembers.
_MAX_REJECTED, _MAX_TRIALS = 16, 8

#: A pod is short when it has less than this part of its share by weight over a longer time than a trial.
_SHORT_LATER = 0.96

#: Gates fail when they leave the card idle for this many measurements in a row. NVML's figure may cover a time in which
#: pods rested, and that time may fall into two of them.
_IDLE_TIMES = 3

#: If pods leave the card idle for so long, time is reserved no longer. A pod that has ended counts as busy for half a
#: second.
_UNUSED_NS = NS_PER_S

#: A pod's behaviour has changed when its rate differs by more than _CHANGED of the card plus _CHANGED_PART of its
#: former rate. The tuner then starts over. Each retry doubles the wait before the next, until _RETRY_RESET_NS have
#: passed without one.
_CHANGED, _CHANGED_PART = 0.1, 0.4
_RETRY_NS, _MAX_DOUBLINGS = NS_PER_S, 5
_RETRY_RESET_NS = 10 * NS_PER_S

#: A trial of a tenth of a second can mislead. If a pod has less than _UNDERSERVED of its share by weight for
#: _UNDERSERVED_NS, the tuner starts over. The wait doubles each time, because a retry mostly finds the same.
_UNDERSERVED, _UNDERSERVED_NS = 0.88, NS_PER_S


def advance(
    now: Tuning,
    pods: Mapping[str, RoundEntry],
    applied: Sharing | None,
    elapsed_ns: int,
    foreign_ns: int,
    period_ns: int,
    utilization: float | None,
    now_ns: int,
) -> Tuning:
    """Fold in what busy pods did in ``elapsed_ns``, in which they took turns as ``applied`` says.

    Pods outside ``pods`` had the card for ``foreign_ns`` of that time. ``utilization`` is NVML's figure: the part of
    the time, 0 to 1, in which any kernel ran. If it is None the tuner does not try gates, because it could not tell
    whether they pay. ``applied`` is None where something else decided about turns.
    """
    if applied is None:
        return now.restart()
    if applied != now.sharing:
        rejected = now.rejected if now.sharing in now.rejected else (*now.rejected, now.sharing)[-_MAX_REJECTED:]
        return now.at(applied)._replace(rejected=rejected)
    if not is_contended(now, pods, elapsed_ns, foreign_ns, utilization):
        return _uncontended(now, pods, elapsed_ns, now_ns)
    if (longest := _before_gates(now, pods, period_ns)) is not None:
        return now.at(longest)
    now = accumulate(now, pods, elapsed_ns, foreign_ns, utilization)
    if now.settled and not now.sharing.by_gate and now.sharing.round_ns is not None:
        now = now._replace(debts_ns=work_debts(now, pods, elapsed_ns - foreign_ns))
    if not is_conclusive(now, pods, period_ns):
        return now
    used = now.utilization / max(1, now.utilization_ns)
    long = is_long(now.sharing)
    best = _best_by_slices(now, pods) if now.sharing.by_gate and _slices(now) else None
    trial = observe(
        now.sharing,
        now.uses,
        pods,
        now.watched_ns,
        used,
        now.fits_slice,
        best.gappy if best else frozenset(),
        now.hardware,
        long=long,
        used_by_slices=best.used if best else 1.0,
    )
    if now.unfinished:
        before, now = now.last_trial(), now._replace(unfinished=False)
        if now.settled and before is not None and _has_changed(before, trial):
            return now.afresh().at(first_round(pods))
        return _proceed(_record(now, trial, now_ns), pods, period_ns, utilization, now_ns)
    if not now.settled:
        return _proceed(_record(now, trial, now_ns), pods, period_ns, utilization, now_ns)
    *known, trial = by_entries((*now.trials, trial))
    return _check(now._replace(trials=tuple(known)), trial, pods, period_ns, utilization, now_ns)


def interrupted(now: Tuning) -> Tuning:
    """Start the measurement over after pods came or went.

    A way that was only on trial is given up until there is time for a whole trial. Otherwise a pod that comes and goes
    ten times a second would keep the others in it.
    """
    slices = _slices(now)
    if not slices or (now.settled and not now.unfinished):
        return now.restart()
    known = next((trial for trial in slices if trial.sharing == now.last_settled), slices[0])
    return now.settle_on(known)._replace(unfinished=True)


def _proceed(
    now: Tuning, pods: Mapping[str, RoundEntry], period_ns: int, utilization: float | None, now_ns: int
) -> Tuning:
    """Start the next trial after the last one, or settle on the best way."""
    last = now.trials[-1]
    weights = {name: entry.weight for name, entry in pods.items()}
    if now.expected:
        if serves_as_before(now.expected, last, weights):
            return now.keep(last, now_ns)
        now = now._replace(expected=0.0)
        if last.sharing != first_round(pods):
            return now.at(first_round(pods))
    if not last.sharing.by_gate:
        now = now._replace(satisfied=satisfied_pods(now.trials, now.hardware) | resting_unasked(now, last, weights))
        following = next_round(now, last, weights, pods, period_ns)
        if following is not None:
            wanted, fits_slice = following
            return now.at(wanted)._replace(fits_slice=fits_slice)
    if not _slices(now):  # a policy took turns by gate unasked
        return now.at(first_round(pods))
    best = _best_by_slices(now, pods)
    if not last.sharing.by_gate and (shorter := shorter_slices(now, best, pods)) is not None:
        return now.at(shorter)._replace(fits_slice=best.fits_slice - dict(shorter.slice_factors).keys())
    if last.sharing.reserved:
        return _proceed_reserved(now, last, best, pods, now_ns)
    if last.sharing.by_gate:
        if gates_pay(last, best, now, pods):
            return now.settle_on(last)
        now = now._replace(trials=now.trials[:-1])  # NVML counts all pods together, so single rates were estimates
        best = _best_by_slices(now, pods)
        if (reserved := _reserved_to_try(now, best, pods)) is not None:
            return now.at(reserved)
        now = now._replace(gates_failed=best.turns_ns, gates_failed_ns=now_ns)
    elif (gates := _gates_to_try(now, best, pods, utilization, now_ns)) is not None:
        return now.at(gates)
    return now.settle_on(best)


def _proceed_reserved(now: Tuning, last: Trial, best: Trial, pods: Mapping[str, RoundEntry], now_ns: int) -> Tuning:
    """Go on after a trial of reserved time: reserve more, settle on the better of two trials, or on the best round."""
    pays = reservation.pays(last, best, now, pods)
    first = next((trial for trial in now.trials[:-1] if trial.sharing.reserved), None)
    if first is None:
        if not pays:
            return _without_reserved(now, pods, now_ns)
        wanted = reservation.more(now, last, best, pods)
        return now.at(wanted) if wanted is not None else now.settle_on(last)
    better = pays and reservation.worth(last, last, now, pods) > reservation.worth(first, last, now, pods)
    kept, dropped = (last, first) if better else (first, last)
    return now._replace(trials=tuple(trial for trial in now.trials if trial is not dropped)).settle_on(kept)


def _uncontended(now: Tuning, pods: Mapping[str, RoundEntry], elapsed_ns: int, now_ns: int) -> Tuning:
    """Start the measurement over; after _UNUSED_NS in which pods did not fill the card, reserve no time any more."""
    if not now.sharing.reserved or not _slices(now) or any(entry.starting for entry in pods.values()):
        return now.restart()
    unused_ns = now.unused_ns + elapsed_ns
    if unused_ns < _UNUSED_NS:
        return now.restart()._replace(unused_ns=unused_ns)
    left = _without_reserved(now, pods, now_ns)
    return left._replace(gates_failed={}) if now.settled else left


def _without_reserved(now: Tuning, pods: Mapping[str, RoundEntry], now_ns: int) -> Tuning:
    """Settle on the best round again, because reserved time does not pay or nobody uses it."""
    now = now._replace(trials=tuple(trial for trial in now.trials if not trial.sharing.reserved))
    best = _best_by_slices(now, pods)
    return now._replace(gates_failed=best.turns_ns, gates_failed_ns=now_ns, idle_by_gate=0).settle_on(best)


def _before_gates(now: Tuning, pods: Mapping[str, RoundEntry], period_ns: int) -> Sharing | None:
    """Return the round to try before gates, once the policy has begun to take turns by gate; None for none."""
    if not _slices(now) or not now.sharing.by_gate or now.settled or now.passed_ns:
        return None
    return round_to_see_steps(now, _best_by_slices(now, pods), pods, period_ns)


def _gates_to_try(
    now: Tuning, best: Trial, pods: Mapping[str, RoundEntry], utilization: float | None, now_ns: int
) -> Sharing | None:
    """Return the way with gates that is worth a trial after ``best``, the best round; None for none."""
    if utilization is None or not gates_retry_due(now, best, now_ns):
        return None
    gates = gates_worth_a_trial(now, best, pods)
    return gates if gates is not None and gates not in now.rejected else _reserved_to_try(now, best, pods)


def _reserved_to_try(now: Tuning, best: Trial, pods: Mapping[str, RoundEntry]) -> Sharing | None:
    """Return the best round with reserved time; None if that is not worth a trial or the policy refuses it."""
    if any(rejected.reserved for rejected in now.rejected):
        return None
    return reservation.worth_a_trial(now, best, pods)


def _slices(now: Tuning) -> list[Trial]:
    """Return the trials of timeslices."""
    return [trial for trial in now.trials if not trial.sharing.by_gate]


def _best_by_slices(now: Tuning, pods: Mapping[str, RoundEntry]) -> Trial:
    """Return the best round of those tried; there is one."""
    return best_round(_slices(now), now.trials, pods)


def _record(now: Tuning, trial: Trial, now_ns: int) -> Tuning:
    """Remember the last trial of each way to take turns."""
    if not now.trials:
        now = now._replace(tried_ns=now_ns)
    others = [each for each in now.trials if each.sharing != trial.sharing]
    return now._replace(trials=by_entries((*others, trial)[-_MAX_TRIALS:]))


def _check(
    now: Tuning,
    trial: Trial,
    pods: Mapping[str, RoundEntry],
    period_ns: int,
    utilization: float | None,
    now_ns: int,
) -> Tuning:
    """Compare the way that is settled on with its trial: keep it, make its round fit better, or try again."""
    before = now.last_trial()
    if before is None:
        return _retry(now, trial, pods, period_ns, utilization, now_ns, changed=True)
    kept = _note_underserved(now, trial, pods, now_ns)
    if trial.slices_exhausted and not trial.resting:  # all wait for more, whatever trials showed
        kept = kept._replace(satisfied=frozenset())
    if kept.underserved_retries > now.underserved_retries:
        return kept.at(first_round(pods))
    if all_retry_due(now, trial, now_ns):
        return kept.afresh().at(first_round(pods))
    changed = _has_changed(before, trial)
    kept = kept._replace(idle_by_gate=kept.idle_by_gate + 1 if _idles_by_gate(now, trial, pods) else 0)
    gates = None if now.sharing.by_gate else _gates_to_try(now, trial, pods, utilization, now_ns)
    if changed or kept.idle_by_gate >= _IDLE_TIMES or gates is not None or _newly_short(before, trial, now, pods):
        return _retry(kept, trial, pods, period_ns, utilization, now_ns, changed=changed)
    weights = {name: entry.weight for name, entry in pods.items()}
    is_final = now.sharing.by_gate or now.kept_until_ns > 0
    following = None if is_final else next_round(now, trial, weights, pods, period_ns)
    if following is None:
        return kept
    wanted, fits_slice = following
    return kept.at(wanted)._replace(fits_slice=fits_slice)


def _idles_by_gate(now: Tuning, trial: Trial, pods: Mapping[str, RoundEntry]) -> bool:
    """Tell whether turns by gate leave more of the card idle than they may; False for slices."""
    if not now.sharing.by_gate or not _slices(now):
        return False
    if now.sharing.reserved:
        return not reservation.keeps(trial, _best_by_slices(now, pods))
    return sum(trial.rates.values()) < least_gated_use(now, trial, _best_by_slices(now, pods))


def _note_underserved(now: Tuning, trial: Trial, pods: Mapping[str, RoundEntry], now_ns: int) -> Tuning:
    """Restart the measurement, and count for how long a pod is underserved; after too long, forget all trials."""
    kept = now.restart()
    if not _underserves(trial, pods, now.trials):
        return kept._replace(underserved_retries=max(0, now.underserved_retries - 1), underserved_since_ns=0)
    since_ns = now.underserved_since_ns or now_ns
    if now_ns - since_ns < _UNDERSERVED_NS << min(now.underserved_retries, _MAX_DOUBLINGS):
        return kept._replace(underserved_since_ns=since_ns)
    retries = now.underserved_retries + 1
    return kept.afresh()._replace(underserved_retries=retries, underserved_since_ns=0)


def _underserves(trial: Trial, pods: Mapping[str, RoundEntry], trials: Sequence[Trial]) -> bool:
    """Tell whether a pod with a guaranteed share has less than that; always False for turns by gate.

    A pod that rests may want no more. It wants more if another way gave it more entries.
    """
    if trial.sharing.by_gate:
        return False
    done, whole = sum(trial.rates.values()), sum(entry.weight for entry in pods.values())
    for name in guaranteed(trial, pods):
        rate, due = trial.rates[name], done * pods[name].weight / whole
        if name in trial.resting:  # each trial may have counted a step too many or too few
            step_ns, others = trial.turns_ns[name], [each for each in trials if name in each.counted & trial.counted]
            most = max((each.rates[name] - step_ns / each.watched_ns for each in others), default=0.0)
            rate, due = rate + step_ns / trial.watched_ns, min(due, most)
        if rate < _UNDERSERVED * due:
            return True
    return False


def _has_changed(before: Trial, trial: Trial) -> bool:
    """Tell whether pods behave differently than when the tuner settled on this way."""
    before, trial = alike(before, trial), alike(trial, before)
    return before.rates.keys() != trial.rates.keys() or any(
        abs(rate - before.rates[name]) > _CHANGED + _CHANGED_PART * before.rates[name]
        for name, rate in trial.rates.items()
    )


def _newly_short(before: Trial, trial: Trial, now: Tuning, pods: Mapping[str, RoundEntry]) -> bool:
    """Tell whether a pod is short now that was not when the tuner settled on this way."""
    weights = {name: entry.weight for name, entry in pods.items()}
    known, found = (short_of_share(alike(*two), weights, _SHORT_LATER) for two in ((before, trial), (trial, before)))
    return bool(found - known - now.satisfied)


def _retry(
    kept: Tuning,
    trial: Trial,
    pods: Mapping[str, RoundEntry],
    period_ns: int,
    utilization: float | None,
    now_ns: int,
    *,
    changed: bool,
) -> Tuning:
    """Try other ways again, unless that was done too recently; from the start if pods ``changed`` what they do."""
    doublings = kept.retries if now_ns - kept.retried_ns < _RETRY_RESET_NS else 0
    if now_ns - kept.retried_ns < _RETRY_NS << min(doublings, _MAX_DOUBLINGS):
        return kept.restart()
    retried = kept._replace(retries=doublings + 1, retried_ns=now_ns)
    if changed:
        retried = retried.afresh()
    if kept.sharing.by_gate:
        failed = retried._replace(gates_failed={}, gates_failed_ns=now_ns, idle_by_gate=0)
        return failed.at(first_round(pods))
    if changed:
        return retried.at(first_round(pods))
    return _proceed(_record(retried, trial, now_ns), pods, period_ns, utilization, now_ns)

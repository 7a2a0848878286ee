"""Chooses how the busy pods of one class take turns: the control law. It judges by work done, not by residence.

There are two ways to take turns. With timeslices, the hardware switches to the next pod when a slice ends or a pod has
nothing to run. With gates, each pod has the card to itself for its part of a period. For timeslices one number, the
length of a round, sets every slice: a pod's slice is its weight's part of the round.

A long round costs few context switches. But a pod that waits for its own work ends its turn early, and then waits for
the long turns of the others. So the tuner tries several rounds, tries gates where slices fail, and keeps the way with
the best ``score``: how far the least satisfied pod is satisfied, times the work of all pods. A pod is satisfied when
it has its due (``dues``), or as much as it had in any round tried. docs/feedback.md gives the reasons and the limits.

Pure arithmetic: ``advance`` folds one measured round into a ``Tuning``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from types import MappingProxyType
from typing import NamedTuple

from qgpu.model import NS_PER_MS, NS_PER_S, PodClass, Sharing
from qgpu.model.hardware_traits import OTHER, HardwareTraits
from qgpu.sched.gpu_usage import GpuUse, RoundEntry
from qgpu.sched.trial import (
    MIN_TURNS,
    Trial,
    dues,
    guaranteed,
    is_early,
    observe,
    satisfied_pods,
    score,
    short_of_share,
)

#: The longest slice of pods that have not been measured yet: about the driver's own timeslice.
START_SLICE_NS = 2 * NS_PER_MS

#: When a round shrinks to fit a pod that ends its turns early, the longest slice of the other pods stays at least this
#: long, because a switch there and back takes a third of a millisecond. Online pods pay more of that for latency.
SHORTEST_NS = {PodClass.OFFLINE: NS_PER_MS, PodClass.ONLINE: NS_PER_MS // 2}

#: How long the tuner measures a way to take turns before it judges it: on trial, and after it settled on it.
TRIAL_NS = 90 * NS_PER_MS
WATCH_NS = 300 * NS_PER_MS

#: A trial lasts up to MAX_TRIAL_NS where pods have few turns. The first turns of a round of LONG_ROUND_NS or more still
#: belong to the previous way.
MAX_TRIAL_NS = 300 * NS_PER_MS
LONG_ROUND_NS = 30 * NS_PER_MS

#: For STALE_NS after gates begin to move, NVML's utilisation still covers the time before.
STALE_NS = 300 * NS_PER_MS
GATE_TRIAL_NS = 500 * NS_PER_MS

#: Pods contend for the card when together, switches included, they occupy it for at least this part of the time.
_CONTENDED = 0.85

#: Longer turns save no switch if some pod uses less than half of its turn.
_HALF = 0.5

#: A pod is short when it has less than this part of its share by weight: in a trial, and over a longer time.
_SHORT, _SHORT_LATER = 0.93, 0.96

#: The tuner tries a longer round, and gates, once switches take more than these parts of the time.
_SWITCHING_LOW, _SWITCHING_HIGH = 0.02, 0.05
_WELL_SERVED = 0.95

#: Small corrections of slices can make up the rest for pods that have at least this part of their share.
_NEARLY_FAIR = 0.85

#: The largest work debt or credit of a pod under timeslices.
MAX_WORK_DEBT_NS = 24 * NS_PER_MS
#: The part of a work debt that remains after a round. A measured round ends at a random point of a turn, and the decay
#: keeps those errors from adding up.
_DEBT_DECAY = 0.9

#: How many rejected ways and how many trials a ``Tuning`` remembers.
_MAX_REJECTED, _MAX_TRIALS = 16, 8

#: Two rounds are alike if one is less than a fifth longer than the other: the difference of their logarithms, base 2.
_ALIKE = 0.25

#: A round must beat the score of the driver's own slices by _ROUND_WORTH. Gates must beat every round by _GATES_WORTH,
#: because a step then waits for whole turns of others. With gates, pods must also use _MIN_GATED_USE of the card, and
#: _MIN_USE_KEPT of what they used with slices: with less, they have gaps in their turns and the card idles.
_ROUND_WORTH = 1.08
_GATES_WORTH = 1.03
_MIN_GATED_USE, _MIN_USE_KEPT = 0.7, 0.97

#: A pod's behaviour has changed when its rate differs by more than _CHANGED of the card plus _CHANGED_PART of its
#: former rate. The tuner then starts over. Each retry doubles the wait before the next, until _RETRY_RESET_NS have
#: passed without one.
_CHANGED, _CHANGED_PART = 0.1, 0.4
_RETRY_NS, _MAX_DOUBLINGS = NS_PER_S, 5
_RETRY_RESET_NS = 10 * NS_PER_S

#: A trial of a tenth of a second can mislead. If a pod has less than _UNDERSERVED of its share by weight for
#: _UNDERSERVED_NS, the tuner starts over. The wait doubles each time, because a retry mostly finds the same.
_UNDERSERVED, _UNDERSERVED_NS = 0.88, NS_PER_S

#: Gates that failed are tried again after GATES_RETRY_NS; or after _GATES_BACKOFF_NS, if a pod's turns have become
#: longer or shorter by the factor _CHANGED_TURNS.
GATES_RETRY_NS = 120 * NS_PER_S
_GATES_BACKOFF_NS = 10 * NS_PER_S
_CHANGED_TURNS = 3.0


class Tuning(NamedTuple):
    """What is known of a set of contending pods, and how they take turns now."""

    sharing: Sharing
    trials: tuple[Trial, ...] = ()
    #: Ways the tuner asked for and the policy did not plan.
    rejected: tuple[Sharing, ...] = ()
    settled: bool = False
    #: A trial was interrupted. The tuner resumes once there is time for a whole one.
    unfinished: bool = False
    uses: Mapping[str, GpuUse] = MappingProxyType({})
    #: How long this way has been measured, less the time of other classes.
    watched_ns: int = 0
    passed_ns: int = 0
    utilization: float = 0.0
    utilization_ns: int = 0
    #: Pods that get all they ask for under timeslices.
    satisfied: frozenset[str] = frozenset()
    #: Pods whose steps fit into one slice. The policy makes their slices somewhat longer, so that no step is cut.
    fits_slice: frozenset[str] = frozenset()
    #: Work done beyond (positive) or short of (negative) each pod's part under timeslices, in ns; bounded.
    debts_ns: Mapping[str, float] = MappingProxyType({})
    #: How long each pod's turns were when gates failed, and when that was.
    gates_failed: Mapping[str, float] = MappingProxyType({})
    gates_failed_ns: int = 0
    #: Retries because pods' behaviour changed or a pod fell short: how many lately, and when the last was.
    retries: int = 0
    retried_ns: int = 0
    #: Retries because a pod stayed underserved: how many lately, and since when one is underserved now.
    underserved_retries: int = 0
    underserved_since_ns: int = 0
    #: What was measured of the card's model.
    hardware: HardwareTraits = OTHER

    def at(self, sharing: Sharing) -> Tuning:
        """Start to measure another way."""
        return self._replace(
            sharing=sharing,
            uses={},
            watched_ns=0,
            passed_ns=0,
            utilization=0.0,
            utilization_ns=0,
            settled=False,
            fits_slice=frozenset(),
            debts_ns=self.debts_ns if sharing == self.sharing else MappingProxyType({}),
        )

    def _restart(self) -> Tuning:
        """Start to measure the same way again."""
        return self.at(self.sharing)._replace(settled=self.settled, fits_slice=self.fits_slice)

    def _settle_on(self, trial: Trial) -> Tuning:
        """Keep to the way of a trial."""
        return self.at(trial.sharing)._replace(settled=True, fits_slice=trial.fits_slice)


def begin(weights: Sequence[int], pod_class: PodClass = PodClass.OFFLINE, hardware: HardwareTraits = OTHER) -> Tuning:
    """Return the tuning of pods that have not been measured together: their first slices are short."""
    return Tuning(_start(weights, pod_class), hardware=hardware)


def _start(weights: Sequence[int], pod_class: PodClass) -> Sharing:
    """Return the first round. The longest slice is START_SLICE_NS; among online pods the mean slice is.

    Online pods get longer slices because every extra cut of a step adds latency, and they never take turns by gate.
    """
    if pod_class is PodClass.ONLINE:
        return Sharing(round_ns=START_SLICE_NS * len(weights))
    return Sharing(round_ns=START_SLICE_NS * sum(weights) // max(weights))


def _first(pods: Mapping[str, RoundEntry]) -> Sharing:
    pod_class = next(iter(pods.values())).grant.pod_class
    return _start([entry.weight for entry in pods.values()], pod_class)


def advance(
    now: Tuning,
    pods: Mapping[str, RoundEntry],
    done: Sharing | None,
    elapsed_ns: int,
    foreign_ns: int,
    period_ns: int,
    utilization: float | None,
    now_ns: int,
) -> Tuning:
    """Fold in what busy pods did in ``elapsed_ns``, in which they took turns as ``done`` says.

    Pods outside ``pods`` had the card for ``foreign_ns`` of that time. ``utilization`` is NVML's figure: the part of
    the time, 0 to 1, in which any kernel ran. If it is None the tuner does not try gates, because it could not tell
    whether they pay. ``done`` is None where something else decided about turns.
    """
    if done is None:
        return now._restart()
    if done != now.sharing:
        rejected = now.rejected if now.sharing in now.rejected else (*now.rejected, now.sharing)[-_MAX_REJECTED:]
        return now.at(done)._replace(rejected=rejected)
    if not _is_contended(now, pods, elapsed_ns, foreign_ns, utilization):
        return now._restart()
    now = _accumulate(now, pods, elapsed_ns, foreign_ns, utilization)
    if now.settled and now.sharing.round_ns is not None:
        now = now._replace(debts_ns=_debts(now, pods, elapsed_ns - foreign_ns))
    if not _is_conclusive(now, pods, period_ns):
        return now
    used = now.utilization / max(1, now.utilization_ns)
    long = _is_long(now.sharing)
    early = next((each.early for each in reversed(now.trials) if not each.sharing.by_gate), frozenset())
    trial = observe(now.sharing, now.uses, pods, now.watched_ns, used, now.fits_slice, early, now.hardware, long=long)
    if not now.settled or now.unfinished:
        return _proceed(_record(now._replace(unfinished=False), trial), pods, period_ns, utilization, now_ns)
    return _check(now, trial, pods, period_ns, utilization, now_ns)


def _is_contended(
    now: Tuning, pods: Mapping[str, RoundEntry], elapsed_ns: int, foreign_ns: int, utilization: float | None
) -> bool:
    """Tell whether pods filled the card and none was starting: other rounds teach nothing."""
    if True in [entry.starting for entry in pods.values()]:
        return False
    used_ns = sum(entry.use.run_ns + entry.use.starts * now.hardware.gap_ns for entry in pods.values())
    if used_ns + foreign_ns < _CONTENDED * elapsed_ns:
        return False
    # A context that is alone on the card counts as running while it idles. Only NVML shows the difference.
    return now.sharing.by_gate or utilization is None or utilization >= _CONTENDED


def _check(
    now: Tuning,
    trial: Trial,
    pods: Mapping[str, RoundEntry],
    period_ns: int,
    utilization: float | None,
    now_ns: int,
) -> Tuning:
    """Compare the way that is settled on with its trial: keep it, make its round fit better, or try again."""
    before = next((each for each in reversed(now.trials) if each.sharing == now.sharing), None)
    if before is None:
        return _retry(now, trial, pods, period_ns, utilization, now_ns, changed=True, gated_turns={})
    kept = _note_underserved(now, trial, pods, now_ns)
    if kept.underserved_retries > now.underserved_retries:
        return kept.at(_first(pods))
    changed = _has_changed(before, trial)
    idle = now.sharing.by_gate and sum(trial.rates.values()) < _MIN_GATED_USE
    if changed or idle or _newly_short(before, trial, now, pods):
        return _retry(kept, trial, pods, period_ns, utilization, now_ns, changed=changed, gated_turns=before.turns_ns)
    weights = {name: entry.weight for name, entry in pods.items()}
    following = None if now.sharing.by_gate else _next_round(now, trial, weights, pods, period_ns)
    if following is None:
        return kept
    wanted, fits_slice = following
    return kept.at(wanted)._replace(fits_slice=fits_slice)


def _note_underserved(now: Tuning, trial: Trial, pods: Mapping[str, RoundEntry], now_ns: int) -> Tuning:
    """Restart the measurement, and count for how long a pod is underserved; after too long, forget all trials."""
    kept = now._restart()
    if not _underserves(trial, pods):
        return kept._replace(underserved_retries=max(0, now.underserved_retries - 1), underserved_since_ns=0)
    since_ns = now.underserved_since_ns or now_ns
    if now_ns - since_ns < _UNDERSERVED_NS << min(now.underserved_retries, _MAX_DOUBLINGS):
        return kept._replace(underserved_since_ns=since_ns)
    retries = now.underserved_retries + 1
    return kept._replace(trials=(), satisfied=frozenset(), underserved_retries=retries, underserved_since_ns=0)


def _retry(
    kept: Tuning,
    trial: Trial,
    pods: Mapping[str, RoundEntry],
    period_ns: int,
    utilization: float | None,
    now_ns: int,
    *,
    changed: bool,
    gated_turns: Mapping[str, float],
) -> Tuning:
    """Try other ways again, unless that was done too lately; from the start if pods ``changed`` what they do."""
    doublings = kept.retries if now_ns - kept.retried_ns < _RETRY_RESET_NS else 0
    if now_ns - kept.retried_ns < _RETRY_NS << min(doublings, _MAX_DOUBLINGS):
        return kept._restart()
    retried = kept._replace(retries=doublings + 1, retried_ns=now_ns)
    if changed:
        retried = retried._replace(trials=(), satisfied=frozenset())
    if kept.sharing.by_gate:
        return retried._replace(gates_failed=gated_turns, gates_failed_ns=now_ns).at(_first(pods))
    if changed:
        return retried.at(_first(pods))
    return _proceed(_record(retried, trial), pods, period_ns, utilization, now_ns)


def _record(now: Tuning, trial: Trial) -> Tuning:
    """Remember the last trial of each way to take turns."""
    others = [each for each in now.trials if each.sharing != trial.sharing]
    return now._replace(trials=(*others, trial)[-_MAX_TRIALS:])


def interrupted(now: Tuning) -> Tuning:
    """Start the measurement over after pods came or went.

    A way that was only on trial is given up until there is time for a whole trial. Otherwise a pod that comes and goes
    ten times a second would keep the others in it.
    """
    first = next((trial for trial in now.trials if not trial.sharing.by_gate), None)
    if first is None or (now.settled and not now.unfinished):
        return now._restart()
    return now._settle_on(first)._replace(unfinished=True)


def _accumulate(
    now: Tuning, pods: Mapping[str, RoundEntry], elapsed_ns: int, foreign_ns: int, utilization: float | None
) -> Tuning:
    """Add what pods did, except in the first moments, which still belong to the previous way."""
    passed_ns = now.passed_ns + elapsed_ns
    stale_ns = STALE_NS if now.sharing.by_gate else TRIAL_NS if _is_long(now.sharing) else 0
    if not now.settled and passed_ns - elapsed_ns < stale_ns:
        return now._replace(passed_ns=passed_ns)
    uses = {name: _sum(now.uses.get(name, GpuUse()), entry.use) for name, entry in pods.items()}
    told_ns = elapsed_ns if utilization is not None else 0
    return now._replace(
        uses=uses,
        passed_ns=passed_ns,
        watched_ns=now.watched_ns + max(0, elapsed_ns - foreign_ns),
        utilization=now.utilization + (utilization or 0.0) * told_ns,
        utilization_ns=now.utilization_ns + told_ns,
    )


def _is_nearly_fair(now: Tuning, pods: Mapping[str, RoundEntry]) -> bool:
    """Tell whether all unsatisfied pods nearly have their share, so that small corrections can give them the rest."""
    trial = next((each for each in reversed(now.trials) if each.sharing == now.sharing), None)
    if trial is None or not trial.rates.keys() <= pods.keys():
        return False
    asking = [name for name in trial.rates if name not in now.satisfied]
    done, whole = sum(trial.rates[name] for name in asking), sum(pods[name].weight for name in asking)
    return all(trial.rates[name] >= _NEARLY_FAIR * done * pods[name].weight / whole for name in asking)


def _debts(now: Tuning, pods: Mapping[str, RoundEntry], available_ns: int) -> dict[str, float]:
    """Add each unsatisfied pod's work beyond its due of what those pods did; only credits where shares are far off.

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


def _is_conclusive(now: Tuning, pods: Mapping[str, RoundEntry], period_ns: int) -> bool:
    """Tell whether the measurement is long enough: by time, and by the number of turns where pods have few."""
    if now.settled:
        return now.passed_ns >= max(WATCH_NS, 2 * period_ns)
    if now.sharing.by_gate:
        return now.passed_ns >= max(GATE_TRIAL_NS, 3 * period_ns)
    long = _is_long(now.sharing)
    if now.passed_ns < (2 * period_ns * 9 // 10 if long else TRIAL_NS):
        return False
    few = any(
        use.starts < MIN_TURNS * pods[name].busy_tsgs and is_early(use, pods[name], now.hardware)
        for name, use in now.uses.items()
    )
    return not (few and now.passed_ns < (4 * period_ns if long else MAX_TRIAL_NS))


def _is_long(sharing: Sharing) -> bool:
    return sharing.round_ns is None or sharing.round_ns >= LONG_ROUND_NS


def _proceed(
    now: Tuning, pods: Mapping[str, RoundEntry], period_ns: int, utilization: float | None, now_ns: int
) -> Tuning:
    """Start the next trial after the last one, or settle on the best way."""
    last = now.trials[-1]
    weights = {name: entry.weight for name, entry in pods.items()}
    if not last.sharing.by_gate:
        now = now._replace(satisfied=satisfied_pods(now.trials, now.hardware) | last.resting)
        following = _next_round(now, last, weights, pods, period_ns)
        if following is not None:
            wanted, fits_slice = following
            return now.at(wanted)._replace(fits_slice=fits_slice)
    slices = [trial for trial in now.trials if not trial.sharing.by_gate]
    if not slices:  # a policy took turns by gate unasked
        return now.at(_first(pods))
    best = _best(slices, now.trials, pods)
    by_gate = Sharing(by_gate=True)
    if last.sharing.by_gate:
        worth = score(last, now.trials, pods) >= _GATES_WORTH * score(best, now.trials, pods)
        if worth and sum(last.rates.values()) >= max(_MIN_GATED_USE, _MIN_USE_KEPT * sum(best.rates.values())):
            return now._settle_on(last)
        now = now._replace(trials=now.trials[:-1])  # NVML counts all pods together, so single rates were estimates
        best = _best(slices, now.trials, pods)
        now = now._replace(gates_failed=best.turns_ns, gates_failed_ns=now_ns)
    elif (
        utilization is not None
        and by_gate not in now.rejected
        and _gates_may_pay(now, best, pods)
        and _gates_retry_due(now, best, now_ns)
    ):
        return now.at(by_gate)
    return now._settle_on(best)


def _next_round(
    now: Tuning, last: Trial, weights: Mapping[str, int], pods: Mapping[str, RoundEntry], period_ns: int
) -> tuple[Sharing, frozenset[str]] | None:
    """Return the next round worth a trial after ``last``, and the pods whose steps it fits; None for no more.

    The round is shorter if a pod is short: that pod's turn becomes as long as its step. It is longer if all pods use
    their slices and switching costs too much.
    """
    whole = sum(weights.values())
    start_ns = _first(pods).round_ns or 0
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
        wanted_ns = float(period_ns) if last.slices_exhausted else 2.0 * round_ns
        if any(last.starts[name] * wanted_ns > last.watched_ns / 2 for name in last.resting):
            return None  # resting pods come more often than once in such a round
    else:
        return None
    wanted = Sharing(round_ns=None if wanted_ns >= period_ns else int(wanted_ns))
    return None if _tried(wanted, now, period_ns) else (wanted, short)


def _tried(wanted: Sharing, now: Tuning, period_ns: int) -> bool:
    """Tell whether a similar way was on trial or rejected by the policy."""
    known = [*(trial.sharing for trial in now.trials), *now.rejected]
    if wanted.equal:
        return wanted in known
    rounds = [sharing.round_ns or period_ns for sharing in known if not sharing.equal and not sharing.by_gate]
    return any(abs(log2((wanted.round_ns or period_ns) / before)) < _ALIKE for before in rounds)


def _best(slices: Sequence[Trial], every: Sequence[Trial], pods: Mapping[str, RoundEntry]) -> Trial:
    """Return the best round: the first or the equal one, unless another is clearly better."""
    usual = (_first(pods), Sharing(equal=True))
    scores = {id(trial): score(trial, every, pods) for trial in slices}
    best = max(slices, key=lambda trial: scores[id(trial)])
    plain = max(
        (trial for trial in slices if trial.sharing in usual), key=lambda trial: scores[id(trial)], default=best
    )
    return best if scores[id(best)] >= _ROUND_WORTH * scores[id(plain)] or _is_longer(best, plain) else plain


def _is_longer(trial: Trial, than: Trial) -> bool:
    """Tell whether a round is longer than another, and so costs fewer switches."""
    if trial.sharing.equal or than.sharing.equal:
        return False
    return than.sharing.round_ns is not None and (
        trial.sharing.round_ns is None or trial.sharing.round_ns > than.sharing.round_ns
    )


def _gates_may_pay(now: Tuning, best: Trial, pods: Mapping[str, RoundEntry]) -> bool:
    """Tell whether gates can gain something over slices: some pod is short, or switches take much time.

    A pod with uneven turns is launched kernel by kernel. Its turns by gate would be full of gaps.
    """
    weights = {name: entry.weight for name, entry in pods.items()}
    asking = weights.keys() - now.satisfied
    if len(asking) < 2 or asking & best.uneven:
        return False
    if score(best, now.trials, pods) >= _WELL_SERVED:
        return False
    return best.switching > _SWITCHING_HIGH or bool(short_of_share(best, weights, _SHORT) - now.satisfied)


def _gates_retry_due(now: Tuning, best: Trial, now_ns: int) -> bool:
    """Tell whether gates have not failed lately, or the pods' turns have changed since."""
    since_ns = now_ns - now.gates_failed_ns
    if not now.gates_failed or since_ns >= GATES_RETRY_NS:
        return True
    if since_ns < _GATES_BACKOFF_NS:
        return False
    return any(
        not 1 / _CHANGED_TURNS <= turn / max(1.0, now.gates_failed.get(name, 1.0)) <= _CHANGED_TURNS
        for name, turn in best.turns_ns.items()
    )


def _has_changed(before: Trial, trial: Trial) -> bool:
    """Tell whether pods behave differently than when the tuner settled on this way."""
    return before.rates.keys() != trial.rates.keys() or any(
        abs(rate - before.rates[name]) > _CHANGED + _CHANGED_PART * before.rates[name]
        for name, rate in trial.rates.items()
    )


def _newly_short(before: Trial, trial: Trial, now: Tuning, pods: Mapping[str, RoundEntry]) -> bool:
    """Tell whether a pod is short now that was not when the tuner settled on this way."""
    weights = {name: entry.weight for name, entry in pods.items()}
    known = short_of_share(before, weights, _SHORT_LATER)
    return bool(short_of_share(trial, weights, _SHORT_LATER) - known - now.satisfied)


def _underserves(trial: Trial, pods: Mapping[str, RoundEntry]) -> bool:
    """Tell whether a pod with a guaranteed share has less than that; always False for turns by gate."""
    if trial.sharing.by_gate:
        return False
    done, whole = sum(trial.rates.values()), sum(entry.weight for entry in pods.values())
    return any(
        trial.rates[name] < _UNDERSERVED * done * pods[name].weight / whole
        for name in guaranteed(trial, pods) - trial.resting
    )


def _sum(a: GpuUse, b: GpuUse) -> GpuUse:
    return GpuUse(
        a.run_ns + b.run_ns,
        a.starts + b.starts,
        a.open_ns + b.open_ns,
        a.passed_ns + b.passed_ns,
        max(a.longest_ns, b.longest_ns),
    )

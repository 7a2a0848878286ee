"""How the busy pods of one class had best take their turns: the control law, told by work and not by residence.

There are two ways to take turns. Timeslices: the hardware goes to the next pod when a slice ends or a pod has nothing
to run. Gates: each pod has the card to itself for its part of a period. One number says how long a round of
timeslices is, and every pod's slice is its weight's part of it.

A round that is long costs little switching, but a pod that often waits for its own work leaves its turn early and
waits for the long turns of others. So the law tries a few rounds, and gates where slices fail, and keeps what serves
best: the least satisfied pod, times the work of all (``score``). A pod is satisfied when it has its weight's part,
or as much as it ever had by any round tried: more it does not ask for. docs/feedback.md tells why, and what it can't.

Pure arithmetic: ``advance`` folds what a round of measurement showed into what is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from types import MappingProxyType
from typing import NamedTuple

from qgpu.model import NS_PER_MS, NS_PER_S, PodClass, Sharing
from qgpu.model.turn_length import GAP_NS, SWITCHED_NS
from qgpu.sched.gpu_usage import GpuUse, RoundEntry
from qgpu.sched.trial import MIN_TURNS, Trial, guaranteed, is_early, observe, satisfied_pods, score, short_of_share

#: The longest slice among pods of which nothing is known yet: about what the driver gives everybody.
START_SLICE_NS = 2 * NS_PER_MS

#: The longest slice of those who wait for nobody, where a round is made to fit a pod that leaves early: not shorter,
#: for switching takes a third of a millisecond. Among online pods latency is worth more of it.
SHORTEST_NS = {PodClass.OFFLINE: NS_PER_MS, PodClass.ONLINE: NS_PER_MS // 2}

#: How long a way to take turns is watched before it is judged; and once it is settled on, every so often.
TRIAL_NS = 90 * NS_PER_MS
WATCH_NS = 300 * NS_PER_MS

#: Where pods have few turns a look is longer, up to this. A round so long begins with turns of the way before.
MAX_TRIAL_NS = 300 * NS_PER_MS
LONG_ROUND_NS = 30 * NS_PER_MS

#: After gates begin to move, NVML's utilisation tells of the time before for so long.
STALE_NS = 300 * NS_PER_MS
GATE_TRIAL_NS = 500 * NS_PER_MS

#: Pods contend for the card when they are on it for this part of the time between them, switches and all.
_CONTENDED = 0.85

#: Where somebody takes less than half of a turn, longer ones save no switch.
_HALF = 0.5

#: A pod is short when it has less than this part of what its weight gives it: at a first look, and over a longer time.
_SHORT, _SHORT_LATER = 0.93, 0.96

#: Switches may take this part of the time before a longer round is tried, and before gates are.
_SWITCHING_LOW, _SWITCHING_HIGH = 0.02, 0.05
_WELL_SERVED = 0.95

#: A pod with this part of what it is due has the rest by small corrections of others' slices.
_NEARLY_FAIR = 0.85

#: The most work by timeslices that a pod may owe the others, or they owe it.
MAX_WORK_DEBT_NS = 24 * NS_PER_MS
#: The part of it that is still owed a round later: where in a turn a round ends is chance, and adds up to nothing.
_DEBT_DECAY = 0.9

#: So many ways that a policy would not do are remembered, and so many looks.
_MAX_REJECTED, _MAX_TRIALS = 16, 8

#: Rounds are alike if one is less than a fifth longer than the other (in powers of 2).
_ALIKE = 0.25

#: A round must score better than the driver's own slices by this factor. Gates must score better than any round by
#: theirs, because steps then wait for whole turns of others. Pods must use this part of their turns by gate, and as
#: much of the card as by slices: less shows that they had little to run in them, and the card idles.
_ROUND_WORTH = 1.08
_GATES_WORTH = 1.03
_MIN_GATED_USE, _MIN_USE_KEPT = 0.7, 0.97

#: What pods do has changed when a rate is off by so much, absolute and relative; then all is tried again, but not
#: again and again: the wait doubles each time.
_CHANGED, _CHANGED_PART = 0.1, 0.4
_RETRY_NS, _MAX_DOUBLINGS = NS_PER_S, 5
_RETRY_RESET_NS = 10 * NS_PER_S

#: A look of a tenth of a second may deceive. Where a pod has less than so much of its weight's part for so long, all is
#: tried again; the wait doubles each time, for mostly the same is found.
_UNDERSERVED, _UNDERSERVED_NS = 0.88, NS_PER_S

#: Gates that did not pay are tried again after so long, or where a pod's turns have become this many times as long.
GATES_RETRY_NS = 120 * NS_PER_S
_GATES_BACKOFF_NS = 10 * NS_PER_S
_CHANGED_TURNS = 3.0


class Tuning(NamedTuple):
    """What is known of some pods that contend, and how they take their turns now."""

    sharing: Sharing
    trials: tuple[Trial, ...] = ()
    #: What was tried and the policy would not do.
    rejected: tuple[Sharing, ...] = ()
    settled: bool = False
    #: What was being tried was broken off: all is to be tried once there is time for a whole look.
    unfinished: bool = False
    uses: Mapping[str, GpuUse] = MappingProxyType({})
    #: For how long this way has been watched, less the time of other classes.
    watched_ns: int = 0
    passed_ns: int = 0
    utilization: float = 0.0
    utilization_ns: int = 0
    #: Pods that get all they ask for by slices.
    satisfied: frozenset[str] = frozenset()
    #: Pods whose steps fit into their slices: those are somewhat longer, so that no step is cut.
    fits_slice: frozenset[str] = frozenset()
    #: Work done beyond (positive) or short of each pod's part, in ns, by slices of one round; bounded.
    debts_ns: Mapping[str, float] = MappingProxyType({})
    #: How long pods' turns were when gates did not pay, and when that was.
    gates_failed: Mapping[str, float] = MappingProxyType({})
    gates_failed_ns: int = 0
    #: How often of late all was tried again, and when last.
    retries: int = 0
    retried_ns: int = 0
    #: How often it was tried again because a pod kept having less than its weight's part, and since when one has.
    underserved_retries: int = 0
    underserved_since_ns: int = 0

    def at(self, sharing: Sharing) -> Tuning:
        """Begin to watch another way."""
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
        """Begin to watch the same way again."""
        return self.at(self.sharing)._replace(settled=self.settled, fits_slice=self.fits_slice)

    def _settle_on(self, trial: Trial) -> Tuning:
        """Keep to a way that was seen."""
        return self.at(trial.sharing)._replace(settled=True, fits_slice=trial.fits_slice)


def begin(weights: Sequence[int], pod_class: PodClass = PodClass.OFFLINE) -> Tuning:
    """Return what is known of pods that were never seen together: nothing, so turns are short at first."""
    return Tuning(_start(weights, pod_class))


def _start(weights: Sequence[int], pod_class: PodClass) -> Sharing:
    """Return the first round: slices as the driver's own at most, or among online pods on average.

    Among those a step that is cut once more than need be costs latency, and turns by gate can't mend it.
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
    """Fold in what busy pods did in ``elapsed_ns`` under a plan in which they took turns as ``done`` says.

    ``foreign_ns`` of that time others had the card. ``utilization`` is the part of the time in which any kernel ran,
    as NVML tells; without it gates are not tried, as nobody could tell whether they pay.
    """
    if done is None:
        return now._restart()
    if done != now.sharing:
        rejected = now.rejected if now.sharing in now.rejected else (*now.rejected, now.sharing)[-_MAX_REJECTED:]
        return now.at(done)._replace(rejected=rejected)
    used_ns = sum(entry.use.run_ns + entry.use.starts * GAP_NS for entry in pods.values())
    full = used_ns + foreign_ns >= _CONTENDED * elapsed_ns
    # A context that is alone on the card counts as running while it idles; NVML tells.
    full = full and (now.sharing.by_gate or utilization is None or utilization >= _CONTENDED)
    if True in [entry.starting for entry in pods.values()] or not full:
        return now._restart()
    now = _accumulate(now, pods, elapsed_ns, foreign_ns, utilization)
    if now.settled and now.sharing.round_ns is not None:
        now = now._replace(debts_ns=_debts(now, pods, MAX_WORK_DEBT_NS if _is_nearly_fair(now, pods) else 0))
    if not _is_conclusive(now, pods, period_ns):
        return now
    used = now.utilization / max(1, now.utilization_ns)
    trial = observe(now.sharing, now.uses, pods, now.watched_ns, used, now.fits_slice, long=_is_long(now.sharing))
    if not now.settled or now.unfinished:
        now = now._replace(unfinished=False)
        return _proceed(_record(now, trial), pods, period_ns, utilization, now_ns)
    kept = now._restart()
    before = next((each for each in reversed(now.trials) if each.sharing == now.sharing), None)
    other = before is None or _has_changed(before, trial)
    idle = now.sharing.by_gate and sum(trial.rates.values()) < _MIN_GATED_USE
    if not _underserves(trial, pods):
        kept = kept._replace(underserved_retries=max(0, now.underserved_retries - 1), underserved_since_ns=0)
    elif before is not None:
        since_ns = now.underserved_since_ns or now_ns
        kept = kept._replace(underserved_since_ns=since_ns)
        if now_ns - since_ns >= _UNDERSERVED_NS << min(now.underserved_retries, _MAX_DOUBLINGS):
            doubted = now._replace(
                trials=(),
                satisfied=frozenset(),
                underserved_retries=now.underserved_retries + 1,
                underserved_since_ns=0,
            )
            return doubted.at(_first(pods))
    if before is not None and not other and not idle and not _newly_short(before, trial, now, pods):
        weights = {name: entry.weight for name, entry in pods.items()}
        following = None if now.sharing.by_gate else _next_round(now, trial, weights, pods, period_ns)
        if following is None:
            return kept
        wanted, fits_slice = following
        return kept.at(wanted)._replace(fits_slice=fits_slice)
    doublings = now.retries if now_ns - now.retried_ns < _RETRY_RESET_NS else 0
    if now_ns - now.retried_ns < _RETRY_NS << min(doublings, _MAX_DOUBLINGS):
        return kept
    again = now._replace(retries=doublings + 1, retried_ns=now_ns)
    if other:
        again = again._replace(trials=(), satisfied=frozenset())
    if now.sharing.by_gate:
        return again._replace(gates_failed=before.turns_ns if before else {}, gates_failed_ns=now_ns).at(_first(pods))
    if other:
        return again.at(_first(pods))
    return _proceed(_record(again, trial), pods, period_ns, utilization, now_ns)


def _record(now: Tuning, trial: Trial) -> Tuning:
    """Remember the last look at each way to take turns."""
    others = [each for each in now.trials if each.sharing != trial.sharing]
    return now._replace(trials=(*others, trial)[-_MAX_TRIALS:])


def interrupted(now: Tuning) -> Tuning:
    """Take note that pods rested or others came: a look begins anew.

    What was only being tried is left, or whoever comes and goes ten times a second would keep others in it. It is tried
    again once there is time for a whole look.
    """
    first = next((trial for trial in now.trials if not trial.sharing.by_gate), None)
    if first is None or (now.settled and not now.unfinished):
        return now._restart()
    return now._settle_on(first)._replace(unfinished=True)


def _accumulate(
    now: Tuning, pods: Mapping[str, RoundEntry], elapsed_ns: int, foreign_ns: int, utilization: float | None
) -> Tuning:
    """Add what pods did, but for a first time that tells of the way before."""
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
    """Tell whether pods that ask for their part nearly have it, so that small corrections give them the rest."""
    trial = next((each for each in reversed(now.trials) if each.sharing == now.sharing), None)
    if trial is None or not trial.rates.keys() <= pods.keys():
        return False
    asking = [name for name in trial.rates if name not in now.satisfied]
    done, whole = sum(trial.rates[name] for name in asking), sum(pods[name].weight for name in asking)
    return all(trial.rates[name] >= _NEARLY_FAIR * done * pods[name].weight / whole for name in asking)


def _debts(now: Tuning, pods: Mapping[str, RoundEntry], most_ns: int) -> dict[str, float]:
    """Add what each pod did beyond its part of the work of all that ask for theirs, up to ``most_ns``.

    A slice that cuts steps of a pod into pieces gives it a whole part of a step, never just its own part. So slices are
    shortened by what is owed, and lengthened by what is due, now by more and now by less, and the mean is right.
    """
    asking = {name: entry for name, entry in pods.items() if name not in now.satisfied}
    work = {name: max(0, entry.use.run_ns - entry.use.starts * SWITCHED_NS) for name, entry in asking.items()}
    done, whole = sum(work.values()), max(1, sum(entry.weight for entry in asking.values()))
    return {
        name: max(
            -MAX_WORK_DEBT_NS,
            min(most_ns, _DEBT_DECAY * now.debts_ns.get(name, 0.0) + work[name] - done * entry.weight / whole),
        )
        for name, entry in asking.items()
    }


def _is_conclusive(now: Tuning, pods: Mapping[str, RoundEntry], period_ns: int) -> bool:
    """Tell whether this way was watched for long enough: by time, and by turns where pods have few."""
    if now.settled:
        return now.passed_ns >= max(WATCH_NS, 2 * period_ns)
    if now.sharing.by_gate:
        return now.passed_ns >= max(GATE_TRIAL_NS, 3 * period_ns)
    long = _is_long(now.sharing)
    if now.passed_ns < (2 * period_ns * 9 // 10 if long else TRIAL_NS):
        return False
    few = any(
        use.starts < MIN_TURNS * pods[name].busy_tsgs and is_early(use, pods[name]) for name, use in now.uses.items()
    )
    return not (few and now.passed_ns < (4 * period_ns if long else MAX_TRIAL_NS))


def _is_long(sharing: Sharing) -> bool:
    return sharing.round_ns is None or sharing.round_ns >= LONG_ROUND_NS


def _proceed(
    now: Tuning, pods: Mapping[str, RoundEntry], period_ns: int, utilization: float | None, now_ns: int
) -> Tuning:
    """Try the next way after the last one was seen, or settle on the best."""
    last = now.trials[-1]
    weights = {name: entry.weight for name, entry in pods.items()}
    if not last.sharing.by_gate:
        now = now._replace(satisfied=satisfied_pods(now.trials) | last.resting)
        following = _next_round(now, last, weights, pods, period_ns)
        if following is not None:
            wanted, fits_slice = following
            return now.at(wanted)._replace(fits_slice=fits_slice)
    slices = [trial for trial in now.trials if not trial.sharing.by_gate]
    best = _best(slices, now.trials, pods)
    by_gate = Sharing(by_gate=True)
    if last.sharing.by_gate:
        worth = score(last, now.trials, pods) >= _GATES_WORTH * score(best, now.trials, pods)
        if worth and sum(last.rates.values()) >= max(_MIN_GATED_USE, _MIN_USE_KEPT * sum(best.rates.values())):
            return now._settle_on(last)
        now = now._replace(trials=now.trials[:-1])  # of single pods its rates are guesses
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
    """Return a round of slices worth trying after ``last``, and whose steps it is to fit; None for no more.

    Shorter, so that a turn of a pod that comes short is as long as its steps; longer where all use their turns up and
    switching costs something.
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
            max(1.0, last.turns_ns[name] - pods[name].busy_tsgs * SWITCHED_NS) * whole / weights[name] for name in short
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
            return None  # they come more often than such a round
    else:
        return None
    wanted = Sharing(round_ns=None if wanted_ns >= period_ns else int(wanted_ns))
    return None if _tried(wanted, now, period_ns) else (wanted, short)


def _tried(wanted: Sharing, now: Tuning, period_ns: int) -> bool:
    """Tell whether a way like this was seen, or the policy would not do it."""
    known = [*(trial.sharing for trial in now.trials), *now.rejected]
    if wanted.equal:
        return wanted in known
    rounds = [sharing.round_ns or period_ns for sharing in known if not sharing.equal and not sharing.by_gate]
    return any(abs(log2((wanted.round_ns or period_ns) / before)) < _ALIKE for before in rounds)


def _best(slices: Sequence[Trial], every: Sequence[Trial], pods: Mapping[str, RoundEntry]) -> Trial:
    """Return the round that serves best; one as by the driver's own slices, unless another is clearly better."""
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
    """Tell whether slices leave something to gain: a pod that comes short, or much switching.

    A pod whose turns are uneven is launched kernel by kernel, and would leave its turns by gate full of gaps.
    """
    weights = {name: entry.weight for name, entry in pods.items()}
    asking = weights.keys() - now.satisfied
    if len(asking) < 2 or asking & best.uneven:
        return False
    if score(best, now.trials, pods) >= _WELL_SERVED:
        return False
    return best.switching > _SWITCHING_HIGH or bool(short_of_share(best, weights, _SHORT) - now.satisfied)


def _gates_retry_due(now: Tuning, best: Trial, now_ns: int) -> bool:
    """Tell whether gates were not tried lately by pods that did what these do now."""
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
    """Tell whether pods do otherwise than when this way was settled on."""
    return before.rates.keys() != trial.rates.keys() or any(
        abs(rate - before.rates[name]) > _CHANGED + _CHANGED_PART * before.rates[name]
        for name, rate in trial.rates.items()
    )


def _newly_short(before: Trial, trial: Trial, now: Tuning, pods: Mapping[str, RoundEntry]) -> bool:
    """Tell whether a pod has come short that was not when this way was settled on."""
    weights = {name: entry.weight for name, entry in pods.items()}
    known = short_of_share(before, weights, _SHORT_LATER)
    return bool(short_of_share(trial, weights, _SHORT_LATER) - known - now.satisfied)


def _underserves(trial: Trial, pods: Mapping[str, RoundEntry]) -> bool:
    """Tell whether a pod of those that are promised a part has less, as far as slices show it."""
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

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
from qgpu.model.hardware_traits import OTHER, HardwareTraits
from qgpu.sched.gpu_usage import GpuUse, RoundEntry
from qgpu.sched.trial import TELLING, Trial, asking_no_more, is_early, observe, promised, score, short_of_due

#: The longest slice among pods of which nothing is known yet: about what the driver gives everybody.
START_SLICE_NS = 2 * NS_PER_MS

#: The longest slice of those who wait for nobody, where a round is made to fit a pod that leaves early: not shorter,
#: for switching takes a third of a millisecond. Among online pods latency is worth more of it.
SHORTEST_NS = {PodClass.OFFLINE: NS_PER_MS, PodClass.ONLINE: NS_PER_MS // 2}

#: How long a way to take turns is watched before it is judged; and once it is settled on, every so often.
TRIAL_NS = 90 * NS_PER_MS
WATCH_NS = 300 * NS_PER_MS

#: Where pods have few turns a look is longer, up to this. A round so long begins with turns of the way before.
MOST_TRIAL_NS = 300 * NS_PER_MS
LONG_ROUND_NS = 30 * NS_PER_MS

#: After gates begin to move, NVML's utilisation tells of the time before for so long.
STALE_NS = 300 * NS_PER_MS
GATE_TRIAL_NS = 500 * NS_PER_MS

#: Pods contend for the card when they are on it for this part of the time between them, switches and all.
_FULL = 0.85

#: Where somebody takes less than half of a turn, longer ones save no switch.
_HALF = 0.5

#: A pod is short when it has less than this part of what its weight gives it: at a first look, and over a longer time.
_SHORT, _SHORT_LATER = 0.93, 0.96

#: Switches may take this part of the time before a longer round is tried, and before gates are.
_CHEAP, _DEAR = 0.02, 0.05
_WELL_SERVED = 0.95

#: A pod with this part of what it is due has the rest by small corrections of others' slices.
_NEARLY = 0.85

#: The most work by timeslices that a pod may owe the others, or they owe it.
MOST_OWED_NS = 24 * NS_PER_MS
#: The part of it that is still owed a round later: where in a turn a round ends is chance, and adds up to nothing.
_REMEMBERED = 0.9

#: So many ways that a policy would not do are remembered, and so many looks.
_MOST_BARRED, _MOST_SEEN = 16, 8

#: Rounds are alike if one is less than a fifth longer than the other (in powers of 2).
_ALIKE = 0.25

#: A round must score better than the driver's own slices by this factor. Gates must score better than any round by
#: theirs, because steps then wait for whole turns of others. Pods must use this part of their turns by gate, and as
#: much of the card as by slices: less shows that they had little to run in them, and the card idles.
_ROUND_WORTH = 1.08
_GATES_WORTH = 1.03
_DENSE, _AS_MUCH = 0.7, 0.97

#: What pods do has changed when a rate is off by so much, absolute and relative; then all is tried again, but not
#: again and again: the wait doubles each time.
_OFF, _OFF_PART = 0.1, 0.4
_AGAIN_NS, _MOST_DOUBLINGS = NS_PER_S, 5
_CALM_NS = 10 * NS_PER_S

#: A look of a tenth of a second may deceive. Where a pod has less than so much of its weight's part for so long, all is
#: tried again; the wait doubles each time, for mostly the same is found.
_DEPRIVED, _DOUBT_NS = 0.88, NS_PER_S

#: Gates that did not pay are tried again after so long, or where a pod's turns have become this many times as long.
GATES_AGAIN_NS = 120 * NS_PER_S
_GATES_SOON_NS = 10 * NS_PER_S
_OTHER_TURNS = 3.0


class Tuning(NamedTuple):
    """What is known of some pods that contend, and how they take their turns now."""

    sharing: Sharing
    seen: tuple[Trial, ...] = ()
    #: What was tried and the policy would not do.
    barred: tuple[Sharing, ...] = ()
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
    fitted: frozenset[str] = frozenset()
    #: Work done beyond (positive) or short of each pod's part, in ns, by slices of one round; bounded.
    debts_ns: Mapping[str, float] = MappingProxyType({})
    #: How long pods' turns were when gates did not pay, and when that was.
    gates_failed: Mapping[str, float] = MappingProxyType({})
    gates_failed_ns: int = 0
    #: How often of late all was tried again, and when last.
    again: int = 0
    again_ns: int = 0
    #: How often it was tried again because a pod kept having less than its weight's part, and since when one has.
    doubts: int = 0
    deprived_since_ns: int = 0
    #: What is known of the card.
    hardware: HardwareTraits = OTHER

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
            fitted=frozenset(),
            debts_ns=self.debts_ns if sharing == self.sharing else MappingProxyType({}),
        )

    def _anew(self) -> Tuning:
        """Begin to watch the same way again."""
        return self.at(self.sharing)._replace(settled=self.settled, fitted=self.fitted)

    def _settled(self, seen: Trial) -> Tuning:
        """Keep to a way that was seen."""
        return self.at(seen.sharing)._replace(settled=True, fitted=seen.fitted)


def begin(weights: Sequence[int], pod_class: PodClass = PodClass.OFFLINE, hardware: HardwareTraits = OTHER) -> Tuning:
    """Return what is known of pods that were never seen together: nothing, so turns are short at first."""
    return Tuning(_start(weights, pod_class), hardware=hardware)


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
        return now._anew()
    if done != now.sharing:
        barred = now.barred if now.sharing in now.barred else (*now.barred, now.sharing)[-_MOST_BARRED:]
        return now.at(done)._replace(barred=barred)
    used_ns = sum(entry.use.run_ns + entry.use.starts * now.hardware.gap_ns for entry in pods.values())
    full = used_ns + foreign_ns >= _FULL * elapsed_ns
    # A context that is alone on the card counts as running while it idles; NVML tells.
    full = full and (now.sharing.by_gate or utilization is None or utilization >= _FULL)
    if True in [entry.starting for entry in pods.values()] or not full:
        return now._anew()
    now = _watched(now, pods, elapsed_ns, foreign_ns, utilization)
    if now.settled and now.sharing.round_ns is not None:
        now = now._replace(debts_ns=_debts(now, pods, MOST_OWED_NS if _is_nearly_fair(now, pods) else 0))
    if not _enough(now, pods, period_ns):
        return now
    used = now.utilization / max(1, now.utilization_ns)
    long = _is_long(now.sharing)
    seen = observe(now.sharing, now.uses, pods, now.watched_ns, used, now.fitted, now.hardware, long=long)
    if not now.settled or now.unfinished:
        now = now._replace(unfinished=False)
        return _after(_noted(now, seen), pods, period_ns, utilization, now_ns)
    kept = now._anew()
    before = next((each for each in reversed(now.seen) if each.sharing == now.sharing), None)
    other = before is None or _differs(before, seen)
    idle = now.sharing.by_gate and sum(seen.rates.values()) < _DENSE
    if not _deprives(seen, pods):
        kept = kept._replace(doubts=max(0, now.doubts - 1), deprived_since_ns=0)
    elif before is not None:
        since_ns = now.deprived_since_ns or now_ns
        kept = kept._replace(deprived_since_ns=since_ns)
        if now_ns - since_ns >= _DOUBT_NS << min(now.doubts, _MOST_DOUBLINGS):
            doubted = now._replace(seen=(), satisfied=frozenset(), doubts=now.doubts + 1, deprived_since_ns=0)
            return doubted.at(_first(pods))
    if before is not None and not other and not idle and not _falls_short(before, seen, now, pods):
        weights = {name: entry.weight for name, entry in pods.items()}
        following = None if now.sharing.by_gate else _next_round(now, seen, weights, pods, period_ns)
        if following is None:
            return kept
        wanted, fitted = following
        return kept.at(wanted)._replace(fitted=fitted)
    doublings = now.again if now_ns - now.again_ns < _CALM_NS else 0
    if now_ns - now.again_ns < _AGAIN_NS << min(doublings, _MOST_DOUBLINGS):
        return kept
    again = now._replace(again=doublings + 1, again_ns=now_ns)
    if other:
        again = again._replace(seen=(), satisfied=frozenset())
    if now.sharing.by_gate:
        return again._replace(gates_failed=before.turns_ns if before else {}, gates_failed_ns=now_ns).at(_first(pods))
    if other:
        return again.at(_first(pods))
    return _after(_noted(again, seen), pods, period_ns, utilization, now_ns)


def _noted(now: Tuning, seen: Trial) -> Tuning:
    """Remember the last look at each way to take turns."""
    others = [each for each in now.seen if each.sharing != seen.sharing]
    return now._replace(seen=(*others, seen)[-_MOST_SEEN:])


def interrupted(now: Tuning) -> Tuning:
    """Take note that pods rested or others came: a look begins anew.

    What was only being tried is left, or whoever comes and goes ten times a second would keep others in it. It is tried
    again once there is time for a whole look.
    """
    first = next((seen for seen in now.seen if not seen.sharing.by_gate), None)
    if first is None or (now.settled and not now.unfinished):
        return now._anew()
    return now._settled(first)._replace(unfinished=True)


def _watched(
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
    seen = next((each for each in reversed(now.seen) if each.sharing == now.sharing), None)
    if seen is None or not seen.rates.keys() <= pods.keys():
        return False
    asking = [name for name in seen.rates if name not in now.satisfied]
    done, whole = sum(seen.rates[name] for name in asking), sum(pods[name].weight for name in asking)
    return all(seen.rates[name] >= _NEARLY * done * pods[name].weight / whole for name in asking)


def _debts(now: Tuning, pods: Mapping[str, RoundEntry], most_ns: int) -> dict[str, float]:
    """Add what each pod did beyond its part of the work of all that ask for theirs, up to ``most_ns``.

    A slice that cuts steps of a pod into pieces gives it a whole part of a step, never just its own part. So slices are
    shortened by what is owed, and lengthened by what is due, now by more and now by less, and the mean is right.
    """
    asking = {name: entry for name, entry in pods.items() if name not in now.satisfied}
    work = {
        name: max(0, entry.use.run_ns - entry.use.starts * now.hardware.switched_ns) for name, entry in asking.items()
    }
    done, whole = sum(work.values()), max(1, sum(entry.weight for entry in asking.values()))
    return {
        name: max(
            -MOST_OWED_NS,
            min(most_ns, _REMEMBERED * now.debts_ns.get(name, 0.0) + work[name] - done * entry.weight / whole),
        )
        for name, entry in asking.items()
    }


def _enough(now: Tuning, pods: Mapping[str, RoundEntry], period_ns: int) -> bool:
    """Tell whether this way was watched for long enough: by time, and by turns where pods have few."""
    if now.settled:
        return now.passed_ns >= max(WATCH_NS, 2 * period_ns)
    if now.sharing.by_gate:
        return now.passed_ns >= max(GATE_TRIAL_NS, 3 * period_ns)
    long = _is_long(now.sharing)
    if now.passed_ns < (2 * period_ns * 9 // 10 if long else TRIAL_NS):
        return False
    few = any(
        use.starts < TELLING * pods[name].busy_tsgs and is_early(use, pods[name], now.hardware)
        for name, use in now.uses.items()
    )
    return not (few and now.passed_ns < (4 * period_ns if long else MOST_TRIAL_NS))


def _is_long(sharing: Sharing) -> bool:
    return sharing.round_ns is None or sharing.round_ns >= LONG_ROUND_NS


def _after(
    now: Tuning, pods: Mapping[str, RoundEntry], period_ns: int, utilization: float | None, now_ns: int
) -> Tuning:
    """Try the next way after the last one was seen, or settle on the best."""
    last = now.seen[-1]
    weights = {name: entry.weight for name, entry in pods.items()}
    if not last.sharing.by_gate:
        now = now._replace(satisfied=asking_no_more(now.seen, now.hardware) | last.resting)
        following = _next_round(now, last, weights, pods, period_ns)
        if following is not None:
            wanted, fitted = following
            return now.at(wanted)._replace(fitted=fitted)
    slices = [seen for seen in now.seen if not seen.sharing.by_gate]
    best = _best(slices, now.seen, pods)
    by_gate = Sharing(by_gate=True)
    if last.sharing.by_gate:
        worth = score(last, now.seen, pods) >= _GATES_WORTH * score(best, now.seen, pods)
        if worth and sum(last.rates.values()) >= max(_DENSE, _AS_MUCH * sum(best.rates.values())):
            return now._settled(last)
        now = now._replace(seen=now.seen[:-1])  # of single pods its rates are guesses
        best = _best(slices, now.seen, pods)
        now = now._replace(gates_failed=best.turns_ns, gates_failed_ns=now_ns)
    elif (
        utilization is not None
        and by_gate not in now.barred
        and _gates_may_pay(now, best, pods)
        and _gates_again(now, best, now_ns)
    ):
        return now.at(by_gate)
    return now._settled(best)


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
    short = short_of_due(last, weights, _SHORT) - now.satisfied
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
    elif last.sharing.round_ns and last.switching > _CHEAP and last.least_used > _HALF and last.fitted <= last.resting:
        wanted_ns = float(period_ns) if last.used_up else 2.0 * round_ns
        if any(last.starts[name] * wanted_ns > last.watched_ns / 2 for name in last.resting):
            return None  # they come more often than such a round
    else:
        return None
    wanted = Sharing(round_ns=None if wanted_ns >= period_ns else int(wanted_ns))
    return None if _tried(wanted, now, period_ns) else (wanted, short)


def _tried(wanted: Sharing, now: Tuning, period_ns: int) -> bool:
    """Tell whether a way like this was seen, or the policy would not do it."""
    known = [*(seen.sharing for seen in now.seen), *now.barred]
    if wanted.equal:
        return wanted in known
    rounds = [sharing.round_ns or period_ns for sharing in known if not sharing.equal and not sharing.by_gate]
    return any(abs(log2((wanted.round_ns or period_ns) / before)) < _ALIKE for before in rounds)


def _best(slices: Sequence[Trial], every: Sequence[Trial], pods: Mapping[str, RoundEntry]) -> Trial:
    """Return the round that serves best; one as by the driver's own slices, unless another is clearly better."""
    usual = (_first(pods), Sharing(equal=True))
    scores = {id(seen): score(seen, every, pods) for seen in slices}
    best = max(slices, key=lambda seen: scores[id(seen)])
    plain = max((seen for seen in slices if seen.sharing in usual), key=lambda seen: scores[id(seen)], default=best)
    return best if scores[id(best)] >= _ROUND_WORTH * scores[id(plain)] or _is_longer(best, plain) else plain


def _is_longer(seen: Trial, than: Trial) -> bool:
    """Tell whether a round is longer than another, and so costs fewer switches."""
    if seen.sharing.equal or than.sharing.equal:
        return False
    return than.sharing.round_ns is not None and (
        seen.sharing.round_ns is None or seen.sharing.round_ns > than.sharing.round_ns
    )


def _gates_may_pay(now: Tuning, best: Trial, pods: Mapping[str, RoundEntry]) -> bool:
    """Tell whether slices leave something to gain: a pod that comes short, or much switching.

    A pod whose turns are uneven is launched kernel by kernel, and would leave its turns by gate full of gaps.
    """
    weights = {name: entry.weight for name, entry in pods.items()}
    asking = weights.keys() - now.satisfied
    if len(asking) < 2 or asking & best.uneven:
        return False
    if score(best, now.seen, pods) >= _WELL_SERVED:
        return False
    return best.switching > _DEAR or bool(short_of_due(best, weights, _SHORT) - now.satisfied)


def _gates_again(now: Tuning, best: Trial, now_ns: int) -> bool:
    """Tell whether gates were not tried lately by pods that did what these do now."""
    since_ns = now_ns - now.gates_failed_ns
    if not now.gates_failed or since_ns >= GATES_AGAIN_NS:
        return True
    if since_ns < _GATES_SOON_NS:
        return False
    return any(
        not 1 / _OTHER_TURNS <= turn / max(1.0, now.gates_failed.get(name, 1.0)) <= _OTHER_TURNS
        for name, turn in best.turns_ns.items()
    )


def _differs(before: Trial, seen: Trial) -> bool:
    """Tell whether pods do otherwise than when this way was settled on."""
    return before.rates.keys() != seen.rates.keys() or any(
        abs(rate - before.rates[name]) > _OFF + _OFF_PART * before.rates[name] for name, rate in seen.rates.items()
    )


def _falls_short(before: Trial, seen: Trial, now: Tuning, pods: Mapping[str, RoundEntry]) -> bool:
    """Tell whether a pod has come short that was not when this way was settled on."""
    weights = {name: entry.weight for name, entry in pods.items()}
    known = short_of_due(before, weights, _SHORT_LATER)
    return bool(short_of_due(seen, weights, _SHORT_LATER) - known - now.satisfied)


def _deprives(seen: Trial, pods: Mapping[str, RoundEntry]) -> bool:
    """Tell whether a pod of those that are promised a part has less, as far as slices show it."""
    if seen.sharing.by_gate:
        return False
    done, whole = sum(seen.rates.values()), sum(entry.weight for entry in pods.values())
    return any(
        seen.rates[name] < _DEPRIVED * done * pods[name].weight / whole for name in promised(seen, pods) - seen.resting
    )


def _sum(a: GpuUse, b: GpuUse) -> GpuUse:
    return GpuUse(
        a.run_ns + b.run_ns,
        a.starts + b.starts,
        a.open_ns + b.open_ns,
        a.passed_ns + b.passed_ns,
        max(a.longest_ns, b.longest_ns),
    )

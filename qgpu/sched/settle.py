"""What the pods of a pGPU owe each other after a round: measured GPU time against what the plan aimed at.

Pure arithmetic on one round; the ledger keeps what comes of it, policies act on it. The control law, its
limits and why nobody can starve are in docs/feedback.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from qgpu.model import NS_PER_MS, NS_PER_US, Grant, Pace, PodClass, PodPlan

#: Overruns of a quota are paid back up to what the quota gives in this time; older ones are forgiven.
DEBT_HORIZON_NS = 200 * NS_PER_MS

#: What a pod may be short of at most, in ns and as part of a period: what gates cost, not what it left unused.
CREDIT_NS = 6 * NS_PER_MS
CREDIT = 0.06

#: A pod that ran for less than this part of its turns (and the price of a gate) had nothing to run in the rest.
_FILLING = 0.85
_GATE_NS = 1 * NS_PER_MS

#: Pods contend for the card when they use this much of it between them.
_FULL = 0.85

#: Timeslices don't bind when this part of a round of turns has gone to the wrong pods, beyond the part of all
#: time that is let pass. Where in a round a sample falls may shift a quarter of it for the moment.
_MISSED = 0.3
_LET_PASS = 0.005

_LEAST_MISSED_NS = 10 * NS_PER_MS

#: Who was switched in so often in a round was there at its beginning and at its end.
_THERE_STARTS = 2

#: What a pod that was found sparse must have come short of, always there for its turns, to be doubted again.
_DOUBT_AGAIN_NS = 1_000 * NS_PER_MS

#: A pod is there all the time if it takes this part of the turns there are, and has pauses short
#: enough for turns by gate if it does so where turns come thick and fast. A switch takes so long.
_PRESENT = 0.75
_PRESENT_AT_ONCE = 0.85
_SWITCH_NS = 100 * NS_PER_US

#: A pod uses its turns up when it takes this part of them, over the last few rounds.
_USED_UP = 0.9
_LONG_NS = 300 * NS_PER_MS

#: How much of what was seen of a pod's turns is carried into the next round.
_CARRIED = 0.8


# Named tuples, not frozen dataclasses: the loop makes several of each for every pod and tick, at a third of the price.


class Use(NamedTuple):
    """What a pod did in a stretch of time: GPU time, how often it was switched in, time its gate was open."""

    run_ns: int = 0
    #: A fraction where older turns weigh less.
    starts: float = 0
    open_ns: int = 0


NOTHING = Use()


class Standing(NamedTuple):
    """Where a pod stands: its debt, its pace, and what its turns were like of late."""

    debt_ns: int = 0
    pace: Pace = Pace.STEADY
    #: It was sparse once and then steady: the next time it stays sparse, so that it can't go back and forth.
    reformed: bool = False
    #: What it had beyond its part in the last round, not yet counted; None where that round doesn't count.
    pending_ns: int | None = None
    #: What its turns were like of late, older ones weighing less; ``open_ns`` is all time they were seen in.
    turns: Use = NOTHING


class Entry(NamedTuple):
    """One pod in a round that is over: its part of the plan (None: there was none), and how many TSGs were busy."""

    grant: Grant
    part: PodPlan | None
    use: Use
    standing: Standing
    busy_tsgs: int
    #: It has only just come: what it misses while its processes start tells nothing.
    starting: bool = False

    @property
    def weight(self) -> int:
        """Return its weight among its class; 0 where it is held to its quota."""
        return self.part.weight if self.part else 0

    @property
    def turns_ns(self) -> int | None:
        """Return how much of a period its own windows take; None without any."""
        if self.part is None or self.part.windows is None:
            return None
        return sum(window.end_ns - window.start_ns for window in self.part.windows)


def settle(entries: Mapping[str, Entry], round_ns: int, period_ns: int, *, ragged: bool = False) -> dict[str, Standing]:
    """Return where everybody stands after a round of ``round_ns`` under a plan of ``period_ns``.

    Of a ragged round, in which pods came to life or went to rest or of which a part is missing, only quotas are
    settled: they are held to the clock, not to what others did.
    """
    standings = {name: entry.standing for name, entry in entries.items()}
    for name, entry in entries.items():
        if not entry.weight:
            standings[name] = entry.standing._replace(debt_ns=_against_quota(entry, round_ns, period_ns))
        elif not entry.busy_tsgs:
            standings[name] = entry.standing._replace(debt_ns=0)
    for pod_class in PodClass:
        rivals = {
            name: entry
            for name, entry in entries.items()
            if entry.grant.pod_class is pod_class and entry.busy_tsgs and entry.weight
        }
        if ragged or len(rivals) < 2 or not round_ns:
            continue
        foreign_ns = sum(entry.use.run_ns for name, entry in entries.items() if name not in rivals)
        gated = {name: entry for name, entry in rivals.items() if entry.turns_ns is not None}
        if gated:
            foreign_ns += sum(entry.use.run_ns for name, entry in rivals.items() if name not in gated)
            standings |= _by_windows(gated, round_ns, period_ns, foreign_ns)
            standings |= _beside_windows(rivals, gated)
        elif pod_class is PodClass.OFFLINE:
            standings |= _by_timeslices(rivals, round_ns, foreign_ns)
    return standings


def _against_quota(entry: Entry, round_ns: int, period_ns: int) -> int:
    cores = entry.grant.cores
    if cores is None or not entry.busy_tsgs:
        return 0
    before_ns = entry.standing.debt_ns
    after_ns = before_ns + entry.use.run_ns - round_ns * cores // 100
    if not _fills(entry, round_ns, period_ns, 0):
        after_ns = max(after_ns, min(before_ns, 0))
    return max(-_credit_ns(period_ns), min(DEBT_HORIZON_NS * cores // 100, after_ns))


def _by_windows(rivals: Mapping[str, Entry], round_ns: int, period_ns: int, foreign_ns: int) -> dict[str, Standing]:
    """Hold those who filled their turns to their weights in what they got together.

    Who left some of its turns unused has what it wants; it neither saves that up nor owes for it.
    """
    filling = {name: entry for name, entry in rivals.items() if _fills(entry, round_ns, period_ns, foreign_ns)}
    bound_ns = _credit_ns(period_ns)
    return {
        name: filling[name].standing._replace(
            debt_ns=max(-bound_ns, min(bound_ns, filling[name].standing.debt_ns + over_ns))
        )
        for name, over_ns in _overruns(filling).items()
    }


def _beside_windows(rivals: Mapping[str, Entry], gated: Mapping[str, Entry]) -> dict[str, Standing]:
    """Send those who were left ungated for their long pauses to take turns too, once they use more than their part."""
    return {
        name: _anew(rivals[name].standing, Pace.GAPPY)
        for name, over_ns in _overruns(rivals).items()
        if name not in gated and over_ns > 0 and rivals[name].standing.pace is Pace.SPARSE
    }


def _by_timeslices(rivals: Mapping[str, Entry], round_ns: int, foreign_ns: int) -> dict[str, Standing]:
    """Add up what went to the wrong pods; once it is more than chance, doubt who came short most.

    It counts only while everybody was on the card in the rounds before and after too, or came back to it within this
    one, as pods that come and go get less for their own reasons; and while the card was full.
    """
    ran = all(entry.use.run_ns and not entry.starting for entry in rivals.values())
    at_once = all(entry.use.starts >= _THERE_STARTS * entry.busy_tsgs for entry in rivals.values())
    if any(entry.standing.pace is Pace.DOUBTED for entry in rivals.values()):
        return {name: _judged(entry, rivals, round_ns) for name, entry in rivals.items()}
    if not ran or foreign_ns + sum(entry.use.run_ns for entry in rivals.values()) < _FULL * round_ns:
        return {name: entry.standing._replace(pending_ns=None) for name, entry in rivals.items()}
    limit_ns = max(_LEAST_MISSED_NS, round(_MISSED * sum([_turns_ns(entry) for entry in rivals.values()])))
    passed_ns = round(_LET_PASS * round_ns)
    overruns, standings, late = _overruns(rivals), {}, []
    for name, entry in rivals.items():
        debt_ns, pace, reformed, pending_ns, turns = entry.standing
        at_most_ns = _DOUBT_AGAIN_NS if pace is Pace.SPARSE else limit_ns
        debt_ns += (pending_ns or 0) + (overruns[name] if at_once else 0)
        debt_ns = max(0, debt_ns - passed_ns) if debt_ns > 0 else min(0, debt_ns + passed_ns)
        if debt_ns < -at_most_ns:
            late.append(name)
        standings[name] = Standing(
            max(-2 * at_most_ns, min(2 * at_most_ns, debt_ns)),
            pace,
            reformed,
            0 if pending_ns is None or at_once else overruns[name],
            Use(
                int(_CARRIED * turns.run_ns) + entry.use.run_ns,
                _CARRIED * turns.starts + entry.use.starts,
                int(_CARRIED * turns.open_ns) + round_ns,
            ),
        )
    if not late and all(now.pace is not Pace.SPARSE for now in standings.values()):
        return standings
    seen = {name: entry._replace(use=standings[name].turns) for name, entry in rivals.items()}
    short = [name for name in late if _present(seen[name], seen)]
    if not short:
        return _reformed(standings, seen)
    worst = min(short, key=lambda name: standings[name].debt_ns)
    return {
        name: _anew(entry.standing, _doubted(entry.standing.pace) if name == worst else entry.standing.pace)
        for name, entry in rivals.items()
    }


def _reformed(standings: dict[str, Standing], seen: Mapping[str, Entry]) -> dict[str, Standing]:
    """Take sparse pods for steady again that are always there and use their turns up."""
    steady = {
        name
        for name, entry in seen.items()
        if entry.standing.pace is Pace.SPARSE
        and not entry.standing.reformed
        and entry.use.open_ns >= _LONG_NS
        and entry.use.run_ns >= _USED_UP * entry.use.starts * _slice_ns(entry)
        and _present(entry, seen)
    }
    if not steady:
        return standings
    return {
        name: Standing(reformed=True) if name in steady else _anew(now, now.pace) for name, now in standings.items()
    }


def _anew(standing: Standing, pace: Pace) -> Standing:
    """Begin to reckon anew under a pace that may have changed: what was owed came of the turns of before."""
    return Standing(pace=pace, reformed=standing.reformed)


def _doubted(pace: Pace) -> Pace:
    return pace if pace is Pace.GAPPY else Pace.DOUBTED


def _judged(entry: Entry, rivals: Mapping[str, Entry], round_ns: int) -> Standing:
    """Tell by a round of very short timeslices what kind of pod a doubted one is."""
    if entry.standing.pace is not Pace.DOUBTED:
        return _anew(entry.standing, entry.standing.pace)
    seen = {name: rival._replace(use=rival.use._replace(open_ns=round_ns)) for name, rival in rivals.items()}
    here = entry.use.run_ns and _present(
        entry._replace(use=entry.use._replace(open_ns=round_ns)), seen, _PRESENT_AT_ONCE
    )
    return _anew(entry.standing, Pace.GAPPY if here else Pace.SPARSE)


def _present(entry: Entry, rivals: Mapping[str, Entry], part: float = _PRESENT) -> bool:
    """Tell whether a pod had work nearly every time its turn came: its turns and those in between make up the time.

    A round takes what everybody makes of a turn, no more than a timeslice, and as many switches.
    """
    round_ns = sum(_turns_ns(rival) + rival.busy_tsgs * _SWITCH_NS for rival in rivals.values())
    own_ns, starts = entry.use.run_ns, entry.use.starts
    if starts:
        own_ns = min(own_ns, round(starts * _slice_ns(entry)))
    there_ns = own_ns + starts / entry.busy_tsgs * (round_ns - _turns_ns(entry))
    return there_ns >= part * entry.use.open_ns


def _turns_ns(entry: Entry) -> float:
    """Return what the turns of a pod take of a round: no more than its timeslices, and what it made of them."""
    return entry.busy_tsgs * min(_slice_ns(entry), entry.use.run_ns / max(1, entry.use.starts))


def _overruns(rivals: Mapping[str, Entry]) -> dict[str, int]:
    """Return what each had beyond its part, by weight, of what they had together."""
    used_ns = sum(entry.use.run_ns for entry in rivals.values())
    weights = sum(entry.weight for entry in rivals.values())
    return {name: entry.use.run_ns - used_ns * entry.weight // weights for name, entry in rivals.items()}


def _fills(entry: Entry, round_ns: int, period_ns: int, foreign_ns: int) -> bool:
    """Tell whether it had work in all of its own turns; ``foreign_ns`` of the round was never to be had."""
    own_ns = entry.turns_ns
    if own_ns is None:
        return True
    turns_ns = (
        min(entry.use.open_ns, own_ns * round_ns // period_ns) * max(0, round_ns - foreign_ns) // max(1, round_ns)
    )
    return entry.use.run_ns >= _FILLING * turns_ns - _GATE_NS


def _slice_ns(entry: Entry) -> int:
    assert entry.part is not None
    return entry.part.timeslice_us * NS_PER_US


def _credit_ns(period_ns: int) -> int:
    return max(CREDIT_NS, round(CREDIT * period_ns))

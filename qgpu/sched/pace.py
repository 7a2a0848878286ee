"""What turns by timeslice tell of pods: whether they bind, and who has pauses, of what kind.

Pure arithmetic on one round, among pods that share by timeslices. Which turns a pace is given is the policies' matter;
the rules and their reasons are in docs/feedback.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from qgpu.model import NS_PER_MS, Pace
from qgpu.sched.standing import Entry, Standing, Use, overruns
from qgpu.turns import GAP_NS, turn_ns

#: Pods contend for the card when they use this much of it between them.
_FULL = 0.85

#: Timeslices don't bind when this part of a round of turns has gone to the wrong pods, beyond the part of all
#: time that is let pass. Where in a round a sample falls may shift a quarter of it for the moment.
_MISSED = 0.3
_LET_PASS = 0.005

_LEAST_MISSED_NS = 10 * NS_PER_MS

#: Who was switched in so often in a round was there at its beginning and at its end.
_THERE_STARTS = 2

#: For how long a pod that was found sparse must have been there for its turns to be doubted again, and what it may be
#: owed until then: twice this, and twice as much again every time it is found so. Short or not: two that wait for
#: short batches can fall in step, where each has its part and leaves a pause after every turn.
_DOUBT_AGAIN_NS = 500 * NS_PER_MS

#: A pod is there all the time if it takes this part of the turns there are, and has pauses short
#: enough for turns by gate if it does so where turns come thick and fast.
_PRESENT = 0.75
_PRESENT_AT_ONCE = 0.85

#: Who is there all the time is in this part of the rounds that others have, give or take one.
_EVERY_ROUND = 0.9

#: So many turns must have been left early in a round for it to tell that by itself, and so many in two of them: one is
#: counted too many or too few where a round begins and ends.
_TELLING = 4
_PROOF = 0.5

#: For how long pods take turns by gate for want of proof until they are tried by timeslices once more.
_ACQUITTED_AFTER_NS = 1_000 * NS_PER_MS

#: A pod came short for leaving its turns early if this part of what it missed lies in them. Else others overran theirs:
#: a kernel that reads host memory without end is off the engine up to a millisecond after its slice.
_BY_LEAVING = 0.25

#: A pod uses its turns up when it takes this part of them, over the last few rounds.
_USED_UP = 0.9
_LONG_NS = 300 * NS_PER_MS

#: How much of what was seen of a pod's turns is carried into the next round.
_CARRIED = 0.8


def by_timeslices(rivals: Mapping[str, Entry], round_ns: int, period_ns: int, foreign_ns: int) -> dict[str, Standing]:
    """Add up what went to the wrong pods; once it is more than chance, doubt who came short most.

    It counts only while everybody was on the card in the rounds before and after too, or came back to it within this
    one, as pods that come and go get less for their own reasons; and while the card was full. A round of turns lasts
    the period: what was counted over another time may show one pod's turn and not another's.
    """
    entries = rivals.values()
    paces = {entry.standing.pace for entry in entries}
    if Pace.DOUBTED in paces:
        return _judged(rivals, round_ns)
    used_ns = [entry.use.run_ns for entry in entries]
    ran = all(used_ns) and True not in [entry.starting for entry in entries]
    if not ran or foreign_ns + sum(used_ns) < _FULL * round_ns:
        return {name: entry.standing._replace(pending_ns=None) for name, entry in rivals.items()}
    at_once = all(entry.use.starts >= _THERE_STARTS * entry.busy_tsgs for entry in entries)
    turns_ns = sum([_turns_ns(entry) for entry in entries])
    limit_ns = max(_LEAST_MISSED_NS, round(_MISSED * turns_ns))
    passed_ns = round(_LET_PASS * round_ns)
    over, standings, late = overruns(rivals), {}, []
    for name, entry in rivals.items():
        use, now = entry.use, entry.standing
        owed_ns, pace, pending_ns, turns = now.debt_ns, now.pace, now.pending_ns, now.turns
        at_most_ns = _again_ns(now) if pace is Pace.SPARSE else limit_ns
        debt_ns = owed_ns + (pending_ns or 0) + (over[name] if at_once else 0)
        debt_ns = max(0, debt_ns - passed_ns) if debt_ns > 0 else min(0, debt_ns + passed_ns)
        if debt_ns < -at_most_ns:
            odd_ns = (now.counted_ns + (round_ns if at_once else 0)) % period_ns
            part = entry.weight / sum([rival.weight for rival in entries])
            if debt_ns < -at_most_ns - _cut_off_ns(part, odd_ns, period_ns, turns_ns):
                late.append(name)
        standings[name] = Standing(
            max(-2 * at_most_ns, min(2 * at_most_ns, debt_ns)),
            pace,
            now.reformed,
            now.suspect,
            now.found,
            now.unproven,
            now.acquitted,
            now.there_ns,
            0 if pending_ns is None or at_once else over[name],
            now.counted_ns if pending_ns is None and not at_once else now.counted_ns + round_ns,
            Use(
                int(_CARRIED * turns.run_ns) + use.run_ns,
                _CARRIED * turns.starts + use.starts,
                int(_CARRIED * turns.open_ns) + round_ns,
            ),
        )
    if not late and Pace.SPARSE not in paces:
        return standings
    seen = {name: entry._replace(use=standings[name].turns) for name, entry in rivals.items()}
    for name, now in standings.items():
        if now.pace is Pace.SPARSE:
            there = _present(seen[name], seen, _PRESENT_AT_ONCE) and not _uses_up(seen[name])
            there_ns = now.there_ns + round_ns if there else 0
            standings[name] = now._replace(there_ns=there_ns)
            if there_ns >= _again_ns(now) and name not in late:
                late.append(name)
    over = overruns(seen)
    short = [name for name in late if _present(seen[name], seen) and _leaves(seen[name], -over[name])]
    if not short:
        return _reformed(standings, seen)
    worst = min(short, key=lambda name: standings[name].debt_ns)
    return {
        name: entry.standing.anew._replace(
            pace=_doubted(entry.standing.pace) if name == worst else entry.standing.pace,
            suspect=name in late and name != worst and entry.standing.pace is Pace.STEADY,
        )
        for name, entry in rivals.items()
    }


def _cut_off_ns(part: float, odd_ns: int, period_ns: int, turns_ns: float) -> int:
    """Return how far a pod with this part may be off for ``odd_ns`` that were counted beyond whole rounds of turns."""
    return int(min(part * odd_ns, (1 - part) * (period_ns - odd_ns), part * turns_ns))


def _reformed(standings: dict[str, Standing], seen: Mapping[str, Entry]) -> dict[str, Standing]:
    """Take sparse pods for steady again that are always there and use their turns up."""
    steady = {
        name
        for name, entry in seen.items()
        if entry.standing.pace is Pace.SPARSE
        and not entry.standing.reformed
        and entry.use.open_ns >= _LONG_NS
        and _uses_up(entry)
        and _present(entry, seen)
    }
    if not steady:
        return standings
    return {name: Standing(reformed=True) if name in steady else now.anew for name, now in standings.items()}


def _uses_up(entry: Entry) -> bool:
    return entry.use.run_ns >= _USED_UP * entry.use.starts * _whole_turn_ns(entry)


def _leaves(entry: Entry, short_ns: int) -> bool:
    """Tell whether a pod came short because it left its turns early: else others overran theirs."""
    return entry.use.starts * _whole_turn_ns(entry) - entry.use.run_ns >= _BY_LEAVING * short_ns


def _again_ns(standing: Standing) -> int:
    return _DOUBT_AGAIN_NS << standing.found


def _doubted(pace: Pace) -> Pace:
    return pace if pace is Pace.GAPPY else Pace.DOUBTED


def _judged(rivals: Mapping[str, Entry], round_ns: int) -> dict[str, Standing]:
    """Tell by a round of very short timeslices what kind of pod the doubted one is.

    Where it will take turns by gate, all who came short with it are doubted first, one after the other: they may have
    long pauses, and turns of their own would be wasted on them.
    """
    seen = {name: entry._replace(use=entry.use._replace(open_ns=round_ns)) for name, entry in rivals.items()}
    judged = {name: _judgement(entry, seen) for name, entry in seen.items()}
    paces = {standing.pace for standing in judged.values()}
    if Pace.DOUBTED in paces:
        return judged
    if Pace.GAPPY not in paces:
        return {name: standing._replace(suspect=False) for name, standing in judged.items()}
    suspect = next((name for name, standing in judged.items() if standing.suspect), None)
    if suspect is not None:
        judged[suspect] = judged[suspect]._replace(pace=Pace.DOUBTED, suspect=False)
    return judged


def _judgement(entry: Entry, rivals: Mapping[str, Entry]) -> Standing:
    """Return where a pod stands after such a round.

    Who was there all the time must also have left some turns and come back; else a second round tells, for what it was
    at may last longer than the first. If not even that does, it may be for longer still, or what the pod came short of
    had other reasons: that is unproven.
    """
    standing, use = entry.standing.anew, entry.use
    if standing.pace is not Pace.DOUBTED:
        return standing
    if not use.run_ns or not _present(entry, rivals, _PRESENT_AT_ONCE):
        return standing._replace(pace=Pace.SPARSE, found=standing.found + 1)
    before = entry.standing.turns
    left = before.starts + use.starts - (before.run_ns + use.run_ns) / _whole_turn_ns(entry)
    if left < _TELLING and not before.open_ns:
        return standing._replace(turns=use)
    return standing._replace(pace=Pace.GAPPY, unproven=left < _PROOF and not standing.acquitted)


def acquitted(rivals: Mapping[str, Entry], round_ns: int) -> dict[str, Standing]:
    """After a round of turns by gate that nobody was proven to need, count it; after enough of them, try without."""
    gappy = {name: entry.standing for name, entry in rivals.items() if entry.standing.pace is Pace.GAPPY}
    if not all(standing.unproven for standing in gappy.values()):
        return {}
    if all(standing.there_ns + round_ns >= _ACQUITTED_AFTER_NS for standing in gappy.values()):
        return {
            name: standing.anew._replace(pace=Pace.STEADY, unproven=False, acquitted=True)
            for name, standing in gappy.items()
        }
    return {name: standing._replace(there_ns=standing.there_ns + round_ns) for name, standing in gappy.items()}


def _present(entry: Entry, rivals: Mapping[str, Entry], part: float = _PRESENT) -> bool:
    """Tell whether a pod had work nearly every time its turn came.

    It was switched in as often as any other, or they had rounds without it; and its turns and those in between make up
    the time. A round takes what everybody makes of a turn, no more than a timeslice allows, and as many gaps.
    """
    rounds = max(rival.use.starts / rival.busy_tsgs for rival in rivals.values())
    round_ns = sum(_turns_ns(rival) + rival.busy_tsgs * GAP_NS for rival in rivals.values())
    own_ns, starts = entry.use.run_ns, entry.use.starts
    if starts:
        own_ns = min(own_ns, round(starts * _whole_turn_ns(entry)))
    there_ns = own_ns + starts / entry.busy_tsgs * (round_ns - _turns_ns(entry))
    return there_ns >= part * entry.use.open_ns and starts / entry.busy_tsgs + 1 >= _EVERY_ROUND * rounds


def _turns_ns(entry: Entry) -> float:
    """Return what the turns of a pod take of a round: no more than its timeslices, and what it made of them."""
    use = entry.use
    return entry.busy_tsgs * min(_whole_turn_ns(entry), use.run_ns / max(1, use.starts))


def _whole_turn_ns(entry: Entry) -> int:
    assert entry.part is not None
    return turn_ns(entry.part.timeslice_us)
